"""Run the parts of the GPU check, each in a process of its own, and say what came of them.

A part that crashes, hangs or poisons its CUDA context costs its own lines only. Parts print JSON
lines (`gpu_report.Check`); this prints them as they are, and a table at the end.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from gpu_report import Check, emit, holds, informs, rate, table

# In this order: the module and its function, imported in the part's own process only, and how many
# seconds it may take. With the cases that is less than 300 in all.
PARTS = {
    "promises": ("gpu_check", "promises", 40),
    "speed": ("gpu_speed", "checks", 60),
    "memory": ("gpu_memory", "checks", 45),
    "flashinfer": ("gpu_speed", "flashinfer_checks", 50),
}
CASES_SECONDS = 100
MAX_WORKERS = 8


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--part"]:
        run_here(arguments[1])
        return 0
    start = time.monotonic()
    if problem := obstacle():
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    names = arguments or ["cases", *PARTS]
    if unknown := set(names) - {"cases", *PARTS}:
        print(f"gpu_check: no part {', '.join(unknown)} (of cases, {', '.join(PARTS)})")
        return 2
    checks: list[Check] = []
    for name in names:
        for check in run_cases() if name == "cases" else run_part(name):
            emit(check)
            checks.append(check)
    print(f"\n{table(checks)}\n\n{time.monotonic() - start:.0f} s on {device_name()}")
    return 0 if all(check.ok for check in checks) else 1


def obstacle() -> str | None:
    """Why nothing can be checked here, in words."""
    try:
        import torch
    except ImportError as error:
        return f"needs torch: {error}"
    if not torch.cuda.is_available():
        return f"needs a CUDA GPU; torch {torch.__version__} sees none"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"needs triton, which torch's CUDA packages bring: {error}"
    return None


def device_name() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def run_here(name: str) -> None:
    module, function, _ = PARTS[name]
    for check in getattr(importlib.import_module(module), function)():
        emit(check)


def run_part(name: str) -> Iterator[Check]:
    """A part's checks as a process of its own printed them, and how it failed, if it did."""
    command = [sys.executable, "-W", "ignore", __file__, "--part", name]
    lines, problem = run_process(command, PARTS[name][2])
    for line in lines:
        yield Check(**json.loads(line))
    if problem:
        # What is no part of ours may be there and not work.
        if name == "flashinfer":
            yield informs("flashinfer", problem)
        else:
            yield holds(f"{name} runs to its end", False, problem)


def run_process(command: list[str], seconds: int) -> tuple[list[str], str]:
    """The JSON lines that a process printed, and what went wrong with it."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
            problem = ""
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            problem = f"more than {seconds} s"
    if process.returncode and not problem:
        problem = err.strip().rpartition("\n")[2] or f"exit status {process.returncode}"
    return [line for line in out.splitlines() if line.startswith("{")], problem


def run_cases() -> Iterator[Check]:
    """The cases of tests/triton_cases.py, shared out, for compiling takes long; only the small set
    where there are few CPUs."""
    from tests.triton_cases import CASES, OTHER_CASES

    num_workers = max(1, min(MAX_WORKERS, (os.cpu_count() or 1) // 2))
    chosen = [name for name, case in CASES.items() if case.small or num_workers >= MAX_WORKERS // 2]
    names = [*chosen, *OTHER_CASES]
    commands = [
        [sys.executable, "-W", "ignore", "-m", "tests.triton_cases", *names[worker::num_workers]]
        for worker in range(num_workers)
    ]
    errors: dict[str, str | None] = dict.fromkeys(names, "no result")
    with ThreadPoolExecutor(num_workers) as pool:
        for lines, problem in pool.map(lambda each: run_process(each, CASES_SECONDS), commands):
            results = [json.loads(line) for line in lines]
            errors |= {result["case"]: result["error"] for result in results}
            if problem:
                yield holds("a process of cases runs to its end", False, problem)
    wrong = {name: error for name, error in errors.items() if error}
    for name, error in wrong.items():
        yield holds(f"case {name}", False, str(error))
    right, of = len(names) - len(wrong), len(CASES) + len(OTHER_CASES)
    yield rate(f"cases right of those run (of {of})", right, len(names), 1.0)


def promises() -> Iterator[Check]:
    import torch

    from tests.triton_promises import PROMISES

    for promise in PROMISES:
        try:
            with torch.no_grad():
                promise()
            problem = ""
        except (AssertionError, RuntimeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        yield holds(promise.__name__.replace("_", " "), not problem, problem)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
