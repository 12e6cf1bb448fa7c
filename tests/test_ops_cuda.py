"""What surrounds the GPU kernels and needs no GPU: dispatch, the cut of the work, FlashInfer's plan
and scripts/gpu_check where there is nothing to check.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_calls import DECODE, MIXED, make_call
from tierd.ops import cuda, flashinfer, reference
from tierd.ops.call import AttentionCall

ROOT = Path(__file__).parents[1]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton)",
)


class Wrapper:
    """Stands in for FlashInfer's: keeps its plan, and answers from it with the reference."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "HND"

    def plan(self, *plan: Any, **options: Any) -> None:
        self.starts, self.begins, self.ids, self.last = plan[:4]
        self.options = options

    def run(self, q: Tensor, caches: Any, *, out: Tensor, return_lse: bool) -> Any:
        counts = self.begins.diff()
        table = torch.full((len(counts), max(1, int(counts.max()))), -1, dtype=torch.int32)
        for row, (begin, count) in enumerate(zip(self.begins, counts, strict=False)):
            table[row, :count] = self.ids[begin : begin + count]
        block_size = caches[0].shape[2]
        call = AttentionCall(
            out, None, q, *caches, table,
            ((counts - 1) * block_size + self.last).int(), self.starts, 99,
            self.options["sm_scale"], causal=self.options["causal"],
            window_left=self.options["window_left"], softcap=self.options["logits_soft_cap"],
        )  # fmt: skip
        result, lse = reference.attention(call, torch.float32)
        out.copy_(result)
        return (out, lse / 0.6931471805599453) if return_lse else out


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(flashinfer, "_library", lambda: there)


def decode_call(**options: Any) -> AttentionCall:
    return make_call("cpu", [(37, 1), (48, 1)], dtype=torch.bfloat16, **options)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("options", [{}, {"window_left": 10}, {"softcap": 2.0, "causal": False}])
@pytest.mark.parametrize("with_lse", [True, False])
def test_a_plan_holds_the_batch_and_its_lse_is_natural(
    options: dict[str, Any], with_lse: bool
) -> None:
    call = make_call(
        "cpu", [(37, 1), (20, 20), (0, 0), (50, 9), (48, 0)], dtype=torch.bfloat16, **options
    )
    call = call if with_lse else call._replace(lse=None)
    flashinfer.paged_attention(call)
    out, lse = reference.attention(call, torch.float32)
    torch.testing.assert_close(call.out, out.bfloat16())
    if call.lse is not None:
        torch.testing.assert_close(call.lse, lse)


LIMITS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "heads of 96 and 96": {"dims": (96, 96)},
    "heads of 128 and 64": {"dims": (128, 64)},
    "int8 caches": {"cache": torch.int8},
    "scales of less": {"cache": torch.float8_e4m3fn, "scales": "block"},
    "ALiBi": {"alibi_slopes": torch.zeros(4)},
    "and sinks": {"sinks": torch.zeros(4)},
    "a window without": {"window_left": 3, "causal": False},
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("reason", "options"), LIMITS.items(), ids=LIMITS)
def test_what_flashinfer_cannot_do_is_refused_in_words(
    reason: str, options: dict[str, Any]
) -> None:
    call = make_call("cpu", [(37, 1)], **{"dtype": torch.bfloat16, **options})
    with pytest.raises(ValueError, match=f"backend flashinfer does not do .*{reason}"):
        flashinfer.paged_attention(call)
    assert call.out.isnan().all()


@pytest.mark.usefixtures("library")
def test_flashinfer_is_refused_queries_of_an_empty_sequence() -> None:
    with pytest.raises(ValueError, match="queries of an empty sequence"):
        flashinfer.paged_attention(make_call("cpu", DECODE, dtype=torch.bfloat16))


def test_flashinfer_within_its_limits_has_no_obstacle() -> None:
    assert flashinfer.obstacle(decode_call()) is None
    assert flashinfer.obstacle(decode_call(cache=torch.float8_e5m2, scales="one")) is None


def test_flashinfer_that_is_not_there_is_said_so() -> None:
    if flashinfer.available():
        pytest.skip("it is there")
    with pytest.raises(ValueError, match="cannot be imported"):
        flashinfer.paged_attention(decode_call())


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be one of triton, flashinfer or None"):
        cuda.set_backend("magic")


def test_float8_that_a_gpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_has_e4m3", lambda device: False)
    for cache, is_refused in ((torch.float8_e4m3fn, True), (torch.float8_e5m2, False)):
        call = decode_call(cache=cache)
        if is_refused:
            with pytest.raises(TypeError, match=r"float8_e4m3fn needs .* capability 8\.9"):
                cuda._check_dtype(call.k_cache)
        else:
            cuda._check_dtype(call.k_cache)


@needs_triton
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_the_cut_of_the_work_reads_no_values(lengths: list[tuple[int, int]]) -> None:
    from tierd.ops.triton_tiling import tiling

    call = make_call("cpu", lengths)
    on_meta = call._replace(
        **{name: x.to("meta") for name, x in call._asdict().items() if isinstance(x, Tensor)}
    )
    assert tiling(on_meta) == tiling(call)


@needs_triton
@pytest.mark.parametrize("num_splits", [0, 1, 7, 1000])
@pytest.mark.parametrize("num_queries", [1, 64, 4096])
def test_records_of_all_splits_fit_the_workspace(num_queries: int, num_splits: int) -> None:
    from tests.triton_compile import meta_call
    from tierd.ops.triton_tiling import tiling
    from tierd.ops.triton_workspace import NBYTES

    call = meta_call(num_queries, (128, 128), torch.bfloat16, torch.bfloat16, num_splits=num_splits)
    cut = tiling(call)
    assert 1 <= cut.num_splits <= (num_splits or 64)
    if cut.num_splits > 1:
        assert call.q.shape[0] * 32 * cut.num_splits * 4 * (128 + 4) <= NBYTES


def test_gpu_check_without_a_gpu_says_so_and_does_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    found = subprocess.run(
        [ROOT / "scripts" / "gpu_check"],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert "gpu_check: needs a CUDA GPU" in found.stderr
    assert found.stdout == ""
