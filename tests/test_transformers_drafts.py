"""Assisted generation in blocks of a real daemon: rejected drafts are gone back from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import gemma3, gpt_oss, greedy, llama, ours, prompt, served
from tierd.engines.transformers import NAME, TierdCache
from tierd.errors import LeaseError

FAMILIES = pytest.mark.parametrize("family", [llama, gemma3, gpt_oss], ids=lambda f: f.__name__)


def repeating() -> Tensor:
    """A prompt that prompt lookup finds drafts in; most are rejected."""
    return torch.cat([prompt(20)] * 4, 1)


def helper(family: Callable[[], Any]) -> Any:
    """A model that often says what `family` does, and not always."""
    model = family()
    torch.manual_seed(3)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * 0.1 * weights.abs().mean())
    return model


@FAMILIES
def test_drafts_of_the_prompt_change_no_token(family: Callable[[], Any], tmp_path: Path) -> None:
    model, ids = family(), repeating()
    expected = greedy(model, ids, 60)
    with served(tmp_path, model) as pool:
        for _ in ("cold", "after a hit"):
            got = ours(model, pool, ids, 60, prompt_lookup_num_tokens=5)
            assert torch.equal(got, expected)
        with TierdCache(pool, torch.cat((expected, prompt(1)), 1)) as cache:
            assert cache.hit == (expected.shape[1] - 1) // 16 * 16
        assert torch.equal(ours(model, pool, expected, 9), greedy(model, expected, 9))


@FAMILIES
def test_drafts_of_an_assistant_change_no_token(family: Callable[[], Any], tmp_path: Path) -> None:
    model, assistant, ids = family(), helper(family), prompt(50)
    expected = greedy(model, ids, 60)
    with served(tmp_path, model) as pool:
        for _ in ("cold", "after a hit"):
            assert torch.equal(ours(model, pool, ids, 60, assistant_model=assistant), expected)


def test_a_hit_is_not_computed_by_assisted_generation_either(tmp_path: Path) -> None:
    model, ids, computed = llama(), repeating(), list[int]()

    def count(module: Any, args: Any, kwargs: Any) -> None:
        computed.append(kwargs["input_ids"].shape[1])

    with served(tmp_path, model) as pool:
        ours(model, pool, ids, 3)
        with model.model.register_forward_pre_hook(count, with_kwargs=True):
            ours(model, pool, ids, 60, prompt_lookup_num_tokens=5)
    assert 80 - 64 <= computed[0] <= 80 - 64 + 5


def test_a_cache_handed_over_has_a_hit_computed_again_and_not_written(tmp_path: Path) -> None:
    model, ids = gemma3(), repeating()
    expected, more = greedy(model, ids, 30), greedy(model, ids, 60)
    with served(tmp_path, model) as pool:
        ours(model, pool, ids, 3)
        model.set_attn_implementation(NAME)
        with TierdCache(pool, ids) as cache:
            assert cache.hit == 64
            facts: Any = {"logits_processor": [cache.channel], "prompt_lookup_num_tokens": 5}
            assert torch.equal(greedy(model, ids, 30, cache=cache, **facts), expected)
            assert torch.equal(greedy(model, expected, 30, cache=cache, **facts), more)
        model.set_attn_implementation("sdpa")
        assert torch.equal(ours(model, pool, more, 9), greedy(model, more, 9))


def test_rejected_drafts_cost_no_message(tmp_path: Path) -> None:
    model, ids = llama(), repeating()
    cuts = list[int]()

    class Counted(TierdCache):
        def crop(self, tokens_to_remove: int) -> None:
            before = self.pool.client._request
            super().crop(tokens_to_remove)
            assert self.pool.client._request == before
            cuts.append(-tokens_to_remove)

    with served(tmp_path, model) as pool:
        model.set_attn_implementation(NAME)
        before = pool.client._request
        with Counted(pool, ids) as cache:
            facts: Any = {"logits_processor": [cache.channel], "prompt_lookup_num_tokens": 5}
            greedy(model, ids, 60, cache=cache, **facts)
        # Acquired, committed and released, and one message each time that a block fills.
        assert pool.client._request - before <= 3 + 2 * (60 // 16 + 1)
    assert sum(cuts) > 0


def test_a_cache_goes_back_into_what_is_committed_and_on_from_there(tmp_path: Path) -> None:
    model, ids = llama(), prompt(70)
    with served(tmp_path, model) as pool:
        model.set_attn_implementation(NAME)
        with TierdCache(pool, ids) as cache:
            said = greedy(model, ids, 30, cache=cache, logits_processor=[cache.channel])
            cache.crop(41 - cache.get_seq_length())
            other = torch.cat((ids[:, :41], prompt(20, 2)), 1)
            got = greedy(model, other, 30, cache=cache, logits_processor=[cache.channel])
            with pytest.raises(ValueError, match="negative"):
                cache.crop(3)
        model.set_attn_implementation("sdpa")
        assert torch.equal(got, greedy(model, other, 30))
        for known in (said, got):
            assert torch.equal(ours(model, pool, known, 9), greedy(model, known, 9))


def test_a_cache_does_not_go_back_past_a_window(tmp_path: Path) -> None:
    model, ids = gemma3(), prompt(70)
    with served(tmp_path, model) as pool:
        model.set_attn_implementation(NAME)
        with TierdCache(pool, ids) as cache:
            greedy(model, ids, 30, cache=cache, logits_processor=[cache.channel])
            with pytest.raises(LeaseError, match="window"):
                cache.crop(-60)
