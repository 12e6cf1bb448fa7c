"""Copies wait for the copies they depend on and for nothing else; batches; cancelling; ending."""

import asyncio
from itertools import pairwise

import pytest

from tests.bench import DEVICE, HOST, KEY, SSD, Bench, FakeMemory, FakeStore, turn
from tierd.block import Block, BlockHash, BlockId
from tierd.daemon.copy import Copy, Outcome, Place
from tierd.daemon.route import Route, tag_of
from tierd.daemon.tag import pack


async def test_a_copy_ends_when_its_bytes_are_there() -> None:
    bench = Bench()
    copy = bench.copy((SSD, 5), (HOST, 1))
    assert bench.asked == []  # never before submit has returned
    await turn()
    assert bench.asked == [("read ssd", [5])]
    assert bench.transfer.busy
    assert bench.outcomes == {}
    await bench.log[0].end()
    assert bench.outcomes == {copy: Outcome.DONE}
    assert not bench.transfer.busy
    assert bench.transfer.blocks_moved == {(SSD, HOST): 1}


async def test_a_read_waits_for_the_write_of_its_source() -> None:
    bench = Bench()
    first = bench.copy((SSD, 5), (HOST, 1))
    second = bench.copy((HOST, 1), (DEVICE, 2))
    await turn()
    assert bench.asked == [("read ssd", [5])]
    await bench.log[0].end()
    assert bench.asked[1:] == [("read host", [1])]
    await bench.log[1].end()
    assert bench.outcomes == {first: Outcome.DONE, second: Outcome.DONE}


async def test_a_write_waits_for_the_reads_of_its_target() -> None:
    bench = Bench()
    bench.copy((HOST, 1), (SSD, 5))
    bench.copy((HOST, 1), (DEVICE, 2))
    bench.copy((DEVICE, 7), (HOST, 1))
    await turn()
    assert sorted(bench.asked) == [("read host", [1]), ("write ssd", [5])]
    await bench.log[0].end()
    assert len(bench.log) == 2
    await bench.log[1].end()
    assert bench.asked[2:] == [("read device", [7])]


async def test_a_place_changes_hands_while_its_old_bytes_are_on_their_way_out() -> None:
    bench = Bench()
    bench.copy((DEVICE, 0), (HOST, 1))  # demoted
    bench.copy((SSD, 5), (DEVICE, 0))  # its place is loaded anew
    back = bench.copy((HOST, 1), (DEVICE, 3))  # and wanted again
    await turn()
    assert bench.asked == [("read device", [0])]
    await bench.log[0].end()
    assert sorted(bench.asked[1:]) == [("read host", [1]), ("read ssd", [5])]
    for operation in bench.log[1:]:
        await operation.end()
    assert bench.outcomes[back] is Outcome.DONE


async def test_an_independent_route_does_not_wait() -> None:
    bench = Bench()
    slow = bench.copy((SSD, 5), (HOST, 1))
    fast = bench.copy((HOST, 2), (DEVICE, 3))
    await turn()
    await bench.log[1 if bench.asked[0][0] == "read ssd" else 0].end()
    assert bench.outcomes == {fast: Outcome.DONE}
    assert bench.transfer.busy
    late = bench.copy((DEVICE, 4), (HOST, 5))  # begun while the SSD still hangs
    await turn()
    await bench.log[-1].end()
    assert bench.outcomes == {fast: Outcome.DONE, late: Outcome.DONE}
    assert slow not in bench.outcomes


async def test_copies_of_one_route_go_in_batches() -> None:
    bench = Bench()
    for n in range(300):
        bench.copy((HOST, n), (DEVICE, n))
        bench.copy((SSD, n), (HOST, 1000 + n))
    await turn()
    batches = sorted((name, len(ids)) for name, ids in bench.asked)
    host, ssd = [("read host", n) for n in (44, 256)], [("read ssd", n) for n in (44, 256)]
    assert batches == host + ssd
    await bench.finish()


@pytest.mark.parametrize(
    ("level", "block_nbytes", "blocks"),
    [(SSD, 1 << 20, 64), (SSD, 1 << 30, 1), (DEVICE, 1 << 20, 16), (DEVICE, 64 << 10, 256)],
)
def test_a_batch_of_large_blocks_has_fewer(level: int, block_nbytes: int, blocks: int) -> None:
    kind = FakeMemory if level == DEVICE else FakeStore
    stores = kind("", [], block_nbytes), FakeMemory("", [], block_nbytes)
    for source, target in (stores, stores[::-1]):
        assert Route(source, target, None, lambda: None).batch == blocks


async def test_the_end_of_a_batch_takes_several_turns_of_the_loop() -> None:
    bench, ended = Bench(), [0]
    for n in range(256):
        bench.copy((HOST, n), (DEVICE, n))
    await turn()
    bench.log[0].ended.set_result(None)
    while bench.transfer.busy:
        await asyncio.sleep(0)
        ended.append(len(bench.outcomes))
    assert ended[-1] == 256
    assert max(after - before for before, after in pairwise(ended)) == 32


async def test_a_load_is_not_behind_all_demotions() -> None:
    bench = Bench()
    for n in range(4 * 256):
        bench.copy((DEVICE, n), (HOST, n))
    await turn()
    bench.copy((HOST, 5000), (DEVICE, 5000))
    await turn()
    assert [name for name, _ in bench.asked] == ["read device", "read device", "read host"]
    await bench.log[0].end()
    assert bench.asked[-1] == ("read device", list(range(512, 768)))
    await bench.finish()


