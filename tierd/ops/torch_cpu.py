"""The attention op on the CPU in plain torch: gather a sequence's blocks, then flash attention.

1. Blocks are gathered head by head into one run of tokens, cut to the sequence's length, so neither
   the unfilled end of a block nor a table's unused end is ever seen by a kernel.
2. The query heads of one KV head become rows of one long query wherever no mask tells them apart;
   `enable_gqa` is 8x slower. Decode is this and nothing else.
3. A chunk on a prefix is two parts, prefix without a mask and chunk with the causal one, merged by
   their LSE: 5 to 15 % faster than one call with an explicit mask for chunks of 64 and more.
4. What needs a mask or sees the scores (window, ALiBi, softcap) goes in runs of queries, each with
   the keys in its reach, so memory is bounded and a window's cost does not grow with the prefix.

Arguments are checked elsewhere.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tierd.ops.call import AttentionCall
from tierd.ops.quantised import whole_scale
from tierd.ops.scratch import Scratch
from tierd.ops.sequences import Sequence
from tierd.ops.values import checked_sequences

QUERIES_PER_RUN = 256

# (q, k, v, dropout, is_causal, *, attn_mask, scale) -> (out, lse); F.sdpa returns no lse.
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_scratch = Scratch()


@torch.no_grad()
def paged_attention(call: AttentionCall) -> None:
    """Fill the call's out and lse."""
    batch = checked_sequences(call)
    sees_scores = call.softcap > 0 or call.alibi_slopes is not None or call.sinks is not None
    for row, sequence in enumerate(batch):
        num_queries = sequence.end - sequence.start
        if num_queries == 1 and sequence.num_keys and not sees_scores:
            _decode(call, row, sequence)
        elif num_queries:
            _any_rows(call, row, sequence)


def _decode(call: AttentionCall, row: int, sequence: Sequence) -> None:
    start, end, _, _ = sequence
    keys, values = _gather(call, row, sequence)
    num_kv_heads = keys.shape[0]
    q = call.q[start:end].view(num_kv_heads, 1, -1, keys.shape[3])
    out, lse = _flash(q, keys, values, scale=call.scale)
    call.out[start:end].view(num_kv_heads, 1, -1, values.shape[3]).copy_(out)
    if call.lse is not None:
        call.lse[start].copy_(lse.view(-1))


def _any_rows(call: AttentionCall, row: int, sequence: Sequence) -> None:
    start, end, _, num_keys = sequence
    num_kv_heads = call.k_cache.shape[1]
    q = _by_kv_head(call.q[start:end], num_kv_heads)
    if num_keys:
        out, lse = _attend(call, q, *_gather(call, row, sequence))
    else:
        out = q.new_zeros(*q.shape[:-1], call.v_cache.shape[3])
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    if call.sinks is not None:
        out, lse = _add_sinks(out, lse, call.sinks)
    _by_kv_head(call.out[start:end], num_kv_heads).copy_(out)
    if call.lse is not None:
        _by_kv_head(call.lse[start:end, :, None], num_kv_heads).copy_(lse[..., None])


def _by_kv_head(rows: Tensor, num_kv_heads: int) -> Tensor:
    """[T, Hq, D] seen as [Hkv, G, T, D], G query heads to a KV head."""
    num_rows, num_heads, head_dim = rows.shape
    grouped = rows.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return grouped.permute(1, 2, 0, 3)


