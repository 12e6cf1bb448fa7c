"""Two attentions over disjoint keys merged into one: Milakov and Gimelshein 2018, arXiv:1805.02867.

An attention's state is its output and its log-sum-exp; no keys is output 0 and LSE -inf. A sink
may be in one of the two only.
"""

import torch
from torch import Tensor


def merge_states(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> None:
    """Merge (out2, lse2) into (out, lse), out [T, Hq, D] and lse [T, Hq], on any device."""
    merged = torch.logaddexp(lse, lse2)
    weights = [torch.exp(x - merged).nan_to_num_(0.0)[..., None] for x in (lse, lse2)]
    out.copy_(out.float() * weights[0] + out2.float() * weights[1])
    lse.copy_(merged)