async def test_loads_and_demotions_that_wait_together_begin_with_the_loads() -> None:
    bench = Bench()
    bench.copy((DEVICE, 1), (HOST, 1))
    bench.copy((HOST, 2), (DEVICE, 2))
    await turn()
    assert [name for name, _ in bench.asked] == ["read host", "read device"]
    await bench.finish()


async def test_a_demotion_that_has_not_begun_is_cancelled() -> None:
    bench = Bench()
    copies = [bench.copy((DEVICE, n), (HOST, n)) for n in range(3 * 256)]
    await turn()
    bench.transfer.cancel(Place(HOST, 0, BlockId(600)))
    assert bench.outcomes == {copies[600]: Outcome.CANCELLED}
    await bench.log[0].end()
    assert 600 not in bench.asked[-1][1]
    assert len(bench.asked[-1][1]) == 255
    await bench.finish()


async def test_groups_do_not_share_a_batch() -> None:
    bench = Bench(groups=2)
    bench.copy((SSD, 1), (HOST, 1), group=0)
    bench.copy((SSD, 1), (HOST, 1), group=1)  # the same ids, other places
    await turn()
    assert bench.asked == [("read ssd", [1]), ("read ssd", [1])]


async def test_a_copy_is_cancelled_before_it_begins() -> None:
    bench = Bench()
    copy = bench.copy((SSD, 5), (HOST, 1))
    after = bench.copy((HOST, 1), (DEVICE, 2))
    bench.transfer.cancel(Place(HOST, 0, BlockId(1)))
    assert bench.outcomes == {copy: Outcome.CANCELLED, after: Outcome.FAILED}
    await turn()
    assert bench.asked == []


async def test_a_copy_that_has_begun_is_not_cancelled() -> None:
    bench = Bench()
    copy = bench.copy((SSD, 5), (HOST, 1))
    await turn()
    bench.transfer.cancel(Place(HOST, 0, BlockId(1)))
    assert bench.outcomes == {}
    await bench.log[0].end()
    assert bench.outcomes == {copy: Outcome.DONE}


async def test_a_place_nobody_writes_has_nothing_to_cancel() -> None:
    bench = Bench()
    bench.copy((SSD, 5), (HOST, 1))
    bench.transfer.cancel(Place(SSD, 0, BlockId(5)))
    assert bench.outcomes == {}
    await bench.transfer.close()


async def test_the_next_writer_still_waits_for_readers_when_one_before_it_is_cancelled() -> None:
    bench = Bench()
    bench.copy((HOST, 1), (SSD, 5))
    await turn()
    bench.copy((DEVICE, 7), (HOST, 1))
    bench.transfer.cancel(Place(HOST, 0, BlockId(1)))
    bench.copy((DEVICE, 8), (HOST, 1))
    await turn()
    assert bench.asked == [("write ssd", [5])]
    await bench.log[0].end()
    assert bench.asked[1:] == [("read device", [8])]


async def test_what_is_kept_beside_a_block_is_its_name_and_its_parents() -> None:
    bench = Bench()
    blocks = Block(BlockId(1)), Block(BlockId(2))
    copy = Copy(KEY, BlockHash(b"parent"), 0, HOST, blocks[0], SSD, blocks[1], False)
    bench.transfer.submit([copy], bench.settle)
    await turn()
    assert bench.stores[SSD][0].tags == [tag_of(copy)] == [pack(KEY, BlockHash(b"parent"), ())]
    await bench.log[0].end()


async def test_waiting_for_idle_places() -> None:
    bench, calls = Bench(), list[str]()
    places = [Place(HOST, 0, BlockId(1)), Place(HOST, 0, BlockId(2))]
    assert bench.transfer.when_idle(places, lambda: calls.append("at once"))
    bench.copy((HOST, 1), (SSD, 5))
    bench.copy((HOST, 2), (DEVICE, 2))
    bench.copy((HOST, 9), (SSD, 9))
    assert not bench.transfer.when_idle(places, lambda: calls.append("idle"))
    await turn()
    reading = {tuple(operation.ids): operation for operation in bench.log}
    await reading[(2,)].end()
    assert calls == []
    await reading[(5, 9)].end()
    assert calls == ["idle"]


async def test_a_place_that_is_being_written_is_not_idle() -> None:
    bench, calls = Bench(), list[str]()
    bench.copy((SSD, 5), (HOST, 1))
    assert not bench.transfer.when_idle([Place(HOST, 0, BlockId(1))], lambda: calls.append("idle"))
    await turn()
    assert calls == []
    await bench.log[0].end()
    assert calls == ["idle"]


async def test_drain_waits_for_what_was_begun_and_for_what_waits_for_it() -> None:
    bench = Bench()
    bench.copy((SSD, 5), (HOST, 1))
    bench.copy((HOST, 1), (DEVICE, 2))
    drained = asyncio.create_task(bench.transfer.drain())
    await turn()
    await bench.log[0].end()
    assert not drained.done()
    await bench.log[1].end()
    await drained
    assert set(bench.outcomes.values()) == {Outcome.DONE}


async def test_close_cancels_what_has_not_begun_and_waits_for_the_rest() -> None:
    bench = Bench()
    begun = bench.copy((SSD, 5), (HOST, 1))
    await turn()
    waiting = bench.copy((HOST, 1), (DEVICE, 2))
    closed = asyncio.create_task(bench.transfer.close())
    await turn()
    assert bench.outcomes == {waiting: Outcome.CANCELLED}
    assert not closed.done()
    await bench.log[0].end()
    await closed
    assert bench.outcomes[begun] is Outcome.DONE
