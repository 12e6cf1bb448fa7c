"""merge_states on a GPU: two attentions over disjoint keys as one, in one pass over both."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tierd.ops.triton_kernels import padded


def merge_states(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> None:
    """Merge (out2, lse2) into (out, lse), on the device's current stream."""
    num_tokens, num_heads, dim = out.shape
    if out.numel() == 0:
        return
    heads = min(padded(num_heads), 16)
    kernel: Any = _merge[num_tokens, -(-num_heads // heads)]
    kernel(
        out, lse, out2, lse2, out.stride(), lse.stride(), out2.stride(), lse2.stride(), num_heads,
        DIM=dim, HEADS=heads, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _merge(
    Out, Lse, Out2, Lse2, out_stride, lse_stride, out2_stride, lse2_stride, num_heads,
    DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; grid (tokens, tiles of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64)
    is_head = head < num_heads
    place = Lse + token * lse_stride[0] + head * lse_stride[1]
    lse = tl.load(place, is_head, 0.0)
    lse2 = tl.load(Lse2 + token * lse2_stride[0] + head * lse2_stride[1], is_head, 0.0)
    most = tl.maximum(lse, lse2)
    shift = tl.where(most == float("-inf"), 0.0, most)  # -inf minus -inf is no number
    weight, weight2 = tl.exp(lse - shift), tl.exp(lse2 - shift)
    total = weight + weight2
    tl.store(place, tl.where(total > 0, shift + tl.log(total), most), is_head)
    dim = tl.arange(0, padded(DIM))[None, :]
    mask = is_head[:, None] & (dim < DIM)
    row = Out + (token * out_stride[0] + head * out_stride[1])[:, None] + dim * out_stride[2]
    row2 = Out2 + (token * out2_stride[0] + head * out2_stride[1])[:, None] + dim * out2_stride[2]
    x = tl.load(row, mask, 0.0).to(tl.float32) * weight[:, None]
    x += tl.load(row2, mask, 0.0).to(tl.float32) * weight2[:, None]
    x = tl.where(total[:, None] > 0, x / total[:, None], 0.0)
    tl.store(row, x.to(Out.dtype.element_ty), mask)
