"""What the arguments of the two ops must be; a check raises TypeError or ValueError naming one.

Facts of the tensors (dtype, shape, strides, device) are also checked by the fake kernels, so a
compiled graph fails where it is made; values (lengths, block ids, slots) only where there are some.
A good call costs a few microseconds: texts are made when a check fails.
"""

from collections.abc import Sequence as Shape

import torch
from torch import Tensor

from tierd.ops.call import AttentionCall
from tierd.ops.sequences import Sequence

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_call(call: AttentionCall) -> None:
    """The facts of an attention call's tensors, and its options."""
    q, table, device = call.q, call.block_table, call.q.device
    if q.dim() != 3:
        raise ValueError(f"q must be [T, Hq, D], not {list(q.shape)}")
    if call.k_scale is not None or call.v_scale is not None:
        raise NotImplementedError("k_scale, v_scale: quantised caches are not supported")
    _caches(q, call.k_cache, call.v_cache)
    num_tokens, num_heads, _ = q.shape
    num_kv_heads = call.k_cache.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"q: {num_heads} heads are no multiple of k_cache's {num_kv_heads}")
    _tensor("out", call.out, q.dtype, q.shape, device)
    _inner_stride("q", q)
    _inner_stride("out", call.out)
    if call.lse is not None:
        _tensor("lse", call.lse, torch.float32, (num_tokens, num_heads), device)
    if table.dim() != 2:
        raise ValueError(f"block_table must be [B, max_blocks], not {list(table.shape)}")
    batch_size, width = table.shape
    _tensor("block_table", table, torch.int32, (batch_size, width), device)
    _inner_stride("block_table", table)
    _tensor("seq_lens", call.seq_lens, torch.int32, (batch_size,), device)
    _tensor("cu_seqlens_q", call.cu_seqlens_q, torch.int32, (batch_size + 1,), device)
    if call.alibi_slopes is not None:
        _tensor("alibi_slopes", call.alibi_slopes, torch.float32, (num_heads,), device)
    if call.sinks is not None:
        _tensor("sinks", call.sinks, torch.float32, (num_heads,), device)
    if call.window_left < -1:
        raise ValueError(f"window_left must be -1 (none) or more, not {call.window_left}")
    if call.softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or more, not {call.softcap}")


def check_batch(call: AttentionCall, batch: list[Sequence]) -> None:
    """The values of cu_seqlens_q, seq_lens and block_table."""
    num_blocks, _, block_size, _ = call.k_cache.shape
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
    _block_ids(call.block_table, batch, num_blocks, block_size)


def _block_ids(table: Tensor, batch: list[Sequence], num_blocks: int, block_size: int) -> None:
    """The ids that the op will read; what surrounds them may be anything."""
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


def check_tokens(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The facts of the tensors of write_kv."""
    if k.dim() != 3:
        raise ValueError(f"k must be [T, Hkv, D], not {list(k.shape)}")
    _caches(k, k_cache, v_cache)
    num_tokens, num_heads, _ = k.shape
    if num_heads != k_cache.shape[1]:
        raise ValueError(f"k has {num_heads} heads, k_cache {k_cache.shape[1]}")
    _tensor("v", v, k.dtype, k.shape, k.device)
    _inner_stride("k", k)
    _inner_stride("v", v)
    _tensor("slot_mapping", slot_mapping, torch.int64, (num_tokens,), k.device)


def check_slots(slot_mapping: Tensor, num_slots: int) -> bool:
    """The values of slot_mapping; True if some token is to be skipped."""
    if slot_mapping.numel() == 0:
        return False
    low, high = (int(bound) for bound in slot_mapping.aminmax())
    if low < -1 or high >= num_slots:
        raise ValueError(
            f"slot_mapping goes from {low} to {high}, slots from -1 to {num_slots - 1}"
        )
    return low < 0


def _caches(tokens: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if tokens.dtype not in _DTYPES:
        raise TypeError(f"q, k, v must be float32, bfloat16 or float16, not {tokens.dtype}")
    if k_cache.dim() != 4:
        raise ValueError(
            f"k_cache must be [num_blocks, Hkv, block_size, D], not {list(k_cache.shape)}"
        )
    num_blocks, num_heads, block_size, _ = k_cache.shape
    shape = (num_blocks, num_heads, block_size, tokens.shape[2])
    _tensor("k_cache", k_cache, tokens.dtype, shape, tokens.device)
    _tensor("v_cache", v_cache, tokens.dtype, shape, tokens.device)
    if block_size == 0:
        raise ValueError("k_cache: block_size must be 1 or more")
    _inner_stride("k_cache", k_cache)
    _inner_stride("v_cache", v_cache)


def _tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: Shape[int], device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, not {tensor.device}")


def _inner_stride(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension")
