"""Fixtures of the tests that run a real daemon."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.content import LAYOUT
from tests.daemon import Daemon
from tests.ssd_folder import fill
from tierd.layout import KVLayout
from tierd.pool import Pool


@pytest.fixture
def layout() -> KVLayout:
    """Blocks of 64 KiB, 16 tokens each."""
    return LAYOUT


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of small tiers: 32 blocks of `layout` on the device, 32 in host memory."""
    with Daemon(tmp_path) as running:
        yield running


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    """An SSD folder that a daemon left, of one tenant with 80 blocks."""
    fill(tmp_path)
    return tmp_path / "ssd"


@pytest.fixture
def pool_of(tmp_path: Path) -> Iterator[Callable[[Any], Pool]]:
    """A pool for a model of transformers, in a daemon of its own."""
    from tests.tiny_models import served  # takes seconds, and few tests need it

    with ExitStack() as stack:
        yield lambda model: stack.enter_context(served(tmp_path, model))
