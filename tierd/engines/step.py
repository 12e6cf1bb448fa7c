"""One forward pass over one sequence: where its new tokens go and where the old ones lie.

Made once, used by every layer: what layers of one group share is not computed again for each. It
holds block ids and lengths, no keys or values, and knows no model.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierd.layout import KVLayout
from tierd.lease import Lease


@dataclass(slots=True)
class Step:
    """One forward pass over tokens `start` to `end` of one sequence, the same for every layer.

    `slots[g]` says where the new tokens of group g go, `tables[g]` is its block table `[1, n]`.
    """

    start: int
    end: int
    slots: list[Tensor]
    tables: list[Tensor]
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    _masks: list[tuple[Tensor, int | None]] = field(default_factory=list)

    def check_mask(self, mask: Tensor, window: int | None) -> None:
        """Raise NotImplementedError unless `mask` is the causal one, with this window.

        Masks are shared by layers: each is looked at once.
        """
        if any(known is mask and window == of for known, of in self._masks):
            return
        kv, q = torch.arange(self.end), torch.arange(self.start, self.end)[:, None]
        plain = kv <= q if window is None else (kv <= q) & (kv > q - window)
        if mask.shape[-2:] != plain.shape or not bool((mask == plain.to(mask.device)).all()):
            raise NotImplementedError(
                "attention_mask: a cache in tierd is attended to causally, each layer with its own "
                "sliding window; padding, packed sequences and other masks are not supported"
            )
        self._masks.append((mask, window))


class Steps:
    """Makes the steps of one lease, whose tables only ever grow."""

    def __init__(self, lease: Lease, layout: KVLayout) -> None:
        self._lease, self._layout = lease, layout
        self._tables: dict[int, tuple[npt.NDArray[np.int32], Tensor]] = {}

    def plan(self, start: int, end: int, device: torch.device) -> Step:
        """The step from token `start` to `end`, for which the lease has room."""
        positions, slots, tables = np.arange(start, end), [], []
        for number, group in enumerate(self._layout.groups):
            blocks, offsets = np.divmod(positions, group.block_size)
            place = self._lease.tables[number][blocks].astype(np.int64) * group.block_size + offsets
            slots.append(torch.from_numpy(place).to(device))
            tables.append(self._table(number, device))
        lengths = torch.tensor([end], dtype=torch.int32, device=device)
        rows = torch.tensor([0, end - start], dtype=torch.int32, device=device)
        return Step(start, end, slots, tables, lengths, rows)

    def _table(self, group: int, device: torch.device) -> Tensor:
        """The group's block table `[1, n]`, made anew only when it has changed."""
        ids = self._lease.tables[group]
        if group not in self._tables or self._tables[group][0] is not ids:
            table = torch.from_numpy(self._lease.block_table(group)).to(device)
            self._tables[group] = (ids, table[None])
        return self._tables[group][1]
