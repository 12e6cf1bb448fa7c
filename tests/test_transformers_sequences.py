"""Sequences that are preempted, and prompts that two processes fork, in blocks of a real daemon."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.daemon import Daemon, held
from tests.tiny_models import BLOCK, damage, gemma3, greedy, llama, ours, padded, prompt, served
from tierd.engines.transformers import NAME, HitCutShort, TierdCache, layout_of
from tierd.errors import LeaseError, OutOfBlocks
from tierd.layout import LayerGroup

ROOT = Path(__file__).parents[1]
CHILD = """
import sys
from pathlib import Path
import tierd
from tests.test_transformers_sequences import fine, going_on
from tests.tiny_models import llama, prompt
from tierd.engines.transformers import NAME, TierdCache

with tierd.connect(Path(sys.argv[1])) as client, client.attach(fine(llama())) as pool:
    with TierdCache(pool, going_on(3)) as cache:
        print(cache.hit, flush=True)
        model = llama()
        model.set_attn_implementation(NAME)
        said = model.generate(going_on(3), max_new_tokens=30, do_sample=False, cache=cache,
                              logits_processor=[cache.channel])
        print(said.tolist(), flush=True)
"""


def fine(model: Any) -> Any:
    """A layout whose prompts are found to the token."""
    return replace(layout_of(model), groups=(LayerGroup((0, 1, 2), 16),), granule=1)


def going_on(seed: int) -> Tensor:
    """The prompt that is shared, which ends within a block, and a question."""
    return torch.cat((prompt(70), prompt(5, seed)), 1)


def test_two_processes_fork_one_published_prompt(tmp_path: Path) -> None:
    model = llama()
    expected = [greedy(model, going_on(seed), 30) for seed in (2, 3)]
    with served(tmp_path, model, fine(model)) as pool:
        model.set_attn_implementation(NAME)
        with TierdCache(pool, prompt(70)) as cache:
            greedy(model, prompt(70), 1, cache=cache, logits_processor=[cache.channel])
            cache.publish()
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(tmp_path / "tierd.sock")],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdout is not None
            assert child.stdout.readline() == "70\n"
            got = greedy(model, going_on(2), 30, cache=cache, logits_processor=[cache.channel])
            assert child.stdout.readline() == f"{expected[1].tolist()}\n"
            child.stdout.close()
            assert child.wait(30) == 0
        assert torch.equal(got, expected[0])
        model.set_attn_implementation("sdpa")
        with TierdCache(pool, going_on(4)) as cache:
            assert cache.hit == 70
        assert torch.equal(ours(model, pool, going_on(4), 30), greedy(model, going_on(4), 30))


class Preempt:
    """A logits processor that suspends a cache at some step, and does other work meanwhile."""

    def __init__(self, cache: TierdCache, at: int, meanwhile: Callable[[], None]) -> None:
        self._cache, self._left, self._meanwhile = cache, at, meanwhile

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._left -= 1
        if not self._left:
            self._cache.suspend()
            self._meanwhile()
            self._cache.resume()
        return scores


@pytest.mark.parametrize("family", [llama, gemma3], ids=lambda f: f.__name__)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_preempted_batch_goes_on_where_it_was(
    family: Callable[[], Any], beams: int, tmp_path: Path
) -> None:
    model, batch = family(), padded(prompt(70), prompt(33, 2))
    expected = model.generate(**batch, max_new_tokens=30, do_sample=False, num_beams=beams)
    filled = list[int]()

    def fill() -> None:  # all of the device, so that nothing of the sequences is left there
        for blocks in range(400, 0, -1):
            with suppress(OutOfBlocks), pool.acquire([1], room=blocks * BLOCK):
                filled.append(blocks)
                return

    with served(tmp_path, model, device="4MiB") as pool:
        model.set_attn_implementation(NAME)
        with TierdCache(pool, **batch) as cache:
            processors = [cache.channel, Preempt(cache, 12, fill)]
            got = model.generate(**batch, max_new_tokens=30, do_sample=False, num_beams=beams,
                                 cache=cache, logits_processor=processors)  # fmt: skip
    assert filled[0] > 200
    assert torch.equal(got, expected)


def test_a_suspended_cache_computes_nothing(tmp_path: Path) -> None:
    model, ids = llama(), prompt(40)
    with served(tmp_path, model) as pool:
        model.set_attn_implementation(NAME)
        with TierdCache(pool, ids) as cache:
            said = greedy(model, ids, cache=cache, logits_processor=[cache.channel])
            cache.suspend()
            with pytest.raises(LeaseError, match="suspended"):
                greedy(model, said, cache=cache)
            assert pool.client.status()["sessions"][0]["leases"] == 1


def test_a_sequence_of_which_not_all_comes_back_is_computed_from_there(tmp_path: Path) -> None:
    model, ids = llama(), prompt(100)
    expected = greedy(model, ids, 40)
    with (
        Daemon(tmp_path, device="4MiB", host="0", ssd="16MiB") as daemon,
        daemon.client() as client,
    ):
        pool = client.attach(layout_of(model))
        model.set_attn_implementation(NAME)
        with TierdCache(pool, ids) as cache:
            said = greedy(model, ids, 20, cache=cache, logits_processor=[cache.channel])
            cache.suspend()
            daemon.until(lambda status: not held_on_device(status))
            room = pool.view(0).shape[0] * 16
            pool.acquire([1], room=room).release()
            damage(tmp_path / "ssd")
            with pytest.raises(HitCutShort, match="of 119 tokens"):
                cache.resume()
            assert cache.hit == cache.get_seq_length() < 119
            got = greedy(model, said, 20, cache=cache, logits_processor=[cache.channel])
        assert torch.equal(got, expected)
        daemon.until(lambda status: not held(status))


def held_on_device(status: Any) -> int:
    (namespace,) = status["tenants"][0]["namespaces"]
    return sum(group["private"] + group["loading"] for group in namespace["tiers"][0]["groups"])
