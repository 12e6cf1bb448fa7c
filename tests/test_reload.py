"""The configuration changes while the daemon runs, by `tierd reload` and SIGHUP."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.content import BLOCK, BLOCK_NBYTES, LAYOUT, ask, check, prompt, serve
from tests.daemon import NOT_AHEAD, Daemon, Status, tiers
from tests.engine import Engine
from tests.wire import Wire, told
from tierd.daemon.config import Config
from tierd.daemon.reload import Reload
from tierd.errors import ConfigError
from tierd.layout import KVLayout
from tierd.protocol import Op

MIB = 1 << 20
WINDOWS = KVLayout("windows", 4, 2, 64, "float32", windows=(None, None, 24, 24))


def policies(status: Status) -> dict[str, list[Any]]:
    """The policies of the pools, by tier."""
    return {tier: [group["policy"] for group in groups] for tier, groups in tiers(status).items()}


def keys(changes: list[dict[str, str]]) -> list[str]:
    return [change["key"] for change in changes]


def command(daemon: Daemon, *words: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "tierd", *words, "--socket", str(daemon.socket)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_every_pool_gets_the_policy_of_the_last_rule_that_fits(tmp_path: Path) -> None:
    more = """
        device.policy = "slru"
        [[rules]]
        tier = "device"
        attention = "window"
        policy = "s3fifo"
        options = { small = 0.2 }
        [[rules]]
        tier = "host"
        layers = "0-1"
        policy = "fifo"
        [[rules]]
        model = "another"
        policy = "arc"
    """
    with Daemon(tmp_path, more=more) as daemon, daemon.client() as client:
        client.attach(WINDOWS)
        found = policies(daemon.status())
        assert found == {
            "device": ["SLRU", "S3FIFO"],
            "host": ["FIFO", "LRU"],
            "ssd": ["LRU", "LRU"],
        }


@pytest.mark.parametrize("by", ["command", "signal"])
def test_a_policy_is_exchanged_and_nothing_resident_is_lost(tmp_path: Path, by: str) -> None:
    with Daemon(tmp_path, device="8MiB", more=NOT_AHEAD) as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        for seed in range(6):
            ask(pool, prompt(seed, 8 * BLOCK))
        held = serve(pool, prompt(0, 8 * BLOCK))
        for policy, name in (("learned", "Learned"), ("s3fifo", "S3FIFO"), ("lru", "LRU")):
            daemon.configure(device="8MiB", more=f'{NOT_AHEAD}device.policy = "{policy}"\n')
            if by == "command":
                assert f'-> "{policy}"\n' in command(daemon, "reload").stdout
            else:
                daemon.signal(signal.SIGHUP)
            found = daemon.until(lambda s, name=name: policies(s)["device"] == [name])
            assert tiers(found)["device"][0]["committed"] == 48
            check(held)
        held.release()
        assert [ask(pool, prompt(seed, 8 * BLOCK + 1)) for seed in range(6)] == [8 * BLOCK] * 6


def test_a_handed_over_pool_goes_on_in_its_order(tmp_path: Path) -> None:
    """32 blocks fit; of 32 the 24 used longest ago give way, though they did not come first."""
    with Daemon(tmp_path, host="0B", ssd=None) as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        for seed in (1, 2, 3, 4, 1):
            ask(pool, prompt(seed, 8 * BLOCK))
        daemon.configure(host="0B", ssd=None, more='device.policy = "fifo"\n')
        client.reload()
        ask(pool, prompt(9, 24 * BLOCK))
        assert ask(pool, prompt(1, 8 * BLOCK + 1)) == 8 * BLOCK


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('device.policy = "lur"\n', "device.policy = 'lur' is not installed"),
        ('grace = "soon"\n', 'grace = "soon": must be a number'),
        ("[[rules]]\n", "rules.1.policy: is missing, and has no default"),
        ('[[rules]]\ntier = "tape"\npolicy = "lru"\n', 'rules.1.tier = "tape": must be one of'),
        ("device.size =\n", "is not TOML"),
        ('ssd.slab = "32MiB"\n', "is not TOML: Cannot overwrite"),
    ],
)
def test_a_bad_file_changes_nothing(tmp_path: Path, bad: str, message: str) -> None:
    with Daemon(tmp_path) as daemon, daemon.client() as client:
        client.attach(LAYOUT)
        before = daemon.status()
        daemon.configure(device="4MiB", more='host.policy = "arc"\n' + bad)
        with pytest.raises(ConfigError, match=message) as caught:
            client.reload()
        assert str(daemon.config) in str(caught.value)
        said = command(daemon, "reload")
        assert (said.returncode, said.stdout) == (1, "")
        assert message in said.stderr
        assert said.stderr.endswith("nothing has changed\n")
        daemon.signal(signal.SIGHUP)
        daemon.until(lambda _: daemon.log.read_text().count("is as it was") == 3)
        after = daemon.status()
        assert policies(after) == policies(before)
        assert after["tenants"][0]["memory"]["device"]["nbytes"] == 2 * MIB


def test_what_needs_a_restart_says_so_again_and_again(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, daemon.client() as client:
        daemon.configure(
            device="4MiB",
            ssd="8MiB",
            more='ssd.durability = "sync"\nblocks.policy = "auto"\nhost.policy = "arc"\n',
        )
        told = client.reload()
        assert told["path"] == str(daemon.config)
        assert keys(told["changed"]) == ["host.policy", "ssd.size"]
        late = ["device.size", "ssd.durability", "blocks.policy"]
        assert keys(told["needs_restart"]) == late
        told = client.reload()
        assert (keys(told["changed"]), keys(told["needs_restart"])) == ([], late)
        said = command(daemon, "reload")
        assert said.returncode == 0
        assert 'device.size: "2MiB" -> "4MiB" (after a restart)\n' in said.stdout
        client.attach(LAYOUT)
        assert policies(daemon.status())["host"] == ["ARC"]


def test_what_does_not_fit_what_runs_changes_nothing(tmp_path: Path) -> None:
    stopped = Daemon(tmp_path)
    text = stopped.config.read_text()
    stopped.config.write_text(text.replace('slab = "1MiB"', 'slab = "8MiB"'))
    with stopped as daemon, daemon.client() as client:
        daemon.config.write_text(text.replace('"16MiB"', '"4MiB"') + 'host.policy = "arc"\n')
        why = (
            r'ssd.slab = "8MiB": must be at most the size, "4MiB"; as long as the rest is as it is'
        )
        with pytest.raises(ConfigError, match=why):
            client.reload()
        client.attach(LAYOUT)
        assert policies(daemon.status())["host"] == ["LRU"]


async def test_who_has_no_file_has_nothing_to_reload() -> None:
    config = Config.default()
    with pytest.raises(ConfigError, match="without --config"):
        await Reload(config, None).read(config)


def test_prefetch_and_the_largest_frame_change_live(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, daemon.client() as client:
        daemon.configure(more='max_frame = "64KiB"\nprefetch.policy = "next"\n')
        told_keys = keys(client.reload()["changed"])
        assert told_keys == ["max_frame", "prefetch.policy"]
        with Wire(daemon.socket) as wire:
            wire.hello()
            wire.send(Op.ACQUIRE, bytes(1 << 17))
            assert "at most 65536" in told(wire.frame())


def test_a_tier_shrinks_and_grows_while_two_engines_go_on(tmp_path: Path) -> None:
    sizes = {"device": "8MiB", "host": "16MiB", "ssd": "32MiB"}
    with (
        Daemon(tmp_path, **sizes) as daemon,  # type: ignore[arg-type]
        Engine(daemon.socket) as a,
        Engine(daemon.socket) as b,
        daemon.client() as client,
    ):
        for device, host in (("4MiB", "6MiB"), ("2MiB", "4MiB"), ("6MiB", "16MiB")):
            for seed, engine in enumerate((a, b)):
                engine.tell("many", seed=seed, requests=60, trunks=30, longest=200)
            daemon.configure(device=device, host=host, ssd="8MiB")
            assert not client.reload()["needs_restart"]
            a.answer(), b.answer()  # every byte of every hit is checked there
            found = daemon.until(
                lambda s: not sum(m["nbytes_over"] for m in s["tenants"][0]["memory"].values())
            )
            memory = found["tenants"][0]["memory"]
            for name, size in (("device", device), ("host", host)):
                assert memory[name]["nbytes"] == int(size[:-3]) * MIB
                used = tiers(found)[name][0]["capacity"] * BLOCK_NBYTES
                assert used <= memory[name]["nbytes"]
        daemon.until(lambda s: s["tenants"][0]["ssd"]["nbytes_used"] <= 8 * MIB)


def test_memory_that_is_given_up_goes_back_to_the_system(tmp_path: Path) -> None:
    def shared(daemon: Daemon) -> int:
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        return int(status.split("RssShmem:")[1].split()[0]) << 10

    with (
        Daemon(tmp_path, device="32MiB", host="0B", ssd=None) as daemon,
        daemon.client() as client,
        client.attach(LAYOUT) as pool,
    ):
        for seed in range(64):
            ask(pool, prompt(seed, 8 * BLOCK))
        daemon.until(lambda _: shared(daemon) >= 32 * MIB)
        daemon.configure(device="4MiB", host="0B", ssd=None)
        client.reload()
        daemon.until(lambda _: shared(daemon) <= 5 * MIB)
        daemon.configure(device="32MiB", host="0B", ssd=None)
        client.reload()
        for seed in range(64):
            ask(pool, prompt(seed, 8 * BLOCK))
        assert tiers(daemon.status())["device"][0]["capacity"] == 32 * MIB // BLOCK_NBYTES


def test_a_tier_grows_up_to_what_is_reserved(tmp_path: Path) -> None:
    more = 'device.reserve = "8MiB"\n'
    with Daemon(tmp_path, host="0B", ssd=None, more=more) as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        assert daemon.status()["tenants"][0]["memory"]["device"]["nbytes"] == 2 * MIB
        with pytest.raises(Exception, match="blocks"):
            serve(pool, prompt(1, 40 * BLOCK))
        daemon.configure(device="8MiB", host="0B", ssd=None, more=more)
        assert keys(client.reload()["changed"]) == ["device.size"]
        held = serve(pool, prompt(1, 100 * BLOCK))
        check(held)
        daemon.configure(device="10MiB", host="0B", ssd=None, more='device.reserve = "12MiB"\n')
        late = client.reload()
        assert (late["changed"], keys(late["needs_restart"])) == (
            [],
            ["device.size", "device.reserve"],
        )


FOREIGNER = """
import os, sys, tierd.client
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    with tierd.connect(sys.argv[1]) as client:
        client.reload()
except tierd.TierdError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_only_the_daemons_own_user_and_root_may_have_it_reload() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # others may enter
        with Daemon(Path(folder), more="[tenants.us]\nuids = [0, 65534]\n") as daemon:
            command = [sys.executable, "-c", FOREIGNER, str(daemon.socket)]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert said == "Refused uid 65534 may not reload the configuration\n"
            assert "in force" not in daemon.log.read_text()


def test_blocks_in_use_keep_their_places_when_a_tier_shrinks(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, device="8MiB", host="0B", ssd=None) as daemon,
        daemon.client() as client,
        client.attach(LAYOUT) as pool,
    ):
        held = [serve(pool, prompt(seed, 20 * BLOCK)) for seed in range(5)]
        daemon.configure(host="0B", ssd=None)
        client.reload()
        assert "still to be given up" in command(daemon, "status").stdout
        for lease in held:
            check(lease)
            lease.release()
        daemon.until(lambda s: s["tenants"][0]["memory"]["device"]["nbytes"] == 2 * MIB)
