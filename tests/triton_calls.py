"""Calls of the attention op for any device: the same numbers on each, made on the CPU.

Needs torch only, for scripts/gpu_check uses it where there is no pytest.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tierd.ops.call import AttentionCall
from tierd.ops.quantised import largest, quantise

LAYERS, LAYER, PADDING = 3, 1, 48
SCALE_SHAPES: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "one": lambda blocks, heads, size: (1,),
    "block": lambda blocks, heads, size: (blocks, 1, 1),
    "head": lambda blocks, heads, size: (blocks, heads, 1),
    "token": lambda blocks, heads, size: (blocks, heads, size),
}

# (keys, queries): decode, prompt, nothing, chunk, ...
MIXED = [(37, 1), (20, 20), (0, 0), (50, 9), (1, 1), (33, 32), (0, 2), (48, 0)]
DECODE = [(70, 1), (1, 1), (0, 1), (300, 1)]


def make_call(
    device: str,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    block_size: int = 16,
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    scales: str = "head",
    token_major: bool = False,
    **options: Any,
) -> AttentionCall:
    """The same call on every device: scattered blocks, -1 past tables' ends, NaN past the keys."""
    random = torch.Generator().manual_seed(0)
    counts = [-(-keys // block_size) for keys, _ in lengths]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=random)
    table = torch.full((len(lengths), max([*counts, 0]) + 1), -1, dtype=torch.int32)
    is_token = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for row, (keys, _) in enumerate(lengths):
        mine, order = order[: counts[row]], order[counts[row] :]
        table[row, : counts[row]] = mine
        for index, block in enumerate(mine.tolist()):
            is_token[block, : keys - index * block_size] = True
    cache = cache or dtype
    k, k_scale = _cache(random, is_token, heads[1], dims[0], cache, scales)
    v, v_scale = _cache(random, is_token, heads[1], dims[1], cache, scales)
    k_cache, v_cache = _views(k, v, device, token_major)
    queries = torch.tensor([0] + [count for _, count in lengths])
    starts = queries.cumsum(0).int()
    q = torch.randn(int(starts[-1]), heads[0], dims[0], generator=random).to(dtype)
    tensors = {name: x.to(device) for name, x in options.items() if isinstance(x, Tensor)}
    return AttentionCall(
        out=torch.full((*q.shape[:2], dims[1]), torch.nan, dtype=dtype, device=device),
        lse=torch.full(q.shape[:2], torch.nan, device=device),
        q=q.to(device),
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=table.to(device),
        seq_lens=torch.tensor([keys for keys, _ in lengths], dtype=torch.int32, device=device),
        cu_seqlens_q=starts.to(device),
        max_seqlen_q=int(queries.max()),
        scale=dims[0] ** -0.5,
        k_scale=k_scale.to(device) if k_scale is not None else None,
        v_scale=v_scale.to(device) if v_scale is not None else None,
        **{**options, **tensors},
    )


def _cache(
    random: torch.Generator,
    is_token: Tensor,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    scales: str,
) -> tuple[Tensor, Tensor | None]:
    """[num_blocks, heads, block_size, dim], and its scale if it is of one byte a number."""
    num_blocks, block_size = is_token.shape
    x = torch.randn(num_blocks, heads, block_size, dim, generator=random)
    garbage = ~is_token[:, None, :, None]
    if dtype.itemsize > 1:
        return x.masked_fill(garbage, torch.nan).to(dtype), None
    shape = SCALE_SHAPES[scales](num_blocks, heads, block_size)
    scale = (torch.rand(shape, generator=random) + 0.5) * (4 / largest(dtype))
    places = (1, 1, 1, 1) if scales == "one" else (*shape, 1)
    stored = quantise(x, scale.view(places), dtype).float()
    if scales != "one":
        used = is_token[:, None] if scales == "token" else is_token.any(1)[:, None, None]
        scale.masked_fill_(~used, torch.nan)
    fill = 127 if dtype == torch.int8 else torch.nan
    return stored.masked_fill(garbage, fill).to(dtype), scale


def _views(k: Tensor, v: Tensor, device: str, token_major: bool) -> tuple[Tensor, Tensor]:
    """The caches as one layer's views into a pool, or as tensors with tokens before heads."""
    if token_major:
        k, v = (x.transpose(1, 2).contiguous().to(device).transpose(1, 2) for x in (k, v))
        return k, v
    num_blocks, sizes = k.shape[0], (k[0].numel(), v[0].numel())
    pool = torch.full((num_blocks, LAYERS * sum(sizes) + PADDING), 1.0).to(k.dtype)
    begin = LAYER * sum(sizes)
    pool[:, begin : begin + sizes[0]] = k.flatten(1)
    pool[:, begin + sizes[0] : begin + sum(sizes)] = v.flatten(1)
    layer = pool.to(device)[:, begin : begin + sum(sizes)]
    k_rows, v_rows = layer.split(sizes, dim=1)
    return k_rows.unflatten(1, k.shape[1:]), v_rows.unflatten(1, v.shape[1:])


def attend(call: AttentionCall) -> Tensor:
    """Run the registered op, out variant."""
    arguments = call._asdict()
    positional = [arguments.pop(name) for name in call._fields[:10]]
    torch.ops.tierd.paged_attention(*positional, **arguments)
    return call.out
