"""The attention kernels in Triton: one for decode, chunks and prompts, and one that joins splits.

A *tile* is one program's share of the queries: `QUERIES` consecutive queries of one sequence times
`GROUP` of the query heads that share a KV head, as the rows of one matrix. Its keys are cut into
splits, walked `KEYS` at a time with an online softmax. What a program computes is a *state*: the
output over its keys and the logarithm of the sum of their exponentials. Where a tile has one split
the state is the answer; else it goes to the workspace, as a record [V_DIM values, lse, number of
splits, 2 unused], and `merge_splits` joins the records of a row.

Chosen by the host from shapes alone (`triton_tiling.py`); how long a split is, each program derives
from its own sequence, so neither a sync nor another sequence decides about a result. Block ids out
of range and whatever lies past a table's end are masked and never dereferenced. Nothing is checked.
"""

import triton
import triton.language as tl

RECORD_EXTRA = 4  # floats of a record besides the values; keeps records 16-byte aligned

# Numbers that differ from call to call and are not worth a compilation each.
_VARYING = ("window", "num_sequences", "num_blocks", "table_width", "num_splits", "min_split")

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_NONE = tl.constexpr(float("-inf"))
_EXTRA = tl.constexpr(RECORD_EXTRA)
# float32 on tensor cores, each number as three of theirs; nothing to types that they take as it is.
_PRECISION = tl.constexpr("tf32x3")
# The interpreter multiplies the bits of bfloat16 as if they were integers (triton issue 11584).
_UPCAST = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def padded(dim: int) -> int:
    """The head size as the tensor cores take it: a power of two, 16 or more."""
    return max(16, triton.next_power_of_2(dim))


