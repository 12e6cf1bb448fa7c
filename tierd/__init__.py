"""tierd: one KV-cache for every LLM engine on a host, in GPU memory, pinned memory and SSD.

The public surface. Names are resolved at first use (PEP 562): importing this loads no torch, which
the daemon on a CPU host never needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierd.client import Client, connect
    from tierd.errors import (
        ConfigError,
        DaemonLost,
        LayoutMismatch,
        LeaseError,
        OutOfBlocks,
        ProtocolError,
        Refused,
        TierdError,
    )
    from tierd.hints import Hints
    from tierd.layout import KVLayout, LayerGroup
    from tierd.lease import Lease
    from tierd.ops import paged_attention, write_kv
    from tierd.pool import Pool

_HOMES = {
    "tierd.client": ("connect", "Client"),
    "tierd.pool": ("Pool",),
    "tierd.lease": ("Lease",),
    "tierd.hints": ("Hints",),
    "tierd.layout": ("KVLayout", "LayerGroup"),
    "tierd.ops": ("paged_attention", "write_kv"),
    "tierd.errors": (
        "TierdError",
        "OutOfBlocks",
        "DaemonLost",
        "ProtocolError",
        "Refused",
        "LayoutMismatch",
        "LeaseError",
        "ConfigError",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Client",
    "ConfigError",
    "DaemonLost",
    "Hints",
    "KVLayout",
    "LayerGroup",
    "LayoutMismatch",
    "Lease",
    "LeaseError",
    "OutOfBlocks",
    "Pool",
    "ProtocolError",
    "Refused",
    "TierdError",
    "connect",
    "paged_attention",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tierd' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
