"""The GPU kernels' cases, each against its definition in float64: one list for the interpreter, a
GPU and scripts/gpu_check. Needs torch only; `python -m tests.triton_cases NAME...` runs cases
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

from tests.triton_calls import DECODE, MIXED, SCALE_SHAPES, attend, make_call
from tierd import ops
from tierd.ops import kv_write, reference, states
from tierd.ops.call import AttentionCall

# Norm of the error over norm of the output; int8 and float8 caches weigh values in bfloat16.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


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


def error(name: str, device: str, run: Callable[[AttentionCall], object]) -> tuple[float, float]:
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
    scales: list[torch.Tensor | None] = [None, None]
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
    kv_write.write_kv(
        k.cpu()[keep], v.cpu()[keep], caches[0], caches[1], kept[keep], scales[0], scales[1]
    )
    written = [torch.zeros(4, 3, 5, dim).to(cache).to(device) for dim in (40, 24)]
    on_device = [scale.to(device) if scale is not None else None for scale in scales]
    _kernels(device).write_kv(k, v, *written, slots.to(device), *on_device)
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
    _kernels(device).merge_states(*merged, outs[1].to(device), lses[1].to(device))
    torch.testing.assert_close(merged[0].cpu(), expected[0])
    torch.testing.assert_close(merged[1].cpu(), expected[1])


def check_masked(device: str) -> None:
    """Ids out of range inside a sequence: as if their keys were not there."""
    call = make_call(device, [(40, 1), (60, 20)])
    call.block_table[0, 1], call.block_table[0, 2] = 2**31 - 1, -5
    _kernels(device).paged_attention(call)
    masked = call.out[0].clone()
    call.seq_lens[0] = 16
    _kernels(device).paged_attention(call)
    torch.testing.assert_close(masked, call.out[0])


def check_alone(device: str) -> None:
    """A decoding sequence gets the same bits alone and in a batch with longer ones."""
    call = make_call(device, [(700, 1), (70, 1), (1500, 1)], dims=(32, 32))
    _kernels(device).paged_attention(call)
    alone = call._replace(
        out=torch.empty_like(call.out[:1]),
        lse=None,
        q=call.q[:1],
        block_table=call.block_table[:1, : -(-700 // 16)],
        seq_lens=call.seq_lens[:1],
        cu_seqlens_q=call.cu_seqlens_q[:2],
    )
    _kernels(device).paged_attention(alone)
    assert torch.equal(alone.out[0], call.out[0])


def check_far(device: str) -> None:
    """Blocks beyond 2**31 elements of a pool that is mostly never touched."""
    num_blocks = 2**31 // (2 * 2 * 16 * 64) + 64
    pool = torch.empty(num_blocks, 2, 2, 16, 64, dtype=torch.float16, device=device)
    near = make_call(device, [(40, 1)], dtype=torch.float16)
    _kernels(device).paged_attention(near)
    expected = near.out.clone()
    for place, block in enumerate(near.block_table[0, :3].tolist()):
        pool[num_blocks - 1 - place, 0] = near.k_cache[block]
        pool[num_blocks - 1 - place, 1] = near.v_cache[block]
        near.block_table[0, place] = num_blocks - 1 - place
    far = near._replace(k_cache=pool[:, 0], v_cache=pool[:, 1])
    _kernels(device).paged_attention(far)
    assert torch.equal(far.out, expected)
    k = v = torch.ones(1, 2, 64, dtype=torch.float16, device=device)
    slot = torch.tensor([num_blocks * 16 - 1], device=device)
    _kernels(device).write_kv(k, v, far.k_cache, far.v_cache, slot, None, None)
    assert torch.equal(far.k_cache[-1, :, -1], k[0])


OTHER_CASES: dict[str, Callable[[str], None]] = {
    **{
        f"write-{name}-{kind}": partial(check_write, cache=cache, dtype=dtype)
        for name, dtype in DTYPES.items()
        for kind, cache in {"plain": dtype, **CACHES}.items()
    },
    **{f"merge-{name}": partial(check_merge, dtype=dtype) for name, dtype in DTYPES.items()},
    "masked-ids": check_masked,
    "same-bits-alone": check_alone,
    "far-blocks": check_far,
}


def _kernels(device: str) -> Any:
    """The ops on a GPU; elsewhere what launches the kernels, for the interpreter."""
    if device == "cuda":
        return SimpleNamespace(
            paged_attention=attend, write_kv=ops.write_kv, merge_states=ops.merge_states
        )
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
                error(name, device, _kernels(device).paged_attention)
            else:
                OTHER_CASES[name](device)
            problem = None
        except Exception as failure:
            problem = f"{type(failure).__name__}: {failure}"
        print(json.dumps({"case": name, "error": problem}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [*CASES, *OTHER_CASES])
