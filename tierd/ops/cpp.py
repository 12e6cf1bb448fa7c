"""The C++ kernel: its library, found beside this file and loaded by ctypes, and how it is called.

Imported after torch, the library shares the OpenMP runtime that torch brought, hence its threads.
A call is packed into one run of bytes, in the order of `Arguments` in cpu/arguments.h; the integer
tensors are checked on the other side, before any other memory is touched. Without a compiler at
build time there is no library, and nothing else is lost.

TIERD_ISA forces an instruction set (generic, avx2, avx512, avx512bf16), TIERD_CPU_KERNEL a library.
"""

import ctypes
import os
import struct
import sys
from pathlib import Path

import torch
from torch import Tensor

from tierd.ops.call import AttentionCall
from tierd.ops.quantised import whole_scale
from tierd.ops.values import checked_sequences

ISAS = ("best", "generic", "avx2", "avx512", "avx512bf16")
MAX_HEAD_DIM = 512
HEAD_DIMS = f"multiples of 16 up to {MAX_HEAD_DIM}"

_NAME = "_paged_attention.so"
_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}
_DONE, _WRONG_VALUES, _NO_SUCH_ISA, _NO_MEMORY = range(4)
_pack = struct.Struct("12Q19q4q12i2f").pack


def _load() -> ctypes.CDLL | None:
    forced = os.environ.get("TIERD_CPU_KERNEL")
    paths = (
        [Path(forced)]
        if forced
        else [Path(each) / _NAME for each in sys.modules[__package__].__path__]
    )
    path = next((each for each in paths if each.exists()), None)
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.tierd_paged_attention.argtypes = [ctypes.c_char_p]
    library.tierd_isa_name.argtypes = [ctypes.c_int32]
    library.tierd_isa_name.restype = ctypes.c_char_p
    return library


_library = _load()
_isa = ISAS.index(os.environ.get("TIERD_ISA", "best"))


def available() -> bool:
    """Whether the library is there."""
    return _library is not None


def isa() -> str | None:
    """The instruction set of the next call; None if the library or the machine has it not."""
    name = _library.tierd_isa_name(_isa) if _library else None
    return None if name is None else name.decode()


def set_isa(name: str | None) -> None:
    """Force an instruction set, or go back to the best; ValueError if it is not there."""
    global _isa
    wanted = name or "best"
    old = _isa
    if wanted in ISAS:
        _isa = ISAS.index(wanted)
    if wanted not in ISAS or isa() is None:
        _isa = old
        raise ValueError(f"no kernel for {name} here")


def can(call: AttentionCall) -> bool:
    """Whether the library is there and knows the call's head sizes."""
    dim, v_dim = call.q.shape[2], call.v_cache.shape[3]
    known = dim % 16 == 0 and v_dim % 16 == 0 and dim <= MAX_HEAD_DIM and v_dim <= MAX_HEAD_DIM
    return known and _library is not None


def paged_attention(call: AttentionCall) -> None:
    """Fill the out and lse of a call that `can` accepts."""
    assert _library is not None, "there is no library to call"
    status = _library.tierd_paged_attention(_packed(call))
    if status == _DONE:
        return
    if status == _NO_MEMORY:
        raise MemoryError("paged_attention: no memory for scratch")
    if status == _NO_SUCH_ISA:
        raise RuntimeError(f"no kernel for {ISAS[_isa]} here")
    checked_sequences(call)
    raise AssertionError("the kernel refused values that the checks accept")


def _packed(call: AttentionCall) -> bytes:
    out, lse, q, k, v, table = call[:6]
    num_blocks, num_kv_heads, block_size, head_dim = k.shape
    k_scale = k_strides = v_scale = v_strides = None
    if call.k_scale is not None and call.v_scale is not None:
        k_scale, v_scale = whole_scale(call.k_scale, k), whole_scale(call.v_scale, v)
        k_strides, v_strides = k_scale.stride(), v_scale.stride()
    return _pack(
        out.data_ptr(), _pointer(lse), q.data_ptr(), k.data_ptr(), v.data_ptr(),
        _pointer(k_scale), _pointer(v_scale), table.data_ptr(), call.seq_lens.data_ptr(),
        call.cu_seqlens_q.data_ptr(), _pointer(call.alibi_slopes), _pointer(call.sinks),
        *out.stride()[:2], *((0, 0) if lse is None else lse.stride()), *q.stride()[:2],
        *k.stride()[:3], *v.stride()[:3], *(k_strides or (0, 0, 0)), *(v_strides or (0, 0, 0)),
        table.stride(0), q.shape[0], num_blocks, table.shape[1], call.max_seqlen_q,
        table.shape[0], q.shape[1], num_kv_heads, head_dim, v.shape[3], block_size,
        _DTYPES[q.dtype], _DTYPES[k.dtype], call.causal, call.window_left,
        torch.get_num_threads(), _isa, call.scale, call.softcap,
    )  # fmt: skip


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
