"""A KV-cache for transformers' `generate()` that lies in tierd's blocks.

    with tierd.connect() as client, client.attach(layout_of(model)) as pool:
        ids = generate(model, pool, input_ids, max_new_tokens=64, do_sample=False)

or, taken apart, with a stock model whose attention is set to "tierd":

    with TierdCache(pool, input_ids) as cache:
        model.generate(input_ids, cache=cache, logits_processor=[cache.channel], ...)

One cache is one sequence and one lease; its K and V are written and read in place, in every layer.
Only what a prompt's hit lacks is computed, a layer group as soon as its own part of the hit is
there. It is frozen for others once its ids are known, which the cache learns from the channel:
`Cache.update` never sees them. Tiers it does not know.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from math import gcd
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import ALL_CACHE_NAMES

from tierd.engines.attention import NAME, PagedKeys, attending
from tierd.engines.layer import CacheLayer
from tierd.engines.model_layout import layout_of, revision_of
from tierd.engines.step import Step, Steps
from tierd.errors import DaemonLost, OutOfBlocks, TierdError
from tierd.pool import Pool

__all__ = [
    "NAME",
    "HitCutShort",
    "TierdCache",
    "TokenChannel",
    "generate",
    "layout_of",
    "revision_of",
]

TokenIds = Tensor | Sequence[int] | npt.NDArray[np.integer]


class HitCutShort(TierdError):
    """A load failed after a cache was made: settle the cache, and begin the forward pass again."""


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
    with TierdCache(pool, input_ids, extra=extra, overlap=True) as cache, attending(model):
        processors = LogitsProcessorList([*kwargs.pop("logits_processor", ()), cache.channel])
        kwargs |= {ALL_CACHE_NAMES[0]: cache, "logits_processor": processors}
        try:
            return model.generate(input_ids, **kwargs)
        except HitCutShort:  # in its first forward pass: nothing is drawn, said or committed yet
            cache.settle()
        if (streamer := kwargs.get("streamer")) is not None:
            kwargs["streamer"] = _PromptTold(streamer)
        return model.generate(input_ids, **kwargs)


class TierdCache(Cache):
    """The cache of one sequence. `hit` tokens of its prompt were there and are not computed.

    It waits for the whole hit before it is made. With `overlap` each layer waits for its own group
    instead, while those before it are computed; `hit` is then the planned one, and should it be cut
    short the forward pass raises HitCutShort: `settle`, and run it again from the hit that stands.
    Raises OutOfBlocks, DaemonLost, and ValueError for more than one sequence.
    """

    def __init__(
        self,
        pool: Pool,
        input_ids: TokenIds,
        *,
        extra: Mapping[int, bytes] | None = None,
        overlap: bool = False,
    ) -> None:
        self._ids = _one_row(input_ids)
        self.pool, self.channel = pool, TokenChannel(self)
        self._layers: list[CacheLayer] = []
        self._step: Step | None = None
        self._latest: PagedKeys | None = None
        self._loading = set(range(len(pool.layout.groups)))  # not known to be there
        self._grant = gcd(*(group.block_size for group in pool.layout.groups))
        self._lease = pool.acquire(self._ids, room=self._rounded(len(self._ids)), extra=extra)
        with ExitStack() as undo:
            undo.callback(self.release)
            self.hit = self._lease.hit
            if not overlap:
                self.settle()
            undo.pop_all()
        self._layers = [CacheLayer(self, i, self.hit) for i in range(pool.layout.num_layers)]
        super().__init__(layers=list[Any](self._layers))
        self._steps = Steps(self._lease, pool.layout)

    # -- while the hit is loaded ---------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the whole hit; what was computed without knowing all of it is computed again."""
        self.hit = self._lease.wait()
        self._loading.clear()
        self._latest = self._step = None
        for layer in self._layers:
            layer.length = self.hit

    def await_group(self, group: int) -> None:
        """Wait until a layer group's part of the hit is in place. Raises HitCutShort."""
        if group in self._loading:
            if self._lease.wait(group) < self.hit:
                raise HitCutShort(f"of a hit of {self.hit} tokens {self._lease.hit} are left")
            self._loading.discard(group)

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


class TokenChannel(LogitsProcessor):
    """Tells a cache the ids that `generate()` works on. It changes no score."""

    def __init__(self, cache: TierdCache) -> None:
        self._cache = cache

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._cache.saw(_one_row(input_ids))
        return scores


class _PromptTold(BaseStreamer):
    """A streamer that has been given the prompt, and is not given it again."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._told = streamer, False

    def put(self, value: Tensor) -> None:
        if self._told:
            self._streamer.put(value)
        self._told = True

    def end(self) -> None:
        self._streamer.end()


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
