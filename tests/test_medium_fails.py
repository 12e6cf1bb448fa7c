"""The SSD fails while the daemon runs (DESIGN §8): it serves from the other tiers, and resumes."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tierd
from tests.content import BLOCK, LAYOUT, ask, check, prompt
from tests.daemon import Daemon, Status, held, tiers
from tests.engine import Engine
from tests.failing import PAUSE_S, STORE, medium
from tests.torture import Count

PROMPT = 8 * BLOCK


@contextmanager
def attached(daemon: Daemon) -> Iterator[tierd.Pool]:
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        yield pool


def namespace(status: Status) -> Status:
    found: Status = status["tenants"][0]["namespaces"][0]
    return found


def paused(status: Status) -> bool:
    return bool(namespace(status)["tiers"][-1]["paused"])


def on_ssd(status: Status) -> int:
    return tiers(status)["ssd"][0]["committed"]


def idle(status: Status) -> bool:
    return held(status) == 0


def is_right(folder: Path) -> int:
    """After the daemon's end: every block of the SSD is what its name says. How many."""
    count = Count()
    count.blocks_of(folder / "ssd" / "default")
    assert (count.wrong, count.refused) == ([], 0)
    return count.right


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS", "EIO", "EDQUOT"])
def test_a_medium_that_refuses_writes_is_left_alone_and_tried_again(
    tmp_path: Path, error: str
) -> None:
    with Daemon(tmp_path, more=STORE) as daemon, attached(daemon) as pool:
        for seed in range(10):
            ask(pool, prompt(seed, PROMPT))
        before = on_ssd(daemon.until(idle))
        assert before > 0
        with medium(tmp_path, write=error):
            for seed in range(10, 20):
                ask(pool, prompt(seed, PROMPT))  # no error reaches an engine
            status = daemon.until(idle)
            assert namespace(status)["failed"] > 0
            assert namespace(status)["dropped"] > 0  # they had nowhere to go
            assert "refuses writes" in daemon.log.read_text()
            assert ask(pool, [*prompt(19, PROMPT), 7]) == PROMPT  # from memory
            on_medium = [s for s in range(10) if ask(pool, [*prompt(s, PROMPT), 7]) == PROMPT]
            assert on_medium, "what is on the medium is still served"
        time.sleep(1.5 * PAUSE_S)
        daemon.until(lambda status: not paused(status))
        now = on_ssd(daemon.status())
        for seed in range(20, 30):
            ask(pool, prompt(seed, PROMPT))
        daemon.until(lambda status: on_ssd(status) > now)
    assert is_right(tmp_path) > before


def test_an_unreadable_block_is_dropped_and_counted_and_its_place_used_again(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path, more=STORE) as daemon, attached(daemon) as pool:
        for seed in range(12):
            ask(pool, prompt(seed, PROMPT))
        daemon.until(idle)
        with medium(tmp_path, read="EIO"):
            with pool.acquire([*prompt(0, PROMPT), 7]) as lease:
                assert lease.wait() == 0  # a shorter hit than was planned, and no error
                check(lease)
                assert len(lease.tables[0]) == 9
            status = daemon.until(idle)
            assert 1 <= namespace(status)["lost"] <= 8
            log = daemon.log.read_text()
            assert "cannot read block" in log
            assert "/store.zarr/" in log
            with pool.acquire([*prompt(0, PROMPT), 7]) as lease:
                assert lease.hit == 0  # nobody is promised it again
        assert ask(pool, [*prompt(0, PROMPT), 7]) == 0
        assert ask(pool, [*prompt(0, PROMPT), 7]) == PROMPT
        group = tiers(daemon.until(idle))["ssd"][0]
        assert group["free"] + group["committed"] == group["capacity"]
    assert is_right(tmp_path) > 0


def test_the_daemon_ends_well_while_its_medium_refuses_everything(tmp_path: Path) -> None:
    with Daemon(tmp_path, more=STORE) as daemon, attached(daemon) as pool:
        for seed in range(6):
            ask(pool, prompt(seed, PROMPT))
        with medium(tmp_path, write="EROFS", read="EIO"):
            daemon.terminate()
    with Daemon(tmp_path, more=STORE) as daemon, attached(daemon) as pool:
        assert ask(pool, prompt(1, PROMPT)) % BLOCK == 0


def test_a_hit_cut_short_before_its_answer_gives_no_place_that_is_still_read(
    tmp_path: Path,
) -> None:
    """Two wait for the same loads, which fail while demotions are slow. The places each gets in
    their stead are those of blocks that are still on their way out: writing there at once would
    give those other bytes under their names (I2)."""
    with (
        Daemon(tmp_path, host="0B", more=STORE) as daemon,
        Engine(daemon.socket) as a,
        Engine(daemon.socket) as b,
        attached(daemon) as pool,
    ):
        for seed in range(5):
            ask(pool, prompt(seed, PROMPT))
        cold = [*prompt(0, PROMPT), 7]
        daemon.until(lambda status: on_ssd(status) >= 8)
        with medium(tmp_path, read="EIO", slow=0.1):
            a.tell("acquire", tokens=cold)
            time.sleep(0.02)
            b.tell("acquire", tokens=cold, room=PROMPT + 7 * BLOCK)
            for one in (b, a):
                lease = one.answer()["lease"]
                hit = one.ask("wait", lease=lease)["hit"]
                one.ask("write", lease=lease, start=hit, stop=PROMPT)
            status = daemon.until(lambda status: on_ssd(status) > 16)
            assert namespace(status)["lost"] > 0
    assert is_right(tmp_path) > 16


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB below the SSD folder of a daemon in `tmp_path`."""
    path = tmp_path / "ssd"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(path)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("nothing can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_file_system_is_lived_with_until_it_has_room_again(
    tmp_path: Path, small_disk: Path
) -> None:
    with Daemon(tmp_path, more=STORE) as daemon, attached(daemon) as pool:
        for seed in range(30):
            ask(pool, prompt(seed, PROMPT))
        status = daemon.until(idle)
        full = on_ssd(status)
        assert 0 < full < 6 * 16
        assert namespace(status)["failed"] > 0
        assert "[Errno 28]" in daemon.log.read_text()
        assert ask(pool, [*prompt(29, PROMPT), 7]) == PROMPT
        subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
        time.sleep(1.5 * PAUSE_S)
        for seed in range(30, 50):
            ask(pool, prompt(seed, PROMPT))
        daemon.until(lambda status: on_ssd(status) > full)
    assert is_right(tmp_path) > full
