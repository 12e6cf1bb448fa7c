"""States on a GPU, and how they are merged: those of one row's splits, and those of two attentions.

A state is an attention's output and its log-sum-exp; states over disjoint keys merge into that over
all of them (arXiv:1805.02867). No keys is output 0 and LSE -inf.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tierd.ops.triton_tiles import (
    LN2,
    LOG2E,
    NONE,
    RECORD_EXTRA,
    padded,
    rows,
    scaled,
    state,
    store_rows,
)


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


@triton.jit(do_not_specialize=("num_splits",))
def merge_splits(
    Out, Lse, Records, out_stride, lse_stride, num_heads, num_splits,
    V_DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Join the records of HEADS heads of one token; grid (tokens, tiles of heads).

    In the order of the splits, so a row's bits do not depend on how many splits others have.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_row = head < num_heads
    width: tl.constexpr = V_DIM + RECORD_EXTRA
    record = Records + (token * num_heads + head) * num_splits * width
    counts = tl.load(record + V_DIM + 1, is_row, 1.0).to(tl.int32)
    count = tl.minimum(tl.max(counts, 0), num_splits)  # equal in all heads of a token
    if count <= 1:
        return
    most = tl.full([HEADS], NONE, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    values = tl.zeros([HEADS, padded(V_DIM)], tl.float32)
    for split in tl.range(0, count):
        lse = tl.load(record + split * width + V_DIM, is_row, NONE) * LOG2E
        most, shift, shrink = scaled(most, lse)
        weight = tl.exp2(lse - shift)
        total = total * shrink + weight
        part = rows(record + split * width, is_row, V_DIM)
        values = values * shrink[:, None] + part * weight[:, None]
    out, lse = state(values, most, total)
    store_rows(Out + token * out_stride[0] + head * out_stride[1], out, is_row, V_DIM)
    if Lse is not None:
        tl.store(Lse + token * lse_stride[0] + head * lse_stride[1], lse, is_row)


@triton.jit
def _merge(
    Out, Lse, Out2, Lse2, out_stride, lse_stride, out2_stride, lse2_stride, num_heads,
    DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; grid (tokens, tiles of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64)
    is_head = head < num_heads
    at = Lse + token * lse_stride[0] + head * lse_stride[1]
    lse = tl.load(at, is_head, 0.0)
    lse2 = tl.load(Lse2 + token * lse2_stride[0] + head * lse2_stride[1], is_head, 0.0)
    _, shift, weight = scaled(lse * LOG2E, lse2 * LOG2E)
    weight2 = tl.exp2(lse2 * LOG2E - shift)
    total = weight + weight2
    tl.store(at, tl.where(total > 0, (shift + tl.log2(total)) * LN2, NONE), is_head)
    dim = tl.arange(0, padded(DIM))[None, :]
    mask = is_head[:, None] & (dim < DIM)
    row = Out + (token * out_stride[0] + head * out_stride[1])[:, None] + dim * out_stride[2]
    row2 = Out2 + (token * out2_stride[0] + head * out2_stride[1])[:, None] + dim * out2_stride[2]
    x = tl.load(row, mask, 0.0).to(tl.float32) * weight[:, None]
    x += tl.load(row2, mask, 0.0).to(tl.float32) * weight2[:, None]
    x = tl.where(total[:, None] > 0, x / total[:, None], 0.0)
    tl.store(row, x.to(Out.dtype.element_ty), mask)
