"""FlashInfer as a backend, for calls within its limits: bfloat16 or float16, plain caches or float8
with one scale each, and nothing that moves single scores but window and soft cap.

FlashInfer reads a batch from a *plan*, made on the host once for all layers: `Plan` is that, and an
engine keeps it for as long as its tables and lengths hold. The op itself plans at every call. Its
log-sum-exp is of base 2; here it leaves as the natural one.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tierd.ops.call import AttentionCall
from tierd.ops.sequences import Sequence
from tierd.ops.values import checked_sequences

_LN2 = 0.6931471805599453
_DIMS = (64, 128, 256)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def available() -> bool:
    """Whether FlashInfer can be imported here."""
    return _library() is not None


def obstacle(call: AttentionCall) -> str | None:
    """What of this call FlashInfer cannot do, in words; None if it can do it."""
    dim, v_dim = call.k_cache.shape[3], call.v_cache.shape[3]
    if call.q.dtype == torch.float32:
        return "float32"
    if dim != v_dim or dim not in _DIMS:
        return f"heads of {dim} and {v_dim}"
    if call.k_cache.dtype == torch.int8:
        return "int8 caches"
    if call.k_cache.dtype in _FLOAT8 and not (_is_one(call.k_scale) and _is_one(call.v_scale)):
        return "scales of less than a whole cache"
    if call.alibi_slopes is not None or call.sinks is not None:
        return "ALiBi slopes of one's own, and sinks"
    if not call.causal and call.window_left >= 0:
        return "a window without a causal mask"
    if call.k_cache.stride() != call.v_cache.stride():
        return "caches of different strides"
    return None


def paged_attention(call: AttentionCall) -> None:
    """Plan and run one call; ValueError where FlashInfer is missing or cannot do it."""
    if not available():
        raise ValueError("backend flashinfer: the package flashinfer cannot be imported")
    if reason := obstacle(call):
        raise ValueError(f"backend flashinfer does not do {reason}")
    Plan(call).run(call)


class Plan:
    """A batch as FlashInfer reads it; valid while lengths, tables, types and options stay.

    Plans of one device share memory: they run in one stream.
    """

    def __init__(self, call: AttentionCall) -> None:
        """Plan the batch of `call`, reading its lengths and tables back from the device."""
        host = call._replace(
            block_table=call.block_table.cpu(),
            seq_lens=call.seq_lens.cpu(),
            cu_seqlens_q=call.cu_seqlens_q.cpu(),
        )
        batch = checked_sequences(host)
        indptr, indices, last = _compressed(batch, host.block_table, call.k_cache.shape[2])
        if any(s.num_keys == 0 < s.end - s.start for s in batch):
            raise ValueError("backend flashinfer does not do queries of an empty sequence")
        self._wrapper: Any = _library().BatchPrefillWithPagedKVCacheWrapper(
            _scratch(call.q.device), "HND"
        )
        self._wrapper.plan(
            host.cu_seqlens_q,
            indptr,
            indices.to(call.q.device),
            last,
            call.q.shape[1],
            call.k_cache.shape[1],
            call.q.shape[2],
            call.k_cache.shape[2],
            causal=call.causal,
            sm_scale=call.scale,
            window_left=call.window_left,
            logits_soft_cap=call.softcap,
            q_data_type=call.q.dtype,
            kv_data_type=call.k_cache.dtype,
        )

    def run(self, call: AttentionCall) -> None:
        """Fill out and lse of a call of the planned batch: of any layer, with any q and caches."""
        scales: dict[str, float] = {}
        if call.k_scale is not None and call.v_scale is not None:
            scales = {"k_scale": call.k_scale.item(), "v_scale": call.v_scale.item()}
        caches = (call.k_cache, call.v_cache)
        # Its log-sum-exp goes to memory of its own, for `lse` may have any strides.
        result = self._wrapper.run(
            call.q, caches, out=call.out, return_lse=call.lse is not None, **scales
        )
        if call.lse is not None:
            torch.mul(result[1], _LN2, out=call.lse)


def _compressed(
    batch: list[Sequence], table: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tables' used parts in one row: where each begins, the ids, tokens in each last block."""
    counts = [-(-s.num_keys // block_size) for s in batch]
    ids = [table[b, :count] for b, count in enumerate(counts)]
    begins = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = [s.num_keys - (count - 1) * block_size for s, count in zip(batch, counts, strict=True)]
    indices = torch.cat(ids) if ids else table.new_empty(0)
    # What lies behind a window may be gone: it is masked, but FlashInfer makes addresses of it.
    return begins, indices.clamp(min=0), torch.tensor(last, dtype=torch.int32)


def _is_one(scale: Tensor | None) -> bool:
    return scale is not None and scale.numel() == 1


@cache
def _library() -> Any:
    try:
        return import_module("flashinfer")
    except ImportError:
        return None


@cache
def _scratch(device: torch.device) -> Tensor:
    return torch.empty(128 << 20, dtype=torch.uint8, device=device)
