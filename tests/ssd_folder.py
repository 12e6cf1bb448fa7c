"""Folders of the SSD tier that a real daemon left, and the offline commands on them."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from storage.slab import Geometry
from tests.content import BLOCK, BLOCK_NBYTES, LAYOUT, ask, names, prompt, serve
from tests.daemon import Daemon
from tierd.daemon.cli import main

PROMPT = 8 * BLOCK
GEOMETRY = Geometry.fitting(BLOCK_NBYTES, 1 << 20)


def fill(folder: Path, kill: bool = False) -> list[str]:
    """Let a daemon save some prompts in `folder`; the names of one prompt's blocks."""
    with Daemon(folder) as daemon, daemon.client() as client, client.attach(LAYOUT) as pool:
        with serve(pool, prompt(0, PROMPT)) as lease:
            known = [key.hex() for key in names(lease, 0)]
        for seed in range(1, 10):
            ask(pool, prompt(seed, PROMPT))
        if kill:
            daemon.kill9()
    return known


def snapshot(path: Path) -> dict[str, str]:
    """Every file below a path and its content, and every folder."""
    return {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "folder"
        for file in path.rglob("*")
    }


def run(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status
    printed = capsys.readouterr()
    return printed.out, printed.err


def told(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> Any:
    return json.loads(run(capsys, *arguments, "--json", status=status)[0])


def slabs(ssd: Path) -> list[Path]:
    return sorted(ssd.glob("default/store.zarr/*/c/*/0"), key=lambda path: int(path.parts[-2]))


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, offset)
