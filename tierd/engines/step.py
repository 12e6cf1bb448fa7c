"""One forward pass over the rows of a batch: where their new tokens go and where the old ones lie.

Made once, used by every layer: what layers of one group share is not computed again for each. It
holds block ids and lengths, no keys or values, and knows no model.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierd.engines.sequences import Sequence
from tierd.layout import KVLayout


@dataclass(slots=True)
class Step:
    """One forward pass over columns `start` to `end` of a batch, the same for every layer.

    Of the batch's tokens `[rows * (end - start)]`, `queries` are those that attend: not padding,
    nor what a longer hit than the batch's has. `writes` are those that go to `slots[g]`: of rows
    that are one sequence, the first one's. None: all. `tables[g]`: block tables `[rows, n]`.
    """

    start: int
    end: int
    pads: list[int]
    queries: Tensor | None
    writes: Tensor | None
    slots: list[Tensor]
    tables: list[Tensor]
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    _masks: list[tuple[Tensor, int | None]] = field(default_factory=list)

    def check_mask(self, mask: Tensor | None, window: int | None) -> None:
        """Raise NotImplementedError unless `mask` is the causal one, with this window and padding.

        Masks are shared by layers: each is looked at once.
        """
        if mask is None:
            fits = not any(self.pads)  # what the op would mask is what a model without one means
        elif any(known is mask and window == of for known, of in self._masks):
            return
        else:
            fits = self._fits(mask, window)
            self._masks.append((mask, window))
        if not fits:
            raise NotImplementedError(
                "attention_mask: a cache in tierd is attended to causally, each layer with its own "
                "sliding window, without the padding on the left that its attention_mask named "
                "when it was made; packed sequences and other masks are not supported"
            )

    def _fits(self, mask: Tensor, window: int | None) -> bool:
        kv, q = torch.arange(self.end), torch.arange(self.start, self.end)[:, None]
        plain = kv <= q if window is None else (kv <= q) & (kv > q - window)
        plain = plain & (kv >= torch.tensor(self.pads)[:, None, None])
        if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2:] != plain.shape[1:]:
            return False
        if mask.shape[0] not in (1, len(plain)):
            return False
        same = (mask[:, 0] == plain.to(mask.device)).flatten(0, 1)
        return bool((same if self.queries is None else same[self.queries]).all())


def taken(tokens: Tensor, which: Tensor | None) -> Tensor:
    """The tokens of a batch `[rows, heads, columns, dim]` that `which` says, `[n, heads, dim]`."""
    flat = tokens.transpose(1, 2).flatten(0, 1)
    return flat if which is None else flat[which]


class Steps:
    """Makes the steps of one cache; block tables are made anew only when they have changed."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._ids: dict[int, list[npt.NDArray[np.int32]]] = {}  # that `_tables` were made of
        self._tables: dict[int, Tensor] = {}

    def plan(self, rows: list[Sequence], start: int, end: int, device: torch.device) -> Step:
        """The step of `rows` from column `start` to `end`, for which their leases have room."""
        # Nothing is computed of padding, nor written over a hit.
        firsts = [min(end, max(start, row.pad + row.hit)) for row in rows]
        own = [at for at, row in enumerate(rows) if all(row is not other for other in rows[:at])]
        queries = None
        if any(first > start for first in firsts):
            queries = _flat(range(len(rows)), firsts, start, end).to(device)
        writes = queries
        if len(own) < len(rows):
            writes = _flat(own, firsts, start, end).to(device)
        ends = np.cumsum([0, *(end - first for first in firsts)], dtype=np.int32)
        return Step(
            start,
            end,
            [row.pad for row in rows],
            queries,
            writes,
            self._slots([(rows[at], firsts[at]) for at in own], end, device),
            [self._table(number, rows, device) for number in range(len(self._layout.groups))],
            torch.tensor([row.tokens(end) for row in rows], dtype=torch.int32, device=device),
            torch.from_numpy(ends).to(device),
        )

    def _slots(
        self, written: list[tuple[Sequence, int]], end: int, device: torch.device
    ) -> list[Tensor]:
        """For each group, where the tokens of some rows go, each row's from a column to `end`."""
        spans = [(row, np.arange(first - row.pad, end - row.pad)) for row, first in written]
        slots = []
        for number, group in enumerate(self._layout.groups):
            places = []
            for row, tokens in spans:
                blocks, offsets = np.divmod(tokens, group.block_size)
                ids = row.lease.tables[number][blocks].astype(np.int64)
                places.append(ids * group.block_size + offsets)
            slots.append(torch.from_numpy(np.concatenate(places)).to(device))
        return slots

    def _table(self, group: int, rows: list[Sequence], device: torch.device) -> Tensor:
        """The group's block tables `[rows, n]`; what lies past a row's end is never read."""
        ids = [row.lease.tables[group] for row in rows]
        known = self._ids.get(group, [])
        if len(known) != len(ids) or any(a is not b for a, b in zip(known, ids, strict=True)):
            table = np.zeros((len(ids), max(map(len, ids))), np.int32)
            for at, row in enumerate(rows):
                table[at, : len(ids[at])] = row.lease.block_table(group)
            self._ids[group], self._tables[group] = ids, torch.from_numpy(table).to(device)
        return self._tables[group]


def _flat(rows: Iterable[int], firsts: list[int], start: int, end: int) -> Tensor:
    """The places in a batch, row after row, of each row's tokens from its first column on."""
    width = end - start
    spans = [np.arange(row * width + firsts[row] - start, (row + 1) * width) for row in rows]
    return torch.from_numpy(np.concatenate(spans))
