"""What a namespace does when nobody waits for it: prefetches, and keeping cold blocks clean.

One small batch is under way at a time, and the next is planned when it has ended, so that requests
find the threads free. What an engine announced goes first, then what the prefetch policy guesses,
then write-backs. It wakes when a request has changed something, never by a clock. It plans through
the cache like everybody else.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from policies.base import Access, PrefetchPolicy
from policies.prefetch import Nothing
from tierd.block import BlockHash
from tierd.daemon.cache import TieredCache
from tierd.daemon.copy import Copy
from tierd.daemon.transfer import StoreTransfer

_BATCH = 16  # blocks a pool, and at once
_MOST_PREFETCHES = 256  # waiting ones of a kind; the oldest gives way
_MOST_WAYS = 4  # that one request is guessed to go on
_GUESSED_S = 60.0  # how long a guess is worth a copy
_PIECE = 256  # keys that a policy learns before the loop may breathe


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A prompt that is expected before `deadline`, on the loop's clock; tokens before `start` are
    there already, or somebody else's care. `session`: who is expected with it."""

    hashes: Sequence[BlockHash]
    num_tokens: int
    deadline: float
    start: int = 0
    session: str | None = None


class Upkeep:
    """Owns the task that does it, from `start` to `close`."""

    def __init__(self, cache: TieredCache, transfer: StoreTransfer, policy: PrefetchPolicy) -> None:
        self._cache, self._transfer = cache, transfer
        self.guess_by(policy)
        self._stirred = asyncio.Event()
        self._prefetches: deque[Prefetch] = deque(maxlen=_MOST_PREFETCHES)
        self._guesses: deque[Prefetch] = deque(maxlen=_MOST_PREFETCHES)
        self._asked: deque[Sequence[BlockHash]] = deque(maxlen=_MOST_PREFETCHES)
        self._used: deque[Sequence[BlockHash]] = deque(maxlen=_MOST_PREFETCHES)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def guess_by(self, policy: PrefetchPolicy) -> None:
        """Have another policy guess from now on, and learn."""
        self._policy = None if isinstance(policy, Nothing) else policy  # then nobody is woken

    def stir(self) -> None:
        """Something has changed: look whether there is something to do."""
        self._stirred.set()

    def prefetch(self, prefetch: Prefetch) -> None:
        """Bring a prompt's hit from SSD into host memory, if its deadline allows."""
        self._prefetches.append(prefetch)
        self.stir()

    def drop(self, session: str) -> None:
        """A session is not expected any more: leave out what has not been brought for it."""
        for prefetch in [p for p in self._prefetches if p.session == session]:
            self._prefetches.remove(prefetch)

    def asked(self, path: Sequence[BlockHash]) -> None:
        """A request came for `path`: bring what it is likely to go on with."""
        if self._policy is not None:
            self._asked.append(path)
            self._stirred.set()

    def left_out(self, hashes: Sequence[BlockHash], start: int, num_tokens: int) -> None:
        """A prompt got no more than `start` tokens of its hit: bring the rest, for who is next."""
        self._guesses.append(Prefetch(hashes, num_tokens, self.now() + _GUESSED_S, start))
        self._stirred.set()

    def used(self, path: Sequence[BlockHash]) -> None:
        """A request is over that used `path`: learn from it."""
        if self._policy is not None:
            self._used.append(path)
            self._stirred.set()

    async def _run(self) -> None:
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            await self._consult()
            while copies := self._next():
                await self._transfer.idle([copy.target for copy in copies])
                await self._consult()

    async def _consult(self) -> None:
        """Have the policy guess for who came, then learn from who is done."""
        if (policy := self._policy) is None:
            return
        while self._asked:
            self._guess(policy, self._asked.popleft())
        while self._used:
            path, access = self._used.popleft(), Access(self.now())
            for stop in range(len(path), 1, -_PIECE):
                policy.record(path[max(0, stop - _PIECE - 1) : stop], access)
                if stop > _PIECE:
                    await asyncio.sleep(0)

    def _guess(self, policy: PrefetchPolicy, path: Sequence[BlockHash]) -> None:
        step, deadline = self._cache.layout.hash_step, self.now() + _GUESSED_S
        for keys in islice(policy.wanted(path), _MOST_WAYS):
            way = [BlockHash(key) for key in keys]  # type: ignore[arg-type]
            # No true chain names a block twice; engines may have told of others.
            if len(set(way)) == len(way) and set(way).isdisjoint(path):
                hashes = [*path, *way]
                start, num_tokens = len(path) * step, len(hashes) * step + 1
                self._guesses.append(Prefetch(hashes, num_tokens, deadline, start))

    def _next(self) -> list[Copy]:
        """Begin the next batch; none if all is done."""
        now = self.now()
        for waiting in (self._prefetches, self._guesses):
            while waiting:
                first = waiting[0]
                if first.deadline > now:
                    args = (first.hashes, first.num_tokens, _BATCH, Access(now), first.start)
                    if copies := self._cache.prefetch(*args):
                        return copies
                waiting.popleft()
        return self._cache.reclaim(_BATCH)

    @staticmethod
    def now() -> float:
        """Seconds on the loop's clock."""
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        """End the task; what it began goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
