"""Carrying copies out between stores: batched, off the event loop, never past a hazard.

The planner emits copies as if each were instant. Here each waits for

    read after write    the copy that fills its source      (and fails if that one fails)
    write after read    the copies that still read its target
    write after write   the copy that fills its target, for whoever gave the place up

and for nothing else, so there is no lock, a device hit waits for nobody, and a place may change
hands while its old bytes are still on their way out. Copies that may run are grouped by route and
go to the stores in batches. This knows places and stores, not why something is copied.
"""

import asyncio
import errno
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from storage.base import BlockFault, BlockStore, MemoryStore, Row
from tierd.daemon.copy import Copy, Outcome, Place, Settle
from tierd.daemon.tag import pack

log = logging.getLogger("tierd.transfer")

BATCH = 16  # blocks an executor hop: all of the speed, little of the loop's time (storage_ipc 1.6)
MEDIUM_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


@dataclass(slots=True, eq=False)
class _Step:
    """A copy, or (without one) somebody who waits for places to be idle."""

    copy: Copy | None
    settle: Callable[[Outcome], None]
    source: Place | None = None
    target: Place | None = None
    waits: int = 0
    doomed: bool = False
    begun: bool = False
    cancelled: bool = False  # and settled so
    ended: bool = False
    then: list[tuple["_Step", bool]] = field(default_factory=list)  # True: reads what this writes


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
    ) -> None:
        self._stores = stores
        self._on_full = on_full
        self._staging: asyncio.Queue[Row] = asyncio.Queue()
        self._has_staging = bool(staging)
        for row in staging:
            self._staging.put_nowait(row)
        self._writers: dict[Place, _Step] = {}
        self._readers: dict[Place, list[_Step]] = {}
        self._runnable: list[_Step] = []
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

    def _cancel(self, step: _Step) -> None:
        """Settle a step now. It keeps its turn, for those who wait for it: others may be writing
        the same place still."""
        step.cancelled = True
        step.settle(Outcome.CANCELLED)
        if not step.waits:
            self._end(step, Outcome.CANCELLED)

    def when_idle(self, places: Iterable[Place], call: Callable[[], None]) -> bool:
        """True if nothing reads or writes `places`; else `call` once nothing does."""
        users: list[_Step] = []
        for place in places:
            users += self._readers.get(place, ())
            users += [self._writers[place]] if place in self._writers else []
        if not users:
            return True
        barrier = _Step(None, lambda _: call(), waits=len(users))
        for step in users:
            step.then.append((barrier, False))
        return False

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
        source, target = copy.source, copy.target
        step = _Step(copy, partial(settle, copy), source, target)
        if (writer := self._writers.get(source)) is not None:
            writer.then.append((step, True))
            step.waits += 1
        if (writer := self._writers.get(target)) is not None:
            writer.then.append((step, False))
            step.waits += 1
        for reader in self._readers.get(target, ()):
            reader.then.append((step, False))
            step.waits += 1
        self._writers[target] = step
        self._readers.setdefault(source, []).append(step)
        if not step.waits:
            self._runnable.append(step)

    def _wake(self) -> None:
        if self._runnable and self._wakeup is None:
            self._wakeup = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Start what may run, in batches of one route."""
        self._wakeup = None
        ready = [step for step in self._runnable if not step.ended]
        self._runnable = []
        ready.sort(key=_route)
        for _, steps in groupby(ready, _route):
            same = list(steps)
            for start in range(0, len(same), BATCH):
                batch = same[start : start + BATCH]
                for step in batch:
                    step.begun = True
                task = asyncio.create_task(self._run(batch))
                self._tasks.add(task)
                task.add_done_callback(self._ran)

    def _ran(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a transfer broke", exc_info=error)

    async def _run(self, batch: Sequence[_Step]) -> None:
        copies = [step.copy for step in batch if step.copy is not None]
        failed: dict[Copy, Outcome] | None = None
        try:
            failed = await self._move(copies)
        finally:  # whatever happens, nobody is left waiting
            for step, copy in zip(batch, copies, strict=True):
                broken = Outcome.FAILED if failed is None else failed.get(copy, Outcome.DONE)
                self._end(step, broken)
            self._wake()

    async def _move(self, copies: Sequence[Copy]) -> dict[Copy, Outcome]:
        """Move the bytes of a batch of one route; returns those that did not arrive."""
        first = copies[0]
        source = self._stores[first.src_level][first.group]
        target = self._stores[first.dst_level][first.group]
        route = (first.src_level, first.dst_level)
        self.blocks_moved[route] = self.blocks_moved.get(route, 0) + len(copies)
        if isinstance(target, MemoryStore):
            return await self._read(source, copies, target.rows(_ids(copies, "dst")))
        if source is target:
            return await self._copy_within(source, copies)
        if isinstance(source, MemoryStore):
            return await self._write(target, copies, source.rows(_ids(copies, "src")))
        return await self._stage(source, target, copies)

    async def _read(
        self, store: BlockStore, copies: Sequence[Copy], rows: Sequence[Row]
    ) -> dict[Copy, Outcome]:
        try:
            await store.read(_ids(copies, "src"), rows)
        except BlockFault as fault:
            _report("read", fault)
            return {c: Outcome.LOST for c in copies if c.src.block_id in fault.failed}
        return {}

    async def _write(
        self, store: BlockStore, copies: Sequence[Copy], rows: Sequence[Row]
    ) -> dict[Copy, Outcome]:
        try:
            await store.write(_ids(copies, "dst"), rows, [tag_of(c) for c in copies])
        except BlockFault as fault:
            _report("write", fault)
            if any(error.errno in MEDIUM_IS_FULL for error in fault.failed.values()):
                self._on_full(copies[0].dst_level)
            return {c: Outcome.FAILED for c in copies if c.dst.block_id in fault.failed}
        return {}

    async def _copy_within(
        self, store: BlockStore, copies: Sequence[Copy]
    ) -> dict[Copy, Outcome]:
        """Move blocks of a medium within it, tags and all: the store knows how."""
        ended = await asyncio.gather(
            *(store.copy(copy.src.block_id, copy.dst.block_id) for copy in copies),
            return_exceptions=True,
        )
        failed = {}
        for copy, error in zip(copies, ended, strict=True):
            if isinstance(error, BlockFault):
                _report("copy", error)
                lost = copy.src.block_id in error.failed
                failed[copy] = Outcome.LOST if lost else Outcome.FAILED
            elif error is not None:
                raise error
        return failed

    async def _stage(
        self, source: BlockStore, target: BlockStore, copies: Sequence[Copy]
    ) -> dict[Copy, Outcome]:
        """Through host rows, where neither end is memory; as many at once as there are rows."""
        failed: dict[Copy, Outcome] = {}
        assert self._has_staging, "no end of the route is memory, and there are no rows to stage it"
        for copy in copies:
            staging = await self._staging.get()
            row = staging[: source.block_nbytes]
            try:
                failed |= await self._read(source, [copy], [row])
                if copy not in failed:
                    failed |= await self._write(target, [copy], [row])
            finally:
                self._staging.put_nowait(staging)
        return failed

    def _end(self, step: _Step, outcome: Outcome) -> None:
        step.ended = True
        if step.source is not None and step.target is not None:
            self._leave(step, step.source, step.target)
        if not step.cancelled:
            step.settle(outcome)
        for after, reads in step.then:
            after.waits -= 1
            after.doomed |= reads and outcome is not Outcome.DONE
            if after.waits or after.ended:
                continue
            if after.copy is None or after.doomed or after.cancelled:
                self._end(after, Outcome.CANCELLED if after.cancelled else Outcome.FAILED)
            else:
                self._runnable.append(after)

    def _leave(self, step: _Step, source: Place, target: Place) -> None:
        if self._writers[target] is step:
            del self._writers[target]
        readers = self._readers[source]
        readers.remove(step)
        if not readers:
            del self._readers[source]


def _route(step: _Step) -> tuple[bool, int, int, int]:
    """The batches of one route together, those on their way up first: somebody waits for them."""
    copy = step.copy
    assert copy is not None, "a barrier does not run"
    return (copy.dst_level > copy.src_level, copy.src_level, copy.dst_level, copy.group)


def _ids(copies: Sequence[Copy], end: str) -> list[int]:
    return [getattr(copy, end).block_id for copy in copies]


def _report(verb: str, fault: BlockFault) -> None:
    for block_id, error in fault.failed.items():
        log.warning("cannot %s block %d: %s", verb, block_id, error)


def tag_of(copy: Copy) -> bytes:
    """What is kept with a block so that a restart can find it."""
    return b"" if copy.private else pack(copy.key, copy.parent, copy.dst.inner)
