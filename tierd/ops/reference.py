"""The attention op as its definition: every score in the open, one sequence at a time.

It is the truth the other backends are tested against, so it shares no code with them. Order of the
terms, as in the schema's contract: scale, softcap, ALiBi, mask, then sinks, which join the
denominator only.
"""

import torch
from torch import Tensor

from tierd.ops.call import AttentionCall
from tierd.ops.quantised import whole_scale
from tierd.ops.values import checked_sequences


@torch.no_grad()
def paged_attention(call: AttentionCall) -> None:
    """Fill the call's out and lse, computed in float32."""
    checked_sequences(call)
    out, lse = attention(call, torch.float32)
    call.out.copy_(out)
    if call.lse is not None:
        call.lse.copy_(lse)


def attention(call: AttentionCall, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out [T, Hq, Dv] and lse [T, Hq], computed in and returned as `dtype`."""
    num_tokens, num_heads, _ = call.q.shape
    out = torch.zeros(call.out.shape, dtype=dtype)
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
        table = call.block_table[b]
        k = _tokens(call.k_cache, call.k_scale, table, kv_pos, dtype)
        v = _tokens(call.v_cache, call.v_scale, table, kv_pos, dtype)
        out[start:end], lse[start:end] = _one(
            call, call.q[start:end].to(dtype), k, v, q_pos, kv_pos
        )
    return out, lse


def _tokens(
    cache: Tensor, scale: Tensor | None, table: Tensor, positions: Tensor, dtype: torch.dtype
) -> Tensor:
    """The cache's rows [S, Hkv, D] at these positions of a sequence."""
    block_size = cache.shape[2]
    places = (table[positions // block_size].long(), slice(None), positions % block_size)
    rows = cache[places].to(dtype)
    return rows if scale is None else rows * whole_scale(scale, cache)[places].to(dtype)[..., None]


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
