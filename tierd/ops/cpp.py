"""The C++ kernel (stub until it is built)."""

from tierd.ops.call import AttentionCall


def available() -> bool:
    return False


def can(call: AttentionCall) -> bool:
    return False


def paged_attention(call: AttentionCall) -> None:
    raise RuntimeError("not built")
