"""The attention kernel in Triton, for decode, chunks and prompts.

A *tile* is one program's share of the queries: `QUERIES` consecutive queries of one sequence times
`GROUP` of the query heads that share a KV head, as the rows of one matrix. Its keys are cut into
splits, walked `KEYS` at a time with an online softmax. What a program computes is a *state*: the
output over its keys and the logarithm of the sum of their exponentials. Where a tile has one split
the state is the answer; else it goes to the workspace as a record, which `triton_states` merges.

How work is cut, the host says from shapes alone (`triton_tiling`); how long a split is, a program
derives from its own sequence. Block ids out of range, and whatever lies past a table's end, are
masked and never dereferenced. Nothing is checked.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from tierd.ops.triton_tiles import (
    LOG2E,
    NONE,
    RECORD_EXTRA,
    columns,
    padded,
    place,
    rows,
    scaled,
    state,
    store_rows,
)

# Numbers that differ from call to call and are not worth a compilation each.
_VARYING = ("window", "num_sequences", "num_blocks", "table_width", "num_splits", "min_split")
# float32 on tensor cores, each number as three of theirs; nothing to types that they take as it is.
_PRECISION = tl.constexpr("tf32x3")
# The interpreter multiplies the bits of bfloat16 as if they were integers (triton issue 11584).
_UPCAST = tl.constexpr(triton.knobs.runtime.interpret)


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
        sequence, first = _first_query(tile, Starts, num_sequences, QUERIES)
    start = tl.load(Starts + sequence)
    num_queries = tl.load(Starts + sequence + 1) - start
    if first >= num_queries:
        return
    # A length beyond the table is a mistake of the caller's; it must not become a wild read.
    length = tl.minimum(tl.load(SeqLens + sequence), table_width * BLOCK_SIZE)
    split = tl.program_id(2)
    low, high, last_split = _split(
        split, length, first, num_queries, window, num_splits, min_split, QUERIES, KEYS, CAUSAL
    )
    if split > last_split:
        return

    num_groups: tl.constexpr = (NUM_GROUP + GROUP - 1) // GROUP
    kv_head = (tl.program_id(1) // num_groups).to(tl.int64)
    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    in_group = tl.program_id(1) % num_groups * GROUP + row % GROUP
    is_row = (row < QUERIES * GROUP) & (query < num_queries) & (in_group < NUM_GROUP)
    head = kv_head * NUM_GROUP + in_group
    token = (start + query).to(tl.int64)
    position = length - num_queries + query
    q = rows(Q + token * q_stride[0] + head * q_stride[1], is_row, DIM)
    if _UPCAST:
        q = q.to(tl.float32)
    slope = None if Slopes is None else tl.load(Slopes + head, is_row, 0.0)
    most = tl.full([ROWS], NONE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if Sinks is not None:
        # One more key, without a value: it is counted once, by the first split.
        most = tl.where(split == 0, tl.load(Sinks + head, is_row, 0.0) * LOG2E, NONE)
        total = tl.where(most == NONE, 0.0, 1.0)
    values = tl.zeros([ROWS, padded(V_DIM)], tl.float32)

    Blocks = Table + sequence.to(tl.int64) * table_stride
    for begin in tl.range(low, high, KEYS):
        key = begin + tl.arange(0, KEYS)
        block = tl.load(Blocks + key // BLOCK_SIZE, key < high, -1)
        is_key = (block >= 0) & (block < num_blocks)
        block = block.to(tl.int64)
        offset = (key % BLOCK_SIZE).to(tl.int64)
        k = columns(K + place(k_stride, block, kv_head, offset), is_key, DIM)
        score = tl.dot(q, k.to(q.dtype), input_precision=_PRECISION)
        if KScale is not None:
            at = KScale + place(k_scale_stride, block, kv_head, offset)
            score *= tl.load(at, is_key, 0.0)[None, :]
        score = _biased(
            score, key[None, :] - position[:, None], is_key[None, :] & is_row[:, None],
            scale, softcap, window, slope, CAUSAL,
        )  # fmt: skip
        most, shift, shrink = scaled(most, tl.max(score, 1))
        weight = tl.exp2(score - shift[:, None])
        total = total * shrink + tl.sum(weight, 1)
        if VScale is not None:
            at = VScale + place(v_scale_stride, block, kv_head, offset)
            weight *= tl.load(at, is_key, 0.0)[None, :]
        v = rows(V + place(v_stride, block, kv_head, offset), is_key, V_DIM)
        if _UPCAST:
            v = v.to(tl.float32)
        elif VScale is not None:
            # A weight times a scale may be too small for float16, never for bfloat16.
            v = v.to(tl.float32 if q.dtype == tl.float32 else tl.bfloat16)
        values *= shrink[:, None]
        values = tl.dot(weight.to(v.dtype), v, values, input_precision=_PRECISION)

    out, lse = state(values, most, total)
    if last_split == 0:
        store_rows(Out + token * out_stride[0] + head * out_stride[1], out, is_row, V_DIM)
        if Lse is not None:
            tl.store(Lse + token * lse_stride[0] + head * lse_stride[1], lse, is_row)
    if Records is not None:
        num_heads = tl.num_programs(1) // num_groups * NUM_GROUP
        record = (token * num_heads + head) * num_splits + split
        Record = Records + record * (V_DIM + RECORD_EXTRA)
        if last_split > 0:
            store_rows(Record, out, is_row, V_DIM)
            tl.store(Record + V_DIM, lse, is_row)
        tl.store(Record + V_DIM + 1, (last_split + 1).to(tl.float32), is_row)


@triton.jit
def _first_query(tile, Starts, num_sequences, QUERIES: tl.constexpr):
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
    split, length, first, num_queries, window, num_splits, min_split,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """A split's keys [low, high), and the index of the tile's last split."""
    position = length - num_queries + first
    low, high = length * 0, length
    if window is not None:
        low = tl.maximum(0, position - window)
    if CAUSAL:
        high = tl.minimum(length, position + QUERIES)
    span = tl.maximum(high - low, 0)
    size = tl.maximum(min_split, tl.cdiv(tl.cdiv(span, num_splits), KEYS) * KEYS)
    last_split = tl.maximum(tl.cdiv(span, size), 1) - 1
    low += split * size
    return low, tl.minimum(high, low + size), last_split


@triton.jit
def _biased(score, distance, seen, scale, softcap, window, slope, CAUSAL: tl.constexpr):
    """Scores of base 2, -inf where a query does not see a key; distance is negative to the past."""
    if softcap is not None:
        x = score * (scale / softcap)
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        tanh = (1.0 - e) / (1.0 + e)
        score = tl.where(x < 0, -tanh, tanh) * (softcap * LOG2E)
    else:
        score *= scale * LOG2E
    if slope is not None:
        score += (slope * LOG2E)[:, None] * distance
    if CAUSAL:
        seen &= distance <= 0
    if window is not None:
        seen &= distance >= -window
    return tl.where(seen, score, NONE)
