"""The hash chain of one token sequence: a 128-bit name for everything up to each granule's end.

    root -> H(root, tokens 0..g-1) -> H(that, tokens g..2g-1) -> ...

It is computed in the engine's process; token ids never leave it. A hash names content, it is not
a secret. What a namespace is, and which hash names which block, is the layout's business.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from tierd.block import HASH_NBYTES, BlockHash

_TOKEN = 4  # bytes
_BLANK = blake2b(digest_size=HASH_NBYTES)  # copying it takes half as long as making another

Tokens = Sequence[int] | npt.NDArray[np.integer]


def token_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Token ids as little-endian uint32; ids outside 0 to 2^32-1 are a ValueError."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"tokens: need a one-dimensional run of ids, not {array.dtype} {array.shape}"
        )
    if array.size and (int(array.min()) < 0 or int(array.max()) >= 1 << 32):
        raise ValueError(f"tokens: ids must lie in 0 to 2^32-1, not {array.min()} to {array.max()}")
    return array.astype("<u4")


class PrefixChain:
    """The hashes of a growing sequence, one each `granule` tokens.

    `extra` maps a token's position to bytes that also decide its K and V: the content hash of an
    image behind placeholder tokens, say.
    """

    def __init__(
        self, root: BlockHash, granule: int, extra: Mapping[int, bytes] | None = None
    ) -> None:
        self._root, self._granule = root, granule
        self._extra = dict(extra or {})
        self._tokens = bytearray()  # little-endian uint32
        self.hashes: list[BlockHash] = []

    def __len__(self) -> int:
        """Tokens."""
        return len(self._tokens) // _TOKEN

    def append(self, tokens: Tokens) -> None:
        """Add tokens; each granule they fill gets its hash."""
        self._tokens += token_array(tokens).tobytes()
        nbytes, hashes = self._granule * _TOKEN, self.hashes
        new = bytes(self._tokens[len(hashes) * nbytes :])
        name = hashes[-1] if hashes else self._root
        for start in range(0, len(new) - nbytes + 1, nbytes):
            digest = _BLANK.copy()
            digest.update(name + new[start : start + nbytes])
            if self._extra:
                self._update(digest)
            name = digest.digest()  # type: ignore[assignment]  # the type's name would cost a call
            hashes.append(name)

    def truncate(self, num_tokens: int) -> None:
        """Go back to the first `num_tokens`; what else decided K and V after them is forgotten."""
        del self._tokens[num_tokens * _TOKEN :]
        del self.hashes[num_tokens // self._granule :]
        self._extra = {at: key for at, key in self._extra.items() if at < num_tokens}

    def fork(self, num_tokens: int) -> "PrefixChain":
        """A chain of its own of the first `num_tokens`."""
        extra = {at: key for at, key in self._extra.items() if at < num_tokens}
        chain = PrefixChain(self._root, self._granule, extra)
        chain._tokens = self._tokens[: num_tokens * _TOKEN]
        chain.hashes = self.hashes[: num_tokens // self._granule]
        return chain

    def _update(self, digest: blake2b) -> None:
        """Add what else decides K and V in the next granule."""
        start = len(self.hashes) * self._granule
        for position in range(start, start + self._granule):
            if (key := self._extra.get(position)) is not None:
                digest.update(position.to_bytes(8, "little") + len(key).to_bytes(8, "little") + key)
