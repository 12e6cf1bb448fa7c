"""Layers are computed while later layer groups' hits are still loading from a slow SSD."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from storage.survey import Survey
from tests.content import key_of
from tests.daemon import Daemon, Status, tiers
from tests.failing import STORE, medium
from tests.tiny_models import greedy, ours, prompt
from tests.tiny_models import llama as tiny_llama
from tierd.engines.transformers import NAME, HitCutShort, TierdCache, layout_of
from tierd.layout import KVLayout, LayerGroup
from tierd.pool import Pool
from tierd.prefix import PrefixChain

GROUPS = 5
SLOW_S = 0.05  # what reading a block takes longer: with 12 blocks a group, most of a second in all


def llama() -> Any:
    return tiny_llama(num_hidden_layers=2 * GROUPS)


def in_groups(model: Any, sizes: tuple[int, ...] = (16,) * GROUPS) -> KVLayout:
    groups = tuple(LayerGroup((2 * g, 2 * g + 1), size) for g, size in enumerate(sizes))
    return replace(layout_of(model), groups=groups)


def daemon_in(folder: Path) -> Daemon:
    return Daemon(folder, device="32MiB", host="32MiB", more=STORE)


@contextmanager
def attached(daemon: Daemon, layout: KVLayout) -> Iterator[Pool]:
    with daemon.client() as client:
        yield client.attach(layout)


@contextmanager
def on_slow_ssd(folder: Path, model: Any, ids: Tensor, harm: bool = False) -> Iterator[Pool]:
    """A daemon started again, so that `ids` are on SSD only, `harm`: in the last group damaged."""
    layout = in_groups(model)
    with daemon_in(folder) as daemon, attached(daemon, layout) as pool:
        ours(model, pool, ids)
    if harm:
        damage(
            folder / "ssd" / pool.client.tenant,
            PrefixChain(layout.root(pool.client.tenant), 16),
            ids,
        )
    with (
        medium(folder, slow_read=SLOW_S),
        daemon_in(folder) as daemon,
        attached(daemon, layout) as pool,
    ):
        yield pool


def damage(ssd: Path, chain: PrefixChain, ids: Tensor) -> None:
    """Flip a byte of the seventh block of the last group."""
    chain.append(ids[0].tolist())
    with Survey(ssd) as survey:
        array = next(array for array in survey.arrays if array.name.endswith(f"-{GROUPS - 1}"))
        block = next(block for block in array.blocks if key_of(block.tag) == chain.hashes[6])
        slab, start = array.geometry.locate(block.slot)
    with (ssd / "store.zarr" / array.name / "c" / str(slab) / "0").open("r+b") as file:
        file.seek(start)
        [byte] = file.read(1)
        file.seek(start)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("sizes", [(16,) * GROUPS, (16, 8, 32, 16, 8)], ids=str)
def test_in_five_layer_groups_tokens_and_logits_are_those_of_stock_transformers(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    model = llama()
    layout, facts = (
        in_groups(model, sizes),
        {"return_dict_in_generate": True, "output_logits": True},
    )
    for _ in ("cold, then hits of the device", "hits of the SSD"):
        with daemon_in(tmp_path) as daemon, attached(daemon, layout) as pool:
            for num_tokens in (70, 70, 33, 130, 1):
                ids = prompt(num_tokens)
                expected, got = greedy(model, ids, **facts), ours(model, pool, ids, **facts)
                assert torch.equal(got.sequences, expected.sequences), num_tokens
                torch.testing.assert_close(
                    torch.cat(got.logits), torch.cat(expected.logits), rtol=1e-4, atol=1e-4
                )
            hits = pool.client.status()["tenants"][0]["namespaces"][0]["blocks_hit"]
    assert hits[-1] > 0


def test_a_layer_is_computed_while_a_later_groups_hit_is_loading(tmp_path: Path) -> None:
    model, ids, seen = llama(), prompt(200), list[Status]()
    with on_slow_ssd(tmp_path, model, ids) as pool:
        layer = model.model.layers[0]
        with layer.register_forward_hook(lambda *_: seen.append(pool.client.status())):
            assert torch.equal(ours(model, pool, ids), greedy(model, ids))
    loading = [group["loading"] for group in tiers(seen[0])["device"]]
    assert loading[0] == 0
    assert loading[-1] > 0


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        pass


def test_a_hit_cut_short_while_layers_are_computed_gives_the_same_tokens(tmp_path: Path) -> None:
    model, ids, heard, computed = llama(), prompt(200), Heard(), list[int]()

    def count(module: Any, args: Any, kwargs: Any) -> None:
        computed.append(kwargs["input_ids"].shape[1])

    with (
        on_slow_ssd(tmp_path, model, ids, harm=True) as pool,
        model.register_forward_pre_hook(count, with_kwargs=True),
    ):
        got = ours(model, pool, ids, num_tokens=3, streamer=heard)
    assert torch.equal(got, greedy(model, ids, 3))
    assert heard.ids == got[0].tolist()
    planned, rest, *others = computed
    assert planned == 200 - 192
    assert rest == 200 - 6 * 16
    assert others == [1, 1]


def test_a_cache_made_to_overlap_says_that_its_hit_is_cut_short(tmp_path: Path) -> None:
    model, ids = llama(), prompt(200)
    expected = greedy(model, ids)
    model.set_attn_implementation(NAME)
    with (
        on_slow_ssd(tmp_path, model, ids, harm=True) as pool,
        TierdCache(pool, ids, overlap=True) as cache,
    ):
        assert cache.hit == 192
        with pytest.raises(HitCutShort, match="of a hit of 192 tokens"):
            greedy(model, ids, cache=cache)
        cache.settle()
        assert cache.hit == 96
        assert torch.equal(greedy(model, ids, cache=cache), expected)


def test_any_other_cache_is_made_when_its_whole_hit_is_there(tmp_path: Path) -> None:
    model, ids = llama(), prompt(200)
    with on_slow_ssd(tmp_path, model, ids, harm=True) as pool, TierdCache(pool, ids) as cache:
        assert cache.hit == 96
        [*loading] = (group["loading"] for group in tiers(pool.client.status())["device"])
        assert loading == [0] * GROUPS