@triton.jit(do_not_specialize=_VARYING)
def attend(
    Out, Lse, Records, Q, K, V, KScale, VScale, Table, SeqLens, Starts, Slopes, Sinks,
    scale, softcap, window, out_stride, lse_stride, q_stride, k_stride, v_stride,
    k_scale_stride, v_scale_stride, table_stride,
    num_sequences, num_blocks, table_width, num_splits, min_split,
    NUM_GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr,
    ONE_EACH: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One split of one tile; grid (tiles of queries, KV heads x groups of heads, splits)."""
    # The last tiles of a causal prompt have most to do, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, first = tile, tile * 0
    if not ONE_EACH:
        sequence, first = _place(tile, Starts, num_sequences, QUERIES)
    start = tl.load(Starts + sequence)
    num_queries = tl.load(Starts + sequence + 1) - start
    if first >= num_queries:
        return
    # A length beyond the table is a mistake of the caller's; it must not become a wild read.
    length = tl.minimum(tl.load(SeqLens + sequence), table_width * BLOCK_SIZE)
    low, high, last_split = _split(
        length, first, num_queries, window, num_splits, min_split, QUERIES, KEYS, CAUSAL
    )
    split = tl.program_id(2)
    if split > last_split:
        return
    num_groups: tl.constexpr = (NUM_GROUP + GROUP - 1) // GROUP
    kv_head = (tl.program_id(1) // num_groups).to(tl.int64)
    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    in_group = tl.program_id(1) % num_groups * GROUP + row % GROUP
    head = kv_head * NUM_GROUP + in_group
    is_row = (row < QUERIES * GROUP) & (query < num_queries) & (in_group < NUM_GROUP)
    token = (start + query).to(tl.int64)
    q = _rows(Q + token * q_stride[0] + head * q_stride[1], is_row, DIM)
    if _UPCAST:
        q = q.to(tl.float32)
    slope = None if Slopes is None else tl.load(Slopes + head, is_row, 0.0)
    most = tl.full([ROWS], _NONE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if Sinks is not None:
        # One more key, without a value: it is counted once, by the first split.
        most = tl.where(split == 0, tl.load(Sinks + head, is_row, 0.0) * _LOG2E, _NONE)
        total = tl.where(most == _NONE, 0.0, 1.0)
    values = tl.zeros([ROWS, padded(V_DIM)], tl.float32)
    position = length - num_queries + query
    for begin in tl.range(low, high, KEYS):
        key = begin + tl.arange(0, KEYS)
        block = tl.load(Table + sequence.to(tl.int64) * table_stride + key // BLOCK_SIZE,
                        key < high, -1)  # fmt: skip
        is_key = (block >= 0) & (block < num_blocks)
        block = block.to(tl.int64)
        offset = (key % BLOCK_SIZE).to(tl.int64)
        k_place = block * k_stride[0] + kv_head * k_stride[1] + offset * k_stride[2]
        v_place = block * v_stride[0] + kv_head * v_stride[1] + offset * v_stride[2]
        k = _columns(K + k_place, is_key, DIM).to(q.dtype)
        score = tl.dot(q, k, input_precision=_PRECISION)
        if KScale is not None:
            place = block * k_scale_stride[0] + kv_head * k_scale_stride[1]
            score *= tl.load(KScale + place + offset * k_scale_stride[2], is_key, 0.0)[None, :]
        distance = key[None, :] - position[:, None]
        seen = is_key[None, :] & is_row[:, None]
        score = _biased(score, distance, seen, scale, softcap, window, slope, CAUSAL)
        new_most = tl.maximum(most, tl.max(score, 1))
        shift = tl.where(new_most == _NONE, 0.0, new_most)  # -inf minus -inf is no number
        weight = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(most - shift)
        total = total * shrink + tl.sum(weight, 1)
        most = new_most
        if VScale is not None:
            place = block * v_scale_stride[0] + kv_head * v_scale_stride[1]
            weight *= tl.load(VScale + place + offset * v_scale_stride[2], is_key, 0.0)[None, :]
        v = _rows(V + v_place, is_key, V_DIM)
        if _UPCAST:
            v = v.to(tl.float32)
        elif VScale is not None:
            # A weight times a scale may be too small for float16, never for bfloat16.
            v = v.to(tl.float32 if q.dtype == tl.float32 else tl.bfloat16)
        values = tl.dot(weight.to(v.dtype), v, values * shrink[:, None], input_precision=_PRECISION)
    out, lse = _state(values, most, total)
    if last_split == 0:
        _store_rows(Out + token * out_stride[0] + head * out_stride[1], out, is_row, V_DIM)
        if Lse is not None:
            tl.store(Lse + token * lse_stride[0] + head * lse_stride[1], lse, is_row)
    if Records is not None:
        width: tl.constexpr = V_DIM + _EXTRA
        num_heads = tl.num_programs(1) // num_groups * NUM_GROUP
        record = Records + ((token * num_heads + head) * num_splits + split) * width
        if last_split > 0:
            _store_rows(record, out, is_row, V_DIM)
            tl.store(record + V_DIM, lse, is_row)
        tl.store(record + V_DIM + 1, (last_split + 1).to(tl.float32), is_row)


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
    width: tl.constexpr = V_DIM + _EXTRA
    record = Records + (token * num_heads + head) * num_splits * width
    counts = tl.load(record + V_DIM + 1, is_row, 1.0).to(tl.int32)
    count = tl.minimum(tl.max(counts, 0), num_splits)  # equal in all heads of a token
    if count <= 1:
        return
    most = tl.full([HEADS], _NONE, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    values = tl.zeros([HEADS, padded(V_DIM)], tl.float32)
    for split in tl.range(0, count):
        lse = tl.load(record + split * width + V_DIM, is_row, _NONE) * _LOG2E
        new_most = tl.maximum(most, lse)
        shift = tl.where(new_most == _NONE, 0.0, new_most)
        weight, shrink = tl.exp2(lse - shift), tl.exp2(most - shift)
        total = total * shrink + weight
        part = _rows(record + split * width, is_row, V_DIM)
        values = values * shrink[:, None] + part * weight[:, None]
        most = new_most
    out, lse = _state(values, most, total)
    _store_rows(Out + token * out_stride[0] + head * out_stride[1], out, is_row, V_DIM)
    if Lse is not None:
        tl.store(Lse + token * lse_stride[0] + head * lse_stride[1], lse, is_row)


@triton.jit
def _place(tile, Starts, num_sequences, QUERIES: tl.constexpr):
    """The sequence of a tile, and the tile's first query in it, which may be past its last one.

    Tiles are numbered so that sequence b starts at tile `Starts[b] // QUERIES + b`: that is room
    enough for each, and the number of all tiles follows from shapes.
    """
    low = tile * 0
    high = low + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_past = tl.load(Starts + middle) // QUERIES + middle > tile
        high = tl.where(is_past, middle, high)
        low = tl.where(is_past, low, middle)
    return low, (tile - tl.load(Starts + low) // QUERIES - low) * QUERIES


@triton.jit
def _split(
    length, first, num_queries, window, num_splits, min_split,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """This program's keys [low, high) and the index of the tile's last split."""
    position = length - num_queries + first
    low, high = length * 0, length
    if window is not None:
        low = tl.maximum(0, position - window)
    if CAUSAL:
        high = tl.minimum(length, position + QUERIES)
    span = tl.maximum(high - low, 0)
    size = tl.maximum(min_split, tl.cdiv(tl.cdiv(span, num_splits), KEYS) * KEYS)
    last_split = tl.maximum(tl.cdiv(span, size), 1) - 1
    low += tl.program_id(2) * size
    return low, tl.minimum(high, low + size), last_split


@triton.jit
def _biased(score, distance, seen, scale, softcap, window, slope, CAUSAL: tl.constexpr):
    """Scores of base 2, -inf where a query does not see a key; distance is negative to the past."""
    if softcap is not None:
        x = score * (scale / softcap)
        e = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E))
        tanh = (1.0 - e) / (1.0 + e)
        score = tl.where(x < 0, -tanh, tanh) * (softcap * _LOG2E)
    else:
        score *= scale * _LOG2E
    if slope is not None:
        score += (slope * _LOG2E)[:, None] * distance
    if CAUSAL:
        seen &= distance <= 0
    if window is not None:
        seen &= distance >= -window
    return tl.where(seen, score, _NONE)


@triton.jit
def _state(values, most, total):
    """Output and lse of what was summed; of no key at all, zeros and -inf."""
    out = values * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    return out, tl.where(total > 0, (most + tl.log2(total)) * _LN2, _NONE)


@triton.jit
def _rows(pointers, is_row, DIM: tl.constexpr):
    """[rows, DIM padded to a power of two], zeros where there is nothing."""
    dim = tl.arange(0, padded(DIM))
    mask = is_row[:, None]
    if DIM != padded(DIM):
        mask &= dim[None, :] < DIM
    return tl.load(pointers[:, None] + dim[None, :], mask, 0.0)


@triton.jit
def _columns(pointers, is_column, DIM: tl.constexpr):
    """The transpose of `_rows`, loaded as such."""
    dim = tl.arange(0, padded(DIM))
    mask = is_column[None, :]
    if DIM != padded(DIM):
        mask &= dim[:, None] < DIM
    return tl.load(pointers[None, :] + dim[:, None], mask, 0.0)


@triton.jit
def _store_rows(pointers, rows, is_row, DIM: tl.constexpr):
    dim = tl.arange(0, padded(DIM))
    mask = is_row[:, None]
    if DIM != padded(DIM):
        mask &= dim[None, :] < DIM
    tl.store(pointers[:, None] + dim[None, :], rows.to(pointers.dtype.element_ty), mask)