def _gather(call: AttentionCall, row: int, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Keys and values [Hkv, 1, S, D] of [first_key, num_keys), valid until the next gather."""
    block_size = call.k_cache.shape[2]
    first = sequence.first_key // block_size
    last = -(-sequence.num_keys // block_size)
    blocks = call.block_table[row, first:last]
    seen = slice(sequence.first_key - first * block_size, sequence.num_keys - first * block_size)
    if call.k_scale is not None and call.v_scale is not None:
        keys = _dequantised(call.k_cache, call.k_scale, blocks, call.q.dtype)
        values = _dequantised(call.v_cache, call.v_scale, blocks, call.q.dtype)
        return keys[:, :, seen], values[:, :, seen]
    room = _scratch.room(last - first, call.k_cache, call.v_cache)
    torch.index_select(call.k_cache, 0, blocks, out=room.k_blocks)
    torch.index_select(call.v_cache, 0, blocks, out=room.v_blocks)
    return room.keys[:, :, seen], room.values[:, :, seen]


def _dequantised(cache: Tensor, scale: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """These blocks' tokens [Hkv, 1, S, D], in memory of their own."""
    scales = whole_scale(scale, cache).index_select(0, blocks)
    rows = cache.index_select(0, blocks).float().mul_(scales[..., None]).to(dtype)
    return rows.transpose(0, 1).reshape(cache.shape[1], 1, -1, cache.shape[3])


def _flash(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """torch's kernel, for values of another size than keys too: the narrower are padded."""
    head_dim, value_dim = keys.shape[3], values.shape[3]
    if head_dim < value_dim:
        q, keys = (F.pad(x, (0, value_dim - head_dim)) for x in (q, keys))
    elif value_dim < head_dim:
        values = F.pad(values, (0, head_dim - value_dim))
    out, lse = _FLASH(q, keys, values, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
    return out[..., :value_dim], lse


def _attend(call: AttentionCall, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """out [Hkv, G, T, D] and lse [Hkv, G, T]; the last query is at the last key."""
    num_queries, num_keys = q.shape[2], keys.shape[2]
    # A lone query sees every key that was gathered for it.
    windowed = 0 <= call.window_left < num_keys - 1 and num_queries > 1
    if windowed or call.softcap > 0 or call.alibi_slopes is not None:
        return _in_runs(call, q, keys, values)
    if not call.causal or num_queries == 1:
        return _all_keys(q, keys, values, call.scale)
    prefix = num_keys - num_queries
    chunk = _lower_triangle(q, keys[:, :, prefix:], values[:, :, prefix:], call.scale)
    if prefix == 0:
        return chunk
    return _merge(_all_keys(q, keys[:, :, :prefix], values[:, :, :prefix], call.scale), chunk)


def _all_keys(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    num_kv_heads, group, num_queries, head_dim = q.shape
    folded = q.reshape(num_kv_heads, 1, group * num_queries, head_dim)
    out, lse = _flash(folded, keys, values, scale=scale)
    out = out.reshape(num_kv_heads, group, num_queries, -1)
    return out, lse.view(num_kv_heads, group, num_queries)


def _lower_triangle(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    group = (-1, q.shape[1], -1, -1)
    return _flash(q, keys.expand(group), values.expand(group), True, scale=scale)


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two softmaxes over disjoint keys as one: Milakov and Gimelshein 2018, arXiv:1805.02867."""
    lse = torch.logaddexp(one[1], other[1])
    out = one[0] * torch.exp(one[1] - lse)[..., None]
    return out.addcmul_(other[0], torch.exp(other[1] - lse)[..., None]), lse


def _in_runs(call: AttentionCall, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    num_queries, num_keys = q.shape[2], keys.shape[2]
    prefix = num_keys - num_queries
    outs, lses = [], []
    for begin in range(0, num_queries, QUERIES_PER_RUN):
        end = min(begin + QUERIES_PER_RUN, num_queries)
        low = max(0, prefix + begin - call.window_left) if call.window_left >= 0 else 0
        high = prefix + end if call.causal else num_keys
        distance = torch.arange(low, high) - torch.arange(prefix + begin, prefix + end)[:, None]
        bias = _bias(call, distance, q.shape[:2])
        run = (q[:, :, begin:end], keys[:, :, low:high], values[:, :, low:high], bias)
        out, lse = _soft_capped(call, *run) if call.softcap > 0 else _masked(call, *run)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _bias(call: AttentionCall, distance: Tensor, heads: torch.Size) -> Tensor:
    """What is added to the scores [.., T, S]; distance is key position minus query position."""
    if call.alibi_slopes is not None:
        bias = call.alibi_slopes.view(*heads, 1, 1) * distance
    else:
        bias = torch.zeros(1, 1, *distance.shape)
    if call.causal:
        bias = bias.masked_fill(distance > 0, -torch.inf)
    if call.window_left >= 0:
        bias = bias.masked_fill(distance < -call.window_left, -torch.inf)
    return bias


def _masked(
    call: AttentionCall, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    group = (-1, q.shape[1], -1, -1)
    return _flash(q, keys.expand(group), values.expand(group), attn_mask=bias, scale=call.scale)


def _soft_capped(
    call: AttentionCall, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    num_kv_heads, group, num_queries, head_dim = q.shape
    folded = q.reshape(num_kv_heads, 1, group * num_queries, head_dim).float()
    scores = (folded @ keys.float().transpose(-1, -2)) * (call.scale / call.softcap)
    scores = scores.view(num_kv_heads, group, num_queries, -1).tanh_().mul_(call.softcap) + bias
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    out = weights.view(num_kv_heads, 1, group * num_queries, -1) @ values.float()
    return out.view(num_kv_heads, group, num_queries, -1), lse


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A sink is one more score in the denominator, with no value behind it."""
    with_sinks = torch.logaddexp(lse, sinks.view(*lse.shape[:2], 1))
    return out * torch.exp(lse - with_sinks)[..., None], with_sinks
