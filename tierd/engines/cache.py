"""A KV-cache, as transformers knows caches, that lies in tierd's blocks.

A batch is a lease for each of its sequences; K and V are written and read in place, in every layer.
Only what a prompt's hit lacks is computed, a layer group as soon as its own part of the hit is
there. A sequence is frozen for others once its ids are known, which the cache learns from the
channel, for `Cache.update` never sees them, and once a step begins after it, for a draft may be
rejected until then. Tiers it does not know.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor
from transformers import LogitsProcessor
from transformers.cache_utils import Cache

from tierd.engines.attention import NAME, PagedKeys
from tierd.engines.layer import CacheLayer
from tierd.engines.sequences import HitCutShort, Prompt, Sequences
from tierd.engines.step import Step, Steps
from tierd.errors import OutOfBlocks
from tierd.hints import Hints
from tierd.pool import Pool

TokenIds = Tensor | Sequence[int] | npt.NDArray[np.integer]
Extra = Mapping[int, bytes] | Sequence[Mapping[int, bytes]]
AllHints = Hints | Sequence[Hints | None]


class TierdCache(Cache):
    """The cache of a batch of prompts, `hit` columns of which are not computed.

    `attention_mask` says what is padding, on the left; `hints` what is known of all prompts, or of
    each. It waits for the whole hit before it is
    made. With `overlap` each layer waits for its own group instead, while those before it are
    computed; `hit` is then the planned one, and should it be cut short the forward pass raises
    HitCutShort: `settle`, and run it again from the hit that stands. Raises OutOfBlocks,
    DaemonLost, and NotImplementedError for a mask of another kind.
    """

    def __init__(
        self,
        pool: Pool,
        input_ids: TokenIds,
        *,
        attention_mask: Tensor | None = None,
        extra: Extra | None = None,
        hints: AllHints | None = None,
        overlap: bool = False,
    ) -> None:
        self.pool, self.channel = pool, TokenChannel(self)
        self._layers: list[CacheLayer] = []
        self._step: Step | None = None
        self._latest: PagedKeys | None = None
        self._loading = set(range(len(pool.layout.groups)))  # not known to be there
        self._sequences = Sequences(pool, _prompts(input_ids, attention_mask, extra, hints))
        self._steps = Steps(pool.layout)
        with ExitStack() as undo:
            undo.callback(self.release)
            if not overlap:
                self.settle()
            undo.pop_all()
        self._layers = [CacheLayer(self, i, self.hit) for i in range(pool.layout.num_layers)]
        super().__init__(layers=list[Any](self._layers))

    # -- while the hit is loaded ---------------------------------------------------------------

    @property
    def hit(self) -> int:
        """Columns of the prompts that are not computed: those that every row has, or pads."""
        return self._sequences.hit

    def settle(self) -> None:
        """Wait for the whole hit; what was computed without knowing all of it is computed again."""
        self._sequences.settle()
        self._loading.clear()
        self._go_back(self.hit)

    def await_group(self, group: int) -> None:
        """Wait until a layer group's part of the hit is in place. Raises HitCutShort."""
        if group in self._loading:
            self._sequences.await_group(group)
            self._loading.discard(group)

    # -- while the model computes --------------------------------------------------------------

    def step(self, start: int, keys: Tensor) -> Step:
        """The step that writes `keys` `[rows, heads, columns, dim]` from column `start` on, with
        room for them: made by the first layer to ask.

        Raises OutOfBlocks, the leases released, or DaemonLost if there is no room and no daemon.
        """
        end = start + keys.shape[2]
        if self._step is None or (self._step.start, self._step.end) != (start, end):
            self._sequences.check()
            self._whole()
            self._sequences.fit(keys.shape[0])
            try:
                if end > self._sequences.prompt_end:  # up to there, rows of a prompt are one
                    self._sequences.part(start)
                self._sequences.advance(start, end)
            except OutOfBlocks:
                self.release()
                raise
            self._step = self._steps.plan(self._sequences.rows, start, end, keys.device)
        return self._step

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

    def _whole(self) -> int:
        """The columns that all layers have. Raises RuntimeError if they differ."""
        lengths = {layer.length for layer in self._layers}
        if len(lengths) > 1:
            raise RuntimeError("a forward pass was broken off: release this cache")
        return lengths.pop()

    def _go_back(self, columns: int) -> None:
        self._latest = self._step = None
        for layer in self._layers:
            layer.length = columns

    # -- rows and tokens -----------------------------------------------------------------------

    def saw(self, ids: npt.NDArray[Any]) -> None:
        """The ids of every row, `[rows, n]`. Raises ValueError for other sequences' ids."""
        self.check_attended()
        self._sequences.saw(ids, self._whole())

    def publish(self) -> None:
        """Let other processes find all that is computed, with the part of a block at its end as far
        as it is whole granules; whoever goes on writes a copy of that, this cache too.
        """
        self._sequences.publish(self._whole())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The rows go on from those of `beam_idx`: they fork when they do, and share until then."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows go on, each as often as it is named."""
        self._sequences.select(np.arange(len(self._sequences.rows))[indices.cpu().numpy()].tolist())
        self._step = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row goes on `repeats` times."""
        self._sequences.fit(repeats * len(self._sequences.rows))
        self._step = None

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by `-tokens_to_remove` columns, as if they had never been computed.

        Raises LeaseError where a sliding window has passed.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): the number of tokens to remove, negative")
        if tokens_to_remove:
            columns = self._whole() + tokens_to_remove
            self._sequences.cut(columns)
            self._go_back(columns)

    def activate_past_recording(self) -> None:
        """Assisted generation begins: its first pass is over the whole sequence, from column 0.
        What is there already is neither written nor attended from again.
        """
        self._sequences.keep(self._whole())
        self._go_back(0)

    def skip_hit(self) -> None:
        """The next pass is over what is not there after all."""
        self._go_back(self.hit)

    # -- places --------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Give the places in the pool up for a while, between two forward passes: what is computed
        is kept in the tiers below. Raises OutOfBlocks: resume or release.
        """
        self._sequences.suspend(self._whole())

    def resume(self) -> None:
        """Come back. Raises OutOfBlocks, still suspended, or HitCutShort if not all has come back:
        then generate again, from the ids so far, and only what is lost is computed.
        """
        before = self._whole()
        self._sequences.resume()
        if self.hit < before:
            self._go_back(self.hit)
            raise HitCutShort(f"of {before} tokens that were suspended {self.hit} are left")

    def release(self) -> None:
        """Give the leases back; what was computed stays in tierd. May be repeated."""
        self._latest = self._step = None
        for layer in self._layers:
            layer.forget()
        self._sequences.release(min((layer.length for layer in self._layers), default=0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class TokenChannel(LogitsProcessor):
    """Tells a cache the ids that `generate()` works on. It changes no score."""

    def __init__(self, cache: TierdCache) -> None:
        self._cache = cache

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._cache.saw(input_ids.cpu().numpy())
        return scores


def _prompts(
    ids: TokenIds, mask: Tensor | None, extra: Extra | None, hints: AllHints | None
) -> list[Prompt]:
    """The prompts of `[n]` or `[rows, n]` ids, without their padding."""
    rows = np.atleast_2d(np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids))
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"input_ids: need [n] or [rows, n] ids, not {rows.shape}")
    pads = _pads(mask, rows)
    extras = [extra] if extra is None or isinstance(extra, Mapping) else list(extra)
    if extra is None:
        extras *= len(rows)
    if len(extras) != len(rows):
        raise ValueError(f"extra: {len(extras)} mappings for {len(rows)} prompts")
    said = list(hints) if isinstance(hints, Sequence) else [hints] * len(rows)
    if len(said) != len(rows):
        raise ValueError(f"hints: {len(said)} for {len(rows)} prompts")
    each = zip(rows, pads, extras, said, strict=True)
    return [Prompt(row[pad:], pad, of, hint) for row, pad, of, hint in each]


def _pads(mask: Tensor | None, rows: npt.NDArray[Any]) -> list[int]:
    """The columns of padding on each row's left."""
    if mask is None:
        return [0] * len(rows)
    kept = mask.cpu().numpy() != 0
    pads = rows.shape[1] - kept.sum(-1)
    if kept.shape != rows.shape or not (kept == (np.arange(rows.shape[1]) >= pads[:, None])).all():
        raise NotImplementedError("attention_mask: a cache in tierd is padded on the left only")
    if (pads == rows.shape[1]).any():
        raise ValueError("attention_mask: a prompt has at least one token")
    return [int(pad) for pad in pads]
