"""Layer groups of different block sizes and windows, in blocks of a real daemon."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.daemon import tiers
from tests.tiny_models import WINDOW, check_equal, gemma3, llama, ours, padded, prompt, served
from tierd.engines.transformers import NAME, TierdCache, layout_of
from tierd.layout import KVLayout, LayerGroup

MIXED = ((0, 2), (1, 3))  # the layers with and without a window of gemma3


def in_groups(model: Any, layers: tuple[tuple[int, ...], ...], sizes: tuple[int, ...],
              granule: int = 0) -> KVLayout:  # fmt: skip
    groups = tuple(LayerGroup(of, size) for of, size in zip(layers, sizes, strict=True))
    return replace(layout_of(model), groups=groups, granule=granule)


@pytest.mark.parametrize("sizes", [(16, 16), (8, 32), (32, 8), (4, 16)], ids=str)
@pytest.mark.parametrize("granule", [0, 1])
def test_a_model_with_and_without_windows(
    tmp_path: Path, sizes: tuple[int, int], granule: int
) -> None:
    model = gemma3()
    with served(tmp_path, model, in_groups(model, MIXED, sizes, granule)) as pool:
        for num_tokens in (1, 5, 70, 70, 33, 130, 130):  # cold, whole and partial hits
            check_equal(model, pool, prompt(num_tokens), max_new_tokens=20)
        batch = padded(prompt(130), prompt(33, 2), prompt(70, 3))
        check_equal(model, pool, **batch, max_new_tokens=2 * WINDOW)
        check_equal(model, pool, **batch, max_new_tokens=2 * WINDOW, num_beams=3)
        check_equal(model, pool, prompt(77), max_new_tokens=40, prompt_lookup_num_tokens=4)


@pytest.mark.parametrize("granule", [0, 1, 4])
def test_groups_of_three_block_sizes_do_all_that_one_does(tmp_path: Path, granule: int) -> None:
    model = llama()
    layout = in_groups(model, ((0,), (1,), (2,)), (16, 8, 32), granule)
    with served(tmp_path, model, layout) as pool:
        for num_tokens in (70, 70, 33, 130):
            check_equal(model, pool, prompt(num_tokens), max_new_tokens=20)
        batch = padded(prompt(70), prompt(33, 2), prompt(5, 3))
        check_equal(model, pool, **batch, max_new_tokens=20, num_beams=3)
        check_equal(model, pool, **batch, max_new_tokens=20, num_return_sequences=3, do_sample=True)


def test_blocks_behind_the_window_are_given_back(tmp_path: Path) -> None:
    model, held = gemma3(), list[list[int]]()

    def look(ids: Tensor, scores: Tensor) -> Tensor:
        held.append([int((table >= 0).sum()) for table in cache._sequences.rows[0].lease.tables])
        return scores

    with served(tmp_path, model, in_groups(model, MIXED, (8, 8))) as pool:
        model.set_attn_implementation(NAME)
        with TierdCache(pool, prompt(90)) as cache:
            model.generate(prompt(90), max_new_tokens=100, cache=cache, do_sample=False,
                           logits_processor=[cache.channel, look])  # fmt: skip
            assert tiers(pool.client.status())["device"][0]["private"] <= 2
    assert held[0] == [-(-90 // 8)] * 2
    for windowed_blocks, _ in held[2:]:
        assert windowed_blocks <= WINDOW // 8 + 2
    assert held[-1][1] == -(-189 // 8)


def test_what_a_sequence_ended_with_is_found_to_the_granule(tmp_path: Path) -> None:
    model = llama()
    with served(tmp_path, model, in_groups(model, ((0, 1, 2),), (16,), granule=1)) as pool:
        said = ours(model, pool, prompt(40), 10)
        follow_up = torch.cat((said, prompt(5, 2)), 1)
        with TierdCache(pool, follow_up) as cache:
            assert cache.hit == said.shape[1] - 1  # its last is not computed
        check_equal(model, pool, follow_up, max_new_tokens=20)
