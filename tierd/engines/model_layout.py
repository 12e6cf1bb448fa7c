"""The layout of a transformers model: its KV geometry, and a revision that names its weights.

The revision says yes only to the same weights: it covers every bit of every parameter and buffer
by a sum, a sample of each by value, and the configuration. It does not know where they came from,
so a model loaded from GGUF and the same one saved and loaded again share their blocks.
"""

import json
from hashlib import blake2b
from itertools import chain
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tierd.layout import KVLayout

_SAMPLE = 64  # words of each tensor that are hashed as they are
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # the widest that fits is quickest

# What decides nothing about K and V, and differs between ways to load the same model.
_INCIDENTAL = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_INCIDENTAL |= {"quantization_config", "bos_token_id", "eos_token_id", "pad_token_id"}


def layout_of(
    model: Any, *, name: str | None = None, revision: str | None = None, salt: str = ""
) -> KVLayout:
    """The layout of a causal language model of transformers.

    `name`: what engines attach it under, by default the last part of where it was loaded from.
    `revision`: names the weights, by default `revision_of(model)`, which reads them all once.
    Raises ValueError for a model with layers other than full and sliding-window attention.
    """
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    windows = tuple(_window(layer, i) for i, layer in enumerate(_layers(config)))
    return KVLayout(
        model=name or PurePath(model.config.name_or_path).name or str(config.model_type),
        num_layers=len(windows),
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=str(model.dtype).removeprefix("torch."),
        windows=windows if any(windows) else (),
        revision=revision_of(model) if revision is None else revision,
        salt=salt,
    )


def revision_of(model: Any) -> str:
    """A name of the weights and of all in the configuration that may bear on K and V."""
    config = model.config.get_text_config(decoder=True).to_dict()
    facts = {k: v for k, v in config.items() if k[0] != "_" and k not in _INCIDENTAL}
    digest = blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16)
    with torch.no_grad():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(_checksum(tensor))
    return digest.hexdigest()


def _checksum(tensor: Tensor) -> bytes:
    if not tensor.numel():
        return b""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    word = next(word for word in _WORDS if data.numel() % word.itemsize == 0)
    bits = data.view(word)
    sample = bits[:: max(1, bits.numel() // _SAMPLE)]
    return torch.cat((bits.sum(dtype=torch.int64)[None], sample.long())).cpu().numpy().tobytes()


def _layers(config: Any) -> list[Any]:
    """What transformers' own cache has for each layer."""
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ValueError("a model with chunked attention cannot be cached in tierd")
    return list(DynamicCache(config=config).layers)


def _window(layer: Any, index: int) -> int | None:
    if type(layer) is DynamicLayer:
        return None
    if type(layer) is DynamicSlidingWindowLayer:
        return int(layer.sliding_window)
    raise ValueError(
        f"layer {index} is cached as {type(layer).__name__}: only layers with full or "
        "sliding-window attention can be cached in tierd"
    )
