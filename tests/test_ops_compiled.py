"""The attention kernel, cross-compiled for GPUs that are not here: no spills, loads ahead of use.

It says nothing of speed; only that what would run keeps its numbers in registers.
"""

import importlib.util
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton)",
)

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAPABILITIES = (80, 90, 100)
DECODE, CHUNK, PROMPT = 1, 10, 64  # queries a sequence: the three tiles of 4 heads a group

TYPES = [(q, c) for q in (BF16, FP16) for c in (q, torch.int8, E4M3, E5M2)]
MATRIX = [
    (capability, q, cache, dim, num_queries, options)
    for capability in CAPABILITIES
    for q, cache in TYPES
    for dim in (64, 128)
    for num_queries in (DECODE, CHUNK, PROMPT)
    for options in (False, True)
    if not (cache == E4M3 and capability < 89)  # has no such type
]
SMALL = [
    (80, BF16, BF16, 128, DECODE, True),
    (80, FP16, torch.int8, 64, CHUNK, False),
    (90, BF16, BF16, 128, DECODE, False),
    (90, BF16, BF16, 128, PROMPT, True),
    (90, BF16, torch.int8, 128, DECODE, False),
    (90, BF16, E4M3, 64, DECODE, True),
    (100, BF16, BF16, 128, CHUNK, False),
    (100, FP16, E5M2, 128, DECODE, False),
]


@pytest.mark.parametrize(("capability", "q", "cache", "dim", "num_queries", "options"), SMALL)
def test_nothing_is_spilled(
    capability: int, q: torch.dtype, cache: torch.dtype, dim: int, num_queries: int, options: bool
) -> None:
    check(capability, q, cache, dim, num_queries, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "q", "cache", "dim", "num_queries", "options"),
    [each for each in MATRIX if each not in SMALL],
)
def test_nothing_is_spilled_in_the_rest(
    capability: int, q: torch.dtype, cache: torch.dtype, dim: int, num_queries: int, options: bool
) -> None:
    check(capability, q, cache, dim, num_queries, options)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 256])
def test_other_heads_and_blocks_compile(dims: tuple[int, int], block_size: int) -> None:
    from tests.triton_compile import compiled, meta_call

    for num_queries in (DECODE, CHUNK, PROMPT):
        call = meta_call(num_queries, dims, BF16, BF16, block_size)
        assert compiled(call, 90).count("LDGSTS") > 0


def check(
    capability: int, q: torch.dtype, cache: torch.dtype, dim: int, num_queries: int, options: bool
) -> None:
    from tests.triton_compile import compiled, meta_call

    per_head = torch.empty(32, device="meta")
    every: dict[str, Any] = {
        "window_left": 100, "softcap": 20.0, "alibi_slopes": per_head, "sinks": per_head
    }  # fmt: skip
    chosen = every if options else {}
    made = compiled(meta_call(num_queries, (dim, dim), q, cache, **chosen), capability)
    assert made.stack == made.local == 0, made[:4]
    assert made.count("LDL") == made.count("STL") == 0
    assert made.count("LDGSTS") > 0, "keys and values are not loaded ahead"
    products = {80: "HMMA", 90: "HMMA" if num_queries == DECODE else "HGMMA"}
    assert made.count(products.get(capability, "HMMA|UTCHMMA")) > 0
    print(f"registers {made.registers}, shared {made.shared}")
