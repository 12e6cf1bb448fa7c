"""Calls of the attention op to test with: scattered blocks of a padded pool, garbage around them.

Shared by the tests of all backends; the truth is `reference` in float64 on the same rounded inputs.
"""

import torch
from torch import Tensor

from tierd.ops import cpp, reference
from tierd.ops.call import AttentionCall
from tierd.ops.quantised import QUANTISED, largest, quantise, whole_scale

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BACKENDS = [*(["cpp"] if cpp.available() else []), "torch", "reference"]
LAYERS, LAYER, PADDING = 3, 1, 24


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool_views(
    num_blocks: int, heads: int, block_size: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """One layer's K and V in a pool of padded multi-layer blocks that holds nothing but NaN."""
    numel = LAYERS * 2 * heads * block_size * dim
    pool = torch.full((num_blocks, numel + PADDING), torch.nan, dtype=dtype)
    blocks = pool[:, :numel].unflatten(1, (LAYERS, 2, heads, block_size, dim))
    return blocks[:, LAYER, 0], blocks[:, LAYER, 1]


def make_call(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    block_size: int = 16,
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    v_dim: int | None = None,
    **options: object,
) -> AttentionCall:
    """A batch of (keys, queries): scattered blocks, -1 past a table's end, NaN past the keys."""
    torch.manual_seed(0)
    v_dim = v_dim or dim
    counts = [-(-keys // block_size) for keys, _ in lengths]
    order = torch.randperm(sum(counts) + 2)
    k_cache, _ = pool_views(len(order), heads[1], block_size, dim, dtype)
    _, v_cache = pool_views(len(order), heads[1], block_size, v_dim, dtype)
    table = torch.full((len(lengths), max([*counts, 0]) + 1), -1, dtype=torch.int32)
    for row, (keys, _) in enumerate(lengths):
        mine, order = order[: counts[row]], order[counts[row] :]
        table[row, : counts[row]] = mine
        for index, block in enumerate(mine.tolist()):
            filled = min(block_size, keys - index * block_size)
            for cache in (k_cache, v_cache):
                cache[block, :, :filled] = torch.randn(heads[1], filled, cache.shape[3])
    queries = [count for _, count in lengths]
    q = torch.randn(sum(queries), heads[0], dim).to(dtype)
    return AttentionCall(
        out=torch.full((*q.shape[:2], v_dim), torch.nan, dtype=dtype),
        lse=torch.full(q.shape[:2], torch.nan),
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=table,
        seq_lens=int32(*(keys for keys, _ in lengths)),
        cu_seqlens_q=int32(0, *torch.tensor(queries).cumsum(0).tolist()),
        max_seqlen_q=max([*queries, 0]),
        scale=dim**-0.5,
        **options,  # type: ignore[arg-type]
    )


def quantised_call(
    call: AttentionCall, cache_dtype: torch.dtype, scale_shape: tuple[int, int, int]
) -> AttentionCall:
    """The same call over one-byte caches; 1 in the shape stands for the whole dimension."""
    assert cache_dtype in QUANTISED
    changes: dict[str, Tensor] = {}
    for name in ("k", "v"):
        cache = getattr(call, f"{name}_cache").float()
        shape = [a if b == 0 else b for a, b in zip(cache.shape, scale_shape, strict=False)]
        # Apart by up to 2 and with the range used, so that a wrong scale is a wrong result.
        scale = (4 + 4 * torch.rand(shape)) / largest(cache_dtype)
        whole = whole_scale(scale, cache)
        # No number of a one-byte cache is a NaN in all three types: garbage is just large.
        changes[f"{name}_cache"] = quantise(cache.nan_to_num(1e9), whole[..., None], cache_dtype)
        changes[f"{name}_scale"] = scale
    return call._replace(**changes)  # type: ignore[arg-type]


def run(call: AttentionCall) -> AttentionCall:
    arguments = call._asdict()
    positional = [arguments.pop(name) for name in call._fields[:10]]
    torch.ops.tierd.paged_attention(*positional, **arguments)
    return call


def assert_right(call: AttentionCall) -> None:
    run(call)
    out, lse = reference.attention(call, torch.float64)
    tolerance = TOLERANCE[call.q.dtype]
    torch.testing.assert_close(call.out.double(), out, atol=tolerance, rtol=tolerance)
    assert call.lse is not None
    torch.testing.assert_close(call.lse.double(), lse, atol=tolerance, rtol=tolerance)


MIXED = [(37, 1), (20, 20), (0, 0), (50, 9), (1, 1), (16, 1), (33, 32), (0, 2), (48, 0)]
