"""What ptxas makes of the attention kernel for a GPU that is not here: registers, spills, SASS.

`triton_attention` launches its kernels for a call of meta tensors on a GPU that Triton believes in:
so what is looked at is what would run there.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tierd.ops import triton_attention, triton_kernels, triton_states
from tierd.ops.call import AttentionCall
from tierd.ops.quantised import QUANTISED

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled(NamedTuple):
    """A kernel's use of registers, bytes on the stack and in local memory, and its instructions."""

    registers: int
    stack: int
    local: int
    shared: int
    sass: str

    def count(self, opcode: str) -> int:
        return len(re.findall(rf"\b{opcode}\b", self.sass))


def meta_call(
    num_queries: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    cache: torch.dtype,
    block_size: int = 16,
    heads: tuple[int, int] = (32, 8),
    **options: Any,
) -> AttentionCall:
    """8 sequences of `num_queries` each on up to 4096 keys, scales per token and head."""
    with torch.device("meta"):
        q = torch.empty(8 * num_queries, heads[0], dims[0], dtype=dtype)
        k = torch.empty(4096, heads[1], block_size, dims[0], dtype=cache)
        v = torch.empty(4096, heads[1], block_size, dims[1], dtype=cache)
        scale = torch.empty(4096, heads[1], block_size) if cache in QUANTISED else None
        return AttentionCall(
            out=torch.empty(*q.shape[:2], dims[1], dtype=dtype),
            lse=torch.empty(q.shape[:2]),
            q=q,
            k_cache=k,
            v_cache=v,
            block_table=torch.empty(8, 4096 // block_size, dtype=torch.int32),
            seq_lens=torch.empty(8, dtype=torch.int32),
            cu_seqlens_q=torch.empty(9, dtype=torch.int32),
            max_seqlen_q=num_queries,
            scale=1.0,
            k_scale=scale,
            v_scale=scale,
            **options,
        )


class _Absent:
    """A driver of Triton's for a GPU that is not here: enough to compile, not to launch."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # a cache of kernels belongs to a device

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiler:
    """Stands in for a kernel: compiles it where it would be launched, and keeps what came of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.made: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_it(*args: Any, **kwargs: Any) -> None:
            self.made = self.kernel.warmup(*args, grid=grid, **kwargs)

        return compile_it


def compiled(call: AttentionCall, capability: int) -> Compiled:
    """The attention kernel of this call, for a GPU of this capability."""
    attend = _Compiler(triton_kernels.attend)
    with (
        patch.object(driver, "_active", _Absent(capability)),
        patch.object(triton_kernels, "attend", attend),
        patch.object(triton_states, "merge_splits", _Compiler(triton_states.merge_splits)),
    ):
        triton_attention.paged_attention(call)
    return _look(attend.made.asm["cubin"], attend.made.metadata.shared)


def _look(cubin: bytes, shared: int) -> Compiled:
    with NamedTemporaryFile(suffix=".cubin") as file:  # cuobjdump reads no pipes
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run(
                [_BIN / "cuobjdump", option, file.name], capture_output=True, check=True, text=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, "cuobjdump says nothing of registers"
    registers, stack, local = (int(number) for number in found.groups())
    return Compiled(registers, stack, local, shared, sass)
