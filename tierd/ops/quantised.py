"""Caches of one byte a number: what a stored number means, and how it is made.

    stored = round(x / scale), clamped to what the type holds        x' = stored * scale

int8 is used symmetrically, -127 to 127. A scale is float32, one element for a whole cache or three
dimensions that expand to [num_blocks, Hkv, block_size]: per block, per block and head, or per token
and head. Who chooses the scales is not known here.
"""

import torch
from torch import Tensor

QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def largest(dtype: torch.dtype) -> float:
    """The largest magnitude that is stored: a scale of amax / largest uses the whole range."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x as stored numbers; `scale` broadcasts over it."""
    bound = largest(dtype)
    x = (x.float() / scale).clamp_(-bound, bound)
    return (x.round_() if dtype == torch.int8 else x).to(dtype)


def whole_scale(scale: Tensor, cache: Tensor) -> Tensor:
    """A scale seen as [num_blocks, Hkv, block_size], by strides of zero."""
    if scale.dim() != 3:
        scale = scale.view(1, 1, 1)
    return scale.expand(cache.shape[:3])
