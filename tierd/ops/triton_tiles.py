"""What the GPU kernels share: rows of a matrix in memory, places in a cache, the end of a softmax.

In Triton's language, whose arguments (pointers, tensors, numbers of a kernel) Python's types cannot
name. Head sizes that are no power of two are padded by masks, in registers only.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

# Floats of a record besides the V_DIM values: lse, number of splits, 2 unused. So records, like all
# rows that are read whole, begin at 16 bytes.
RECORD_EXTRA = tl.constexpr(4)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(float("-inf"))


@triton.constexpr_function
def padded(dim: int) -> int:
    """The head size as the tensor cores take it: a power of two, 16 or more."""
    power: int = triton.next_power_of_2(dim)
    return max(16, power)


@triton.jit
def place(stride, block, head, offset):
    """Where a slot's row, or its scale, lies in a cache of these strides."""
    return block * stride[0] + head * stride[1] + offset * stride[2]


@triton.jit
def scaled(most, lse):
    """The new maximum of exponents of base 2, and what turns the old terms and the new ones to it.

    A maximum of -inf is shifted by 0 instead, for -inf minus -inf is no number.
    """
    new_most = tl.maximum(most, lse)
    shift = tl.where(new_most == NONE, 0.0, new_most)
    return new_most, shift, tl.exp2(most - shift)


@triton.jit
def state(values, most, total):
    """Output and lse of what was summed; of no key at all, zeros and -inf."""
    out = values * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    return out, tl.where(total > 0, (most + tl.log2(total)) * LN2, NONE)


@triton.jit
def rows(pointers, is_row, DIM: tl.constexpr):
    """[rows, DIM padded to a power of two], zeros where there is nothing."""
    dim = tl.arange(0, padded(DIM))
    mask = is_row[:, None]
    if padded(DIM) != DIM:
        mask &= dim[None, :] < DIM
    return tl.load(pointers[:, None] + dim[None, :], mask, 0.0)


@triton.jit
def columns(pointers, is_column, DIM: tl.constexpr):
    """The transpose of `rows`, loaded as such."""
    dim = tl.arange(0, padded(DIM))
    mask = is_column[None, :]
    if padded(DIM) != DIM:
        mask &= dim[:, None] < DIM
    return tl.load(pointers[None, :] + dim[:, None], mask, 0.0)


@triton.jit
def store_rows(pointers, values, is_row, DIM: tl.constexpr):
    dim = tl.arange(0, padded(DIM))
    mask = is_row[:, None]
    if padded(DIM) != DIM:
        mask &= dim[None, :] < DIM
    tl.store(pointers[:, None] + dim[None, :], values.to(pointers.dtype.element_ty), mask)
