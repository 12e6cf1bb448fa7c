"""Every figure that is promised of the attention op, measured against its peer in the same run.

A check is one line: what, ours, the peer's or the ceiling's, the ratio of the two, the bar, ok.
Memory bound checks are GB of keys and values a second, others say their unit. The exit status is 1
if a bar was missed.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import bench_peers as peers
import bench_vllm
import torch
from bench_workload import Call, Paged, Workload, memory, seconds

from tierd import ops
from tierd.ops import cpp, reference
from tierd.ops.call import AttentionCall

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DECODE = Workload()


@dataclass(frozen=True)
class Check:
    """`ratio` is ours to the other's; a bar is its least value, or with `at_most` its largest."""

    check: str
    ours: float
    against: float
    ratio: float
    bar: float
    ok: bool


def check(name: str, ours: float, against: float, bar: float, *, at_most: bool = False) -> Check:
    ratio = ours / against
    return Check(name, ours, against, ratio, bar, ratio <= bar if at_most else ratio >= bar)


def rates(workload: Workload, rivals: dict[str, Call], rounds: int = 8) -> dict[str, float]:
    """GB/s of keys and values: of the op as "ours", and of the others over the same workload."""
    paged = Paged(workload)
    times = seconds({"ours": paged.call, **rivals}, rounds)
    return {name: workload.nbytes / 1e9 / time for name, time in times.items()}


def decode() -> Iterator[Check]:
    paged = Paged(DECODE)
    rivals = {
        "contiguous": peers.contiguous(DECODE),
        "gathered": peers.gathered(paged),
        "read": peers.read(paged, DECODE.nbytes),
    }
    if (theirs := bench_vllm.peer(DECODE)) is not None:
        rivals["vllm"] = theirs
    rate = rates(DECODE, rivals)
    yield check("bf16 / contiguous SDPA", rate["ours"], rate["contiguous"], 3.5)
    yield check("bf16 / gather + SDPA", rate["ours"], rate["gathered"], 5.0)
    if "vllm" in rate:
        yield check("bf16 / vLLM CPU", rate["ours"], rate["vllm"], 3.0)
    yield check(f"bf16 / pure read, {torch.get_num_threads()} thread(s)", rate["ours"],
                rate["read"], 0.57)  # fmt: skip


def other_types() -> Iterator[Check]:
    for name, dtype, bar, batch in (("fp16", FP16, 10, 8), ("fp32", FP32, 2, 4)):
        workload = DECODE.with_(dtype=dtype, batch=batch)
        rate = rates(workload, {"contiguous": peers.contiguous(workload)}, 5)
        yield check(f"{name} / contiguous SDPA", rate["ours"], rate["contiguous"], bar)


def quantised() -> Iterator[Check]:
    """Two workloads cannot share the memory, so their rounds cannot alternate; runs do."""
    times = {}
    for _ in range(2):
        for dtype in (BF16, torch.int8):
            paged = Paged(DECODE.with_(cache_dtype=dtype))
            best = seconds({"ours": paged.call}, 8)["ours"] * 1e3
            times[dtype] = min(best, times.get(dtype, best))
    yield check("int8 time / bf16 time (ms)", times[torch.int8], times[BF16], 1.0, at_most=True)


def shapes() -> Iterator[Check]:
    rate = {}
    for block_size in (8, 16, 32, 64):
        rate[block_size] = rates(DECODE.with_(block_size=block_size), {})["ours"]
    yield check("block 8 / best block size", rate[8], max(rate.values()), 0.85)
    alone = rates(DECODE.with_(batch=1, context=1024), {}, 60)["ours"]
    yield check("batch 1 at 1k / batch 8 at 4k", alone, rate[16], 0.8)


