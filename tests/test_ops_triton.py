"""The GPU kernels against their definition in float64: in Triton's interpreter, and on a GPU.

The interpreter is chosen when Triton is imported, so it runs in a process of its own: one for the
small set of cases, one for the slow rest. It knows no bfloat16 products (they are made in float32
there) and drops a carry when it rounds to float8, so float8 writes are only tested where nothing is
rounded; what a GPU does of both, only the `gpu` tests see.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import triton_cases
from tests.triton_cases import CASES, CASES_OF_WRITES, DECODE, MIXED, make_call
from tierd import ops
from tierd.ops import cuda
from tierd.ops.call import AttentionCall

ROOT = Path(__file__).parents[1]
SMALL = [name for name, case in CASES.items() if case.small]
SLOW = [name for name, case in CASES.items() if not case.small]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (1 GB; pip install 'tierd[gpu]')",
)


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    with torch.no_grad():
        yield
    cuda.set_backend(None)
    cuda.set_checked(False)


@cache
def interpreted(names: tuple[str, ...]) -> dict[str, str | None]:
    """What is wrong with each of these cases in the interpreter; None if nothing is."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.triton_cases", *names],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    results = [json.loads(line) for line in found.stdout.splitlines()]
    errors = {result["case"]: result["error"] for result in results}
    return {name: errors.get(name, f"no result: {found.stderr[-2000:]}") for name in names}


@needs_triton
@pytest.mark.parametrize("name", [*SMALL, *CASES_OF_WRITES])
def test_a_call_is_right_in_the_interpreter(name: str) -> None:
    assert interpreted((*SMALL, *CASES_OF_WRITES))[name] is None


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SLOW)
def test_a_rarer_call_is_right_in_the_interpreter(name: str) -> None:
    assert interpreted(tuple(SLOW))[name] is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_right_on_a_gpu(name: str) -> None:
    triton_cases.error(name, "cuda", run)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES_OF_WRITES)
def test_a_write_or_merge_is_right_on_a_gpu(name: str) -> None:
    CASES_OF_WRITES[name]("cuda")


def run(call: AttentionCall) -> Tensor:
    arguments = call._asdict()
    positional = [arguments.pop(name) for name in call._fields[:10]]
    torch.ops.tierd.paged_attention(*positional, **arguments)
    return call.out


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
def test_a_captured_graph_follows_lengths_and_tables(lengths: list[tuple[int, int]]) -> None:
    call = make_call("cuda", lengths)
    expected = run(call).clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(call)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run(call)
    call.out.zero_()
    graph.replay()
    assert torch.equal(call.out, expected)
    call.seq_lens.copy_(call.seq_lens.clamp(max=40).where(call.seq_lens > 40, call.seq_lens))
    graph.replay()
    replayed = call.out.clone()
    assert torch.equal(run(call), replayed)


@pytest.mark.gpu
def test_a_decoding_sequence_gets_the_same_bits_alone_and_in_a_batch() -> None:
    call = make_call("cuda", [(5000, 1), (70, 1), (2049, 1)], dtype=torch.bfloat16)
    together = run(call).clone()
    for row in range(3):
        one = call._replace(
            out=torch.empty_like(call.out[:1]),
            lse=None,
            q=call.q[row : row + 1],
            block_table=call.block_table[row : row + 1],
            seq_lens=call.seq_lens[row : row + 1],
            cu_seqlens_q=call.cu_seqlens_q[:2],
        )
        assert torch.equal(run(one)[0], together[row])


@pytest.mark.gpu
def test_ids_out_of_range_are_masked_and_in_checked_mode_refused() -> None:
    call = make_call("cuda", [(40, 1)])
    call.block_table[0, 1], call.block_table[0, 2] = 2**31 - 1, -5
    clean = make_call("cuda", [(16, 1)])
    first = int(call.block_table[0, 0])
    torch.testing.assert_close(
        run(call),
        run(clean._replace(k_cache=call.k_cache, v_cache=call.v_cache, q=call.q,
                           block_table=torch.full_like(clean.block_table, first))),
    )  # fmt: skip
    cuda.set_checked(True)
    with pytest.raises(ValueError, match=r"block_table\[0, 1\] is 2147483647"):
        run(call)


@pytest.mark.gpu
def test_a_slot_out_of_range_is_skipped_and_in_checked_mode_refused() -> None:
    k_cache, v_cache = torch.zeros(2, 2, 1, 4, 8, device="cuda").unbind()
    k = v = torch.ones(2, 1, 8, device="cuda")
    slots = torch.tensor([8, 3], device="cuda")
    ops.write_kv(k, v, k_cache, v_cache, slots)
    assert int(k_cache.count_nonzero()) == 8
    cuda.set_checked(True)
    with pytest.raises(ValueError, match="slot_mapping goes"):
        ops.write_kv(k, v, k_cache, v_cache, slots)


@pytest.mark.gpu
def test_offsets_beyond_32_bits_are_right() -> None:
    block_numel = 2 * 2 * 16 * 64
    num_blocks = 2**31 // block_numel + 64
    pool = torch.empty(num_blocks, 2, 2, 16, 64, dtype=torch.bfloat16, device="cuda")
    small = make_call("cuda", [(40, 1)], dtype=torch.bfloat16)
    last = torch.arange(num_blocks - 3, num_blocks, device="cuda")
    used = small.block_table[0, :3].long()
    pool[last, 0], pool[last, 1] = small.k_cache[used], small.v_cache[used]
    expected = run(small).clone()
    small.block_table[0, :3] = last.int()
    assert torch.equal(run(small._replace(k_cache=pool[:, 0], v_cache=pool[:, 1])), expected)
