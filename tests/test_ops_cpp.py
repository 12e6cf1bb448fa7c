"""The C++ kernel: instruction sets, types, head sizes and options against float64; and its promise,
a sequence's result is the same bits for any number of threads and in any company.
"""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.op_calls import int32, make_call, quantised_call, run
from tierd import ops
from tierd.ops import cpp, reference
from tierd.ops.call import AttentionCall

pytestmark = pytest.mark.skipif(not cpp.available(), reason="the C++ kernel was not built")

ERROR = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
CACHES = [None, INT8, E4M3, E5M2]
# Per tensor, block, (block, head), (token, head): 0 stands for the whole dimension.
SCALES = [(1, 1, 1), (0, 1, 1), (0, 0, 1), (0, 0, 0)]
BATCH = [(37, 1), (20, 20), (0, 0), (600, 1), (1, 1), (130, 33), (0, 2), (48, 0), (300, 3)]
SHAPES = {  # heads, block size, head size of K, of V
    "MHA": ((4, 4), 16, 64, 64),
    "GQA": ((8, 2), 7, 128, 128),
    "groups of 3": ((6, 2), 16, 80, 96),
    "groups of 5": ((10, 2), 256, 96, 64),
    "MQA": ((32, 1), 16, 192, 256),
    "groups of 7": ((7, 1), 1, 256, 192),
    "odd blocks": ((3, 1), 33, 112, 48),
    "groups of 8": ((16, 2), 16, 64, 64),
}
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "all": {"window_left": 70, "softcap": 2.0, "sinks": True, "alibi_slopes": True},
    "not causal": {"causal": False, "window_left": 100},
}


def isas() -> list[str]:
    found = []
    for name in cpp.ISAS[1:]:
        try:
            cpp.set_isa(name)
        except ValueError:
            continue
        found.append(name)
    cpp.set_isa(None)
    return found


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    threads = torch.get_num_threads()
    ops.set_backend("cpp")
    with torch.no_grad():
        yield
    ops.set_backend(None)
    cpp.set_isa(None)
    torch.set_num_threads(threads)


def a_call(
    shape: str,
    options: str,
    dtype: torch.dtype,
    cache: torch.dtype | None,
    scales: tuple[int, int, int] = (0, 0, 1),
    batch: list[tuple[int, int]] = BATCH,
) -> AttentionCall:
    heads, block_size, dim, v_dim = SHAPES[shape]
    chosen = dict(OPTIONS[options])
    for name in ("sinks", "alibi_slopes"):
        if name in chosen:
            chosen[name] = torch.linspace(0.0, 0.3, heads[0])
    call = make_call(batch, heads, block_size, dim, dtype, v_dim, **chosen)
    return call if cache is None else quantised_call(call, cache, scales)


def assert_close(call: AttentionCall) -> None:
    """Relative to the whole result, which is what rounding scales with."""
    run(call)
    assert call.lse is not None
    out, lse = reference.attention(call, torch.float64)
    some = lse.isfinite()
    error = (call.out.double() - out).norm() / out.norm()
    assert error < ERROR[call.q.dtype]
    assert torch.equal(call.lse[~some].double(), lse[~some])
    torch.testing.assert_close(call.lse[some].double(), lse[some], atol=2e-4, rtol=0)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_every_instruction_set_and_type_matches_float64(
    dtype: torch.dtype, cache: torch.dtype | None, isa: str
) -> None:
    cpp.set_isa(isa)
    assert cpp.isa() == isa
    assert_close(a_call("GQA", "all", dtype, cache))
    assert_close(a_call("MHA", "plain", dtype, cache))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_matches_float64(shape: str, options: str) -> None:
    assert_close(a_call(shape, options, torch.bfloat16, None))
    assert_close(a_call(shape, options, torch.float32, None))
    assert_close(a_call(shape, options, torch.bfloat16, INT8))


