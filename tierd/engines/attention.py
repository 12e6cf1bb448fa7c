"""The attention function that transformers' models call under the name "tierd".

It finds out from the call whether this layer's K and V lie in a pool; if not, another cache is in
use and it is `sdpa`, so a model set to "tierd" goes on working with any cache. A mask is never
applied, only compared with what the op computes anyway: causal, and the layer's window.

It knows no lease and no daemon.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tierd.engines.step import Step, taken
from tierd.ops import paged_attention

NAME = "tierd"

_CHANNEL = "tierd_keys"


@dataclass(slots=True)
class PagedKeys:
    """The keys and values of one layer in a step, where they lie."""

    step: Step
    k_cache: Tensor
    v_cache: Tensor
    group: int
    window: int | None
    attended: bool = False


def hand_over(keys: PagedKeys, key: Tensor, channel: object) -> Tensor:
    """Send `keys` to the attention function, by the dict that a model passes on to it or, where
    it passes none, on the key tensor that is returned."""
    if isinstance(channel, dict):
        channel[_CHANNEL] = keys
        return key
    key = key.view_as(key)
    setattr(key, _CHANNEL, keys)
    return key


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it: query `[rows, heads, tokens, dim]`, out transposed.

    Rows of the result that nobody reads, of padding and of a hit, are zero."""
    keys: PagedKeys | None = kwargs.pop(_CHANNEL, None) or getattr(key, _CHANNEL, None)
    if keys is None:
        return _elsewhere(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    step, window, sinks = keys.step, keys.window, kwargs.get("s_aux")
    keys.attended = True
    if kwargs.get("position_bias") is not None or not kwargs.get("is_causal", module.is_causal):
        raise NotImplementedError("a cache in tierd is attended to causally, without position bias")
    step.check_mask(attention_mask, window)
    out = paged_attention(
        taken(query, step.queries),
        keys.k_cache,
        keys.v_cache,
        step.tables[keys.group],
        step.seq_lens,
        step.cu_seqlens_q,
        step.end - step.start,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window_left=-1 if window is None else window - 1,  # theirs counts the query itself
        softcap=kwargs.get("softcap") or 0.0,
        sinks=None if sinks is None else sinks.float(),
    )
    rows, _, columns, _ = query.shape
    if step.queries is not None:
        out = out.new_zeros(rows * columns, *out.shape[1:]).index_copy_(0, step.queries, out)
    return out.view(rows, columns, *out.shape[1:]), None


def _elsewhere(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Another cache's attention. What sdpa cannot do raises rather than being left out."""
    if kwargs.get("s_aux") is not None:
        raise ValueError("attention sinks: sdpa has none; set_attn_implementation('eager')")
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
    )


@contextmanager
def attending(model: Any) -> Iterator[None]:
    """The model with this attention, and afterwards with the one it had."""
    before = model.config._attn_implementation
    if before == NAME:
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
