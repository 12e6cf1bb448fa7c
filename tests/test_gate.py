"""Frames wait in order for an engine's stream; a thread's event is the fence, for want of a GPU."""

import asyncio
import threading

from tierd.daemon.gate import Gate
from tierd.protocol import Frame, Kind, Op


class Stream:
    """A fence that a test passes."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def passed(self) -> bool:
        return self.done.is_set() and self.error is None

    def wait(self) -> None:
        assert self.done.wait(30)
        if self.error is not None:
            raise self.error


class Desk:
    """A gate, and what came through it."""

    def __init__(self) -> None:
        self.stream = Stream()
        self.served: list[int] = []
        self.came = asyncio.Event()
        self.broken: list[tuple[int, str]] = []
        self.gate = Gate(
            self.stream,
            self._serve,
            self._break,
        )

    def _serve(self, frame: Frame) -> None:
        self.served.append(frame.request)
        self.came.set()

    def _break(self, frame: Frame, error: Exception) -> None:
        self.broken.append((frame.request, str(error)))
        self.came.set()

    def send(self, op: Op, request: int) -> None:
        frame = Frame(op, Kind.REQUEST, request, b"")
        if self.gate.admits(frame):
            self.served.append(request)

    async def until(self, number: int) -> None:
        async with asyncio.timeout(30):
            while len(self.served) + len(self.broken) < number:
                self.came.clear()
                await self.came.wait()


async def test_what_is_done_already_goes_through_at_once() -> None:
    desk = Desk()
    desk.stream.done.set()
    for request, op in enumerate((Op.ACQUIRE, Op.ADVANCE, Op.RELEASE)):
        desk.send(op, request)
    assert desk.served == [0, 1, 2]


async def test_a_commit_waits_for_the_stream_and_all_that_follow_wait_behind_it() -> None:
    desk = Desk()
    desk.send(Op.ACQUIRE, 0)  # publishes nothing of what is being written
    desk.send(Op.ADVANCE, 1)
    desk.send(Op.STATUS, 2)
    desk.send(Op.RELEASE, 3)
    await asyncio.sleep(0.02)
    assert desk.served == [0]
    desk.stream.done.set()
    await desk.until(4)
    assert desk.served == [0, 1, 2, 3]
    desk.send(Op.RELEASE, 4)
    assert desk.served[-1] == 4


async def test_a_fence_that_breaks_is_told_to_each_that_waited() -> None:
    desk = Desk()
    desk.send(Op.RELEASE, 1)
    desk.send(Op.STATUS, 2)
    desk.stream.error = RuntimeError("CUDA error: the device is lost")
    desk.stream.done.set()
    await desk.until(2)
    assert desk.broken == [(n, "CUDA error: the device is lost") for n in (1, 2)]


async def test_a_gate_that_closes_serves_nothing_more() -> None:
    desk = Desk()
    desk.send(Op.RELEASE, 1)
    await asyncio.sleep(0.01)
    desk.gate.close()
    desk.stream.done.set()
    await asyncio.sleep(0.01)
    assert desk.served == desk.broken == []
