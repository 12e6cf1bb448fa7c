"""What an engine may say of a session, a request or a path: the kernel's madvise is the model.

A hint promises nothing and is owed nothing: it may make a later hit likelier, never a wrong byte.
On the socket

    hints   | flags u8 | priority i8 | seconds until it returns f32 | session, UTF-8 |
    advice  | of what u8 | lease u64 | number of hashes u32 | bytes of hints u8 | hints | hashes |

What comes of it is the daemon's business.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from tierd.block import HASH_NBYTES, BlockHash
from tierd.errors import ProtocolError, TierdError

MOST_SESSION_NBYTES = 64
MOST_ADVICE = 256  # words a message

_HINTS = Struct("<Bbf")
_ADVICE = Struct("<BQIB")
_RETURNS, _WILL_NEED, _DONT_NEED, _CLOSED = 1, 2, 4, 8
_FLAGS = _RETURNS | _WILL_NEED | _DONT_NEED | _CLOSED


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of a request, or of a session between two. Raises ValueError for what makes no
    sense.

    `session`: the conversation, up to 64 bytes of UTF-8; `returns_in`: seconds until it is expected
    to ask again, from the end of the request that it is said of, or else from now; `closed`: it
    never will. `priority`: -128 to 127,
    higher is given up later. `will_need`: the path is wanted soon; `dont_need`: it is not.
    """

    session: str | None = None
    priority: int = 0
    returns_in: float | None = None
    will_need: bool = False
    dont_need: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        if self.session is not None and not 1 <= _nbytes(self.session) <= MOST_SESSION_NBYTES:
            raise ValueError(
                f"session: {self.session!r} is not text of 1 to {MOST_SESSION_NBYTES} bytes"
            )
        if type(self.priority) is not int or not -128 <= self.priority <= 127:
            raise ValueError(f"priority: {self.priority!r} is not an integer from -128 to 127")
        if self.returns_in is not None and not 0 <= self.returns_in < math.inf:
            raise ValueError(f"returns_in: {self.returns_in!r} is not so many seconds")
        if self.will_need + self.dont_need + self.closed > 1:
            raise ValueError("will_need, dont_need, closed: at most one can be true")
        if self.returns_in is not None and self.closed:
            raise ValueError("returns_in: a session that is closed does not return")

    def check_whose(self) -> None:
        """Raise ValueError if they say of no session what is said of one."""
        if self.session is None and (self.closed or self.returns_in is not None):
            raise ValueError("session: without one nobody knows who has closed, or returns")

    def after(self, before: "Hints | None") -> "Hints":
        """These, said after `before` of the same request: what that says holds where these are
        silent."""
        if before is None:
            return self
        latest = self
        if not (self.will_need or self.dont_need or self.closed or self.returns_in is not None):
            latest = before  # of what is to become of the session
        return replace(
            latest,
            session=self.session or before.session,
            priority=self.priority or before.priority,
        )


def _nbytes(text: object) -> int:
    """In UTF-8; 0 for what has no form in it."""
    try:
        return len(text.encode()) if isinstance(text, str) else 0
    except UnicodeEncodeError:
        return 0


class Of(IntEnum):
    """What something is said of."""

    LEASE = 0
    SESSION = 1  # what it used last
    PATH = 2


class Advice(NamedTuple):
    """Hints, and what they are of: a lease's number, a path by its names, or else the session."""

    hints: Hints
    lease: int | None = None
    path: Sequence[BlockHash] | None = None


def dump_hints(hints: Hints | None) -> bytes:
    """Nothing for none. Raises ValueError if a session is missing."""
    if hints is None:
        return b""
    hints.check_whose()
    flags = (
        (hints.returns_in is not None) * _RETURNS
        + hints.will_need * _WILL_NEED
        + hints.dont_need * _DONT_NEED
        + hints.closed * _CLOSED
    )
    head = _HINTS.pack(flags, hints.priority, min(hints.returns_in or 0.0, 3e38))
    return head + (hints.session or "").encode()


def parse_hints(body: bytes) -> Hints | None:
    """Raises TierdError if they make no sense."""
    if not body:
        return None
    try:
        if len(body) < _HINTS.size:
            raise ValueError(f"{len(body)} bytes are too few")
        flags, priority, returns_in = _HINTS.unpack_from(body)
        if flags & ~_FLAGS:
            raise ValueError(f"flags {flags:#x} are unknown")
        hints = Hints(
            body[_HINTS.size :].decode() or None,
            priority,
            returns_in if flags & _RETURNS else None,
            bool(flags & _WILL_NEED),
            bool(flags & _DONT_NEED),
            bool(flags & _CLOSED),
        )
        hints.check_whose()
    except ValueError as error:  # a UnicodeDecodeError is one too
        raise TierdError(f"hints: {error}") from None
    return hints


def dump_advice(advice: Iterable[Advice]) -> bytes:
    parts = []
    for hints, lease, path in advice:
        of = Of.PATH if path is not None else Of.SESSION if lease is None else Of.LEASE
        said, hashes = dump_hints(hints), path or ()
        parts += [_ADVICE.pack(of, lease or 0, len(hashes), len(said)), said, *hashes]
    return b"".join(parts)


def parse_advice(body: bytes) -> list[Advice]:
    """Raises ProtocolError if its form is broken, TierdError if it makes no sense."""
    found, at = list[Advice](), 0
    while at < len(body):
        start = at + _ADVICE.size
        if start > len(body):
            raise ProtocolError(f"an ADVISE with {len(body) - at} bytes too many")
        of, lease, count, nbytes = _ADVICE.unpack_from(body, at)
        names = start + nbytes
        at = names + count * HASH_NBYTES
        if at > len(body):
            raise ProtocolError(f"{nbytes} bytes and {count} hashes announced, they end before")
        if len(found) == MOST_ADVICE:
            raise ProtocolError(f"an ADVISE of more than {MOST_ADVICE} words")
        found.append(_advice(of, lease, body[start:names], body[names:at]))
    return found


def _advice(of: int, lease: int, said: bytes, names: bytes) -> Advice:
    hints = parse_hints(said)
    if hints is None:
        raise TierdError("hints: there are none")
    if of == Of.LEASE:
        return Advice(hints, lease)
    if of == Of.PATH:
        steps = range(0, len(names), HASH_NBYTES)
        return Advice(hints, path=[BlockHash(names[i : i + HASH_NBYTES]) for i in steps])
    if of != Of.SESSION:
        raise TierdError(f"hints: of {of}, which is nothing that can be spoken of")
    if hints.session is None:
        raise TierdError("hints: of a session that is not named")
    return Advice(hints)
