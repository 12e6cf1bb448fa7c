"""What the tensors of the ops must be; a check raises TypeError or ValueError naming one.

Facts only (dtype, shape, strides, device, options), so the fake kernels check them too and a
compiled graph fails where it is made; what the integer tensors hold is `values`' business. A good
call costs a few microseconds: texts are made when a check fails.
"""

from collections.abc import Sequence as Shape

import torch
from torch import Tensor

from tierd.ops.call import AttentionCall
from tierd.ops.quantised import QUANTISED

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_call(call: AttentionCall) -> None:
    """An attention call's tensors and options."""
    q, table, device = call.q, call.block_table, call.q.device
    if q.dim() != 3:
        raise ValueError(f"q must be [T, Hq, D], not {list(q.shape)}")
    _caches(q, call.k_cache, call.v_cache, call.k_scale, call.v_scale)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = call.k_cache.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"q: {num_heads} heads are no multiple of k_cache's {num_kv_heads}")
    if head_dim != call.k_cache.shape[3]:
        raise ValueError(f"q: heads of {head_dim}, but k_cache's are of {call.k_cache.shape[3]}")
    _tensor("out", call.out, q.dtype, (num_tokens, num_heads, call.v_cache.shape[3]), device)
    _inner_stride("q", q)
    _inner_stride("out", call.out)
    if call.lse is not None:
        _tensor("lse", call.lse, torch.float32, (num_tokens, num_heads), device)
    if table.dim() != 2:
        raise ValueError(f"block_table must be [B, max_blocks], not {list(table.shape)}")
    batch_size, width = table.shape
    _tensor("block_table", table, torch.int32, (batch_size, width), device)
    _inner_stride("block_table", table)
    _tensor("seq_lens", call.seq_lens, torch.int32, (batch_size,), device)
    _tensor("cu_seqlens_q", call.cu_seqlens_q, torch.int32, (batch_size + 1,), device)
    if call.alibi_slopes is not None:
        _tensor("alibi_slopes", call.alibi_slopes, torch.float32, (num_heads,), device)
    if call.sinks is not None:
        _tensor("sinks", call.sinks, torch.float32, (num_heads,), device)
    if call.window_left < -1:
        raise ValueError(f"window_left must be -1 (none) or more, not {call.window_left}")
    if call.softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or more, not {call.softcap}")
    if call.num_splits < 0:
        raise ValueError(f"num_splits must be 0 (any) or more, not {call.num_splits}")


def check_tokens(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """The tensors of write_kv."""
    if k.dim() != 3:
        raise ValueError(f"k must be [T, Hkv, D], not {list(k.shape)}")
    _caches(k, k_cache, v_cache, k_scale, v_scale)
    num_tokens, num_heads, head_dim = k.shape
    if num_heads != k_cache.shape[1]:
        raise ValueError(f"k has {num_heads} heads, k_cache {k_cache.shape[1]}")
    if head_dim != k_cache.shape[3]:
        raise ValueError(f"k: heads of {head_dim}, but k_cache's are of {k_cache.shape[3]}")
    _tensor("v", v, k.dtype, (num_tokens, num_heads, v_cache.shape[3]), k.device)
    _inner_stride("k", k)
    _inner_stride("v", v)
    _tensor("slot_mapping", slot_mapping, torch.int64, (num_tokens,), k.device)


def check_states(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> None:
    """The tensors of merge_states."""
    if out.dim() != 3:
        raise ValueError(f"out must be [T, Hq, D], not {list(out.shape)}")
    _floating("out", out)
    _tensor("lse", lse, torch.float32, out.shape[:2], out.device)
    _tensor("out2", out2, out.dtype, out.shape, out.device)
    _tensor("lse2", lse2, torch.float32, out.shape[:2], out.device)


def _caches(
    tokens: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    _floating("q, k, v", tokens)
    if k_cache.dim() != 4:
        raise ValueError(
            f"k_cache must be [num_blocks, Hkv, block_size, D], not {list(k_cache.shape)}"
        )
    if v_cache.dim() != 4:
        raise ValueError(
            f"v_cache must be [num_blocks, Hkv, block_size, D], not {list(v_cache.shape)}"
        )
    shape = k_cache.shape
    dtype = k_cache.dtype if k_cache.dtype in QUANTISED else tokens.dtype
    _tensor("k_cache", k_cache, dtype, shape, tokens.device)
    _tensor("v_cache", v_cache, dtype, (*shape[:3], v_cache.shape[3]), tokens.device)
    if shape[2] == 0 or shape[3] == 0 or v_cache.shape[3] == 0:
        raise ValueError("k_cache, v_cache: block_size and D must be 1 or more")
    _inner_stride("k_cache", k_cache)
    _inner_stride("v_cache", v_cache)
    _scale("k_scale", k_scale, k_cache)
    _scale("v_scale", v_scale, v_cache)


def _scale(name: str, scale: Tensor | None, cache: Tensor) -> None:
    if cache.dtype not in QUANTISED:
        if scale is not None:
            raise ValueError(f"{name}: a cache of {cache.dtype} has no scale")
        return
    if scale is None:
        raise ValueError(f"{name} is missing: a cache of {cache.dtype} needs one")
    shape = scale.shape
    if shape.numel() != 1:
        whole = cache.shape[:3]
        if len(shape) != 3 or any(a not in (1, b) for a, b in zip(shape, whole, strict=True)):
            raise ValueError(
                f"{name} must have one element, or expand to {list(whole)} from three dimensions,"
                f" not {list(shape)}"
            )
    _tensor(name, scale, torch.float32, shape, cache.device)


def _floating(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, not {tensor.dtype}")


def _tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: Shape[int], device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, not {tensor.device}")


def _inner_stride(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension")
