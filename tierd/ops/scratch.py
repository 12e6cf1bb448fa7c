"""Room for one sequence's gathered K and V, kept between calls and never shared by two threads.

Fresh memory is mapped and faulted in page by page at every call: at 32 MB that takes 7 times as
long as the gather itself. What is kept stays below a limit; a longer sequence gets fresh memory.
"""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

KEPT_NBYTES = 256 << 20


class Gathered(NamedTuple):
    """One piece of memory [Hkv, n, block_size, D or Dv] each for K and V, seen in two ways."""

    k_blocks: Tensor  # [n, Hkv, block_size, D or Dv]: gather into these
    v_blocks: Tensor
    keys: Tensor  # [Hkv, 1, n * block_size, D or Dv]: attend to these
    values: Tensor


class Scratch(threading.local):
    """The last views stay made: an engine asks for one shape in all of its layers."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._shape: object = None
        self._views: Gathered

    def room(self, num_blocks: int, k_cache: Tensor, v_cache: Tensor) -> Gathered:
        """Views valid until the next call in this thread; their content is whatever was there."""
        _, num_heads, block_size, k_dim = k_cache.shape
        v_dim = v_cache.shape[3]
        shape = (num_heads, num_blocks, block_size, k_dim, v_dim, k_cache.dtype)
        if shape == self._shape:
            return self._views
        rows = num_heads * num_blocks * block_size
        nbytes = rows * (k_dim + v_dim) * k_cache.dtype.itemsize
        # What is born in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            both = self._bytes(nbytes)[:nbytes].view(k_cache.dtype)
            k = both[: rows * k_dim].view(num_heads, num_blocks, block_size, k_dim)
            v = both[rows * k_dim :].view(num_heads, num_blocks, block_size, v_dim)
            views = Gathered(
                k.transpose(0, 1),
                v.transpose(0, 1),
                k.view(num_heads, 1, num_blocks * block_size, k_dim),
                v.view(num_heads, 1, num_blocks * block_size, v_dim),
            )
        if nbytes <= KEPT_NBYTES:
            self._views, self._shape = views, shape
        return views

    def _bytes(self, nbytes: int) -> Tensor:
        if nbytes > KEPT_NBYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        if nbytes > self._memory.numel():
            self._memory = torch.empty(min(2 * nbytes, KEPT_NBYTES), dtype=torch.uint8)
        return self._memory
