"""How the work of an attention call is cut on a GPU, decided from shapes alone.

No value on the device is known here, so a captured CUDA graph stays right when lengths change, and
equal shapes are always cut equally. A split is `min_split` keys long, or a `num_splits`-th of its
own sequence if that is more. So in calls of few queries (decode) a sequence's bits do not depend on
the others in the batch, as long as the workspace has room for all splits that a table allows.
"""

from typing import NamedTuple

import torch

from tierd.ops.call import AttentionCall
from tierd.ops.triton_tiles import RECORD_EXTRA, padded
from tierd.ops.triton_workspace import NBYTES

_MAX_SPLITS = 64
_MAX_MIN_SPLIT = 4096
_MAX_GROUP = 64


class Tile(NamedTuple):
    """One program's matrices, [rows, head size] against [keys, head size], and how it runs."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 3
    # Told that it may have them all, ptxas spills none on some tiles, where it saves a few instead.
    max_registers: int | None = None


class Tiling(NamedTuple):
    """The grid: tiles of `queries` times `group` heads of a KV head, and how keys are split."""

    tile: Tile
    queries: int
    group: int
    num_groups: int
    num_tiles: int
    one_each: bool  # a sequence has one tile of queries
    num_splits: int
    min_split: int


def tiling(call: AttentionCall) -> Tiling:
    """The cut of this call."""
    num_tokens, num_heads, dim = call.q.shape
    _, num_kv_heads, _, v_dim = call.v_cache.shape
    num_sequences = call.block_table.shape[0]
    heads_per_kv_head = num_heads // num_kv_heads
    group = min(heads_per_kv_head, _MAX_GROUP)
    tile = tile_of(
        max(call.max_seqlen_q, 1) * group,
        padded(dim) + padded(v_dim),
        call.q.dtype == torch.float32,
        call.k_scale is not None,
    )
    if tile.rows < group:
        tile = tile._replace(rows=padded(group))
    queries = tile.rows // group
    one_each = call.max_seqlen_q <= queries
    num_splits, min_split = _splits(call, tile)
    return Tiling(
        tile=tile,
        queries=queries,
        group=group,
        num_groups=-(-heads_per_kv_head // group),
        num_tiles=num_sequences if one_each else num_tokens // queries + num_sequences,
        one_each=one_each,
        num_splits=num_splits,
        min_split=min_split,
    )


def tile_of(num_rows: int, dims: int, is_float32: bool, is_quantised: bool) -> Tile:
    """The tile for sequences of so many rows; K's and V's head sizes, padded, add up to `dims`.

    The largest that cross-compilation found to keep all in registers (tests/test_ops_compiled.py).
    """
    keys = 32 if dims > 256 or is_float32 else 64
    if num_rows <= 16 or (is_float32 and dims > 256):
        spills = is_quantised and dims <= 128
        return Tile(16, keys, num_warps=4, max_registers=255 if spills else None)
    if is_float32:
        return Tile(32, keys, num_warps=4)
    if num_rows <= 64 or is_quantised or dims > 256:
        return Tile(64, keys, num_warps=8, max_registers=255)
    return Tile(128, keys, num_warps=8)


def _splits(call: AttentionCall, tile: Tile) -> tuple[int, int]:
    """How many splits a tile has at most, and the length in keys below which none is made."""
    num_tokens, num_heads, _ = call.q.shape
    v_dim = call.v_cache.shape[3]
    most_keys = call.block_table.shape[1] * call.k_cache.shape[2]
    # A split costs `rows` records: long splits for large tiles keep that at a few per cent.
    min_split = tile.keys if call.num_splits else min(tile.rows**2, _MAX_MIN_SPLIT)
    record_nbytes = 4 * (v_dim + RECORD_EXTRA.value)
    room = NBYTES // max(1, num_tokens * num_heads * record_nbytes)
    num_splits = min(call.num_splits or _MAX_SPLITS, -(-most_keys // min_split), room)
    return max(1, num_splits), min_split
