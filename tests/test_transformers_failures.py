"""Stock `generate()` in blocks of a real daemon when something is wrong: no room, no daemon, bytes
that are damaged, a use that is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import tierd
from tests.daemon import Daemon, held
from tests.tiny_models import BLOCK, damage, gemma3, greedy, llama, one_thread, ours, prompt
from tierd.engines.transformers import NAME, TierdCache, layout_of
from tierd.pool import Pool


@contextmanager
def attached(daemon: Daemon, model: Any) -> Iterator[Pool]:
    with one_thread(), daemon.client() as client, client.attach(layout_of(model)) as pool:
        yield pool


def test_a_prompt_too_long_for_the_device_tier_is_out_of_blocks(tmp_path: Path) -> None:
    model = llama()
    with Daemon(tmp_path) as daemon, attached(daemon, model) as pool:
        with pytest.raises(tierd.OutOfBlocks, match="tier 'device'"):
            ours(model, pool, prompt(4000))
        daemon.until(lambda status: not held(status))
        assert torch.equal(ours(model, pool, prompt(50)), greedy(model, prompt(50)))


@pytest.mark.parametrize("beams", [1, 3])
def test_out_of_blocks_in_mid_generation_leaks_nothing(tmp_path: Path, beams: int) -> None:
    model, ids = llama(), prompt(60)
    with Daemon(tmp_path) as daemon, attached(daemon, model) as pool:
        room = pool.view(0).shape[0] * BLOCK
        with pool.acquire([1], room=room - 5 * BLOCK):
            with pytest.raises(tierd.OutOfBlocks):
                ours(model, pool, ids, 60, num_beams=beams)
            assert sum(session["leases"] for session in daemon.status()["sessions"]) == 1
        daemon.until(lambda status: not held(status))
        with TierdCache(pool, ids) as cache:
            assert cache.hit == 48  # what was computed is not lost
        assert torch.equal(ours(model, pool, ids, 60), greedy(model, ids, 60))


class AtStep(LogitsProcessor):
    """Does something once, after `num_steps` steps."""

    def __init__(self, num_steps: int, action: Callable[[], None]) -> None:
        self._left, self._action = num_steps, action

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            self._action()
        return scores


def test_a_generation_outlives_its_daemon_in_the_blocks_it_has(tmp_path: Path) -> None:
    model, ids = llama(), prompt(49)  # room for 15 more, and the last one needs none
    with Daemon(tmp_path) as daemon, attached(daemon, model) as pool:
        got = ours(model, pool, ids, 16, logits_processor=[AtStep(3, daemon.kill9)])
        assert torch.equal(got, greedy(model, ids, 16))
        with pytest.raises(tierd.DaemonLost):
            ours(model, pool, ids)


def test_a_generation_that_needs_blocks_of_a_lost_daemon_says_so(tmp_path: Path) -> None:
    model = llama()
    with (
        Daemon(tmp_path) as daemon,
        attached(daemon, model) as pool,
        pytest.raises(tierd.DaemonLost),
    ):
        ours(model, pool, prompt(49), 40, logits_processor=[AtStep(3, daemon.kill9)])


def test_a_hit_cut_short_by_a_corrupt_block_gives_the_same_tokens(tmp_path: Path) -> None:
    tiers, model, ids = {"device": "32MiB", "host": "32MiB"}, gemma3(), prompt(200)
    with Daemon(tmp_path, **tiers) as daemon, attached(daemon, model) as pool:
        expected = ours(model, pool, ids)
    damage(tmp_path / "ssd")
    with Daemon(tmp_path, **tiers) as daemon, attached(daemon, model) as pool:
        assert torch.equal(ours(model, pool, ids), expected)
        (namespace,) = pool.client.status()["tenants"][0]["namespaces"]
        assert namespace["tokens_hit"] > 0
        assert namespace["lost"] > 0


def test_a_model_that_does_not_attend_to_the_cache_is_found_out(
    pool_of: Callable[[Any], Pool],
) -> None:
    model, ids = llama(), prompt(20)
    with (
        TierdCache(pool_of(model), ids) as cache,
        pytest.raises(RuntimeError, match=r"set_attn_implementation\('tierd'\)"),
    ):
        greedy(model, ids, cache=cache, logits_processor=[cache.channel])


def test_another_prompt_than_the_caches_is_never_committed(
    pool_of: Callable[[Any], Pool],
) -> None:
    model, ids = llama(), prompt(40)
    pool = pool_of(model)
    model.set_attn_implementation(NAME)
    with TierdCache(pool, ids) as cache, pytest.raises(ValueError, match="not the sequence"):
        greedy(model, prompt(40, seed=9), cache=cache, logits_processor=[cache.channel])
    with TierdCache(pool, ids) as cache:
        assert cache.hit == 0
        said = greedy(model, ids, cache=cache, logits_processor=[cache.channel])
        said[0, 45] += 1
        with pytest.raises(ValueError, match="not the sequence"):
            greedy(model, said, 20, cache=cache, logits_processor=[cache.channel])


def test_a_cache_is_not_used_after_a_forward_pass_that_was_broken_off(
    pool_of: Callable[[Any], Pool],
) -> None:
    model, ids = llama(), prompt(40)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model.set_attn_implementation(NAME)
    with TierdCache(pool_of(model), ids) as cache:
        with (
            model.model.layers[1].mlp.register_forward_pre_hook(interrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            greedy(model, ids, cache=cache)
        with pytest.raises(RuntimeError, match="broken off"):
            greedy(model, torch.cat((ids, ids), 1), cache=cache)


def test_a_released_cache_is_not_written(pool_of: Callable[[Any], Pool]) -> None:
    model, ids = llama(), prompt(20)
    cache = TierdCache(pool_of(model), ids)
    cache.release()
    cache.release()
    model.set_attn_implementation(NAME)
    with pytest.raises(tierd.LeaseError, match="released"):
        greedy(model, ids, cache=cache)
