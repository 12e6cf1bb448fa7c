"""A tag: what is kept with a block on a persistent medium, so that a restart can find it again.

    | 1 if it has a parent, else 0: u8 | its name | its parent's | those of granules inside it ... |

A tag is opaque to the medium, which holds a limited number of bytes: where a block has more
granules than fit, it is found by some of them only, evenly spread, so that a hit that ends inside
it loses no more than what lies between two. A block without a name has an empty tag.
"""

from collections.abc import Sequence
from typing import NamedTuple

from storage.base import MAX_TAG_NBYTES
from tierd.block import HASH_NBYTES, BlockHash


class Named(NamedTuple):
    """The names a tag gives."""

    key: BlockHash
    parent: BlockHash | None
    inner: tuple[BlockHash, ...]


def pack(key: BlockHash | None, parent: BlockHash | None, inner: Sequence[BlockHash]) -> bytes:
    """The tag of a block of those names."""
    if key is None:
        return b""
    head = bytes([parent is not None]) + key + (parent or b"")
    room = (MAX_TAG_NBYTES - len(head)) // HASH_NBYTES
    step = -(-(len(inner) + 1) // (room + 1))
    return head + b"".join(inner[step - 1 :: step])


def unpack(tag: bytes) -> Named | None:
    """The names in a tag; None if it is empty, or none of ours."""
    count, rest = divmod(len(tag) - 1, HASH_NBYTES)
    if rest or count < 1 or tag[0] > 1 or count < 1 + tag[0]:
        return None
    names = [BlockHash(tag[i : i + HASH_NBYTES]) for i in range(1, len(tag), HASH_NBYTES)]
    parent = names[1] if tag[0] else None
    return Named(names[0], parent, tuple(names[1 + tag[0] :]))
