"""The registered ops: schemas, fake kernels, and CPU kernels, which check and then dispatch; those
on a GPU are in `cuda`.

`Library.define/impl` rather than `torch.library.custom_op`: 2.8 us a call against 34 for an op that
mutates. `max_seqlen_q` is symbolic, so a compiled model is not compiled again for every length of
prompt.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from tierd.ops import arguments, backends, cuda, kv_write, states, values
from tierd.ops.call import AttentionCall

_LIBRARY: Any = Library("tierd", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.needs_fixed_stride_order,)

_LIBRARY.define(
    "paged_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_cache, Tensor v_cache,"
    " Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt max_seqlen_q, float scale,"
    " *, bool causal=True, int window_left=-1, float softcap=0.0, Tensor? alibi_slopes=None,"
    " Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, int num_splits=0) -> ()",
    tags=_TAGS,
)
_LIBRARY.define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping,"
    " Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
    tags=_TAGS,
)
_LIBRARY.define(
    "merge_states(Tensor(a!) out, Tensor(b!) lse, Tensor out2, Tensor lse2) -> ()", tags=_TAGS
)


def _paged_attention_fake(*args: Any, **kwargs: Any) -> None:
    arguments.check_call(AttentionCall(*args, **kwargs))


def _paged_attention_cpu(*args: Any, **kwargs: Any) -> None:
    call = AttentionCall(*args, **kwargs)
    arguments.check_call(call)
    if torch.is_grad_enabled() and call.q.requires_grad:
        raise RuntimeError("paged_attention has no backward: call it under torch.no_grad()")
    backends.attend(call)


def _write_kv_fake(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    arguments.check_tokens(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _write_kv_cpu(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    arguments.check_tokens(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    with torch.no_grad():
        if values.check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[2]):
            kept = slot_mapping >= 0
            k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
        kv_write.write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _merge_states_fake(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> None:
    arguments.check_states(out, lse, out2, lse2)


def _merge_states(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> None:
    arguments.check_states(out, lse, out2, lse2)
    with torch.no_grad():
        states.merge_states(out, lse, out2, lse2)


register_fake("tierd::paged_attention", _paged_attention_fake, lib=_LIBRARY)
register_fake("tierd::write_kv", _write_kv_fake, lib=_LIBRARY)
register_fake("tierd::merge_states", _merge_states_fake, lib=_LIBRARY)
_LIBRARY.impl("paged_attention", _paged_attention_cpu, "CPU")
_LIBRARY.impl("write_kv", _write_kv_cpu, "CPU")
_LIBRARY.impl("merge_states", _merge_states, "CPU")
_LIBRARY.impl("paged_attention", cuda.paged_attention, "CUDA")
_LIBRARY.impl("write_kv", cuda.write_kv, "CUDA")
_LIBRARY.impl("merge_states", cuda.merge_states, "CUDA")
