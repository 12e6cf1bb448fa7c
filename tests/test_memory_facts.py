"""What the system lets the daemon have: locked memory, memory at all, and huge pages."""

import json
import resource
from pathlib import Path

import pytest

from tests.content import LAYOUT
from tests.daemon import Daemon
from tests.test_cli import command
from tierd.daemon.monitor import memlock_limit, memory_limit, memory_warnings

MIB = 2**20


def test_tiers_that_fit_need_no_warning() -> None:
    assert list(memory_warnings(64 * MIB, 32 * MIB, 64 * MIB, 32 * MIB)) == []
    assert list(memory_warnings(64 * MIB, 32 * MIB, 64 * MIB, None)) == []


def test_tiers_over_the_memory_limit_are_warned_of() -> None:
    (warning,) = memory_warnings(65 * MIB, 0, 64 * MIB, 0)
    assert f"{65 * MIB} bytes, but this process may use only {64 * MIB}" in warning


def test_pinned_memory_over_the_lock_limit_is_warned_of() -> None:
    (warning,) = memory_warnings(64 * MIB, 9 * MIB, 64 * MIB, 8 * MIB)
    assert f"{9 * MIB} bytes for the GPU, but this process may lock only {8 * MIB}" in warning
    assert "RLIMIT_MEMLOCK" in warning


@pytest.mark.parametrize(
    ("groups", "limits", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "7\n"}, 7),
        ("0::/a/b\n", {"a/b/memory.max": "5\n", "a/memory.max": "7\n"}, 5),
        ("0::/elsewhere\n", {"memory.max": "6\n"}, 6),
        ("4:memory:/a\n1:cpu:/\n0::/\n", {"memory/a/memory.limit_in_bytes": "8\n"}, 8),
        ("4:memory:/away\n", {"memory/memory.limit_in_bytes": "9\n"}, 9),
        ("1:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "8\n"}, None),
        ("0::/a\n", {}, None),
        ("", {}, None),
    ],
)
def test_the_limit_is_the_least_of_all_cgroups_above_either_version(
    tmp_path: Path, groups: str, limits: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    for name, text in limits.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = memory_limit(tmp_path / "cgroup", tmp_path / "tree")
    assert found == (limit or memory_limit(tmp_path, tmp_path))
    assert found >= 5


def test_a_limit_on_locked_memory_is_told_and_its_absence_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert memlock_limit() in (None, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    limits = {resource.RLIMIT_MEMLOCK: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert memlock_limit() is None


def test_status_tells_the_limits_and_the_huge_pages(daemon: Daemon) -> None:
    def known(status: dict[str, object]) -> bool:
        return status["tenants"][0]["memory"]["device"]["nbytes_huge"] is not None  # type: ignore

    with daemon.client() as client, client.attach(LAYOUT):
        status = daemon.until(known)
        assert status["process"]["memlock_limit_nbytes"] == memlock_limit()
        assert status["process"]["memory_limit_nbytes"] == memory_limit()
        device = status["tenants"][0]["memory"]["device"]
        assert 0 <= device["nbytes_huge"] <= device["nbytes"]
        assert "nbytes_huge" not in status["tenants"][0]["memory"]["host"]
        printed = command("status", "--socket", daemon.socket).stdout
        assert " on huge pages" in printed
        assert " may be locked" in printed
        told = json.loads(command("status", "--socket", daemon.socket, "--json").stdout)
        assert told["tenants"][0]["memory"]["device"] == device


def test_a_daemon_that_may_not_have_its_tiers_says_so(tmp_path: Path) -> None:
    with Daemon(tmp_path, host="4096GiB") as daemon:
        log = daemon.log.read_text()
    assert f"the tiers in memory may grow to {4096 * 2**30 + 2 * MIB} bytes" in log


def test_a_daemon_whose_tiers_fit_says_nothing(daemon: Daemon) -> None:
    assert " WARNING " not in daemon.log.read_text()
