"""The attention op over paged KV blocks, and the op that writes new K and V into them.

Importing this package registers `torch.ops.tierd.paged_attention` and `torch.ops.tierd.write_kv`;
the functions of the same names here allocate and call them. It knows tensors only: nothing of
leases, tiers or the daemon.
"""

from tierd.ops.backends import backend, set_backend
from tierd.ops.functional import paged_attention, write_kv

__all__ = ["backend", "paged_attention", "set_backend", "write_kv"]
