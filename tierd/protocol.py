"""What daemon and engine say to each other: frames on a Unix stream socket.

    | body bytes u32 | op u8 | kind u8 | 0 u16 | request id u64 | body |        little-endian

A reply carries its request's id and may come out of order; a push has id 0. Hot operations have
fixed binary bodies, cold ones JSON. The first frame is `HELLO`; the daemon's answer to it carries
the pools' file descriptors (SCM_RIGHTS). No payload byte of a block ever crosses the socket.

This module knows bytes, not what they mean: it opens no socket and holds no state.
"""

import json
import math
import os
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple

from tierd import errors
from tierd.block import HASH_NBYTES, BlockHash

VERSION = 1
HEADER = Struct("<IBBHQ")
MAX_FRAME = 16 << 20
NOWHERE = 0xFF  # what LOOKUP says of a granule that no tier can serve; else the level that can
MOST_LOOKED_UP = 1024  # hashes a LOOKUP: the daemon looks them up at once

_HEAD, _pack_head, _unpack_head = HEADER.size, HEADER.pack, HEADER.unpack_from

_ACQUIRE = Struct("<QIIfB")  # lease, prompt tokens, room, prefilled tokens a second, hint bytes
_STEP = Struct("<QIIIB")  # lease, committed, room, number of hashes, 1 to publish
_FORK = Struct("<QQI")  # new lease, its source, tokens
_CUT = Struct("<QI")  # lease, tokens
_COUNT = Struct("<I")
_PREFETCH = Struct("<dI")  # seconds from now, prompt tokens
_LEASE = Struct("<QIIQ")  # lease, hit, room, mask of the ready groups

Tables = list[list[int]]  # block ids by group, -1 where a window has slid past


class Op(IntEnum):
    """What a frame asks for, or answers."""

    HELLO = 1  # JSON {protocol, tenant, tier} -> JSON {boot, memory, ...} and file descriptors
    ATTACH = 2  # JSON {name, layout} -> JSON {layout}
    ACQUIRE = 3
    ADVANCE = 4
    RELEASE = 5
    READY = 6  # push
    STATUS = 7  # JSON {} -> JSON
    GOODBYE = 8  # JSON {} -> JSON {}: views are dropped, nothing will be written any more
    PREFETCH = 9
    LOOKUP = 10  # granules before the first u32, hashes -> a byte each: see `NOWHERE`
    FORK = 11  # any number of new leases
    TRUNCATE = 12  # leases and lengths -> the room that is left, u32 each
    SUSPEND = 13  # a lease and its length
    RESUME = 14  # a lease -> as ACQUIRE
    ADVISE = 15  # hints of leases, sessions and paths: see `tierd.hints`
    RELOAD = 64  # an operator's: JSON {} -> JSON {path, changed, needs_restart}


class Kind(IntEnum):
    """Which way a frame goes, and how it ended."""

    REQUEST = 0
    REPLY = 1
    ERROR = 2  # JSON {error, message}
    PUSH = 3


# An enum's member costs more to look up than a frame to pack.
REQUEST, REPLY, ERROR, PUSH = Kind
_LAST_KIND = int(max(Kind))


class Frame(NamedTuple):
    """One frame, its body not yet decoded."""

    op: int
    kind: int
    request: int
    body: bytes


class LeaseState(NamedTuple):
    """Where a lease stands. `tables` is None where they are as before."""

    lease: int
    hit: int
    room: int
    ready: int  # bit g: group g is ready
    tables: Tables | None


class StepRequest(NamedTuple):
    """One lease's part of an ADVANCE."""

    lease: int
    committed: int
    room: int
    hashes: Sequence[BlockHash]
    publish: bool = False


class AddedBlocks(NamedTuple):
    """What an ADVANCE changed in one table: these blocks are in it from index `start` on."""

    start: int
    ids: list[int]


def default_socket() -> str:
    """Where a daemon listens, and an engine looks, when nobody says otherwise."""
    if path := os.environ.get("TIERD_SOCKET"):
        return path
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return f"{runtime}/tierd/tierd.sock"
    uid = os.getuid()
    return "/run/tierd/tierd.sock" if uid == 0 else f"/tmp/tierd-{uid}/tierd.sock"


def encode(op: int, kind: Kind, request: int, body: bytes = b"") -> bytes:
    """A whole frame."""
    return _pack_head(len(body), op, kind, 0, request) + body


