"""Fixtures of the tests that run a real daemon."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.content import LAYOUT
from tests.daemon import Daemon
from tests.ssd_folder import fill
from tierd.layout import KVLayout


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
