"""Copies wait for the copies they depend on and for nothing else; batches; cancelling; ending."""

import asyncio

from tests.bench import DEVICE, HOST, KEY, SSD, Bench, turn
from tierd.block import Block, BlockHash, BlockId
from tierd.daemon.copy import Copy, Outcome, Place
from tierd.daemon.tag import pack
from tierd.daemon.transfer import tag_of


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


async def test_copies_of_one_route_go_in_batches_of_16() -> None:
    bench = Bench()
    for n in range(20):
        bench.copy((HOST, n), (DEVICE, n))
        bench.copy((SSD, n), (HOST, 100 + n))
    await turn()
    by_route = {name: [ids for of, ids in bench.asked if of == name] for name, _ in bench.asked}
    batches = [list(range(16)), list(range(16, 20))]
    assert by_route == {"read host": batches, "read ssd": batches}


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
