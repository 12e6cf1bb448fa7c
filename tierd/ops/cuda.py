"""The ops on a GPU: they check what a call is, then launch Triton's kernels, or FlashInfer's.

Tensors' facts are always checked. What lies on the device is not read back, so nothing waits and a
CUDA graph can capture every op: ids out of range are masked instead. Checked mode, for debugging,
reads it and raises what the CPU raises. Triton is imported with the first call, so a host without a
GPU needs none.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tierd.ops import arguments, values
from tierd.ops.call import AttentionCall

_BACKENDS = ("triton", "flashinfer")
_backend = "triton"
_checked = False


def set_backend(name: str | None) -> None:
    """Force a backend in this process, or go back to Triton's kernels, which can do every call.

    FlashInfer's plan of a call is made on the host, so forcing it costs a sync a call; an engine
    that wants it plans once a batch with `flashinfer.Plan`.
    """
    global _backend
    if name is not None and name not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)} or None, not {name!r}")
    _backend = name or "triton"


def set_checked(checked: bool) -> None:
    """Whether every call first reads and checks lengths, block ids and slots; it waits for them."""
    global _checked
    _checked = checked


def paged_attention(*args: Any, **kwargs: Any) -> None:
    """The op; the arguments are those of AttentionCall."""
    call = AttentionCall(*args, **kwargs)
    arguments.check_call(call)
    _check_dtype(call.k_cache)
    if torch.is_grad_enabled() and call.q.requires_grad:
        raise RuntimeError("paged_attention has no backward: call it under torch.no_grad()")
    with torch.no_grad(), torch.cuda.device(call.q.device):
        if _checked:
            values.checked_sequences(_on_host(call))
        if _backend == "flashinfer":
            from tierd.ops import flashinfer

            flashinfer.paged_attention(call)
        else:
            from tierd.ops import triton_attention

            triton_attention.paged_attention(call)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """The op; outside checked mode, a slot that is none is skipped as -1 is."""
    arguments.check_tokens(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    _check_dtype(k_cache)
    from tierd.ops import triton_kv_write

    with torch.no_grad(), torch.cuda.device(k.device):
        if _checked:
            values.check_slots(slot_mapping.cpu(), k_cache.shape[0] * k_cache.shape[2])
        triton_kv_write.write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def merge_states(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> None:
    """The op."""
    arguments.check_states(out, lse, out2, lse2)
    from tierd.ops import triton_states

    with torch.no_grad(), torch.cuda.device(out.device):
        triton_states.merge_states(out, lse, out2, lse2)


def _on_host(call: AttentionCall) -> AttentionCall:
    return call._replace(
        block_table=call.block_table.cpu(),
        seq_lens=call.seq_lens.cpu(),
        cu_seqlens_q=call.cu_seqlens_q.cpu(),
    )


def _check_dtype(cache: Tensor) -> None:
    if cache.dtype == torch.float8_e4m3fn and not _has_e4m3(cache.device):
        raise TypeError(
            "k_cache, v_cache: float8_e4m3fn needs a GPU of compute capability 8.9 or more;"
            " float8_e5m2 and int8 do not"
        )


@cache
def _has_e4m3(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)
