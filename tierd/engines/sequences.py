"""The sequences of one cache, a lease each, and which of them each row of the model's batch is.

    columns   0 ..... pad ................. pad + hit ............. computed
              padding | filled by the daemon | written by the model

A batch counts in columns: it is as wide as its longest prompt, the others are padded on the left. A
sequence counts its own tokens. Rows that are the same sequence, as the beams and the samples of one
prompt are, share it until they `part`. What is frozen for others has been seen: the ids that were
computed are the ids it is named by. No tensor and no layer is known here.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from tierd.errors import DaemonLost, TierdError
from tierd.hints import Hints
from tierd.lease import Lease
from tierd.pool import Pool


class HitCutShort(TierdError):
    """A load failed after a cache was made: settle the cache, and begin the forward pass again."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one sequence, and the columns of padding before them; `extra` and `hints` as in
    `Pool.acquire`."""

    ids: npt.NDArray[Any]
    pad: int = 0
    extra: Mapping[int, bytes] | None = None
    hints: Hints | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A lease, `pad` columns before its first token, its ids as far as they are known. `hit` tokens
    were written by others: planned until they have been waited for."""

    lease: Lease
    pad: int
    ids: npt.NDArray[Any]
    hit: int

    def tokens(self, columns: int) -> int:
        """How many of the batch's first `columns` are tokens of its own."""
        return max(0, columns - self.pad)

    def saw(self, ids: npt.NDArray[Any]) -> None:
        """Its ids from the first one on. Raises ValueError if it is known by others."""
        known = min(len(ids), len(self.ids))
        if not np.array_equal(ids[:known], self.ids[:known]):
            raise ValueError("input_ids: not the sequence that this cache was made for")
        if len(ids) > known:
            self.lease.append(ids[known:])
            self.ids = ids.copy()


