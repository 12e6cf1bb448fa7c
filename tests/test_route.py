"""The whole route: a real daemon, real client processes, every byte checked."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tierd
from tests.content import BLOCK, BLOCKS, LAYOUT, ask, check, prompt, serve, write
from tests.daemon import NOT_AHEAD, Daemon, Status, held, tiers
from tests.engine import Engine
from tierd.layout import KVLayout
from tierd.protocol import Op


def from_ssd(namespace: Status) -> int:
    """Blocks that were read from the SSD tier."""
    return sum(count for route, count in namespace["moved"].items() if route.startswith("2>"))


def test_another_process_hits_in_place_what_one_committed(daemon: Daemon) -> None:
    tokens = prompt(1, 10 * BLOCK)
    with Engine(daemon.socket) as a, Engine(daemon.socket) as b:
        first = a.ask("serve", tokens=tokens)
        second = b.ask("acquire", tokens=[*tokens, 7])
        hit = b.ask("wait", lease=second["lease"])["hit"]  # checks every byte
    assert first["hit"] == 0
    assert hit == len(tokens)
    assert second["tables"][0][:10] == first["tables"][0]


def test_all_engines_see_one_memory(daemon: Daemon) -> None:
    with Engine(daemon.socket) as a, daemon.client() as client, client.attach(LAYOUT) as pool:
        mine = a.ask("acquire", tokens=prompt(1, BLOCK))
        place = mine["tables"][0][0]
        for byte in (1, 255):
            a.ask("poke", group=0, block_id=place, byte=byte)
            seen = pool.view(0)[place].view(torch.uint8)
            assert (seen == byte).all()
            del seen


def test_what_the_small_tiers_pushed_out_comes_back_from_host_and_from_ssd(daemon: Daemon) -> None:
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        for seed in range(12):  # 12 x 8 blocks: three times what the device holds
            assert ask(pool, prompt(seed, 8 * BLOCK)) == 0
        for seed in reversed(range(12)):
            assert ask(pool, [*prompt(seed, 8 * BLOCK), 7]) == 8 * BLOCK
        found = daemon.status()["tenants"][0]["namespaces"][0]
    assert found["blocks_hit"][1] > 0
    assert found["blocks_hit"][2] > 0
    assert found["lost"] == found["failed"] == 0
    assert found["tokens_hit"] == 12 * 8 * BLOCK
    assert {"0>1", "1>0", "1>2"} <= set(found["moved"])
    assert from_ssd(found) == found["blocks_hit"][2]


def test_a_hit_from_the_device_is_ready_at_once(daemon: Daemon) -> None:
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        ask(pool, prompt(1, 8 * BLOCK))
        with pool.acquire([*prompt(1, 8 * BLOCK), 7]) as lease:
            assert lease._ready == 1
            assert lease.hit == 8 * BLOCK
            check(lease)


def test_a_prompt_longer_than_what_is_known_hits_its_beginning(daemon: Daemon) -> None:
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        ask(pool, prompt(1, 4 * BLOCK))
        assert ask(pool, prompt(1, 9 * BLOCK + 5)) == 4 * BLOCK
        assert ask(pool, prompt(1, 9 * BLOCK + 5)) == 9 * BLOCK
        assert ask(pool, prompt(1, 9 * BLOCK)) == 8 * BLOCK  # one token is always computed
        assert ask(pool, [*prompt(1, 3 * BLOCK), *prompt(2, 2 * BLOCK)]) == 3 * BLOCK
        assert ask(pool, prompt(2, 1)) == 0


class Counting:
    """How many messages of each kind a client sends."""

    def __init__(self, client: tierd.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: Counter[Op] = Counter()
        really = client.call

        def call(op: Op, *arguments: Any) -> bytes:
            self.sent[op] += 1
            return really(op, *arguments)

        monkeypatch.setattr(client, "call", call)


def test_decoding_says_nothing_until_a_block_fills(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = daemon.client()
    with client.attach(LAYOUT) as pool, pool.acquire(prompt(1, BLOCK), room=4 * BLOCK) as lease:
        counting = Counting(client, monkeypatch)
        said = []
        for at in range(BLOCK, 4 * BLOCK):
            lease.append(prompt(1, 4 * BLOCK)[at : at + 1])
            write(lease, at, at + 1)
            lease.commit(at + 1)
            said.append(counting.sent[Op.ADVANCE])
        assert said[: BLOCK - 1] == [1] * (BLOCK - 1)  # the prompt's own block
        assert said[BLOCK - 1] == 2
        assert counting.sent == {Op.ADVANCE: 4}
        lease.extend(4 * BLOCK)
        assert counting.sent == {Op.ADVANCE: 4}
        lease.extend(4 * BLOCK + 1)
        assert counting.sent == {Op.ADVANCE: 5}
        assert len(lease.tables[0]) == 5


def test_a_batch_advances_in_one_message(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        leases = [pool.acquire(prompt(seed, 2 * BLOCK)) for seed in range(4)]
        for lease in leases:
            write(lease, 0, 2 * BLOCK)
        counting = Counting(client, monkeypatch)
        pool.advance([(lease, 2 * BLOCK, 3 * BLOCK) for lease in leases])
        assert counting.sent == {Op.ADVANCE: 1}
        assert [len(lease.tables[0]) for lease in leases] == [3] * 4
        assert len({int(i) for lease in leases for i in lease.tables[0]}) == 12
        pool.release(leases)
        assert counting.sent == {Op.ADVANCE: 1, Op.RELEASE: 1}
        for seed in range(4):
            assert ask(pool, [*prompt(seed, 2 * BLOCK), 7]) == 2 * BLOCK


WINDOW = 48
MIXED = KVLayout("mixed", 4, 2, 128, "float32", windows=(None, None, WINDOW, WINDOW))
HIERARCHY = """
blocks.policy = "hierarchical"
blocks.options.sizes = { "0-1" = 32, "2-3" = 16 }
"""


def test_groups_have_their_own_block_sizes_and_windows(tmp_path: Path) -> None:
    with Daemon(tmp_path, device="8MiB", host="8MiB", more=HIERARCHY) as daemon:
        with daemon.client() as client, client.attach(MIXED) as pool:
            groups = [(group.layers, group.block_size) for group in pool.layout.groups]
            assert groups == [((0, 1), 32), ((2, 3), 16)]
            assert [pool.layout.window(group) for group in range(2)] == [None, WINDOW]
            assert pool.view(0).shape[1:] == (2, 2, 2, 32, 128)
            assert ask(pool, prompt(1, 160)) == 0
            with serve(pool, prompt(1, 200)) as lease:
                assert lease.hit == 160
                assert [len(table) for table in lease.tables] == [7, 13]
                assert lease.tables[1][:9].tolist() == [-1] * 9  # out of the window of 48
                assert (lease.tables[1][9:] >= 0).all()
            for seed in range(2, 12):  # push it out of the device
                ask(pool, prompt(seed, 160))
            assert ask(pool, prompt(1, 200)) == 192
        assert daemon.status()["tenants"][0]["namespaces"][0]["promoted"] > 0


def test_two_who_want_the_same_cold_prefix_load_it_once(tmp_path: Path) -> None:
    cold = prompt(0, 8 * BLOCK)
    running = Daemon(tmp_path, more=NOT_AHEAD)
    with running as daemon, Engine(daemon.socket) as a, Engine(daemon.socket) as b:
        for seed in range(9):  # 72 blocks, more than device and host hold
            a.ask("release", lease=a.ask("serve", tokens=prompt(seed, 8 * BLOCK))["lease"])
        before = daemon.status()["tenants"][0]["namespaces"][0]
        for engine in (a, b):
            engine.tell("serve", tokens=[*cold, 7])
        answers = [engine.answer() for engine in (a, b)]
        after = daemon.status()["tenants"][0]["namespaces"][0]
        assert [answer["hit"] for answer in answers] == [8 * BLOCK] * 2
        assert answers[0]["tables"][0][:8] == answers[1]["tables"][0][:8]
    assert after["promoted"] - before["promoted"] == 8
    assert from_ssd(after) - from_ssd(before) == 8


def test_a_full_house_of_leases_takes_no_more_than_there_is(daemon: Daemon) -> None:
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        with serve(pool, prompt(1, BLOCKS * BLOCK)) as lease:
            assert len(set(lease.tables[0].tolist())) == BLOCKS
            assert tiers(daemon.status())["device"][0]["free"] == 0
            with pytest.raises(tierd.OutOfBlocks, match=r"group 0 .*need 1 blocks"):
                pool.acquire([1])
        assert ask(pool, [1]) == 0
        status: Status = daemon.until(lambda status: held(status) == 0)
    assert status["tenants"][0]["namespaces"][0]["out_of_blocks"] == 1
