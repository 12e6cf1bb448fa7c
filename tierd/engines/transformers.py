"""A KV-cache for transformers' `generate()` that lies in tierd's blocks.

    with tierd.connect() as client, client.attach(layout_of(model)) as pool:
        ids = generate(model, pool, input_ids, max_new_tokens=64, do_sample=False)

or, taken apart, with a stock model whose attention is set to "tierd":

    with TierdCache(pool, input_ids) as cache:
        model.generate(input_ids, cache=cache, logits_processor=[cache.channel], ...)

One cache is one sequence and one lease; its K and V are written and read in place, in every layer.
Only what a prompt's hit lacks is computed. It is frozen for others once its ids are known, which
the cache learns from the channel: `Cache.update` never sees them. Tiers it does not know.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from math import gcd
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.utils import ALL_CACHE_NAMES

from tierd.engines.attention import NAME, PagedKeys, attending, hand_over
from tierd.engines.model_layout import layout_of, revision_of
from tierd.engines.step import Step, Steps
from tierd.errors import DaemonLost, OutOfBlocks
from tierd.ops import write_kv
from tierd.pool import Pool

__all__ = ["NAME", "TierdCache", "TokenChannel", "generate", "layout_of", "revision_of"]

TokenIds = Tensor | Sequence[int] | npt.NDArray[np.integer]


def generate(
    model: Any,
    pool: Pool,
    input_ids: Tensor,
    *,
    extra: Mapping[int, bytes] | None = None,
    **kwargs: Any,
) -> Any:
    """`model.generate(input_ids, **kwargs)` with its cache in `pool`; returns what that does.

    Inputs that are not token ids (images, embeddings) need `extra`: position to a hash of them.
    What was computed is shared from then on, and the lease is given back. Raises OutOfBlocks if the
    device tier is too full, DaemonLost if the daemon is gone and no room was left without it.
    """
    unnamed = [k for k, v in kwargs.items() if isinstance(v, Tensor) and k != "attention_mask"]
    if unnamed and extra is None:
        raise ValueError(f"{', '.join(unnamed)}: not named by token ids; give its hash in extra")
    with TierdCache(pool, input_ids, extra=extra) as cache, attending(model):
        processors = LogitsProcessorList([*kwargs.pop("logits_processor", ()), cache.channel])
        kwargs[ALL_CACHE_NAMES[0]] = cache
        return model.generate(input_ids, logits_processor=processors, **kwargs)


class TierdCache(Cache):
    """The cache of one sequence. `hit` tokens of its prompt were there and are not computed.

    It waits for the whole hit before it is made: a hit cut short while layers are being computed
    would come too late. Raises OutOfBlocks, DaemonLost, and ValueError for more than one sequence.
    """

    def __init__(
        self, pool: Pool, input_ids: TokenIds, *, extra: Mapping[int, bytes] | None = None
    ) -> None:
        self._ids = _one_row(input_ids)
        self.pool, self.channel = pool, TokenChannel(self)
        self._layers: list[_Layer] = []
        self._step: Step | None = None
        self._latest: PagedKeys | None = None
        self._grant = gcd(*(group.block_size for group in pool.layout.groups))
        self._lease = pool.acquire(self._ids, room=self._rounded(len(self._ids)), extra=extra)
        with ExitStack() as undo:
            undo.callback(self.release)
            self.hit = self._lease.wait()
            undo.pop_all()
        self._layers = [_Layer(self, i, self.hit) for i in range(pool.layout.num_layers)]
        super().__init__(layers=list[Any](self._layers))
        self._steps = Steps(self._lease, pool.layout)

    # -- while the model computes --------------------------------------------------------------

    def step(self, start: int, keys: Tensor) -> Step:
        """The step that writes `keys` from token `start` on, with room for them: made by the first
        layer to ask.

        Raises OutOfBlocks, the lease released, or DaemonLost if there is no room and no daemon.
        """
        if keys.shape[0] != 1:
            raise ValueError(
                f"a cache in tierd holds one sequence (a batch of 1), not {keys.shape[0]}: make "
                "one for each; beams and num_return_sequences > 1 are not supported"
            )
        end = start + keys.shape[2]
        if self._step is None or (self._step.start, self._step.end) != (start, end):
            self._lease.check()
            if any(layer.length != start for layer in self._layers):
                raise RuntimeError("a forward pass was broken off: release this cache")
            self._make_room(end)
            self._step = self._steps.plan(start, end, keys.device)
        return self._step

    def _make_room(self, room: int) -> None:
        if room <= self._lease.room:
            return
        try:
            self._lease.extend(self._rounded(room))
        except OutOfBlocks:
            self.release()
            raise

    def _rounded(self, room: int) -> int:
        """Room up to where the next block of some group ends; it takes no block more."""
        return -(-room // self._grant) * self._grant

    def written(self, keys: PagedKeys) -> None:
        """A layer has written its part; the one before it must have been attended to."""
        self.check_attended()
        self._latest = keys

    def check_attended(self) -> None:
        """Raise RuntimeError if the model does not read what is written here."""
        if self._latest is not None and not self._latest.attended:
            raise RuntimeError(
                f"the model does not attend to this cache: model.set_attn_implementation({NAME!r})"
            )

    # -- token ids and the lease ---------------------------------------------------------------

    def saw(self, ids: npt.NDArray[Any]) -> None:
        """The sequence's ids, all of them: commit what is computed. If the daemon is gone, nothing
        is, and the generation goes on in the blocks it has. Raises ValueError for other ids.
        """
        self.check_attended()
        known = len(self._ids)
        if not np.array_equal(ids[:known], self._ids):
            raise ValueError("input_ids: not the sequence that this cache was made for")
        self._lease.append(ids[known:])
        self._ids = ids.copy()
        with suppress(DaemonLost):
            self._lease.commit(min(self.get_seq_length(), len(ids)))

    def release(self) -> None:
        """Give the lease back; what was committed stays in tierd. May be repeated."""
        self._latest = self._step = None
        for layer in self._layers:
            layer.forget()
        if not self._lease.released:
            with suppress(DaemonLost):  # it gave everything back itself
                self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's K and V. It holds the pool's views only while its cache holds the lease."""

    is_compileable = False
    is_croppable = False

    def __init__(self, cache: TierdCache, index: int, length: int) -> None:
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
        """Write the new tokens in place; the attention function is told where all of them lie."""
        step = self._cache.step(self.length, key_states)
        assert self._kv is not None, "a step needs a lease"
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("a cache in tierd holds one sequence: beams are not supported")


class TokenChannel(LogitsProcessor):
    """Tells a cache the ids that `generate()` works on. It changes no score."""

    def __init__(self, cache: TierdCache) -> None:
        self._cache = cache

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._cache.saw(_one_row(input_ids))
        return scores


def _one_row(ids: TokenIds) -> npt.NDArray[Any]:
    """The ids of the one sequence, `[n]` or `[1, n]`. Raises ValueError for more of them."""
    array = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or not len(array):
        raise ValueError(
            f"input_ids: a cache in tierd holds one sequence (a batch of 1), not {array.shape}"
        )
    return array
