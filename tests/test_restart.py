"""A daemon's end and its next life: what is saved, what survives kill -9, what engines see."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import tierd
from storage.slab import Geometry
from tests.content import BLOCK, BLOCK_NBYTES, LAYOUT, ask, check, content, names, prompt, serve
from tests.daemon import NOT_AHEAD, Daemon, Status, held, tiers
from tests.engine import Engine

PROMPT = 8 * BLOCK


@contextmanager
def attached(daemon: Daemon) -> Iterator[tierd.Pool]:
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        yield pool


def namespace(daemon: Daemon) -> Status:
    found: Status = daemon.status()["tenants"][0]["namespaces"][0]
    return found


def test_sigterm_saves_what_only_memory_holds(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, attached(daemon) as pool:
        for seed in range(6):  # some on the device only, some in host memory, none on SSD
            ask(pool, prompt(seed, PROMPT))
        assert not tiers(daemon.status())["ssd"][0]["committed"]
    with Daemon(tmp_path) as daemon, attached(daemon) as pool:
        assert tiers(daemon.status())["ssd"][0]["committed"] == 6 * 8
        for seed in range(6):
            assert ask(pool, [*prompt(seed, PROMPT), 7]) == PROMPT
        assert namespace(daemon)["lost"] == 0


def test_after_kill_9_what_was_on_ssd_is_served_and_every_slot_is_accounted_for(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path) as daemon, Engine(daemon.socket) as engine:
        with attached(daemon) as pool:
            for seed in range(10):
                ask(pool, prompt(seed, PROMPT))
            first_boot = pool.client.boot
            known = daemon.until(lambda status: held(status) == 0)
            saved = tiers(known)["ssd"][0]["committed"]
            assert saved > 0
            # More, and die while it is being demoted.
            engine.ask("endless", trunks=40, longest=PROMPT)
            daemon.until(lambda status: tiers(status)["ssd"][0]["committed"] > saved)
            daemon.kill9()
            with pytest.raises(tierd.DaemonLost):
                pool.client.status()
        engine.kill9()
    with Daemon(tmp_path) as daemon, attached(daemon) as pool:
        assert pool.client.boot != first_boot
        group = tiers(daemon.status())["ssd"][0]
        assert group["free"] + group["committed"] == group["capacity"]
        assert group["committed"] >= saved
        hits = [ask(pool, [*prompt(seed, PROMPT), 7]) for seed in range(40)]
        assert sum(hits) >= BLOCK * saved // 2
        status = daemon.until(lambda status: held(status) == 0)
        group = tiers(status)["ssd"][0]
        assert group["free"] + group["committed"] == group["capacity"]


def test_an_engine_outlives_its_daemon_and_attaches_to_the_next(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        client = daemon.client()
        pool = client.attach(LAYOUT)
        lease = serve(pool, prompt(1, PROMPT))
        daemon.kill9()
        assert daemon.socket.exists()  # stale: the next daemon must replace it
    with pytest.raises(tierd.DaemonLost, match="is gone"):
        lease.extend(2 * PROMPT)
    with pytest.raises(tierd.DaemonLost, match="is gone"):
        pool.acquire([1, 2, 3])
    with pytest.raises(tierd.DaemonLost):
        tierd.connect(daemon.socket)
    check(lease)
    block = pool.view(0)[int(lease.tables[0][0])]
    block.fill_(2.5)
    assert (block == 2.5).all()
    with Daemon(tmp_path) as daemon, attached(daemon) as other:
        assert other.client.boot != client.boot
        assert ask(other, prompt(1, PROMPT)) == 0  # nothing was on SSD
        assert (block == 2.5).all()
    del block
    client.close()


def slabs(folder: Path) -> list[Path]:
    return sorted((folder / "ssd" / "default" / "store.zarr").glob("*/c/*/0"))


def flip(path: Path, payload: bytes) -> None:
    """Change a byte of the block of a slab whose bytes are `payload`."""
    geometry = Geometry.fitting(BLOCK_NBYTES, 1 << 20)
    with path.open("r+b") as file:
        for slot in range(geometry.num_slots):
            offset = geometry.locate(slot)[1]
            file.seek(offset)
            if file.read(BLOCK_NBYTES) == payload:
                file.seek(offset + 1000)
                file.write(bytes([payload[1000] ^ 1]))
                return
    raise AssertionError("the block is not in the slab")


def test_a_flipped_byte_is_a_shorter_hit_and_no_error(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, attached(daemon) as pool:
        lease = serve(pool, prompt(1, PROMPT))
    flip(slabs(tmp_path)[0], content(names(lease, 0)[5], 0, BLOCK_NBYTES))
    with Daemon(tmp_path) as daemon, attached(daemon) as pool:
        with pool.acquire([*prompt(1, PROMPT), 7]) as lease:
            assert lease.hit == PROMPT  # as planned
            assert lease.wait() == 5 * BLOCK
            check(lease)
            assert len(lease.tables[0]) == 9
        found = namespace(daemon)
        assert found["lost"] == 1
        assert found["failed"] >= 1
        assert ask(pool, [*prompt(1, PROMPT), 7]) == 5 * BLOCK  # written anew
        assert ask(pool, [*prompt(1, PROMPT), 7]) == PROMPT
        daemon.until(lambda status: held(status) == 0)
    assert "checksum" in daemon.log.read_text()


def test_a_second_sigterm_cuts_the_saving_short(tmp_path: Path) -> None:
    """Many blocks to save; told twice, the daemon ends before they are all written."""
    big = Daemon(tmp_path, device="128MiB", ssd="256MiB", more=NOT_AHEAD)
    with big as daemon, attached(daemon) as pool:
        for seed in range(64):
            ask(pool, prompt(seed, 30 * BLOCK))
        daemon.status_at_end = daemon.status()
        daemon.signal(signal.SIGTERM)
        while not slabs(tmp_path):
            time.sleep(0.001)  # it is saving
        daemon.signal(signal.SIGTERM)
        daemon.ended(seconds=5)
    assert "told to stop at once" in daemon.log.read_text()
    with Daemon(tmp_path, device="128MiB", ssd="256MiB") as daemon, attached(daemon) as pool:
        saved = tiers(daemon.status())["ssd"][0]["committed"]
        assert 0 < saved < 64 * 30
        for seed in range(64):
            ask(pool, prompt(seed, 30 * BLOCK))


def test_sigterm_answers_running_calls_first(tmp_path: Path) -> None:
    """An acquire that has to wait for places that are being written to SSD."""
    with Daemon(tmp_path, device="32MiB", host="0B", ssd="64MiB") as daemon:
        client = daemon.client()
        pool = client.attach(LAYOUT)
        for seed in range(16):
            ask(pool, prompt(seed, 30 * BLOCK))
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(pool.acquire, range(450 * BLOCK))
            daemon.status_at_end = daemon.until(lambda status: held(status) > 400)
            daemon.signal(signal.SIGTERM)
            lease = answer.result()
        assert len(lease.tables[0]) == 450
        daemon.ended()
        with pytest.raises(tierd.DaemonLost, match="is gone"):
            client.status()
        client.close()


def test_zarr_reads_what_was_committed(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, attached(daemon) as pool:
        lease = serve(pool, prompt(1, PROMPT))
    root = zarr.open_group(tmp_path / "ssd" / "default" / "store.zarr", mode="r")
    [(_, array)] = list(root.arrays())
    assert array.dtype == np.uint8
    assert array.shape[1] == BLOCK_NBYTES
    facts: Any = array.attrs["tierd"]
    assert tierd.KVLayout.from_json(facts["layout"]) == pool.layout
    assert facts["model"] == "model"
    assert facts["block_shape"] == [4, 2, 2, BLOCK, 64]
    stored = {bytes(row) for row in np.asarray(array[:15])}  # a slab
    committed = {content(key, 0, BLOCK_NBYTES) for key in names(lease, 0)}
    assert stored - {bytes(BLOCK_NBYTES)} == committed
