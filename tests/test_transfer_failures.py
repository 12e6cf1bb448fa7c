"""Copies that fail, stores that surprise, and routes that need a host row on the way (I6)."""

import errno
import logging

import numpy as np
import pytest

from storage.base import BlockFault
from tests.bench import CORRUPT, DEVICE, HOST, SSD, Bench, turn
from tierd.daemon.copy import Outcome


async def test_a_read_whose_source_did_not_arrive_fails_without_a_try() -> None:
    bench = Bench()
    first = bench.copy((SSD, 5), (HOST, 1))
    second = bench.copy((HOST, 1), (DEVICE, 2))
    third = bench.copy((DEVICE, 2), (SSD, 9))
    await turn()
    await bench.log[0].end(CORRUPT)
    assert bench.outcomes == {first: Outcome.LOST, second: Outcome.FAILED, third: Outcome.FAILED}
    assert len(bench.log) == 1


async def test_a_write_goes_ahead_when_the_read_of_its_target_failed() -> None:
    bench = Bench()
    bench.copy((HOST, 1), (SSD, 5))
    after = bench.copy((DEVICE, 7), (HOST, 1))
    await turn()
    await bench.log[0].end(BlockFault({5: OSError(errno.ENOSPC, "full")}))
    await bench.log[1].end()
    assert bench.outcomes[after] is Outcome.DONE


async def test_only_the_blocks_that_failed_fail() -> None:
    bench = Bench()
    good, bad = bench.copy((SSD, 4), (HOST, 1)), bench.copy((SSD, 5), (HOST, 2))
    await turn()
    await bench.log[0].end(CORRUPT)
    assert bench.outcomes == {good: Outcome.DONE, bad: Outcome.LOST}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO])
async def test_a_medium_that_takes_nothing_is_reported(code: int) -> None:
    bench = Bench()
    bad, good = bench.copy((HOST, 1), (SSD, 5)), bench.copy((HOST, 2), (SSD, 6))
    await turn()
    await bench.log[0].end(BlockFault({5: OSError(code, "no")}))
    assert bench.outcomes == {bad: Outcome.FAILED, good: Outcome.DONE}
    assert bench.full == [SSD]


async def test_a_block_that_cannot_be_written_is_no_reason_to_call_the_medium_full() -> None:
    bench = Bench()
    bench.copy((HOST, 1), (SSD, 5))
    await turn()
    await bench.log[0].end(BlockFault({5: OSError(errno.EINVAL, "no")}))
    assert bench.full == []


async def test_a_surprise_in_a_store_fails_its_batch_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    one, two = bench.copy((SSD, 4), (HOST, 1)), bench.copy((SSD, 5), (HOST, 2))
    other = bench.copy((HOST, 7), (DEVICE, 7))
    await turn()
    with caplog.at_level(logging.ERROR, "tierd.transfer"):
        await next(o for o in bench.log if o.name == "read ssd").end(RuntimeError("surprise"))
    assert bench.outcomes == {one: Outcome.FAILED, two: Outcome.FAILED}
    assert "surprise" in caplog.text
    await next(o for o in bench.log if o.name == "read host").end()
    assert bench.outcomes[other] is Outcome.DONE
    assert not bench.transfer.busy


async def test_where_neither_end_is_memory_a_block_goes_through_a_host_row() -> None:
    bench = Bench(staging=[np.zeros(16, np.uint8)], groups=2)  # rows of the larger group's size
    small, large = bench.copy((SSD, 5), (DEVICE, 1)), bench.copy((SSD, 6), (DEVICE, 2), group=1)
    await turn()
    assert bench.asked == [("read ssd", [5])]  # one row: the other batch waits for it
    await bench.log[0].end()
    assert bench.asked[1:] == [("write device", [1])]
    await bench.log[1].end()
    assert bench.asked[2:] == [("read ssd", [6])]
    await bench.log[2].end()
    await bench.log[3].end()
    assert bench.outcomes == {small: Outcome.DONE, large: Outcome.DONE}


async def test_a_staged_block_that_is_corrupt_is_lost_and_gives_its_row_back() -> None:
    bench = Bench(staging=[np.zeros(8, np.uint8)])
    bad, good = bench.copy((SSD, 5), (DEVICE, 1)), bench.copy((SSD, 6), (DEVICE, 2))
    await turn()
    await bench.log[0].end(CORRUPT)
    await bench.log[1].end()
    await bench.log[2].end()
    assert bench.asked == [("read ssd", [5]), ("read ssd", [6]), ("write device", [2])]
    assert bench.outcomes == {bad: Outcome.LOST, good: Outcome.DONE}


async def test_a_gpu_reads_from_and_writes_to_host_rows_itself() -> None:
    bench = Bench(staging=[np.zeros(8, np.uint8)])
    bench.copy((HOST, 1), (DEVICE, 2))
    bench.copy((DEVICE, 3), (HOST, 4))
    await turn()
    assert sorted(bench.asked) == [("read device", [3]), ("write device", [2])]
    for operation in bench.log:
        await operation.end()
    assert set(bench.outcomes.values()) == {Outcome.DONE}
