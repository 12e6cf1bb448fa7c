"""A lookup says where a prompt's granules lie, for one message each and without a trace."""

from pathlib import Path

import pytest

from tests.content import BLOCK, LAYOUT, ask, prompt
from tests.daemon import NOT_AHEAD, Daemon
from tests.rig import DEVICE, HOST, SSD, WINDOWED, Rig, chain
from tests.wire import HASHES, Wire, told
from tierd import protocol
from tierd.protocol import MOST_LOOKED_UP, NOWHERE, Op


def levels(rig: Rig, names: str, first: int = 0) -> list[int]:
    return list(rig.cache.match.lookup(first, chain(names)[first:]))


def test_each_granule_has_the_level_of_its_hottest_copy() -> None:
    rig = Rig(8, 8, 8)
    rig.place(SSD, "abcd")
    rig.place(HOST, "abc")
    rig.place(DEVICE, "a")
    rig.place(DEVICE, "abcd", first=3)
    assert levels(rig, "abcdx") == [DEVICE, HOST, HOST, DEVICE, NOWHERE]


def test_of_several_groups_all_must_hold_it_and_the_coldest_counts() -> None:
    rig = Rig([8, 8], [8, 8], layout=WINDOWED)  # blocks of two granules, and of one
    rig.place(HOST, "abcdef", group=0)
    rig.place(DEVICE, "ab", group=0)
    rig.place(HOST, "ab", group=1)
    rig.place(DEVICE, "a", group=1)
    rig.place(DEVICE, "abcd", group=1, first=2)
    assert levels(rig, "abcdef") == [DEVICE, HOST, HOST, HOST, NOWHERE, NOWHERE]
    for first in range(6):  # wherever a message is cut
        assert levels(rig, "abcdef", first) == levels(rig, "abcdef")[first:]


def test_a_granule_that_one_group_lacks_is_nowhere() -> None:
    rig = Rig([8, 8], layout=WINDOWED)
    rig.place(DEVICE, "ab", group=0)
    assert levels(rig, "ab") == [NOWHERE, NOWHERE]


def test_a_block_on_its_way_counts_where_it_arrives() -> None:
    rig = Rig(8, 8, 8)
    rig.place(SSD, "a")
    rig.acquire("a")
    assert levels(rig, "a") == [DEVICE]


def test_an_engine_looks_a_prompt_up_and_nothing_changes(tmp_path: Path) -> None:
    tokens = prompt(1, 8 * BLOCK)
    with Daemon(tmp_path, more=NOT_AHEAD) as daemon:
        with daemon.client() as client, client.attach(LAYOUT) as pool:
            assert (pool.lookup(tokens) == NOWHERE).all()
            ask(pool, tokens)
            before = daemon.status()["tenants"]
            assert pool.lookup([*tokens, *range(2 * BLOCK)]).tolist() == [0] * 8 + [NOWHERE] * 2
            assert pool.lookup(tokens[: BLOCK - 1]).tolist() == []
            assert daemon.status()["tenants"] == before
        daemon.terminate()
        with daemon, daemon.client() as client, client.attach(LAYOUT) as pool:
            assert pool.lookup(tokens).tolist() == [2] * 8


def test_many_prompts_are_looked_up_at_once(daemon: Daemon) -> None:
    known = prompt(1, 8 * BLOCK)
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        ask(pool, known)
        some, none = pool.hashes(known), pool.hashes(prompt(2, 4 * BLOCK))
        long = [*some, *(some[0] for _ in range(2 * MOST_LOOKED_UP))]  # no true chain: a lookup's
        found = pool.lookup_many([some, [], none] * 200 + [long])
        assert [x.tolist() for x in found[:-1]] == [[0] * 8, [], [NOWHERE] * 4] * 200
        assert found[-1].tolist() == [0] * len(long)
        assert pool.lookup_many([]) == []
        assert ask(pool, known) == 8 * BLOCK - BLOCK  # and the connection is as it was


def test_a_lookup_before_a_layout_is_attached_is_refused(daemon: Daemon) -> None:
    with Wire(daemon.socket) as wire:
        wire.hello()
        frame = wire.ask(Op.LOOKUP, protocol.dump_lookup(0, HASHES[:2]))
        assert told(frame) == "LeaseError: attach a layout first"


@pytest.mark.parametrize("nbytes", [0, 3, 5, 4 + 16 * (MOST_LOOKED_UP + 1)])
def test_a_lookup_of_another_form_ends_the_connection(daemon: Daemon, nbytes: int) -> None:
    with Wire(daemon.socket).attach() as wire:
        assert "LOOKUP" in told(wire.ask(Op.LOOKUP, bytes(nbytes)))
        assert wire.hung_up()
