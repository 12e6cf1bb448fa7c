"""Batches in blocks of a real daemon: padding on the left, beams, samples of one prompt."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from tests.daemon import tiers
from tests.tiny_models import (
    BLOCK,
    check_equal,
    gemma3,
    gpt_oss,
    greedy,
    llama,
    ours,
    padded,
    prompt,
    served,
)
from tierd.engines.transformers import NAME, TierdCache, generate
from tierd.pool import Pool

FAMILIES = pytest.mark.parametrize("family", [llama, gemma3, gpt_oss], ids=lambda f: f.__name__)


@dataclass
class Watch(LogitsProcessor):
    """What is in use of the device tier, in groups of the only namespace, step after step."""

    pool: Pool
    private: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        groups = tiers(self.pool.client.status())["device"]
        self.private.append(sum(group["private"] for group in groups))
        self.used.append(self.private[-1] + sum(group["committed"] for group in groups))
        return scores


@FAMILIES
def test_prompts_of_unequal_length_in_one_batch(family: Callable[[], Any], tmp_path: Path) -> None:
    model, longer = family(), torch.cat((prompt(61), prompt(9, 4)), 1)
    with served(tmp_path, model) as pool:
        for batch in (
            padded(prompt(61), prompt(33, 2), prompt(5, 3)),  # cold
            padded(prompt(61), prompt(33, 2), prompt(5, 3)),
            padded(longer, prompt(33, 2), prompt(70, 7)),  # hits of every length
            padded(prompt(33, 2), prompt(1, 8)),
        ):
            check_equal(model, pool, **batch, max_new_tokens=30)
            check_equal(model, pool, **batch, max_new_tokens=3, prefill_chunk_size=17)


def test_a_prompt_is_found_whatever_its_padding(tmp_path: Path) -> None:
    model = llama()
    with served(tmp_path, model) as pool:
        ours(model, pool, prompt(50))
        batch = padded(prompt(50), prompt(70, 2))
        ours(model, pool, batch["input_ids"], attention_mask=batch["attention_mask"])
        batch = padded(prompt(50), prompt(70, 2), prompt(61, 3))
        with TierdCache(pool, **batch) as cache:
            assert [row.hit for row in cache._sequences.rows] == [48, 64, 0]
            assert cache.hit == 70 - 61
        with TierdCache(pool, **padded(prompt(50), prompt(70, 2))) as cache:
            assert cache.hit == 64


def test_a_batch_computes_only_the_columns_that_some_row_lacks(tmp_path: Path) -> None:
    model, computed = llama(), list[int]()

    def count(module: Any, args: Any, kwargs: Any) -> None:
        computed.append(kwargs["input_ids"].shape[1])

    batch = padded(prompt(50), prompt(70, 2))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with (
        served(tmp_path, model) as pool,
        model.register_forward_pre_hook(count, with_kwargs=True),
    ):
        ours(model, pool, ids, 3, attention_mask=mask)
        ours(model, pool, ids, 3, attention_mask=mask)
    assert computed == [70, 1, 1, 6, 1, 1]


@FAMILIES
@pytest.mark.parametrize("num_beams", [2, 3, 4])
def test_beams_are_those_of_stock_transformers(
    family: Callable[[], Any], num_beams: int, tmp_path: Path
) -> None:
    model = family()
    beams = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 30}
    with served(tmp_path, model) as pool:
        for _ in ("cold", "after a hit"):
            check_equal(model, pool, prompt(41), **beams)
        check_equal(model, pool, **padded(prompt(61), prompt(33, 2), prompt(5, 3)), **beams)


def test_beams_share_their_blocks_and_copy_only_tails(tmp_path: Path) -> None:
    model, num_blocks = llama(), 30
    with served(tmp_path, model) as pool:
        watch, before = Watch(pool), pool.client._request
        ids = prompt(num_blocks * BLOCK + 3)
        ours(model, pool, ids, 20, num_beams=4, logits_processor=[watch])
        (namespace,) = pool.client.status()["tenants"][0]["namespaces"]
        # A prompt, of each beam a tail, and what the losers of 20 steps have filled.
        assert max(watch.used) <= num_blocks + 4 * 4
        assert max(watch.private[1:]) <= 4 * 2
        assert watch.private[0] == num_blocks + 1
        assert 0 < namespace["moved"]["0>0"] <= 19 * 3  # of a parent's children one goes on in it
        # A step is a fork, a release and an extend; beside them, a status, and the prompt.
        assert pool.client._request - before <= 20 * 4 + 5


def test_samples_of_one_prompt_share_it(tmp_path: Path) -> None:
    model, num_blocks = llama(), 30
    sampling = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 20}
    with served(tmp_path, model) as pool:
        watch, ids = Watch(pool), prompt(num_blocks * BLOCK + 3)
        generate(model, pool, ids, **sampling, logits_processor=[watch])
        assert watch.private[0] == num_blocks + 1
        assert max(watch.used) <= num_blocks + 4 * 2
        check_equal(model, pool, ids, **sampling)
        check_equal(model, pool, **padded(prompt(61), prompt(33, 2)), **sampling)


def test_rows_that_end_early_leave_the_others_alone(tmp_path: Path) -> None:
    model, batch = llama(), padded(prompt(61), prompt(33, 2), prompt(5, 3))
    said = greedy(model, batch["input_ids"], 30, attention_mask=batch["attention_mask"])
    model.generation_config.eos_token_id = int(said[1, 61 + 5])
    with served(tmp_path, model) as pool:
        check_equal(model, pool, **batch, max_new_tokens=30)
        check_equal(model, pool, **batch, max_new_tokens=30, num_beams=3)


def test_only_padding_on_the_left_is_supported(tmp_path: Path) -> None:
    model, ids = llama(), prompt(40)
    with served(tmp_path, model) as pool:
        for gap in (3, 39):
            mask = torch.ones_like(ids)
            mask[0, gap] = 0
            with pytest.raises(NotImplementedError, match=r"attention_mask.*left"):
                ours(model, pool, ids, attention_mask=mask)
        with pytest.raises(ValueError, match="at least one token"):
            ours(model, pool, ids, attention_mask=torch.zeros_like(ids))


def test_padding_that_the_cache_was_not_told_of_is_refused(tmp_path: Path) -> None:
    model, batch = llama(), padded(prompt(40), prompt(30, 2))
    with served(tmp_path, model) as pool:
        model.set_attn_implementation(NAME)
        with (
            TierdCache(pool, batch["input_ids"]) as cache,
            pytest.raises(NotImplementedError, match="attention_mask"),
        ):
            model.generate(**batch, cache=cache, max_new_tokens=3)
        with (
            TierdCache(pool, **batch) as cache,
            pytest.raises(NotImplementedError, match="attention_mask"),
        ):
            model.generate(
                batch["input_ids"], attention_mask=torch.ones(2, 40), cache=cache, max_new_tokens=3
            )


def test_a_batch_of_another_size_or_other_rows_is_refused(tmp_path: Path) -> None:
    model, ids = llama(), torch.cat((prompt(40), prompt(40, 2)))
    with served(tmp_path, model) as pool:
        model.set_attn_implementation(NAME)
        with TierdCache(pool, ids) as cache, pytest.raises(ValueError, match="batch of 3"):
            model.generate(torch.cat((ids, prompt(40))), cache=cache, max_new_tokens=3)
        for other in (ids, torch.cat((prompt(40), prompt(40), prompt(40, 2)))):
            with TierdCache(pool, prompt(40)) as cache, pytest.raises(ValueError, match="not the"):
                greedy(model, other, 3, cache=cache, logits_processor=[cache.channel])
        with TierdCache(pool, prompt(40, 2)) as cache:
            assert cache.hit == 0


def test_beams_whose_ids_are_not_told_are_refused(tmp_path: Path) -> None:
    model = llama()
    with served(tmp_path, model) as pool:
        model.set_attn_implementation(NAME)
        with TierdCache(pool, prompt(40)) as cache, pytest.raises(RuntimeError, match="channel"):
            greedy(model, prompt(40), cache=cache, num_beams=2)


def test_each_prompt_of_a_batch_has_its_own_extra(tmp_path: Path) -> None:
    model, ids = llama(), torch.cat((prompt(40), prompt(40)))
    positions = torch.arange(40).expand(2, -1)
    with served(tmp_path, model) as pool:
        with pytest.raises(ValueError, match="1 mappings for 2 prompts"):
            generate(model, pool, ids, position_ids=positions, extra={3: b"positions"})
        extra: list[dict[int, bytes]] = [{}, {3: b"positions"}]
        ours(model, pool, ids, position_ids=positions, extra=extra)
        with TierdCache(pool, prompt(40), extra=extra[1]) as cache:
            assert cache.hit == 32
