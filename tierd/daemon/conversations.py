"""What engines say of a namespace's requests and sessions, and what comes of it.

A session here is a conversation, as engines name it: requests that go on from one another. Which
path each used last is remembered, of so many and so many bytes, so that a word about one that holds
no lease finds it. The policies hear all of it through the cache; what is wanted soon, and what is
expected back shortly before it comes, is brought nearer. A session is known only where it was
named: in a namespace, and so in a tenant (I10).
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from policies.base import NO_HINTS, Access, Hints
from tierd import hints as said
from tierd.block import HASH_NBYTES, BlockHash
from tierd.daemon.cache import TieredCache
from tierd.daemon.returns import Returns
from tierd.daemon.speed import Speeds
from tierd.daemon.upkeep import Prefetch, Upkeep

_MOST = 65536  # conversations remembered
_MOST_NBYTES = 32 << 20  # of their paths
_WANTED_S = 60.0  # how long a word is worth a copy
_HASTE = 2.0  # a return is prepared so many times earlier than the copy should take,
_LEAST_LEAD_S = 0.1  # or so much,
_UNMEASURED_S = 1.0  # or so much, while no copy was made from there yet


def heard(hints: said.Hints | None, now: float) -> Hints:
    """What an engine says at `now`, on the loop's clock, as policies take it."""
    if hints is None:
        return NO_HINTS
    return Hints(
        session=hints.session,
        closed=hints.closed,
        priority=hints.priority,
        returns_at=None if hints.returns_in is None else now + hints.returns_in,
        will_need=hints.will_need,
        dont_need=hints.dont_need,
    )


@dataclass(slots=True)
class _Conversation:
    path: bytes  # its names, joined: a list of them takes five times as much
    closed: bool = False


class Conversations:
    """Owns the timer of returns until `close`."""

    def __init__(self, cache: TieredCache, upkeep: Upkeep, speeds: Speeds) -> None:
        self._cache, self._upkeep, self._speeds = cache, upkeep, speeds
        self._known: OrderedDict[str, _Conversation] = OrderedDict()
        self._nbytes = 0
        self._returns = Returns(self._returning)
        self._heard: Counter[str] = Counter()

    def asked(self, hints: Hints, hashes: Sequence[BlockHash]) -> None:
        """A request came with `hints`: who asks is open, and need not be expected any more."""
        self._count(hints)
        if hints.session is not None:
            self._know(hints.session, hashes)

    def ended(self, hints: Hints, hashes: Sequence[BlockHash]) -> Hints:
        """A request is over; returns what there is to say of it, now that it is."""
        if (session := hints.session) is None:
            return hints
        before = self._known.get(session)
        if before is not None and before.closed:  # while it went on
            hints = replace(hints, closed=True)
        self._know(session, hashes)
        self._tell(session, hints)
        return hints

    def spoken(self, hints: Hints) -> None:
        """Something was said of a request that goes on; it counts when that is over."""
        self._count(hints)

    def advise(self, hints: Hints, now: float, path: Sequence[BlockHash] | None = None) -> None:
        """Something was said of a path, or else of what a session used last."""
        self._count(hints)
        if (session := hints.session) is not None:
            if path is None:
                path = self._path(session)
            else:
                self._know(session, path)
            self._tell(session, hints)
        if path and hints.tells_worth:
            self._cache.advise(path, Access(now, hints))
        if path and hints.will_need:
            self._bring(path, now, session)

    def close(self) -> None:
        """Nobody is expected any more."""
        self._returns.close()

    def status(self) -> dict[str, Any]:
        """Facts for `tierd status`, as JSON: how often each hint came, and who is known."""
        kinds = ("session", "priority", "returns_in", "will_need", "dont_need", "closed")
        counts = {kind: self._heard[kind] for kind in kinds}
        return {**counts, "sessions": len(self._known), "expected": len(self._returns)}

    def _tell(self, session: str, hints: Hints) -> None:
        """A session closes, or says when it returns."""
        if (known := self._known.get(session)) is None:
            return
        if hints.closed:
            self._know(session, ()).closed = True
        elif hints.returns_at is not None and len(self._cache.chain.tiers) > 2:
            num_hashes = len(known.path) // HASH_NBYTES
            self._returns.expect(session, hints.returns_at - self._lead(num_hashes))

    def _know(self, session: str, path: Sequence[BlockHash]) -> _Conversation:
        """A conversation goes on with `path`; nothing is planned for it any more."""
        self._forget(session)
        known = self._known[session] = _Conversation(b"".join(path))
        self._nbytes += len(known.path)
        while len(self._known) > _MOST or (self._nbytes > _MOST_NBYTES and len(self._known) > 1):
            self._forget(next(iter(self._known)))
        return known

    def _forget(self, session: str) -> None:
        if (known := self._known.pop(session, None)) is not None:
            self._nbytes -= len(known.path)
            self._returns.forget(session)
            self._upkeep.drop(session)

    def _path(self, session: str) -> list[BlockHash]:
        """What a session used last; nothing if that is not known."""
        if (known := self._known.get(session)) is None:
            return []
        joined = known.path
        return [BlockHash(joined[i : i + HASH_NBYTES]) for i in range(0, len(joined), HASH_NBYTES)]

    def _returning(self, session: str) -> None:
        """A session is about to return: its path counts as used, and is brought into memory."""
        path, now = self._path(session), self._upkeep.now()
        self._cache.advise(path, Access(now, Hints(session, will_need=True)))
        self._bring(path, now, session)

    def _bring(self, path: Sequence[BlockHash], now: float, session: str | None) -> None:
        num_tokens = len(path) * self._cache.layout.hash_step + 1
        self._upkeep.prefetch(Prefetch(path, num_tokens, now + _WANTED_S, session=session))

    def _lead(self, num_hashes: int) -> float:
        """Seconds that bringing a path into host memory may take, all of it from further below."""
        layout = self._cache.layout
        nbytes = np.array([num_hashes * layout.hash_step * layout.nbytes_per_token()])
        routes = [(level, 1) for level in range(2, len(self._cache.chain.tiers))]
        measured = [speed for r in routes if (speed := self._speeds.routes.get(r)) and speed.bursts]
        if not measured:
            return _UNMEASURED_S
        return max(_LEAST_LEAD_S, _HASTE * max(float(s.seconds(nbytes)[0]) for s in measured))

    def _count(self, hints: Hints) -> None:
        self._heard["session"] += hints.session is not None
        self._heard["priority"] += hints.priority != 0
        self._heard["returns_in"] += hints.returns_at is not None
        self._heard["will_need"] += hints.will_need
        self._heard["dont_need"] += hints.dont_need
        self._heard["closed"] += hints.closed
