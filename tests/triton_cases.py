"""The GPU kernels' cases, each against its definition in float64: one list for the interpreter, for
a GPU and for scripts/gpu_check. Needs torch only; `python -m tests.triton_cases NAME...` runs cases
and prints a JSON line each.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tierd.ops import kv_write, reference, states
from tierd.ops.call import AttentionCall
from tierd.ops.quantised import largest, quantise

LAYERS, LAYER, PADDING = 3, 1, 48
# Norm of the error over norm of the output; int8 and float8 caches weigh values in bfloat16.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
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
    return layer[:, : sizes[0]].unflatten(1, k.shape[1:]), layer[:, sizes[0] :].unflatten(
        1, v.shape[1:]
    )


class Case(NamedTuple):
    """A call to make, and whether it is in the small set that every run of the tests does."""

    arguments: dict[str, Any]
    small: bool = False

    def call(self, device: str) -> AttentionCall:
        return make_call(device, **self.arguments)


SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.1, 0.0]), torch.tensor([0.5, -2.0, 3.0, 0.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not-causal": {"causal": False},
    "window-of-one": {"window_left": 0},
    "window": {"window_left": 10},
    "window-not-causal": {"window_left": 10, "causal": False},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "all": {"window_left": 10, "softcap": 2.0, "alibi_slopes": SLOPES, "sinks": SINKS},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for option, values in OPTIONS.items():
        for name, dtype in DTYPES.items():
            cases[f"{option}-{name}"] = Case(
                {"lengths": MIXED, "dtype": dtype, **values}, small=name != "float16"
            )
        cases[f"{option}-decode-splits"] = Case(
            {"lengths": DECODE, "num_splits": 3, **values}, small=True
        )
    for block_size in (1, 7, 16, 48, 256):
        for heads in ((2, 2), (6, 2), (9, 3), (4, 1), (32, 8), (71, 1)):
            cases[f"block-{block_size}-heads-{heads[0]}-{heads[1]}"] = Case(
                {"lengths": MIXED, "heads": heads, "block_size": block_size},
                small=(block_size, heads) in ((1, (6, 2)), (7, (9, 3)), (48, (71, 1))),
            )
    for dims in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128),
                 (64, 80), (8, 8)):  # fmt: skip
        for name, dtype in DTYPES.items():
            for kind, lengths in (("mixed", MIXED), ("decode", DECODE)):
                cases[f"dims-{dims[0]}-{dims[1]}-{kind}-{name}"] = Case(
                    {"lengths": lengths, "dims": dims, "dtype": dtype},
                    small=dims in ((80, 80), (192, 128)) and name == "bfloat16",
                )
    for cache, cache_dtype in CACHES.items():
        for scales in SCALE_SHAPES:
            for name, dtype in DTYPES.items():
                cases[f"{cache}-{scales}-{name}"] = Case(
                    {"lengths": MIXED + DECODE, "dtype": dtype, "cache": cache_dtype,
                     "scales": scales, "num_splits": 2},
                    small=scales in ("one", "token") and name == "float16",
                )  # fmt: skip
    cases["token-major"] = Case({"lengths": MIXED, "token_major": True}, small=True)
    cases["long-splits"] = Case({"lengths": [(1500, 1), (3, 1), (700, 1)]}, small=True)
    cases["long-prompt"] = Case({"lengths": [(300, 200), (5, 5), (90, 1)], "num_splits": 2})
    return cases


CASES = _cases()


def error(name: str, device: str, run: Callable[[AttentionCall], None]) -> tuple[float, float]:
    """Run a case: its errors, of out relative and in norm, of lse. AssertionError if too large."""
    case = CASES[name]
    expected = reference.attention(case.call("cpu"), torch.float64)
    call = case.call(device)
    run(call)
    assert call.lse is not None
    out, lse = call.out.cpu().double(), call.lse.cpu().double()
    assert torch.equal(lse.isinf(), expected[1].isinf()), "lse: not -inf where it should be"
    out_error = float((out - expected[0]).norm() / expected[0].norm())
    lse_error = float((lse - expected[1]).nan_to_num().abs().max())
    narrow = case.arguments.get("cache") is not None and call.q.dtype == torch.float16
    tolerance = TOLERANCE[torch.bfloat16 if narrow else call.q.dtype]
    assert out_error <= tolerance, f"out: error {out_error:.1e}, at most {tolerance:.0e}"
    assert lse_error <= 1e-4, f"lse: error {lse_error:.1e}"
    return out_error, lse_error


def check_write(device: str, cache: torch.dtype, dtype: torch.dtype) -> None:
    """write_kv to the bit as on the CPU; two of its slots are none."""
    random = torch.Generator().manual_seed(0)
    tokens = [torch.randn(13, 3, dim, generator=random) * 3 for dim in (40, 24)]
    scales = [None, None]
    if cache.itemsize == 1:
        # Powers of two times what float8 holds, for the interpreter rounds that wrongly.
        scales = [2.0 ** -torch.randint(3, 6, (4, 3, 5), generator=random) for _ in range(2)]
        if cache != torch.int8:
            tokens = [x.to(torch.float8_e5m2).float().clamp(-8, 8) for x in tokens]
            tokens = [x * (x.abs() > 0.02) for x in tokens]
    k, v = (x.to(dtype).to(device) for x in tokens)
    caches = [torch.zeros(4, 3, 5, dim).to(cache) for dim in (40, 24)]
    slots = torch.randperm(20, generator=random)[:13]
    kept = slots.clone()
    slots[3], slots[7] = -1, 20
    keep = torch.tensor([i not in (3, 7) for i in range(13)])
    kv_write.write_kv(k.cpu()[keep], v.cpu()[keep], *caches, kept[keep], *scales)
    written = [torch.zeros(4, 3, 5, dim).to(cache).to(device) for dim in (40, 24)]
    on_device = [scale.to(device) if scale is not None else None for scale in scales]
    _kernels().write_kv(k, v, *written, slots.to(device), *on_device)
    for ours, expected in zip(written, caches, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), expected.view(torch.uint8))


def check_merge(device: str, dtype: torch.dtype) -> None:
    """merge_states as on the CPU; some states are of no keys."""
    random = torch.Generator().manual_seed(0)
    outs = [torch.randn(5, 6, 24, generator=random).to(dtype) for _ in range(2)]
    lses = [torch.randn(5, 6, generator=random) * 4 for _ in range(2)]
    for row, of in ((0, 0), (0, 1), (1, 1), (2, 0)):
        outs[of][row], lses[of][row] = 0, -torch.inf
    expected = outs[0].clone(), lses[0].clone()
    states.merge_states(*expected, outs[1], lses[1])
    merged = outs[0].to(device), lses[0].to(device)
    _kernels().merge_states(*merged, outs[1].to(device), lses[1].to(device))
    torch.testing.assert_close(merged[0].cpu(), expected[0])
    torch.testing.assert_close(merged[1].cpu(), expected[1])


CASES_OF_WRITES: dict[str, Callable[[str], None]] = {
    **{
        f"write-{name}-{kind}": partial(check_write, cache=cache, dtype=dtype)
        for name, dtype in DTYPES.items()
        for kind, cache in {"plain": dtype, **CACHES}.items()
    },
    **{f"merge-{name}": partial(check_merge, dtype=dtype) for name, dtype in DTYPES.items()},
}


def _kernels() -> Any:
    """The functions that launch the kernels, on tensors of any device, for the interpreter."""
    from tierd.ops import triton_attention, triton_kv_write, triton_states

    return SimpleNamespace(
        paged_attention=triton_attention.paged_attention,
        write_kv=triton_kv_write.write_kv,
        merge_states=triton_states.merge_states,
    )


def main(names: list[str]) -> None:
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    for name in names:
        try:
            if name in CASES:
                error(name, device, _kernels().paged_attention)
            else:
                CASES_OF_WRITES[name](device)
            problem = None
        except Exception as failure:
            problem = f"{type(failure).__name__}: {failure}"
        print(json.dumps({"case": name, "error": problem}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [*CASES, *CASES_OF_WRITES])
