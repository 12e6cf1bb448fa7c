"""What the ops promise on a GPU alone: no wait, no allocation, CUDA graphs, equal bits, checks.

Each is a function that raises where a promise is broken; needs torch only, for scripts/gpu_check
runs them too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tests.triton_calls import DECODE, MIXED, attend, make_call
from tierd import ops
from tierd.ops import cuda


def a_call_neither_waits_nor_allocates() -> None:
    call = make_call("cuda", [(3000, 1), (70, 1)], dtype=torch.bfloat16)
    attend(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert before == after, f"{after - before} allocations"


def a_captured_decode_follows_lengths() -> None:
    _captured(DECODE)


def a_captured_mixed_batch_follows_lengths() -> None:
    _captured(MIXED)


def _captured(lengths: list[tuple[int, int]]) -> None:
    """Replayed after lengths changed, a captured call gives what a new call gives."""
    call = make_call("cuda", lengths)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(call)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        attend(call)
    for most in (10**6, 40):
        shorter = call.seq_lens.clamp(max=most)
        call.seq_lens.copy_(shorter.where(shorter >= call.cu_seqlens_q.diff(), call.seq_lens))
        call.out.zero_()
        graph.replay()
        replayed = call.out.clone()
        assert torch.equal(attend(call), replayed), f"with at most {most} keys"


def runs_repeat_to_the_bit() -> None:
    call = make_call("cuda", [(5000, 1), (700, 300), (70, 1)], dtype=torch.bfloat16)
    first = attend(call).clone()
    for _ in range(20):
        assert torch.equal(attend(call), first)


def calls_on_two_streams_do_not_disturb_each_other() -> None:
    batches = [make_call("cuda", [(5000, 1), (n, 1)], dtype=torch.bfloat16) for n in (70, 3000)]
    expected = [attend(call).clone() for call in batches]
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(50):
        for call in batches:
            call.out.zero_()
        torch.cuda.synchronize()
        for call, stream in zip(batches, streams, strict=True):
            with torch.cuda.stream(stream):
                attend(call)
        torch.cuda.synchronize()
        for call, right in zip(batches, expected, strict=True):
            assert torch.equal(call.out, right)


def block_ids_out_of_range_are_refused_in_checked_mode() -> None:
    call = make_call("cuda", [(40, 1)])
    call.block_table[0, 1], call.block_table[0, 2] = 2**31 - 1, -5
    with _refused("block_table[0, 1] is 2147483647"):
        attend(call)


def slots_out_of_range_are_skipped_and_refused_in_checked_mode() -> None:
    k_cache, v_cache = torch.zeros(2, 2, 1, 4, 8, device="cuda").unbind()
    k = v = torch.ones(2, 1, 8, device="cuda")
    slots = torch.tensor([8, 3], device="cuda")
    ops.write_kv(k, v, k_cache, v_cache, slots)
    assert int(k_cache.count_nonzero()) == int(v_cache.count_nonzero()) == 8
    with _refused("slot_mapping goes from 3 to 8"):
        ops.write_kv(k, v, k_cache, v_cache, slots)


@contextmanager
def _refused(text: str) -> Iterator[None]:
    """In checked mode, what runs inside must raise ValueError with this text."""
    problem = "nothing"
    cuda.set_checked(True)
    try:
        yield
    except ValueError as error:
        problem = str(error)
    finally:
        cuda.set_checked(False)
    assert text in problem, f"what was said: {problem}"


PROMISES: tuple[Callable[[], None], ...] = (
    a_call_neither_waits_nor_allocates,
    a_captured_decode_follows_lengths,
    a_captured_mixed_batch_follows_lengths,
    runs_repeat_to_the_bit,
    calls_on_two_streams_do_not_disturb_each_other,
    block_ids_out_of_range_are_refused_in_checked_mode,
    slots_out_of_range_are_skipped_and_refused_in_checked_mode,
)
