"""The garbage collector, kept away from blocks: a full collection walks every one (I11).

There are millions, for as long as the daemon lives, and none is part of a cycle: young objects are
all that need it. It does not know what was made, only when.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def spare_what_exists() -> None:
    """From here on collect young objects only; what exists now stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 5, 1_000_000)


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing meanwhile, and never what was made meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
