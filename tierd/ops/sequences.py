"""Where each sequence of a batch lies: its query rows, and the keys that any of them may see.

    keys      0 ........ first_key ................... num_keys
    queries                    start .. end  (the last end - start positions)

Read once a call from seq_lens and cu_seqlens_q; nothing is checked here, and the caches are not
known.
"""

from typing import NamedTuple

from torch import Tensor


class Sequence(NamedTuple):
    """Query rows [start, end) of the batch, keys [first_key, num_keys) of the sequence."""

    start: int
    end: int
    first_key: int
    num_keys: int


def sequences(seq_lens: Tensor, cu_seqlens_q: Tensor, window_left: int) -> list[Sequence]:
    """The batch's sequences in order, empty ones included."""
    starts: list[int] = cu_seqlens_q.tolist()
    lengths: list[int] = seq_lens.tolist()
    if window_left < 0:
        return [Sequence(starts[i], starts[i + 1], 0, length) for i, length in enumerate(lengths)]
    # The first query sees furthest back, and what lies before that may be gone from the table.
    return [
        Sequence(
            starts[i],
            starts[i + 1],
            max(0, length - (starts[i + 1] - starts[i]) - window_left),
            length,
        )
        for i, length in enumerate(lengths)
    ]
