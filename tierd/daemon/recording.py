"""The form of a recording: what a daemon was asked, as lines of JSON.

    {"tierd": "trace", "time": unix s}                                          begins a file
    {"namespace": 0, "tenant": .., "model": .., "granule": 16, "token_nbytes": ..}
    {"timestamp": ms, "namespace": 0, "input_length": .., "hit": .., "kept": .., "held": ms,
     "after": id, "names": base64}                                              one request

A granule has an id by its order in the file. A path is what a request shares with earlier ones of
its file, up to the id `after`, and the granules that are new, whose `names` are the first 8 bytes
of their hashes: enough to know them again in another file, and to find nothing by. Session names
may be personal: they are written as a keyed hash whose key nobody keeps. Tokens are not here at
all. This module opens no file.
"""

import json
import os
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from policies.base import NO_HINTS, Hints
from tierd.block import HASH_NBYTES, BlockHash

if TYPE_CHECKING:
    from tierd.daemon.namespace import Namespace

NAME_NBYTES = 8
_TURN_S, _PAUSE_S = 5e-4, 1e-4  # how long it holds the interpreter, and gives way
_PIECE = 1024  # granules that are learned at once
_FLAGS = ("closed", "will_need", "dont_need")


class Served(NamedTuple):
    """One request that is over; lengths in tokens, times in seconds on one clock. Its path is what
    `Encoder.split` made of it. A `forked` one shared its prompt with another request."""

    tenant: str
    namespace: "Namespace"
    began: float
    ended: float
    num_tokens: int
    hit: int
    committed: int
    hints: Hints
    forked: bool
    after: int | None
    new: Sequence[BlockHash]


class Encoder:
    """Writes one file: made where it begins. Anybody may call `split`, one thread the rest."""

    def __init__(self, time: float, offset: float, salt: bytes) -> None:
        """It begins at the Unix `time`, which is `offset` ahead of the clock of requests."""
        self.time, self._offset, self._salt = time, offset, salt
        self._namespaces: dict[tuple[str, Namespace], int] = {}
        self._ids: dict[BlockHash, int] = {}
        self._next = 0
        self._turn = 0.0  # when it last gave way
        self.num_requests = 0

    @property
    def num_names(self) -> int:
        """Granules that it remembers."""
        return len(self._ids)

    def split(self, hashes: Sequence[BlockHash]) -> tuple[int | None, Sequence[BlockHash]]:
        """The id in the file that a path goes on from, and what is new after it. A name stands for
        all before it, so that some ten looks are enough; most paths take one."""
        ids = self._ids
        if not hashes or (after := ids.get(hashes[-1])) is not None:
            return (after if hashes else None), ()
        known = bisect_left(hashes, True, key=lambda name: name not in ids)
        return (ids[hashes[known - 1]] if known else None), hashes[known:]

    def head(self) -> bytes:
        return _line({"tierd": "trace", "time": self.time})

    def encode(self, batch: Iterable[Served]) -> bytes:
        """The lines of a batch, in order. For a thread: it gives way to others in between."""
        lines, self._turn = [], perf_counter()
        for served in batch:
            if (key := (served.tenant, served.namespace)) not in self._namespaces:
                self._namespaces[key] = len(self._namespaces)
                lines.append(_line(self._describe(*key)))
            lines.append(self._request(served))
            self.num_requests += 1
            self._give_way()
        return b"".join(lines)

    def _describe(self, tenant: str, namespace: "Namespace") -> dict[str, Any]:
        layout = namespace.layout
        return {
            "namespace": self._namespaces[tenant, namespace],
            "tenant": tenant,
            "model": namespace.name,
            "granule": layout.hash_step,
            "block_sizes": [group.block_size for group in layout.groups],
            "token_nbytes": layout.nbytes_per_token(),
        }

    def _request(self, served: Served) -> bytes:
        """Not by `json`: that would take the interpreter as long again from the event loop."""
        began = served.began
        text = (
            f'{{"timestamp":{(began + self._offset - self.time) * 1e3:.1f},'
            f'"namespace":{self._namespaces[served.tenant, served.namespace]},'
            f'"input_length":{served.num_tokens},"hit":{served.hit},"kept":{served.committed},'
            f'"held":{(served.ended - began) * 1e3:.1f}{self._path(served.after, served.new)}'
        )
        if served.forked:
            text += ',"forked":true'
        if served.hints != NO_HINTS:
            text += "," + json.dumps(self._hints(served.hints, began))[1:-1]
        return (text + "}\n").encode()

    def _path(self, after: int | None, new: Sequence[BlockHash]) -> str:
        if new:  # when it was split, others like it may not have been here yet
            further, new = self.split(new)
            after = after if further is None else further
        text = "" if after is None else f',"after":{after}'
        if new:
            for start in range(0, len(new), _PIECE):
                self._learn(new[start : start + _PIECE])
                self._give_way()
            names = np.frombuffer(b"".join(new), np.uint8).reshape(-1, HASH_NBYTES)
            text += f',"names":"{b64encode(names[:, :NAME_NBYTES].tobytes()).decode("ascii")}"'
        return text

    def _learn(self, new: Sequence[BlockHash]) -> None:
        self._ids.update(zip(new, range(self._next, self._next + len(new)), strict=True))
        self._next += len(new)

    def _give_way(self) -> None:
        """Let the event loop have the interpreter, if it was kept from it for long."""
        if perf_counter() - self._turn > _TURN_S:
            sleep(_PAUSE_S)  # 0 would not do: who gives it away may be the one to get it back
            self._turn = perf_counter()

    def _hints(self, hints: Hints, began: float) -> dict[str, Any]:
        found = dict[str, Any]()
        if hints.session is not None:
            digest = blake2b(hints.session.encode(), digest_size=8, key=self._salt)
            found["session_id"] = digest.hexdigest()
        found |= {flag: True for flag in _FLAGS if getattr(hints, flag)}
        if hints.priority:
            found["priority"] = hints.priority
        if hints.returns_at is not None:
            found["returns"] = round(hints.returns_at - began, 3)
        return found


def granules_asked(num_tokens: int, granule: int) -> int:
    """Granules of a prompt that may be hit: one token is always computed."""
    return (num_tokens - 1) // granule


def new_salt() -> bytes:
    """A key for the names of sessions."""
    return os.urandom(16)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
