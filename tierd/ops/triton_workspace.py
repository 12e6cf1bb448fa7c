"""Where the kernels keep what splits computed until it is merged: one piece per device and stream.

A piece has a fixed size, for a captured CUDA graph holds its address: it never grows and is never
freed. The first call on a stream allocates it, later calls and graphs captured on that stream share
it, so two such graphs must not run at the same time. `num_splits=1` needs none.
"""

import torch
from torch import Tensor

NBYTES = 128 << 20

_pieces: dict[tuple[torch.device, int], Tensor] = {}


def workspace(device: torch.device) -> Tensor:
    """The piece of this device's current stream, float32; what is in it is anybody's."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    piece = _pieces.get((device, stream))
    if piece is None:
        # What is born in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            piece = torch.empty(NBYTES // 4, dtype=torch.float32, device=device)
        _pieces[device, stream] = piece
    return piece
