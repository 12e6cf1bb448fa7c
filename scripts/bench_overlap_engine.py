"""An engine of the demo's whose layers lie in five groups, and that can also wait for all of them.

    python bench_overlap_engine.py serve FOLDER SOCKET

Requests are lines of JSON, as the demo's engine takes them. It does not know whence a hit comes.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from demo_engine import Engine, serve, since

from tierd.engines.transformers import NAME, TierdCache
from tierd.layout import KVLayout, LayerGroup

GROUPS, BLOCK = 5, 16


def in_groups(layout: KVLayout) -> KVLayout:
    """The layout with its layers in groups of as many, in order, and a name of its own."""
    size = layout.num_layers // GROUPS
    layers = [tuple(range(g * size, (g + 1) * size)) for g in range(GROUPS)]
    groups = tuple(LayerGroup(of, BLOCK) for of in layers)
    return replace(layout, model=f"{layout.model} in groups", groups=groups)


class GroupedEngine(Engine):
    """`tierd` computes a group's layers when its own part of the hit is there."""

    def __init__(self, folder: Path, socket: str) -> None:
        super().__init__(folder, socket)
        self._layout = in_groups(self._layout)

    def whole(self, ids: list[int], **_: Any) -> dict[str, Any]:
        """As `tierd`, for one token; but nothing is computed before all of the hit is there."""
        self._model.set_attn_implementation(NAME)
        assert self._pool is not None, "attach comes first"
        prompt = torch.tensor([ids])
        start = (time.perf_counter(), time.process_time())
        with TierdCache(self._pool, prompt) as cache:
            out = self._model.generate(
                prompt, max_new_tokens=1, do_sample=False, cache=cache,
                logits_processor=[cache.channel],
            )  # fmt: skip
        return {**since(start), "tokens": out[0, len(ids) :].tolist()}

    def load(self, ids: list[int], **_: Any) -> dict[str, Any]:
        """Seconds until each group's part of the hit was there, with nothing to compute."""
        assert self._pool is not None, "attach comes first"
        begin, ready = time.perf_counter(), []
        with self._pool.acquire(ids) as lease:
            for group in range(GROUPS):
                lease.wait(group)
                ready.append(time.perf_counter() - begin)
            return {"hit": lease.wait(), "ready": ready}


if __name__ == "__main__":
    serve(GroupedEngine(Path(sys.argv[2]), sys.argv[3]))
