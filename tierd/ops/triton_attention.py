"""The attention op on a GPU: launches the kernels of `triton_kernels.py` for one checked call.

Nothing is read back from the device and nothing allocated but a stream's workspace, at its first
call, so a call can be captured into a CUDA graph once a call like it has run on that stream.
"""

from typing import Any

from torch import Tensor

from tierd.ops import triton_kernels as kernels
from tierd.ops import triton_states as states
from tierd.ops.call import AttentionCall
from tierd.ops.quantised import whole_scale
from tierd.ops.triton_tiles import padded
from tierd.ops.triton_tiling import Tiling, tiling
from tierd.ops.triton_workspace import workspace


def paged_attention(call: AttentionCall) -> None:
    """Fill the call's out and lse, on the device's current stream."""
    if call.q.numel() == 0 or call.block_table.shape[0] == 0:
        return
    cut = tiling(call)
    records = workspace(call.q.device) if cut.num_splits > 1 else None
    _attend(call, cut, records)
    if records is not None:
        _merge(call, cut, records)


def _attend(call: AttentionCall, cut: Tiling, records: Tensor | None) -> None:
    num_sequences, table_width = call.block_table.shape
    num_blocks, num_kv_heads, block_size, v_dim = call.v_cache.shape
    k_scale, v_scale = call.k_scale, call.v_scale
    if k_scale is not None and v_scale is not None:
        k_scale = whole_scale(k_scale, call.k_cache)
        v_scale = whole_scale(v_scale, call.v_cache)
    kernel: Any = kernels.attend[cut.num_tiles, num_kv_heads * cut.num_groups, cut.num_splits]
    kernel(
        call.out, call.lse, records, call.q, call.k_cache, call.v_cache, k_scale, v_scale,
        call.block_table, call.seq_lens.contiguous(), call.cu_seqlens_q.contiguous(),
        _dense(call.alibi_slopes), _dense(call.sinks),
        call.scale, call.softcap or None, None if call.window_left < 0 else call.window_left,
        call.out.stride()[:2], _strides(call.lse), call.q.stride()[:2],
        call.k_cache.stride()[:3], call.v_cache.stride()[:3], _strides(k_scale), _strides(v_scale),
        call.block_table.stride(0), num_sequences, num_blocks, table_width, cut.num_splits,
        cut.min_split, NUM_GROUP=call.q.shape[1] // num_kv_heads, DIM=call.q.shape[2], V_DIM=v_dim,
        BLOCK_SIZE=block_size, ROWS=cut.tile.rows, QUERIES=cut.queries, GROUP=cut.group,
        KEYS=cut.tile.keys, ONE_EACH=cut.one_each, CAUSAL=call.causal,
        num_warps=cut.tile.num_warps, num_stages=cut.tile.num_stages,
        maxnreg=cut.tile.max_registers, enable_fp_fusion=True,
    )  # fmt: skip


def _merge(call: AttentionCall, cut: Tiling, records: Tensor) -> None:
    num_tokens, num_heads, v_dim = call.out.shape
    heads = min(padded(num_heads), 16)
    kernel: Any = states.merge_splits[num_tokens, -(-num_heads // heads)]
    kernel(
        call.out, call.lse, records, call.out.stride()[:2], _strides(call.lse), num_heads,
        cut.num_splits, V_DIM=v_dim, HEADS=heads, num_warps=4, num_stages=3,
        enable_fp_fusion=True,
    )  # fmt: skip


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0,) if tensor is None else tensor.stride()
