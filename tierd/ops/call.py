"""One call of the attention op: its arguments, named and in the order of the schema.

The only place besides the schema that lists them: checks, fake kernel and backends take this value.
It holds what the caller gave, unchecked.
"""

from typing import NamedTuple

from torch import Tensor


class AttentionCall(NamedTuple):
    """q [T, Hq, D], out [T, Hq, Dv], lse [T, Hq]; caches [num_blocks, Hkv, block_size, D or Dv],
    any strides but D's; scales as in `quantised`."""

    out: Tensor
    lse: Tensor | None
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    scale: float
    causal: bool = True
    window_left: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    num_splits: int = 0
