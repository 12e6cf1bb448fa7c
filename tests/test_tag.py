"""Tags: the names that a restart finds a block by, in few bytes."""

from itertools import pairwise
from pathlib import Path

import pytest

from storage.base import MAX_TAG_NBYTES
from tests.content import ask, prompt
from tests.daemon import Daemon
from tierd.block import BlockHash
from tierd.daemon.tag import Named, pack, unpack
from tierd.layout import KVLayout

MOST = (MAX_TAG_NBYTES - 1) // 16 - 2  # names inside a block that all fit beside two


def names(count: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "big")) for number in range(count)]


KEY, PARENT = names(1002)[1000:]


@pytest.mark.parametrize("parent", [PARENT, None])
@pytest.mark.parametrize("count", [0, 1, 5, 63, MOST])
def test_what_is_packed_is_unpacked(parent: BlockHash | None, count: int) -> None:
    tag = pack(KEY, parent, names(count))
    assert len(tag) <= MAX_TAG_NBYTES
    assert unpack(tag) == Named(KEY, parent, tuple(names(count)))


@pytest.mark.parametrize("count", [MOST + 1, 2 * MOST, 511, 4095])
def test_of_too_many_names_some_are_kept_evenly_spread(count: int) -> None:
    tag = pack(KEY, PARENT, names(count))
    assert MAX_TAG_NBYTES / 2 < len(tag) <= MAX_TAG_NBYTES
    named = unpack(tag)
    assert named is not None
    places = [-1, *(int.from_bytes(name, "big") for name in named.inner), count]
    gaps = [after - before for before, after in pairwise(places)]
    assert set(gaps[:-1]) == {-(-(count + 1) // (MOST + 1))}
    assert gaps[-1] <= gaps[0]


def test_a_block_without_a_name_has_an_empty_tag() -> None:
    assert pack(None, None, ()) == b""
    assert unpack(b"") is None


@pytest.mark.parametrize("tag", [b"\0", b"x" * 16, b"\2" + bytes(16), b"\1" + bytes(16), bytes(20)])
def test_what_is_no_tag_of_ours_has_no_names(tag: bytes) -> None:
    assert unpack(tag) is None


@pytest.mark.parametrize(("size", "granule"), [(16, 1), (64, 1), (256, 16)])
def test_hits_inside_a_block_survive_a_restart(tmp_path: Path, size: int, granule: int) -> None:
    layout = KVLayout("model", 1, 1, 64, "float32", granule=granule).with_block_sizes([size])
    tokens = prompt(1, 2 * size)
    with Daemon(tmp_path) as daemon, daemon.client() as client, client.attach(layout) as pool:
        ask(pool, tokens)
    with Daemon(tmp_path) as daemon, daemon.client() as client, client.attach(layout) as pool:
        for shared in (size + size // 2, 2 * size - granule, size + granule):
            with pool.acquire([*tokens[:shared], 60_000, 60_001]) as lease:
                assert lease.wait() == shared
