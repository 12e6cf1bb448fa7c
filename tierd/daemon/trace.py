"""A trace: requests that were once made of some server, as the names of their blocks, and when.

One JSON object a line, maybe compressed by gzip; `timestamp` is in milliseconds, and the blocks are
`hash_ids`, or run-length coded `hash_runs`, `[[first id, how many], ..]`. An id is that of a block
and all before it, so that equal ids are equal blocks. A coarser block of m of them has the id of
its last. What a daemon recorded, a file or a folder of them, is a trace of blocks of a granule.

    a request's path    | asked ............ | generated .. |
                        | kept ......................... |

What is read is small; the names of a request's blocks are made when it is replayed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

from policies.base import Hints
from tierd.block import HASH_NBYTES, BlockHash
from tierd.daemon.json_lines import SUFFIX, TraceError, records
from tierd.daemon.recorded import Reading
from tierd.daemon.runs import Run, joined
from tierd.errors import TierdError

_USUAL = [1 << power for power in range(13)]  # tokens that a block may have


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when, in seconds, and the runs of its blocks in order.

    `num_asked` of them are the prompt's, the rest was generated; the first `num_kept` were there at
    its end for others. `num_hit`: tokens that the daemon had of it which recorded the request.
    """

    time: float
    runs: Sequence[Run]
    num_tokens: int
    hints: Hints
    num_asked: int
    num_kept: int
    num_hit: int | None = None

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.runs)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their time; a block has `block_size` tokens, of `token_nbytes` each
    where that is known."""

    name: str
    block_size: int
    requests: Sequence[TraceRequest]
    names: Sequence[BlockHash]  # by id
    token_nbytes: int | None = None

    @classmethod
    def read(
        cls, path: Path, *, coarse: int = 1, closing: bool = False, model: str | None = None
    ) -> Self:
        """Read the trace at `path`, `coarse` blocks of it as one. With `closing` the last request
        of each session says that it is; `model` says whose requests of a recording. Raises
        TraceError, or OSError."""
        try:
            trace = cls._read(path, model)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from error
        if closing:
            trace = trace._closing()
        return trace if coarse == 1 else trace.coarser(coarse)

    @classmethod
    def _read(cls, path: Path, model: str | None) -> Self:
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not files:
            raise TraceError(f"holds no *{SUFFIX}")
        reading, name = Reading(), path.name.partition(".")[0]
        for file in files:
            lines = records(file)
            first = next(lines, {})
            if "tierd" not in first:
                if path.is_dir() or model is not None:
                    raise TraceError(f"{file.name} is no recording of a daemon")
                plain = list(chain([first] if first else [], lines))
                return cls._of(name, plain, None, None)
            try:
                reading.add(chain([first], lines))
            except (TraceError, ValueError, KeyError, TypeError):
                continue  # it breaks off there: its daemon was killed, or its medium was full
        try:
            recorded = reading.recorded(model)
        except TierdError as error:
            raise TraceError(str(error)) from error
        return cls._of(name, recorded.requests, recorded.granule, recorded.token_nbytes)

    @classmethod
    def _of(
        cls,
        name: str,
        records: Sequence[Mapping[str, Any]],
        block_size: int | None,
        token_nbytes: int | None,
    ) -> Self:
        requests = []
        for at, record in enumerate(records):
            try:
                request = _request(record)
            except (KeyError, TypeError, ValueError) as error:
                what = f"{type(error).__name__}: {error}"
                raise TraceError(f"record {at + 1} is no request: {what}") from error
            if request.runs:
                requests.append(request)
        if not requests:
            raise TraceError("holds no request with a whole block")
        if any(later.time < earlier.time for earlier, later in pairwise(requests)):
            raise TraceError("is not in the order of time")
        most = max(first + count for request in requests for first, count in request.runs)
        names = [BlockHash(number.to_bytes(HASH_NBYTES, "big")) for number in range(most)]
        return cls(name, block_size or _block_size(requests), requests, names, token_nbytes)

    def coarser(self, times: int) -> Self:
        """The same requests in blocks of so many of these; what fills no such block is left out.
        Raises TraceError if there is none."""
        requests = [
            replace(
                request,
                runs=runs,
                num_asked=request.num_asked // times,
                num_kept=request.num_kept // times,
            )
            for request in self.requests
            if (runs := _coarser(request.runs, times))
        ]
        if not requests:
            raise TraceError(f"no request fills a block of {self.block_size * times} tokens")
        return replace(self, block_size=self.block_size * times, requests=requests)

    def _closing(self) -> Self:
        last = {r.hints.session: at for at, r in enumerate(self.requests)}
        requests = [
            replace(r, hints=replace(r.hints, closed=True))
            if r.hints.session is not None and last[r.hints.session] == at
            else r
            for at, r in enumerate(self.requests)
        ]
        return replace(self, requests=requests)

    def path(self, request: TraceRequest) -> list[BlockHash]:
        """The names of a request's blocks, first block first."""
        path: list[BlockHash] = []
        for first, count in request.runs:
            path += self.names[first : first + count]
        return path

    @property
    def num_accesses(self) -> int:
        """Blocks that were asked for."""
        return sum(request.num_asked for request in self.requests)


def _request(record: Mapping[str, Any]) -> TraceRequest:
    if "hash_runs" in record:
        runs = [(int(first), int(count)) for first, count in record["hash_runs"]]
    else:
        runs = joined(map(int, record["hash_ids"]))
    if any(first < 0 or count < 0 for first, count in runs):
        raise ValueError("an id is below 0")
    time, count = float(record["timestamp"]) / 1000, sum(count for _, count in runs)
    return TraceRequest(
        time,
        runs,
        int(record["input_length"]),
        _hints(record, time),
        min(count, int(record.get("asked", count))),
        min(count, int(record.get("kept", count))),
        None if "hit" not in record else int(record["hit"]),
    )


def _hints(record: Mapping[str, Any], time: float) -> Hints:
    session, returns = record.get("session_id"), record.get("returns")
    return Hints(
        session=None if session is None else str(session),
        closed=bool(record.get("closed")),
        priority=int(record.get("priority", 0)),
        returns_at=None if returns is None else time + float(returns),
        will_need=bool(record.get("will_need")),
        dont_need=bool(record.get("dont_need")),
    )


def _coarser(runs: Sequence[Run], times: int) -> list[Run]:
    ids = [first + at for first, count in runs for at in range(count)]
    return joined(ids[times - 1 :: times])


def _block_size(requests: Sequence[TraceRequest]) -> int:
    """Tokens a block has, from how many blocks there are of so many tokens: whole ones, or with a
    partly filled last one."""
    for size in _USUAL:
        if all(0 < r.num_tokens / size - r.num_blocks + 1 < 2 for r in requests):
            return size
    raise TraceError("says nowhere how many tokens a block has")
