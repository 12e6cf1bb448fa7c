"""write_kv on a GPU: scatters new tokens' K and V to their slots, quantising where a cache does.

To the bit what `quantised.quantise` does. A slot that is none, -1 or out of range, is skipped:
its token is not written, and no address is made of it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tierd.ops.quantised import largest, whole_scale
from tierd.ops.triton_tiles import padded, place

# Added and taken away again, it leaves a float32 rounded to an integer, halves to even.
_ROUND = tl.constexpr(1.5 * 2**23)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write tokens to slots block_id * block_size + offset, on the device's current stream."""
    num_tokens, num_heads, dim = k.shape
    if num_tokens == 0:
        return
    if k_scale is not None and v_scale is not None:
        k_scale, v_scale = whole_scale(k_scale, k_cache), whole_scale(v_scale, v_cache)
    heads = min(padded(num_heads), 16)
    kernel: Any = _write[num_tokens, -(-num_heads // heads)]
    kernel(
        k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, slot_mapping.stride(0),
        k.stride()[:2], v.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3],
        k_scale.stride() if k_scale is not None else (0,),
        v_scale.stride() if v_scale is not None else (0,),
        k_cache.shape[0], num_heads, BLOCK_SIZE=k_cache.shape[2], DIM=dim, V_DIM=v.shape[2],
        HEADS=heads, LARGEST=largest(k_cache.dtype) if k_scale is not None else None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_blocks",))
def _write(
    K, V, KCache, VCache, KScale, VScale, Slots, slot_stride, k_stride, v_stride,
    k_cache_stride, v_cache_stride, k_scale_stride, v_scale_stride, num_blocks, num_heads,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """One token's heads; grid (tokens, tiles of heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(Slots + token * slot_stride)
    if (slot < 0) | (slot >= num_blocks.to(tl.int64) * BLOCK_SIZE):
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64)
    is_head = head < num_heads
    _put(K + token * k_stride[0] + head * k_stride[1], KCache, KScale, k_cache_stride,
         k_scale_stride, slot, head, is_head, BLOCK_SIZE, DIM, LARGEST)  # fmt: skip
    _put(V + token * v_stride[0] + head * v_stride[1], VCache, VScale, v_cache_stride,
         v_scale_stride, slot, head, is_head, BLOCK_SIZE, V_DIM, LARGEST)  # fmt: skip


@triton.jit
def _put(
    tokens, Cache, Scale, cache_stride, scale_stride, slot, head, is_head,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    dim = tl.arange(0, padded(DIM))
    mask = is_head[:, None] & (dim[None, :] < DIM)
    x = tl.load(tokens[:, None] + dim[None, :], mask, 0.0)
    if Scale is not None:
        at = Scale + place(scale_stride, block, head, offset)
        scale = tl.load(at, is_head, 1.0)[:, None]
        x = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale, x.shape))
        x = tl.clamp(x, -LARGEST, LARGEST, tl.PropagateNan.ALL)
        if Cache.dtype.element_ty == tl.int8:
            x = (x + _ROUND) - _ROUND
    at = Cache + place(cache_stride, block, head, offset)
    tl.store(at[:, None] + dim[None, :], x.to(Cache.dtype.element_ty), mask)