@pytest.mark.slow
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_everything_matches_float64(shape: str, options: str, isa: str) -> None:
    cpp.set_isa(isa)
    for dtype in ERROR:
        for cache in CACHES:
            assert_close(a_call(shape, options, dtype, cache))


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("cache", [INT8, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_scales_of_any_grain_are_applied(
    backend: str, dtype: torch.dtype, cache: torch.dtype, scales: tuple[int, int, int]
) -> None:
    call = a_call("GQA", "plain", dtype, cache, scales, [(40, 1), (21, 21)])
    ops.set_backend(backend)
    run(call)
    out, _ = reference.attention(call, torch.float64)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(call.out.double(), out, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("queries", [1, 4, 40], ids=lambda n: f"{n} queries")
def test_long_sequences_are_cut_and_merged_right(queries: int, cache: torch.dtype | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_close(a_call("GQA", "all", dtype, cache, batch=[(2500, queries)]))
        assert_close(a_call("GQA", "plain", dtype, cache, batch=[(4200, queries), (513, 1)]))


ALONE = [(37, 1), (1100, 1), (130, 33), (1, 1), (2500, 3), (700, 40)]


@pytest.mark.parametrize("cache", [None, INT8], ids=str)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_a_result_is_the_same_bits_for_any_number_of_threads(
    dtype: torch.dtype, cache: torch.dtype | None
) -> None:
    call = a_call("GQA", "all", dtype, cache, batch=ALONE)
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        run(call)
        assert call.lse is not None
        results.append((call.out.clone(), call.lse.clone()))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("cache", [None, INT8], ids=str)
def test_a_result_is_the_same_bits_alone_and_in_a_batch(
    cache: torch.dtype | None, isa: str
) -> None:
    cpp.set_isa(isa)
    call = run(a_call("GQA", "all", torch.bfloat16, cache, batch=ALONE))
    starts = call.cu_seqlens_q.tolist()
    for b, (_, queries) in enumerate(ALONE):
        rows = slice(starts[b], starts[b + 1])
        alone = run(
            call._replace(
                out=torch.empty_like(call.out[rows]),
                lse=torch.empty(queries, 8),
                q=call.q[rows],
                block_table=call.block_table[b : b + 1],
                seq_lens=call.seq_lens[b : b + 1],
                cu_seqlens_q=int32(0, queries),
                max_seqlen_q=queries,
            )
        )
        assert alone.lse is not None
        assert call.lse is not None
        assert torch.equal(alone.out, call.out[rows])
        assert torch.equal(alone.lse, call.lse[rows])


def sparse_blocks(num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of which only what is touched takes memory."""
    numel = num_blocks * torch.Size(shape).numel()
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, numel * dtype.itemsize)
    memory = mmap.mmap(fd, numel * dtype.itemsize)
    os.close(fd)
    return torch.frombuffer(memory, dtype=dtype).view(num_blocks, *shape)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=str)
def test_offsets_beyond_two_to_the_31_are_reached(cache: torch.dtype) -> None:
    shape = (2, 2, 16, 64)
    num_blocks = 2**31 // torch.Size(shape).numel() + 300
    pool = sparse_blocks(num_blocks, shape, cache)
    assert pool.numel() > 2**31
    far, near = num_blocks - 1, 5
    call = make_call([(20, 1), (20, 20)], (4, 2), 16, 64, torch.bfloat16)
    scales: dict[str, Tensor] = {}
    if cache == torch.int8:
        scales = {"k_scale": torch.tensor(0.05), "v_scale": torch.tensor(0.05)}
    call = call._replace(
        k_cache=pool[:, 0],
        v_cache=pool[:, 1],
        block_table=int32(near, far, far - 1, near).view(2, 2),
        **scales,
    )
    k, v = torch.randn(2, 3, 16, 2, 64, dtype=torch.bfloat16)
    for i, block in enumerate((near, far, far - 1)):
        slots = block * 16 + torch.arange(16)
        ops.write_kv(k[i], v[i], pool[:, 0], pool[:, 1], slots, *scales.values())
    assert pool[far].any()
    for backend in ("cpp", "torch"):
        ops.set_backend(backend)
        run(call)
        out, _ = reference.attention(call, torch.float64)
        torch.testing.assert_close(call.out.double(), out, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("queries", [1, 8])
def test_a_query_that_is_not_a_number_stays_one(queries: int, cache: torch.dtype | None) -> None:
    call = a_call("GQA", "plain", torch.bfloat16, cache, batch=[(40, queries), (30, 1)])
    call.q[0, 0, 0] = torch.nan
    run(call)
    assert call.out[0, 0].isnan().all()
    assert call.out[:, 1:].isfinite().all()


def test_a_key_or_value_that_is_not_a_number_reaches_who_sees_it() -> None:
    for dtype in ERROR:
        for name in ("k_cache", "v_cache"):
            call = make_call([(40, 1), (30, 20)], (4, 2), 16, 64, dtype)
            getattr(call, name)[int(call.block_table[0, 1]), 0, 3, 5] = torch.nan
            run(call)
            assert call.out[0, :2].isnan().any()
            assert call.out[0, 2:].isfinite().all()
            assert call.out[1:].isfinite().all()


@pytest.mark.parametrize("dims", [(40, 64), (64, 40), (528, 64)], ids=str)
def test_head_sizes_that_it_does_not_know_go_to_torch_or_are_refused(dims: tuple[int, int]) -> None:
    call = make_call([(20, 1)], (2, 2), 16, dims[0], v_dim=dims[1])
    with pytest.raises(ValueError, match="head sizes must be multiples of 16 up to 512"):
        run(call)
    ops.set_backend(None)
    assert_close(call)


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="sse9"):
        cpp.set_isa("sse9")
    assert cpp.isa() in cpp.ISAS


def said(program: str, **environment: str) -> str:
    """What a process of its own prints."""
    surrounding = {**os.environ, "PYTHONPATH": ":".join(sys.path), **environment}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=surrounding, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_kernel_brings_no_openmp_of_its_own() -> None:
    program = """if True:
        from tierd.ops import cpp
        assert cpp.available()
        maps = open("/proc/self/maps")
        print(*{line.split()[-1] for line in maps if "libgomp" in line}, sep=",")
    """
    (library,) = said(program).split(",")
    assert "torch" in library


def test_without_the_library_torch_runs() -> None:
    program = "from tierd import ops; print(ops.backend())"
    assert said(program, TIERD_CPU_KERNEL="/nowhere") == "torch"
