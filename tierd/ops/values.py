"""What the integer tensors of a call may hold: lengths, block ids, slots; for tensors on a CPU.

The checks need only the tensors' shapes to be right, and read nothing of the caches. Only ids that
the op will read are looked at: what lies behind a window or past a sequence's end may be anything.
"""

import torch
from torch import Tensor

from tierd.ops.call import AttentionCall
from tierd.ops.sequences import Sequence, sequences


def checked_sequences(call: AttentionCall) -> list[Sequence]:
    """The batch's sequences; ValueError if lengths, rows or block ids are wrong."""
    batch = sequences(call.seq_lens, call.cu_seqlens_q, call.window_left)
    block_size = call.k_cache.shape[2]
    width = call.block_table.shape[1]
    row = 0
    for b, (start, end, _, num_keys) in enumerate(batch):
        if start != row or end < start:
            raise ValueError(f"cu_seqlens_q must rise from 0, not {call.cu_seqlens_q.tolist()}")
        row = end
        if end - start > call.max_seqlen_q:
            raise ValueError(f"max_seqlen_q {call.max_seqlen_q}: sequence {b} has {end - start}")
        if (num_keys and num_keys < end - start) or num_keys < 0:
            raise ValueError(f"seq_lens[{b}] is {num_keys}, with {end - start} queries")
        if num_keys > width * block_size:
            raise ValueError(
                f"block_table: {width} blocks of {block_size} are too few for seq_lens[{b}],"
                f" {num_keys}"
            )
    if row != call.q.shape[0]:
        raise ValueError(f"cu_seqlens_q ends at {row}, q has {call.q.shape[0]} rows")
    _block_ids(call.block_table, batch, call.k_cache.shape[0], block_size)
    return batch


def _block_ids(table: Tensor, batch: list[Sequence], num_blocks: int, block_size: int) -> None:
    spans = [(s.first_key // block_size, -(-s.num_keys // block_size)) for s in batch]
    if len(spans) == 1:
        first, last = spans[0]
        read = table[0, first:last]
    else:
        span = torch.tensor(spans, dtype=torch.int32).view(-1, 2, 1)
        column = torch.arange(table.shape[1], dtype=torch.int32)
        read = table.where((column >= span[:, 0]) & (column < span[:, 1]), 0)
    if read.numel() == 0:
        return
    low, high = read.aminmax()
    if low.item() < 0 or high.item() >= num_blocks:
        for b, (first, last) in enumerate(spans):
            for column_index, block in enumerate(table[b, first:last].tolist(), first):
                if not 0 <= block < num_blocks:
                    raise ValueError(
                        f"block_table[{b}, {column_index}] is {block}, not a block of 0 to"
                        f" {num_blocks - 1}"
                    )


def check_slots(slot_mapping: Tensor, num_slots: int) -> bool:
    """True if some token is to be skipped; ValueError if a slot is no slot and not -1."""
    if slot_mapping.numel() == 0:
        return False
    low, high = (int(bound) for bound in slot_mapping.aminmax())
    if low < -1 or high >= num_slots:
        raise ValueError(
            f"slot_mapping goes from {low} to {high}, slots from -1 to {num_slots - 1}"
        )
    return low < 0
