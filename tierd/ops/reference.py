"""The attention op as its definition: every score in the open, one sequence at a time.

It is the truth the other backends are tested against, so it shares no code with them. Order of the
terms, as in the schema's contract: scale, softcap, ALiBi, mask, then sinks, which join the
denominator only.
"""

import torch
from torch import Tensor

from tierd.ops.call import AttentionCall
from tierd.ops.sequences import Sequence


def paged_attention(call: AttentionCall, batch: list[Sequence]) -> None:
    """Fill the call's out and lse, computed in float32."""
    out, lse = attention(call, torch.float32)
    call.out.copy_(out)
    if call.lse is not None:
        call.lse.copy_(lse)


def attention(call: AttentionCall, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out [T, Hq, D] and lse [T, Hq], computed in and returned as `dtype`."""
    num_tokens, num_heads, _ = call.q.shape
    out = torch.zeros(call.q.shape, dtype=dtype)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=dtype)
    if call.sinks is not None:
        lse[:] = call.sinks
    starts = call.cu_seqlens_q.tolist()
    for b, length in enumerate(call.seq_lens.tolist()):
        start, end = starts[b], starts[b + 1]
        if start == end or length == 0:
            continue
        q_pos = torch.arange(length - (end - start), length)
        kv_pos = torch.arange(length)
        if call.window_left >= 0:
            kv_pos = kv_pos[kv_pos >= q_pos[0] - call.window_left]
        k = _tokens(call.k_cache, call.block_table[b], kv_pos).to(dtype)
        v = _tokens(call.v_cache, call.block_table[b], kv_pos).to(dtype)
        out[start:end], lse[start:end] = _one(
            call, call.q[start:end].to(dtype), k, v, q_pos, kv_pos
        )
    return out, lse


def _tokens(cache: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """The cache's rows [S, Hkv, D] at these positions of a sequence."""
    block_size = cache.shape[2]
    blocks = table[positions // block_size].long()
    return cache[blocks, :, positions % block_size]


def _one(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, kv_pos: Tensor
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    distance = kv_pos - q_pos[:, None]  # [T, S], negative: the key is older
    scores = torch.einsum("thd,shd->hts", q, k) * call.scale
    if call.softcap > 0:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        scores = scores + call.alibi_slopes.to(q.dtype)[:, None, None] * distance
    if call.causal:
        scores = scores.masked_fill(distance > 0, -torch.inf)
    if call.window_left >= 0:
        scores = scores.masked_fill(distance < -call.window_left, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.to(q.dtype)[:, None])
    weights = torch.exp(scores - lse[..., None])
    return torch.einsum("hts,shd->thd", weights, v), lse.T
