"""A trace: requests that were once made of some server, as the names of their blocks, and when.

One JSON object a line, maybe compressed by gzip; `timestamp` is in milliseconds, and the blocks are
`hash_ids`, or run-length coded `hash_runs`, `[[first id, how many], ..]`. An id is that of a block
and all before it, so that equal ids are equal blocks. A coarser block of m of them has the id of
its last. What is read is small; the names of a request's blocks are made when it is replayed.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from policies.base import Hints
from tierd.block import HASH_NBYTES, BlockHash
from tierd.errors import TierdError

_USUAL = [1 << power for power in range(13)]  # tokens that a block may have
_GZIP = b"\x1f\x8b"


class TraceError(TierdError):
    """A file is no trace that can be replayed."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when, in seconds, and the `(first id, how many)` of its blocks in order."""

    time: float
    runs: Sequence[tuple[int, int]]
    num_tokens: int
    hints: Hints

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.runs)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their time; a block has `block_size` tokens."""

    name: str
    block_size: int
    requests: Sequence[TraceRequest]
    names: Sequence[BlockHash]  # by id

    @classmethod
    def read(cls, path: Path, *, coarse: int = 1, closing: bool = False) -> Self:
        """Read the file at `path`, `coarse` blocks of it as one. With `closing` the last request of
        each session says that it is. Raises TraceError, or OSError."""
        records = list(_records(path))
        last = {r["session_id"]: at for at, r in enumerate(records) if r.get("session_id")}
        requests = []
        for at, record in enumerate(records):
            try:
                runs = _runs(record, coarse)
                session = record.get("session_id")
                hints = Hints(
                    session=None if session is None else str(session),
                    closed=closing and last.get(session) == at,
                )
                time, tokens = float(record["timestamp"]) / 1000, int(record["input_length"])
            except (KeyError, TypeError, ValueError) as error:
                what = f"{type(error).__name__}: {error}"
                raise TraceError(f"{path}: record {at + 1} is no request: {what}") from error
            if runs:
                requests.append(TraceRequest(time, runs, tokens, hints))
        if not requests:
            raise TraceError(f"{path}: holds no request with a whole block")
        if any(later.time < earlier.time for earlier, later in pairwise(requests)):
            raise TraceError(f"{path}: is not in the order of time")
        most = max(first + count for request in requests for first, count in request.runs)
        names = [BlockHash(number.to_bytes(HASH_NBYTES, "big")) for number in range(most)]
        size = _block_size(path, requests, coarse)
        return cls(path.name.partition(".")[0], size, requests, names)

    def path(self, request: TraceRequest) -> list[BlockHash]:
        """The names of a request's blocks, first block first."""
        path: list[BlockHash] = []
        for first, count in request.runs:
            path += self.names[first : first + count]
        return path

    @property
    def num_accesses(self) -> int:
        """Blocks that were asked for."""
        return sum(request.num_blocks for request in self.requests)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
    with gzip.open(path, "rb") if packed else path.open("rb") as lines:
        try:
            for line in lines:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise TraceError(f"{path}: a line is not an object")
                yield record
        except (ValueError, EOFError) as error:
            raise TraceError(f"{path}: is not lines of JSON: {error}") from error


def _runs(record: dict[str, Any], coarse: int) -> tuple[tuple[int, int], ...]:
    """The blocks of a record as runs of consecutive ids."""
    if "hash_runs" in record:
        runs = [(int(first), int(count)) for first, count in record["hash_runs"]]
    else:
        runs = _joined(map(int, record["hash_ids"]))
    if any(first < 0 or count < 0 for first, count in runs):
        raise ValueError("an id is below 0")
    if coarse == 1:
        return tuple(runs)
    ids = [first + at for first, count in runs for at in range(count)]
    return tuple(_joined(ids[coarse - 1 :: coarse]))


def _joined(ids: Iterator[int] | Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in ids:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def _block_size(path: Path, requests: Sequence[TraceRequest], coarse: int) -> int:
    """Tokens a block has, from how many blocks there are of so many tokens: whole ones, or with a
    partly filled last one."""
    for size in _USUAL:
        tokens = size * coarse
        if all(0 < r.num_tokens / tokens - r.num_blocks + 1 < 2 for r in requests):
            return tokens
    raise TraceError(f"{path}: says nowhere how many tokens a block has")
