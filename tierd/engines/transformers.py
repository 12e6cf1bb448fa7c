"""Stock transformers' `generate()` with its KV-cache in tierd's blocks.

    with tierd.connect() as client, client.attach(layout_of(model)) as pool:
        ids = generate(model, pool, input_ids, max_new_tokens=64, do_sample=False)

or, taken apart, with a stock model whose attention is set to "tierd":

    with TierdCache(pool, input_ids, attention_mask=mask) as cache:
        model.generate(input_ids, attention_mask=mask, cache=cache,
                       logits_processor=[cache.channel], ...)

What `generate()` does with a cache, this one does: batches padded on the left, beams, several
samples of a prompt, assisted generation.
"""

from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import ALL_CACHE_NAMES

from tierd.engines.attention import NAME, attending
from tierd.engines.cache import AllHints, Extra, TierdCache, TokenChannel
from tierd.engines.model_layout import layout_of, revision_of
from tierd.engines.sequences import HitCutShort
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


def generate(
    model: Any,
    pool: Pool,
    input_ids: Tensor,
    *,
    extra: Extra | None = None,
    hints: AllHints | None = None,
    **kwargs: Any,
) -> Any:
    """`model.generate(input_ids, **kwargs)` with its cache in `pool`; returns what that does.

    Padding needs the `attention_mask`. Inputs that are not token ids (images, embeddings) need
    `extra`: position to a hash of them, for each prompt of a batch. `hints`: what is known of all
    prompts, or of each. What was computed is shared from then on, and the leases are given back.
    Raises OutOfBlocks if the device tier is too full, DaemonLost if the daemon is gone and no room
    was left without it.
    """
    mask = kwargs.get("attention_mask")
    unnamed = [k for k, v in kwargs.items() if isinstance(v, Tensor) and k != "attention_mask"]
    if unnamed and extra is None:
        raise ValueError(f"{', '.join(unnamed)}: not named by token ids; give its hash in extra")
    with (
        TierdCache(
            pool, input_ids, attention_mask=mask, extra=extra, hints=hints, overlap=True
        ) as cache,
        attending(model),
        model.register_forward_pre_hook(_Skip(cache), with_kwargs=True),
    ):
        processors = LogitsProcessorList([cache.channel, *kwargs.pop("logits_processor", ())])
        kwargs |= {ALL_CACHE_NAMES[0]: cache, "logits_processor": processors}
        try:
            return model.generate(input_ids, **kwargs)
        except HitCutShort:  # in its first forward pass: nothing is drawn, said or committed yet
            cache.settle()
        if (streamer := kwargs.get("streamer")) is not None:
            kwargs["streamer"] = _PromptTold(streamer)
        return model.generate(input_ids, **kwargs)


class _Skip:
    """A hook before a model's passes: leaves a hit out of one that begins at column 0 in spite of
    it, as the first one of assisted generation does."""

    def __init__(self, cache: TierdCache) -> None:
        self._cache = cache

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hit = self._cache.hit
        if kwargs.get(ALL_CACHE_NAMES[0]) is self._cache and self._cache.get_seq_length() < hit:
            for name in kwargs.keys() & {"input_ids", "position_ids"}:
                kwargs[name] = kwargs[name][..., hit:]
            self._cache.skip_hit()
        return args, kwargs


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
