"""How fast the op is on this GPU: against a copy of memory, torch's own attention and FlashInfer.

32 query heads, 8 KV heads of 128, random blocks, several batches in turn, so that no KV is in the
L2 cache. Times are of CUDA graphs, so no host is in them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gpu_report as report
import torch
import torch.nn.functional as F
from gpu_report import Check
from torch.nn.attention.bias import causal_lower_right

from tests.triton_calls import attend
from tierd.ops import flashinfer
from tierd.ops.call import AttentionCall
from tierd.ops.quantised import QUANTISED

Run = Callable[[], Any]

HEADS, KV_HEADS, DIM = 32, 8, 128
NUM_BATCHES = 3


def make_batches(
    batch: int,
    keys: int,
    block_size: int = 16,
    queries: int = 1,
    cache: torch.dtype = torch.bfloat16,
    q_dtype: torch.dtype = torch.bfloat16,
) -> list[AttentionCall]:
    """Calls of one shape over one pool, each on other blocks of it."""
    per_sequence = -(-keys // block_size)
    num_blocks = NUM_BATCHES * batch * per_sequence
    pool = torch.empty(num_blocks, 2, KV_HEADS, block_size, DIM, dtype=cache, device="cuda")
    for part in pool.split(4096):
        noise = torch.randn(part.shape, device="cuda")
        part.copy_((noise * 30).clamp(-127, 127) if cache == torch.int8 else noise)
    tables = torch.randperm(num_blocks, device="cuda").int().view(NUM_BATCHES, batch, -1)
    scale = torch.full((1,), 0.03, device="cuda") if cache in QUANTISED else None
    q = torch.randn(batch * queries, HEADS, DIM, device="cuda").to(q_dtype)
    int32 = partial(torch.tensor, dtype=torch.int32, device="cuda")
    return [
        AttentionCall(
            out=torch.empty_like(q),
            lse=None,
            q=q,
            k_cache=pool[:, 0],
            v_cache=pool[:, 1],
            block_table=table,
            seq_lens=int32([keys] * batch),
            cu_seqlens_q=int32(range(0, batch * queries + 1, queries)),
            max_seqlen_q=queries,
            scale=DIM**-0.5,
            k_scale=scale,
            v_scale=scale,
        )
        for table in tables
    ]


def captured(runs: Sequence[Run]) -> torch.cuda.CUDAGraph:
    """Runs, one after the other, as a CUDA graph; each has run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    return graph


def milliseconds(runs: Sequence[Run]) -> float:
    """The time of one of them, all in turn in one CUDA graph: the best of several replays."""
    graph = captured(runs)
    times: list[float] = []
    end_of_time = time.monotonic() + 1.0
    while len(times) < 5 or (time.monotonic() < end_of_time and len(times) < 100):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) / len(runs)


def copy_rate() -> float:
    """GB/s of a copy inside the GPU's memory, reads and writes counted."""
    source, target = torch.empty(2, 1 << 30, dtype=torch.uint8, device="cuda").unbind()
    return 2 * source.nbytes / milliseconds([lambda: target.copy_(source)]) / 1e6


def kv_gigabytes(call: AttentionCall) -> float:
    batch, width = call.block_table.shape
    return 2 * batch * width * call.k_cache[0].numel() * call.k_cache.itemsize / 1e9


def attention_ms(calls: Sequence[AttentionCall]) -> float:
    return milliseconds([partial(attend, call) for call in calls])


@torch.inference_mode()
def checks() -> Iterator[Check]:
    copied = copy_rate()
    base = 0.0
    shapes = [(8, 4096, 16), (32, 4096, 16), (8, 16384, 16), (8, 4096, 64), (8, 4096, 8)]
    for batch, keys, block_size in [*shapes, (1, 16384, 16), (1, 1024, 16)]:
        calls = make_batches(batch, keys, block_size)
        ms = attention_ms(calls)
        base = base or ms
        bar = 0.75 if batch >= 8 and block_size >= 16 else None
        name = f"bf16 decode, batch {batch}, {keys} keys, block {block_size}: GB/s against a copy"
        yield report.rate(name, kv_gigabytes(calls[0]) / ms * 1e3, copied, bar)
        del calls
    for cache in QUANTISED:
        if cache == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
            continue
        ms = attention_ms(make_batches(8, 4096, cache=cache))
        name = f"{str(cache)[6:]} decode, batch 8, 4096 keys: ms against bf16"
        yield report.time(name, ms, base, 1.0)
    yield from _against_torch()


def _against_torch() -> Iterator[Check]:
    """Against torch's attention over contiguous keys and values, which needs no block table."""
    for queries, batch, bar, theirs in ((1, 8, 1.0, _folded), (512, 1, None, _lower_right)):
        keys = 4096 + (queries if queries > 1 else 0)
        ours = attention_ms(make_batches(batch, keys, queries=queries))
        k, v = torch.randn(2, NUM_BATCHES, batch, KV_HEADS, keys, DIM, device="cuda").bfloat16()
        q = torch.randn(batch, HEADS, queries, DIM, device="cuda").bfloat16()
        against = milliseconds([partial(theirs, q, k[i], v[i]) for i in range(NUM_BATCHES)])
        name = f"bf16, {queries} queries, batch {batch}, {keys} keys: ms against torch SDPA"
        yield report.time(name, ours, against, bar)


def _folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads of a group as queries of one head: torch's fastest for decode."""
    return F.scaled_dot_product_attention(q.view(q.shape[0], KV_HEADS, -1, DIM), k, v)


def _lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask: Any = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@torch.inference_mode()
def flashinfer_checks() -> Iterator[Check]:
    """The same calls by FlashInfer, planned before; it may have to compile itself first."""
    if not flashinfer.available():
        yield report.informs("flashinfer", "not installed")
        return
    for queries, batch, bar in ((1, 8, 0.9), (1, 32, 0.9), (512, 1, 0.8)):
        keys = 4096 + (queries if queries > 1 else 0)
        calls = make_batches(batch, keys, queries=queries)
        ours = attention_ms(calls)
        expected = calls[0].out.float()
        plans = [flashinfer.Plan(call) for call in calls]
        theirs = milliseconds(
            [partial(plan.run, call) for plan, call in zip(plans, calls, strict=True)]
        )
        plans[0].run(calls[0])
        close = torch.allclose(calls[0].out.float(), expected, atol=2e-2)
        name = f"bf16, {queries} queries, batch {batch}, {keys} keys"
        yield report.holds(f"{name}: FlashInfer agrees", close)
        yield report.time(f"{name}: ms against FlashInfer", ours, theirs, bar)
