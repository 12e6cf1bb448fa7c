"""A daemon of a given size for the benchmarks of sharing, and what its status says of places.

Nothing is copied ahead: what moves is what a request needs.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from demo_stage import Stage, stage

from tierd.client import connect
from tierd.layout import KVLayout
from tierd.pool import Pool

SMALL = KVLayout("small", 1, 1, 64, "bfloat16")  # blocks of 4 KiB, 16 tokens

CONFIG = """\
socket = "{folder}/tierd.sock"
device.size = "{device}"
device.watermarks = [0, 0]
host.size = "{host}"
host.watermarks = [0, 0]
"""
SSD = """\
ssd.path = "{folder}/ssd"
ssd.size = "{ssd}"
ssd.min_free = "0B"
ssd.durability = "none"
"""


@contextmanager
def running(device: str, host: str = "0B", ssd: str = "") -> Iterator[Stage]:
    """A daemon whose tiers have these sizes; without `ssd` there is none."""
    with stage() as on:
        text = (CONFIG + SSD if ssd else CONFIG).format(
            folder=on.folder, device=device, host=host, ssd=ssd
        )
        (on.folder / "tierd.toml").write_text(text)
        on.start_daemon()
        yield on
        on.stop_daemon(signal.SIGTERM)


@contextmanager
def attached(on: Stage, layout: KVLayout) -> Iterator[Pool]:
    """A pool of the daemon's, in this process."""
    with connect(on.socket) as client, client.attach(layout) as pool:
        yield pool


def places(pool: Pool) -> int:
    """Blocks of the device tier that are in use, or kept."""
    return sum(group["capacity"] - group["free"] for group in _facts(pool)["tiers"][0]["groups"])


def moved(pool: Pool) -> dict[str, int]:
    """Blocks that were copied so far, by "from>to", levels."""
    found: dict[str, int] = _facts(pool)["moved"]
    return found


def _facts(pool: Pool) -> dict[str, Any]:
    (namespace,) = pool.client.status()["tenants"][0]["namespaces"]
    facts: dict[str, Any] = namespace
    return facts