def split(
    data: bytes | memoryview, max_frame: int = MAX_FRAME, stop: int | None = None
) -> tuple[list[Frame], int]:
    """The whole frames at the start of `data` (up to `stop`), and how many bytes they are.

    Raises ProtocolError as soon as a header claims a body over `max_frame`, or breaks the form.
    """
    frames, at = [], 0
    stop = len(data) if stop is None else stop
    while stop - at >= _HEAD:
        nbytes, op, kind, zero, request = _unpack_head(data, at)
        if nbytes > max_frame:
            raise errors.ProtocolError(
                f"a frame of {nbytes} bytes; at most {max_frame} are allowed"
            )
        if zero or kind > _LAST_KIND:
            raise errors.ProtocolError("these bytes are no frame of tierd's protocol")
        start = at + _HEAD
        if stop - start < nbytes:
            break
        at = start + nbytes
        frames.append(Frame(op, kind, request, bytes(data[start:at]) if nbytes else b""))
    return frames, at


# -- JSON bodies and errors ----------------------------------------------------------------------


def dump(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode()


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object; anything else is a ProtocolError."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise errors.ProtocolError(f"a body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise errors.ProtocolError(f"a body is a JSON {type(values).__name__}, not an object")
    return values


_ERRORS = {
    kind.__name__: kind
    for kind in (
        errors.TierdError,
        errors.OutOfBlocks,
        errors.ProtocolError,
        errors.Refused,
        errors.LayoutMismatch,
        errors.LeaseError,
        errors.ConfigError,
    )
}


def dump_error(error: errors.TierdError) -> bytes:
    return dump({"error": type(error).__name__, "message": str(error)})


def parse_error(body: bytes) -> errors.TierdError:
    """The exception the other side raised."""
    values = parse(body)
    kind = _ERRORS.get(str(values.get("error")), errors.TierdError)
    return kind(str(values.get("message")))


# -- binary bodies -------------------------------------------------------------------------------


def dump_tables(tables: Iterable[Sequence[int]]) -> bytes:
    return b"".join(_COUNT.pack(len(ids)) + array("q", ids).tobytes() for ids in tables)


def _tables(body: bytes, at: int, groups: int) -> tuple[Tables, int]:
    tables = []
    for _ in range(groups):
        (count,) = _COUNT.unpack_from(body, at)
        start = at + _COUNT.size
        at = start + 8 * count
        ids = array("q")
        ids.frombytes(body[start:at])
        tables.append(ids.tolist())
    return tables, at


def _hashes(body: bytes, at: int, count: int) -> list[BlockHash]:
    stop = at + count * HASH_NBYTES
    if stop > len(body):
        raise errors.ProtocolError(f"{count} hashes announced, the frame ends before")
    # Not `BlockHash(...)`: there may be thousands, and the call takes twice as long again.
    return [body[i : i + HASH_NBYTES] for i in range(at, stop, HASH_NBYTES)]  # type: ignore[misc]


def dump_acquire(
    lease: int,
    num_tokens: int,
    room: int,
    hashes: Sequence[BlockHash],
    prefill: float = 0.0,
    hints: bytes = b"",
) -> bytes:
    head = _ACQUIRE.pack(lease, num_tokens, room, prefill, len(hints))
    return b"".join([head, *hashes, hints])


def parse_acquire(body: bytes) -> tuple[int, int, int, float, list[BlockHash], bytes]:
    """Lease, prompt tokens, room, speed, names, and hints not yet decoded."""
    if len(body) < _ACQUIRE.size:
        raise errors.ProtocolError(f"an ACQUIRE of {len(body)} bytes")
    lease, num_tokens, room, prefill, nbytes = _ACQUIRE.unpack_from(body)
    count, rest = divmod(len(body) - _ACQUIRE.size - nbytes, HASH_NBYTES)
    if count < 0 or rest:
        raise errors.ProtocolError(f"an ACQUIRE of {len(body)} bytes, {nbytes} of them hints")
    if not 0 <= prefill < math.inf:
        raise errors.ProtocolError(f"an ACQUIRE at {prefill} tokens a second")
    hints = body[-nbytes:] if nbytes else b""
    return lease, num_tokens, room, prefill, _hashes(body, _ACQUIRE.size, count), hints


def dump_prefetch(seconds: float, num_tokens: int, hashes: Sequence[BlockHash]) -> bytes:
    return _PREFETCH.pack(seconds, num_tokens) + b"".join(hashes)


def parse_prefetch(body: bytes) -> tuple[float, int, list[BlockHash]]:
    count, rest = divmod(len(body) - _PREFETCH.size, HASH_NBYTES)
    if count < 0 or rest:
        raise errors.ProtocolError(f"a PREFETCH of {len(body)} bytes")
    seconds, num_tokens = _PREFETCH.unpack_from(body)
    return seconds, num_tokens, _hashes(body, _PREFETCH.size, count)


def dump_lookup(first: int, hashes: Sequence[BlockHash]) -> bytes:
    return _COUNT.pack(first) + b"".join(hashes)


def parse_lookup(body: bytes) -> tuple[int, list[BlockHash]]:
    count, rest = divmod(len(body) - _COUNT.size, HASH_NBYTES)
    if count < 0 or rest or count > MOST_LOOKED_UP:
        raise errors.ProtocolError(f"a LOOKUP of {len(body)} bytes")
    return _COUNT.unpack_from(body)[0], _hashes(body, _COUNT.size, count)


def dump_lease(state: LeaseState) -> bytes:
    head = _LEASE.pack(state.lease, state.hit, state.room, state.ready)
    return head if state.tables is None else head + dump_tables(state.tables)


def parse_lease(body: bytes, groups: int) -> LeaseState:
    lease, hit, room, ready = _LEASE.unpack_from(body)
    changed = len(body) > _LEASE.size
    tables = _tables(body, _LEASE.size, groups)[0] if changed else None
    return LeaseState(lease, hit, room, ready, tables)


def dump_steps(steps: Sequence[StepRequest]) -> bytes:
    heads = [_STEP.pack(s.lease, s.committed, s.room, len(s.hashes), s.publish) for s in steps]
    return b"".join([_COUNT.pack(len(steps)), *heads, *(h for s in steps for h in s.hashes)])


def parse_steps(body: bytes) -> list[StepRequest]:
    if len(body) < _COUNT.size:
        raise errors.ProtocolError("an ADVANCE without a count")
    (count,) = _COUNT.unpack_from(body)
    at = _COUNT.size + count * _STEP.size
    if at > len(body):
        raise errors.ProtocolError(f"an ADVANCE of {count} steps in {len(body)} bytes")
    steps = []
    for lease, committed, room, count, publish in _STEP.iter_unpack(body[_COUNT.size : at]):
        names = _hashes(body, at, count)
        steps.append(StepRequest(lease, committed, room, names, bool(publish)))
        at += count * HASH_NBYTES
    if at != len(body):
        raise errors.ProtocolError(f"an ADVANCE with {len(body) - at} bytes too many")
    return steps


def dump_added(added: Iterable[Iterable[AddedBlocks]]) -> bytes:
    return b"".join(
        _COUNT.pack(start) + dump_tables([ids]) for groups in added for start, ids in groups
    )


def parse_added(body: bytes, steps: int, groups: int) -> list[list[AddedBlocks]]:
    """The blocks an ADVANCE added, by step and group."""
    added, at = [], 0
    for _ in range(steps):
        tables = []
        for _ in range(groups):
            (start,) = _COUNT.unpack_from(body, at)
            (ids,), at = _tables(body, at + _COUNT.size, 1)
            tables.append(AddedBlocks(start, ids))
        added.append(tables)
    return added


def dump_forks(forks: Iterable[tuple[int, int, int]]) -> bytes:
    """`(new lease, source, tokens)` each."""
    return b"".join(_FORK.pack(*fork) for fork in forks)


def parse_forks(body: bytes) -> list[tuple[int, int, int]]:
    return _several(_FORK, body, "FORK")


def dump_cuts(cuts: Iterable[tuple[int, int]]) -> bytes:
    """`(lease, tokens)` each."""
    return b"".join(_CUT.pack(*cut) for cut in cuts)


def parse_cuts(body: bytes) -> list[tuple[int, int]]:
    return _several(_CUT, body, "TRUNCATE or SUSPEND")


def dump_rooms(rooms: Sequence[int]) -> bytes:
    return array("I", rooms).tobytes()


def parse_rooms(body: bytes) -> list[int]:
    rooms = array("I")
    rooms.frombytes(body)
    return rooms.tolist()


def _several(of: Struct, body: bytes, what: str) -> list[Any]:
    if len(body) % of.size:
        raise errors.ProtocolError(f"a {what} of {len(body)} bytes")
    return list(of.iter_unpack(body))


def dump_leases(leases: Sequence[int]) -> bytes:
    return array("Q", leases).tobytes()


def parse_leases(body: bytes) -> list[int]:
    if len(body) % 8:
        raise errors.ProtocolError(f"a RELEASE of {len(body)} bytes")
    leases = array("Q")
    leases.frombytes(body)
    return leases.tolist()
