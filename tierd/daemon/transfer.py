"""Carrying copies out between stores: batched, off the event loop, never past a hazard.

The planner emits copies as if each were instant. Here each waits for

    read after write    the copy that fills its source      (and fails if that one fails)
    write after read    the copies that still read its target
    write after write   the copy that fills its target, for whoever gave the place up

and for nothing else, so there is no lock, a device hit waits for nobody, and a place may change
hands while its old bytes are still on their way out. Copies that may run are gathered by route and
go to the stores in batches: as many at once as there are on the way up, where somebody waits for
them, and a few on the way down, so that loads find the threads free. This knows places and routes,
not why something is copied.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from storage.base import BlockStore, Row
from tierd.daemon.copy import Copy, Outcome, Place, Settle
from tierd.daemon.route import Failed, Route
from tierd.daemon.speed import Speeds

log = logging.getLogger("tierd.transfer")

_ENDED_AT_ONCE = 32
_MOST_DOWN = 2  # batches of a route at once: while one ends, the next keeps the threads busy

_Key = tuple[int, int, int]  # what a Place is, made in a third of the time


@dataclass(slots=True, eq=False)
class _Step:
    """A copy on its way, and who waits for it (True: to read what it writes)."""

    copy: Copy
    settle: Settle
    source: _Key
    target: _Key
    waits: int = 0
    doomed: bool = False
    begun: bool = False
    ended: bool = False
    cancelled: bool = False  # and settled so
    then: "list[tuple[_Step | _Barrier, bool]] | None" = None

    def before(self, after: "_Step | _Barrier", *, reads: bool) -> None:
        """`after` waits for this."""
        after.waits += 1
        if self.then is None:
            self.then = []
        self.then.append((after, reads))


@dataclass(slots=True, eq=False)
class _Barrier:
    """Somebody who waits for places to be idle."""

    call: Callable[[], None]
    waits: int = 0


class _Lane:
    """The steps of one route that may run, and how many batches of them are under way."""

    def __init__(self, levels: tuple[int, int], route: Route) -> None:
        self.levels, self.route = levels, route
        self.is_load = levels[0] > levels[1] or levels[1] == 0  # somebody waits for it
        self.waiting: list[_Step] = []
        self.under_way = 0

    def next(self) -> list[_Step]:
        """The next batch; none if there is nothing to do, or not yet."""
        while self.waiting and (self.is_load or self.under_way < _MOST_DOWN):
            first, self.waiting = self.waiting[: self.route.batch], self.waiting[self.route.batch :]
            if batch := [step for step in first if not step.ended]:
                return batch
        return []


class StoreTransfer:
    """Moves blocks between the stores of one namespace: `stores[level][group]`.

    `on_full(level)` is called when a medium refuses writes; `staging` are host rows, each as long
    as the largest block, for routes whose both ends are no memory.
    """

    def __init__(
        self,
        stores: Sequence[Sequence[BlockStore]],
        on_full: Callable[[int], None],
        staging: Sequence[Row] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.speeds = Speeds(clock)
        self._stores = stores
        self._on_full = on_full
        rows: asyncio.Queue[Row] = asyncio.Queue()
        for row in staging:
            rows.put_nowait(row)
        self._staging = rows if staging else None
        self._writers: dict[_Key, _Step] = {}
        self._readers: dict[_Key, list[_Step]] = {}
        self._lanes: dict[tuple[int, int, int], _Lane] = {}  # by levels and group, loads first
        self._tasks: set[asyncio.Task[None]] = set()
        self._wakeup: asyncio.Handle | None = None
        self.blocks_moved: dict[tuple[int, int], int] = {}  # by (from level, to level)

    def submit(self, copies: Iterable[Copy], settle: Settle) -> None:
        """See `Transfer.submit`; `settle` is never called before this returns."""
        for copy in copies:
            self._enter(copy, settle)
        self._wake()

    def cancel(self, place: Place) -> None:
        """See `Transfer.cancel`."""
        step = self._writers.get(place)
        if step is not None and not step.begun and not step.cancelled:
            self._cancel(step)
            self._wake()

    def when_idle(self, places: Iterable[Place], call: Callable[[], None]) -> bool:
        """True if nothing reads or writes `places`; else `call` once nothing does."""
        barrier = _Barrier(call)
        for place in places:
            for step in self._readers.get(place, ()):
                step.before(barrier, reads=False)
            if (writer := self._writers.get(place)) is not None:
                writer.before(barrier, reads=False)
        return not barrier.waits

    async def idle(self, places: Iterable[Place]) -> None:
        """Wait until nothing reads or writes `places`."""
        told = asyncio.Event()
        if not self.when_idle(places, told.set):
            await told.wait()

    @property
    def busy(self) -> bool:
        return bool(self._writers)

    async def drain(self) -> None:
        """Wait until every copy has ended."""
        while self._writers:
            self._wake()
            await asyncio.wait(self._tasks) if self._tasks else await asyncio.sleep(0)

    async def close(self) -> None:
        """Settle what has not begun as cancelled, and wait for the rest."""
        for step in list(self._writers.values()):
            if not step.begun and not step.ended and not step.cancelled:
                self._cancel(step)
        await self.drain()

    def _enter(self, copy: Copy, settle: Settle) -> None:
        group, readers = copy.group, self._readers
        source = (copy.src_level, group, copy.src.block_id)
        target = (copy.dst_level, group, copy.dst.block_id)
        step = _Step(copy, settle, source, target)
        if (writer := self._writers.get(source)) is not None:
            writer.before(step, reads=True)
        if (writer := self._writers.get(target)) is not None:
            writer.before(step, reads=False)
        if (others := readers.get(target)) is not None:
            for reader in others:
                reader.before(step, reads=False)
        self._writers[target] = step
        if (others := readers.get(source)) is not None:
            others.append(step)
        else:
            readers[source] = [step]
        if not step.waits:
            self._may_run(step)

    def _cancel(self, step: _Step) -> None:
        """Settle a step now. It keeps its turn, for those who wait for it: others may be writing
        the same place still."""
        step.cancelled = True
        step.settle(step.copy, Outcome.CANCELLED)
        if not step.waits:
            self._end(step, Outcome.CANCELLED)

    def _may_run(self, step: _Step) -> None:
        copy = step.copy
        lane = self._lanes.get((copy.src_level, copy.dst_level, copy.group))
        (lane or self._open_lane(copy)).waiting.append(step)

    def _open_lane(self, copy: Copy) -> _Lane:
        levels, group = (copy.src_level, copy.dst_level), copy.group
        source, target = (self._stores[level][group] for level in levels)
        on_full = partial(self._on_full, levels[1])
        lane = _Lane(levels, Route(source, target, self._staging, on_full))
        lanes = {**self._lanes, (*levels, group): lane}
        self._lanes = dict(sorted(lanes.items(), key=lambda item: (not item[1].is_load, item[0])))
        return lane

    def _wake(self) -> None:
        if self._wakeup is None and self._lanes:
            self._wakeup = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Start what may run, in batches of one route."""
        self._wakeup = None
        for lane in self._lanes.values():
            while batch := lane.next():
                lane.under_way += 1
                for step in batch:
                    step.begun = True
                task = asyncio.create_task(self._run(lane, batch))
                self._tasks.add(task)
                task.add_done_callback(self._ran)

    def _ran(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a transfer broke", exc_info=error)

    async def _run(self, lane: _Lane, batch: Sequence[_Step]) -> None:
        copies = [step.copy for step in batch]
        failed = dict.fromkeys(copies, Outcome.FAILED)
        self.blocks_moved[lane.levels] = self.blocks_moved.get(lane.levels, 0) + len(batch)
        nbytes = len(batch) * lane.route.block_nbytes
        self.speeds.begin(lane.levels, nbytes)
        try:
            failed = await lane.route.move(copies)
        finally:  # whatever happens, nobody is left waiting
            self.speeds.end(lane.levels, nbytes, moved=failed == {})
            lane.under_way -= 1
            self._finish(batch, failed)

    def _finish(self, batch: Sequence[_Step], failed: Failed, start: int = 0) -> None:
        """End the steps of a batch from `start` on, a turn of the loop for some of them: each may
        have much to tell, and other engines are waiting."""
        stop, done = start + _ENDED_AT_ONCE, Outcome.DONE
        for step in batch[start:stop]:
            self._end(step, failed.get(step.copy, done) if failed else done)
        self._wake()
        if stop < len(batch):
            asyncio.get_running_loop().call_soon(self._finish, batch, failed, stop)

    def _end(self, step: _Step, outcome: Outcome) -> None:
        step.ended = True
        if self._writers[step.target] is step:
            del self._writers[step.target]
        readers = self._readers[step.source]
        if len(readers) == 1:
            del self._readers[step.source]
        else:
            readers.remove(step)
        if not step.cancelled:
            step.settle(step.copy, outcome)
        for after, reads in step.then or ():
            after.waits -= 1
            if isinstance(after, _Barrier):
                if not after.waits:
                    after.call()
                continue
            after.doomed |= reads and outcome is not Outcome.DONE
            if after.waits or after.ended:
                continue
            if after.doomed or after.cancelled:
                self._end(after, Outcome.CANCELLED if after.cancelled else Outcome.FAILED)
            else:
                self._may_run(after)
