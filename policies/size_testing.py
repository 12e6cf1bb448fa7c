"""The promises of block-size policies as tests, shipped for whoever writes one.

Subclass `BlockSizePolicyTests`, supply `make`, and pytest runs them all on your policy. Which size
is a good one is the policy's own affair. Needs pytest.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import pytest

from policies.base import BlockSizePolicy, LayerShape, RouteFacts, SizingFacts

SSD = RouteFacts(1e-4, 4e-5, 1e-9)
MEMORY = RouteFacts(1e-5, 5e-6, 1e-10)
FACTS = {
    "three tiers": SizingFacts({500: 3, 4000: 1}, [SSD, MEMORY]),
    "two tiers": SizingFacts({1: 1}, [MEMORY]),
    "slow and long": SizingFacts({1_000_000: 7}, [RouteFacts(1.0, 1.0, 1e-6)]),
    "all for nothing": SizingFacts({100: 1}, [RouteFacts(0.0, 0.0, 0.0)]),
    "granules of 1": SizingFacts({2000: 1}, [SSD, MEMORY], granule=1),
}
LAYERS = {
    "one": [LayerShape(0, 1, None)],
    "equal": [LayerShape(i, 4096, None) for i in range(12)],
    "mixed": [LayerShape(i, 1024, None if i % 6 == 5 else 512) for i in range(12)],
    "all with windows": [LayerShape(i, 65536, (64, 4096)[i % 2]) for i in range(12)],
}


class BlockSizePolicyTests(ABC):
    """The conformance suite of `BlockSizePolicy`."""

    @abstractmethod
    def make(self, num_layers: int) -> BlockSizePolicy:
        """A policy of the kind under test that serves so many layers, of 1 or 12."""

    @pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
    @pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
    def test_every_layer_gets_a_whole_number_of_tokens(
        self, layers: Sequence[LayerShape], facts: SizingFacts
    ) -> None:
        sizes = self.make(len(layers)).sizes(layers, facts)
        assert len(sizes) == len(layers)
        assert all(type(size) is int and size >= 1 for size in sizes)

    @pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
    def test_equal_facts_have_an_equal_answer(self, facts: SizingFacts) -> None:
        layers = LAYERS["mixed"]
        policy = self.make(len(layers))
        sizes = policy.sizes(layers, facts)
        policy.sizes(LAYERS["all with windows"], FACTS["slow and long"])
        assert policy.sizes(layers, facts) == sizes
        assert self.make(len(layers)).sizes(list(layers), facts) == sizes

    def test_only_one_that_says_so_goes_by_facts(self) -> None:
        policy, layers = self.make(12), LAYERS["mixed"]
        if not policy.by_facts:
            answers = [policy.sizes(layers, facts) for facts in FACTS.values()]
            assert all(answer == answers[0] for answer in answers)