class Sequences:
    """All of a cache's, in a batch. Raises OutOfBlocks with nothing leased, DaemonLost."""

    def __init__(self, pool: Pool, prompts: Iterable[Prompt]) -> None:
        self._pool = pool
        self._grant = gcd(*(group.block_size for group in pool.layout.groups))
        self._seen = 0  # columns that were computed of the ids they are named by
        self._held: list[Sequence] = []
        with ExitStack() as undo:
            undo.callback(self.release, 0)
            for prompt in prompts:
                room = self._rounded(len(prompt.ids))
                extra, hints = prompt.extra, prompt.hints
                lease = pool.acquire(prompt.ids, room=room, extra=extra, hints=hints)
                self._held.append(Sequence(lease, prompt.pad, prompt.ids, lease.hit))
            undo.pop_all()
        self.rows = list(self._held)
        self.prompt_end = self.rows[0].pad + len(self.rows[0].ids)

    @property
    def hit(self) -> int:
        """Columns that no sequence needs to have computed."""
        return min(sequence.pad + sequence.hit for sequence in self._held)

    def check(self) -> None:
        """Raise LeaseError unless all are held, and none is suspended."""
        for sequence in self._held:
            sequence.lease.check()

    # -- while hits are loaded -----------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the hits that stand; what is behind them is to be computed (again)."""
        for sequence in self._held:
            sequence.hit = sequence.lease.wait()
        self._seen = min(self._seen, self.hit)

    def await_group(self, group: int) -> None:
        """Wait for a layer group's part of the hits. Raises HitCutShort."""
        for sequence in self._held:
            if (left := sequence.lease.wait(group)) < sequence.hit:
                raise HitCutShort(f"of a hit of {sequence.hit} tokens {left} are left")

    # -- rows ----------------------------------------------------------------------------------

    def fit(self, num_rows: int) -> None:
        """Of a batch that is wider by a whole factor, each row is repeated that often in a row.

        Raises ValueError for another number of rows.
        """
        if num_rows % len(self.rows):
            raise ValueError(
                f"a cache in tierd made for {len(self.rows)} sequences cannot be that of a batch "
                f"of {num_rows}"
            )
        times = num_rows // len(self.rows)
        self.select([row for row in range(len(self.rows)) for _ in range(times)])

    def select(self, rows: Iterable[int]) -> None:
        """The batch's rows are to be these of its rows now; nothing is copied yet."""
        self.rows = [self.rows[row] for row in rows]

    def part(self, columns: int) -> None:
        """Each row becomes a sequence of its own: those that several rows are fork, those that none
        is any more are given back; a message for either. `columns` are computed.
        """
        seen: set[Sequence] = set()
        again = []
        for row, sequence in enumerate(self.rows):
            if sequence in seen:
                again.append(row)
            seen.add(sequence)
        lost = [sequence for sequence in self._held if sequence not in seen]
        if again:
            sources = [self.rows[row] for row in again]
            leases = self._pool.fork([(s.lease, self._known(s, columns)) for s in sources])
            for row, source, lease in zip(again, sources, leases, strict=True):
                self.rows[row] = replace(source, lease=lease)
        self._held = [*self.rows, *lost]
        self._pool.release([sequence.lease for sequence in lost])
        self._held = list(self.rows)

    # -- tokens --------------------------------------------------------------------------------

    def saw(self, ids: npt.NDArray[Any], columns: int) -> None:
        """The ids of all rows, `[rows, n]`, `columns` of which are computed: drafts are named
        before they are. Raises ValueError for ids of other sequences.
        """
        if len(ids) != len(self.rows):
            raise ValueError(f"input_ids: {len(ids)} rows, this cache has {len(self.rows)}")
        for row, sequence in zip(ids, self.rows, strict=True):
            sequence.saw(row[sequence.pad : max(sequence.pad, columns)])
        self._seen = max(self._seen, min(columns, ids.shape[1]))

    def advance(self, columns: int, room: int) -> None:
        """Freeze what was seen of the `columns` that are computed and are not gone back from, and
        have places for `room` columns: one message, or none. Raises OutOfBlocks; DaemonLost only
        if there is no room without it.
        """
        steps, short = [], False
        for sequence in self._held:
            need, lease = sequence.tokens(room), sequence.lease
            short |= need > lease.room
            room_for = self._rounded(need) if need > lease.room else 0
            steps.append((lease, sequence.tokens(min(columns, self._seen)), room_for))
        try:
            self._pool.advance(steps)
        except DaemonLost:
            if short:
                raise

    def publish(self, columns: int) -> None:
        """Freeze what was seen of `columns`, whole granules of partly filled blocks too."""
        self._pool.publish(self._to_freeze(columns))

    def _to_freeze(self, columns: int) -> list[tuple[Lease, int]]:
        seen = min(columns, self._seen)
        held = [s for s in self._held if not s.lease.released and not s.lease.suspended]
        return [(s.lease, s.tokens(seen)) for s in held if s.tokens(seen)]

    def cut(self, columns: int) -> None:
        """Go back to the first `columns`; it costs no message unless they were frozen."""
        self._pool.truncate(
            [
                (sequence.lease, sequence.tokens(columns))
                for sequence in self._held
                if sequence.tokens(columns) < sequence.lease.num_tokens
            ]
        )
        for sequence in self._held:
            sequence.ids = sequence.ids[: sequence.tokens(columns)]
            sequence.hit = min(sequence.hit, sequence.tokens(columns))
        self._seen = min(self._seen, columns)

    def keep(self, columns: int) -> None:
        """What is computed of the first `columns` is not written again."""
        for sequence in self._held:
            sequence.hit = max(sequence.hit, sequence.tokens(columns))

    # -- places --------------------------------------------------------------------------------

    def suspend(self, columns: int) -> None:
        """Give the places in the pool up, for a while. Raises OutOfBlocks, some suspended."""
        held = [sequence for sequence in self._held if not sequence.lease.suspended]
        self._pool.suspend([(s.lease, self._known(s, columns)) for s in held])

    def resume(self) -> None:
        """Have places again. Raises OutOfBlocks, some resumed."""
        self._pool.resume([s.lease for s in self._held if s.lease.suspended])
        self.settle()

    def release(self, columns: int) -> None:
        """Give all back; what was seen of `columns` stays in tierd. May be repeated."""
        layout, steps = self._pool.layout, self._to_freeze(columns)
        with suppress(DaemonLost):  # it gave everything back itself
            if any(layout.hash_step < group.block_size for group in layout.groups):
                self._pool.publish(steps)
            else:
                self._pool.advance([(lease, tokens, 0) for lease, tokens in steps])
            self._pool.release([s.lease for s in self._held if not s.lease.released])

    def _known(self, sequence: Sequence, columns: int) -> int:
        """Its tokens in the first `columns`. Raises RuntimeError if their ids are not known."""
        tokens = sequence.tokens(columns)
        if tokens > sequence.lease.num_tokens:
            raise RuntimeError(
                "the ids of what was computed are not known: generate with "
                "logits_processor=[cache.channel]"
            )
        return tokens

    def _rounded(self, room: int) -> int:
        """Room up to where the next block of some group ends; it takes no block more."""
        return -(-room // self._grant) * self._grant
