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
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests import triton_cases
from tests.triton_calls import attend
from tests.triton_cases import CASES, OTHER_CASES
from tests.triton_promises import PROMISES

ROOT = Path(__file__).parents[1]
SMALL = [name for name, case in CASES.items() if case.small]
SLOW = [name for name, case in CASES.items() if not case.small]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton)",
)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


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
@pytest.mark.parametrize("name", [*SMALL, *OTHER_CASES])
def test_a_call_is_right_in_the_interpreter(name: str) -> None:
    assert interpreted((*SMALL, *OTHER_CASES))[name] is None


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SLOW)
def test_a_rarer_call_is_right_in_the_interpreter(name: str) -> None:
    assert interpreted(tuple(SLOW))[name] is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_right_on_a_gpu(name: str) -> None:
    triton_cases.error(name, "cuda", attend)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OTHER_CASES)
def test_another_case_is_right_on_a_gpu(name: str) -> None:
    OTHER_CASES[name]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_a_promise_is_kept_on_a_gpu(promise: Callable[[], None]) -> None:
    promise()
