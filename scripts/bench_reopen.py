"""Reopening an SSD store of a million blocks: from the daemon's start to the first hit served.

The store is the real one, except that only the first prompt's blocks have bytes: the other slabs
are sparse files, and their blocks only rows of the catalog, under names nobody asks for. The
catalog is out of the page cache when the daemon starts.
"""

import asyncio
import itertools
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from zlib import crc32

from bench_blocks import KIB, MIB, TAG, open_volume, rows
from bench_engine import prompt
from bench_report import BenchReport, Figure
from bench_rounds import seconds
from demo_stage import Stage

from storage.catalog import Catalog
from storage.slab import Geometry, Trailer
from tierd.block import BlockHash
from tierd.client import connect
from tierd.daemon.config import Config
from tierd.daemon.tag import pack
from tierd.layout import KVLayout
from tierd.prefix import PrefixChain

BAR, STRETCH = 3.0, 1.5  # seconds
BLOCK, PROMPT = 16, 32  # tokens, blocks
BLOCK_NBYTES = 64 * KIB
SLAB_NBYTES = 64 * MIB  # the default
LAYOUT = KVLayout("reopened", 4, 2, 64, "float32").with_block_sizes([BLOCK] * 4)
CONFIG = """\
socket = "{folder}/tierd.sock"
device.size = "64MiB"
host.size = "64MiB"
ssd.path = "{folder}/ssd"
ssd.size = "128GiB"
ssd.min_free = "0B"
"""


def measure(report: BenchReport, on: Stage, quick: bool) -> None:
    """The daemon of `on` does not run yet; it will not be told to stop."""
    number = 100_000 if quick else 1_000_000
    report.heading(f"Reopening an SSD store of {number:,} blocks, s")
    (on.folder / "tierd.toml").write_text(CONFIG.format(folder=on.folder))
    tenant = next(iter(Config.load(on.folder / "tierd.toml").tenants))
    path, tokens = on.folder / "ssd" / tenant, prompt(5, PROMPT * BLOCK + 1)
    _build(path, LAYOUT.root(tenant), tokens, number)
    _forget(path)
    plain = seconds(lambda: _plain(path / "catalog.sqlite"))
    _forget(path)
    begin = time.perf_counter()
    on.start_daemon()
    parts = {"daemon ready": time.perf_counter() - begin}
    with connect(on.socket) as client, client.attach(LAYOUT) as pool:
        parts["attached, all blocks recovered"] = time.perf_counter() - begin
        with pool.acquire(tokens) as lease:
            assert lease.wait() == PROMPT * BLOCK, f"a hit of {lease.hit} tokens only"
            parts["first hit served"] = time.perf_counter() - begin
        turns = client.status()["process"]["loop"]
    for what, took in parts.items():
        figure = Figure(f"start to {what}", took, plain, "s", "bare SQLite: read all rows")
        report.limit(figure, BAR) if what == "first hit served" else report.note(figure)
    figure = Figure("longest turn of the daemon's loop", turns["max_cpu_ms"], 1, "ms", "I11: 1 ms")
    report.note(figure)


def _build(path: Path, root: BlockHash, tokens: Sequence[int], number: int) -> None:
    name = f"{root.hex()}-0"
    chain = PrefixChain(root, BLOCK)
    chain.append(tokens)
    tags = [pack(key, parent, ()) for parent, key in itertools.pairwise([root, *chain.hashes])]
    geometry = Geometry.fitting(BLOCK_NBYTES, SLAB_NBYTES)
    volume = open_volume(path, slab_nbytes=SLAB_NBYTES)
    store = volume.array(name, BLOCK_NBYTES, {"made by": "bench_reopen"})
    assert volume.grow(name)
    with asyncio.Runner() as runner:
        runner.run(store.write(range(PROMPT), rows(PROMPT, BLOCK_NBYTES), tags))
    volume.close()
    for slab in range(1, -(-number // geometry.num_slots)):
        file = path / "store.zarr" / name / "c" / str(slab) / "0"
        file.parent.mkdir()
        file.touch(0o600)
        os.truncate(file, geometry.file_nbytes)
    catalog = Catalog.open(path / "catalog.sqlite")
    assert catalog, "the catalog was sealed just now"
    trailers = _trailers(range(PROMPT, number), catalog.last_seq + 1)
    while batch := list(itertools.islice(trailers, 50_000)):
        catalog.put(name, batch)
    catalog.close()


def _trailers(slots: range, seq: int) -> Iterator[Trailer]:
    """Rows of blocks that follow each other in prompts of no one, as short as a daemon's are."""
    parent = BlockHash(TAG[:16])
    for slot in slots:
        key = BlockHash(os.urandom(16))
        yield Trailer(slot, seq + slot, crc32(key), pack(key, parent, ()))
        parent = key


def _forget(path: Path) -> None:
    """Have the catalog and the array's document on disk and out of the page cache."""
    for file in (*path.glob("catalog.sqlite*"), *path.glob("store.zarr/*/zarr.json")):
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _plain(path: Path) -> None:
    """What of it is reading every row of the table into Python, in one thread."""
    db = sqlite3.connect(path)
    db.execute("SELECT slot, seq, crc, tag FROM block").fetchall()
    db.close()
