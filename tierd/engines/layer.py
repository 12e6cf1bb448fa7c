"""One layer of a cache in tierd, as transformers knows layers: it writes K and V where they stay.

It reads nothing: attention does, in place, and is told where. What it waits for before it writes,
and where it may, its cache knows, and so which rows the batch has and how far it goes back.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from tierd.engines.attention import PagedKeys, hand_over
from tierd.engines.step import taken
from tierd.ops import write_kv

if TYPE_CHECKING:
    from tierd.engines.cache import TierdCache


class CacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's K and V. It holds the pool's views only while its cache holds the lease."""

    is_compileable = False
    is_croppable = True

    def __init__(self, cache: "TierdCache", index: int, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        layout = cache.pool.layout
        self.is_initialized = True
        self.length = length
        self._cache = cache
        self._group = layout.group_of(index)[0]
        self._window = layout.window(self._group)
        self._kv: tuple[Tensor, Tensor] | None = cache.pool.kv(index)
        self.is_sliding = self._window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to make: the blocks are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens in place; the attention function is told where all of them lie.

        Raises HitCutShort, DaemonLost and what `TierdCache.step` does.
        """
        self._cache.await_group(self._group)
        step = self._cache.step(self.length, key_states)
        assert self._kv is not None, "a step needs a lease"
        k, v = taken(key_states, step.writes), taken(value_states, step.writes)
        write_kv(k, v, *self._kv, step.slots[self._group])
        self.length = step.end
        keys = PagedKeys(step, *self._kv, self._group, self._window)
        self._cache.written(keys)
        return hand_over(keys, key_states, kwargs.get("kwargs")), value_states

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        # Older versions pass the positions instead of their number.
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.length + new, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name up to 5.20

    def forget(self) -> None:
        """Let the pool's memory go."""
        self._kv = None

    def reset(self) -> None:
        raise NotImplementedError("a cache in tierd is not reset: release it and make another")
