"""The implementations of the attention op on a CPU, and which one runs the next call.

A backend takes a call whose tensors were checked, checks the values it reads, fills `out` and
`lse`, and returns nothing. The first that is there and can do a call does it, unless one is forced:
that is for tests and measurements, and holds for the whole process.
"""

from collections.abc import Callable

from tierd.ops import cpp, reference, torch_cpu
from tierd.ops.call import AttentionCall

Backend = Callable[[AttentionCall], None]

_BACKENDS: dict[str, Backend] = {
    "cpp": cpp.paged_attention,
    "torch": torch_cpu.paged_attention,
    "reference": reference.paged_attention,
}
_forced: str | None = None


def backend() -> str:
    """The name of the backend that runs the next call, if it can do it."""
    return _forced or ("cpp" if cpp.available() else "torch")


def set_backend(name: str | None) -> None:
    """Force a backend by name, or go back to the default; ValueError if it is not there."""
    global _forced
    there = [each for each in _BACKENDS if each != "cpp" or cpp.available()]
    if name is not None and name not in there:
        raise ValueError(f"backend must be one of {', '.join(there)} or None, not {name!r}")
    _forced = name


def attend(call: AttentionCall) -> None:
    """Run the call on its backend."""
    name = _forced
    if name is None:
        name = "cpp" if cpp.can(call) else "torch"
    elif name == "cpp" and not cpp.can(call):
        raise ValueError(f"backend cpp is forced, but head sizes must be {cpp.HEAD_DIMS}")
    _BACKENDS[name](call)
