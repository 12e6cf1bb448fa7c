"""The attention op over paged KV blocks, the op that writes new K and V into them, and the one that
merges two attentions.

Importing this package registers `paged_attention`, `write_kv` and `merge_states` under
`torch.ops.tierd`; the functions of the same names here allocate and call them. It knows tensors
only: nothing of leases, tiers or the daemon.
"""

from tierd.ops.backends import backend, set_backend
from tierd.ops.functional import merge_states, paged_attention, write_kv

__all__ = ["backend", "merge_states", "paged_attention", "set_backend", "write_kv"]
