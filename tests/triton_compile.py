"""What ptxas makes of the attention kernel for a GPU that is not here: registers, spills, SASS.

The kernel is compiled with the arguments that `triton_attention` launches it with for a call of
meta tensors, so what is looked at is what would run.
"""

import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tierd.ops import triton_attention, triton_kernels, triton_states
from tierd.ops.call import AttentionCall
from tierd.ops.quantised import QUANTISED

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
_DIVISIBLE = [["tt.divisibility", 16]]


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


class _Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.arguments: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> "_Recorder":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = dict(zip(self.names, args, strict=False)) | kwargs


def compiled(call: AttentionCall, capability: int) -> Compiled:
    """The attention kernel of this call, for a GPU of this capability."""
    recorder = _Recorder(triton_kernels.attend.arg_names)
    with (
        patch.object(triton_kernels, "attend", recorder),
        patch.object(triton_states, "merge_splits", _Recorder([])),
    ):
        triton_attention.paged_attention(call)
    made = triton.compile(
        _source(triton_kernels.attend, recorder.arguments),
        target=GPUTarget("cuda", capability, 32),
        options={name: recorder.arguments[name] for name in _OPTIONS},
    )
    return _look(made.asm["cubin"], made.metadata.shared)


def _source(kernel: Any, arguments: dict[str, Any]) -> Any:
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(index,)] = _DIVISIBLE
        elif isinstance(value, tuple):
            signature[parameter.name] = ("i32",) * len(value)
            attributes |= {
                (index, place): _DIVISIBLE for place, each in enumerate(value) if each % 16 == 0
            }
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = _DIVISIBLE
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


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
