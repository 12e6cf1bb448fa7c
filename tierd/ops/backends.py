"""The implementations of the attention op, and which one runs: the first, unless one is forced.

A backend fills `out` and `lse` of a call that was already checked, and returns nothing. Forcing one
is for tests and measurements; it holds for the whole process.
"""

from collections.abc import Callable

from tierd.ops import reference, torch_cpu
from tierd.ops.call import AttentionCall
from tierd.ops.sequences import Sequence

Backend = Callable[[AttentionCall, list[Sequence]], None]

_BACKENDS: dict[str, Backend] = {
    "torch": torch_cpu.paged_attention,
    "reference": reference.paged_attention,
}
_DEFAULT = next(iter(_BACKENDS))
_name = _DEFAULT


def backend() -> str:
    """The name of the backend that runs the next call."""
    return _name


def set_backend(name: str | None) -> None:
    """Force a backend by name, or go back to the default; ValueError if the name is unknown."""
    global _name
    if name is not None and name not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)} or None, not {name!r}")
    _name = _DEFAULT if name is None else name


def chosen() -> Backend:
    """The backend that runs the next call."""
    return _BACKENDS[_name]
