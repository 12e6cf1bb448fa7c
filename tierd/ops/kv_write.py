"""Scatter of new tokens' K and V to their slots, in plain torch, quantising where a cache does.

Runs on any device; whether the slots exist was checked elsewhere.
"""

from torch import Tensor

from tierd.ops.quantised import quantise, whole_scale


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write tokens to slots block_id * block_size + offset, none of them skipped."""
    block_size = k_cache.shape[2]
    if k.shape[0] == 1 and k_scale is None:
        block, offset = divmod(int(slot_mapping), block_size)
        k_cache[block, :, offset].copy_(k[0])
        v_cache[block, :, offset].copy_(v[0])
        return
    blocks = slot_mapping // block_size
    places = (blocks, slot_mapping - blocks * block_size)
    _scatter(k, k_cache, places, k_scale)
    _scatter(v, v_cache, places, v_scale)


def _scatter(
    tokens: Tensor, cache: Tensor, places: tuple[Tensor, Tensor], scale: Tensor | None
) -> None:
    if scale is not None:
        scales = whole_scale(scale, cache).transpose(1, 2)[places]
        tokens = quantise(tokens, scales[..., None], cache.dtype)
    cache.transpose(1, 2).index_put_(places, tokens)