def prefill() -> Iterator[Check]:
    for name, dtype, bar in (("bf16", BF16, 1.8), ("fp32", FP32, 1.0)):
        paged = Paged(DECODE.with_(batch=1, context=4608, queries=512, dtype=dtype))

        def in_torch(i: int, paged: Paged = paged) -> None:
            ops.set_backend("torch")
            paged.call(i)
            ops.set_backend(None)

        time = seconds({"ours": paged.call, "gathered": in_torch}, 4)
        ours, theirs = 512 / time["ours"], 512 / time["gathered"]
        yield check(f"prefill 512 @ 4k {name} / gather + SDPA (tokens/s)", ours, theirs, bar)


def instructions() -> Iterator[Check]:
    best = cpp.isa()
    if best not in ("avx512", "avx512bf16"):
        return
    paged = Paged(DECODE)

    def with_isa(name: str | None) -> Call:
        def call(i: int) -> None:
            cpp.set_isa(name)
            paged.call(i)
            cpp.set_isa(None)

        return call

    time = seconds({"avx2": with_isa("avx2"), "best": with_isa(None)}, 8)
    gb = DECODE.nbytes / 1e9
    yield check(f"avx2 / {best}", gb / time["avx2"], gb / time["best"], 0.5)


def overhead() -> Iterator[Check]:
    """A call with one key to attend to, less the little that its kernel has to do."""
    paged = Paged(Workload(batch=1, context=1, heads=1, kv_heads=1, dim=16))
    times = [seconds({"ours": paged.call}, 3000)["ours"] for _ in range(3)]
    yield check("one call of next to nothing (us)", min(times) * 1e6, 1.0, 15, at_most=True)


def errors() -> Iterator[Check]:
    for name, dtype, bar in (("bf16", BF16, 3e-3), ("fp16", FP16, 5e-4), ("fp32", FP32, 1e-6)):
        paged = Paged(DECODE.with_(dtype=dtype, batch=2, context=2049))
        paged.call(0)
        call = AttentionCall(
            paged.out, None, paged.q, paged.pool[:, 0], paged.pool[:, 1], paged.tables[0],
            paged.lengths, paged.starts, 1, paged.workload.dim**-0.5,
        )  # fmt: skip
        exact = reference.attention(call, torch.float64)[0]
        error = ((paged.out.double() - exact).norm() / exact.norm()).item()
        yield check(f"relative error to float64, {name}", error, 1.0, bar, at_most=True)


GROUPS: tuple[Callable[[], Iterator[Check]], ...] = (
    decode,
    other_types,
    quantised,
    shapes,
    prefill,
    instructions,
    overhead,
    errors,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="1: processor time; else wall clock")
    parser.add_argument("--only", default="", help="run the groups whose name contains this")
    parser.add_argument("--json", help="a line a check to this file, or to standard output with -")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    table = sys.stderr if arguments.json == "-" else sys.stdout
    print(headline(), file=table)
    checks = []
    for group in GROUPS:
        if arguments.only in group.__name__:
            for each in group():
                checks.append(each)
                print(line(each), file=table, flush=True)
    if arguments.json:
        lines = "".join(json.dumps(asdict(each)) + "\n" for each in checks)
        sys.stdout.write(lines) if arguments.json == "-" else write(arguments.json, lines)
    return 0 if all(each.ok for each in checks) else 1


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def headline() -> str:
    pages = f"{memory()[1]:.0%} huge pages"
    return (
        f"# {ops.backend()} ({cpp.isa()}), torch {torch.__version__}, threads"
        f" {torch.get_num_threads()}, {pages}, load {os.getloadavg()[0]:.1f}\n\n"
        "| check | ours | against | ratio | bar | ok |\n|---|---|---|---|---|---|"
    )


def line(each: Check) -> str:
    numbers = " | ".join(f"{x:.3g}" for x in (each.ours, each.against, each.ratio, each.bar))
    return f"| {each.check} | {numbers} | {'yes' if each.ok else '**no**'} |"


if __name__ == "__main__":
    sys.exit(main())
