"""Progress: a bar on a terminal while something with steps goes on, and nothing of it after."""

import time
from collections.abc import Iterable, Iterator
from typing import TextIO

_WIDTH = 30  # of the bar
_EVERY = 0.1  # seconds between two looks of it


def shown(steps: Iterable[int], total: int, title: str, out: TextIO | None) -> Iterator[int]:
    """The steps, how many of `total` are over each time; with a bar on `out`, if there is one."""
    looked = 0.0
    for done in steps:
        if out and (now := time.monotonic()) - looked > _EVERY:
            looked = now
            bar = "#" * (_WIDTH * done // total)
            out.write(f"\r\033[K[{bar:<{_WIDTH}}] {done / total:4.0%} {title}")
            out.flush()
        yield done
    if out:
        out.write("\r\033[K")
