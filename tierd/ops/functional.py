"""The ops as plain functions: they allocate, everything else is the registered op's business.

Inference only: no op has a backward.
"""

import torch
from torch import Tensor

import tierd.ops.schema  # noqa: F401  (registers the ops)

_ATTENTION = torch.ops.tierd.paged_attention.default
_MERGE_STATES = torch.ops.tierd.merge_states.default
_WRITE_KV = torch.ops.tierd.write_kv.default


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int = 0,
) -> Tensor:
    """Attention of q [T, Hq, D] over each sequence's blocks: fills `lse`, if given, and
    `out` [T, Hq, Dv].

    Query i of sequence b sits at position seq_lens[b] - qlen[b] + i. Nothing past a sequence's
    length, nor before what its window can see, is read. A wrong argument raises before anything is
    written. `num_splits` is a hint for backends that split long sequences; 0 leaves it to them.
    """
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
    _ATTENTION(
        out, lse, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, scale,
        causal=causal, window_left=window_left, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, k_scale=k_scale, v_scale=v_scale, num_splits=num_splits,
    )  # fmt: skip
    return out


def merge_states(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> None:
    """Merge an attention over other keys into out [T, Hq, D] and lse [T, Hq], in place.

    So a prefix shared by a batch is attended to once, and each sequence's own keys apart. If there
    are sinks, give them to one of the two attentions only.
    """
    _MERGE_STATES(out, lse, out2, lse2)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write k, v [T, Hkv, D] to slots block_id * block_size + offset; slot -1 is skipped.

    A cache of one byte a number gets round(x / scale), by the scales that lie at the slot: they are
    read, never chosen here. Two tokens with one slot leave one of the two there, unspecified which.
    """
    _WRITE_KV(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
