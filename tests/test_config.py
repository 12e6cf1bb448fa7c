"""The configuration: what a good file means, what is the default, and how it is shown."""

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from tierd.daemon.config import (
    Attention,
    BlocksConfig,
    Config,
    DeviceConfig,
    HostConfig,
    ModelConfig,
    PlacementConfig,
    PrefetchConfig,
    Rule,
    SsdConfig,
    TenantConfig,
    TierName,
    TraceConfig,
    describe,
)
from tierd.errors import ConfigError

MIB = 2**20
GIB = 2**30
EXAMPLE = Path(__file__).parents[1] / "scripts" / "tierd.toml"

FULL = """
socket = "/run/user/7/tierd.sock"
grace = 10
quarantine_grace = 2.5
max_frame = "1MiB"

[device]
store = "cpu"
size = "97MiB"
policy = "lru"
[device.options]

[host]
size = 134217728
policy = "policies.lru:LRU"

[ssd]
path = "/var/cache/tierd"
size = "1.5GB"
min_free = 0
slab = "16 MiB"
store = "ssd"
policy = "lru"
admission = "second-hit"
admission_options = { memory = 1000 }

[blocks]
policy = "hierarchical"
granule = 8
[blocks.options]
sizes = { "0-9" = 64, "12" = 32 }
default = 16

[prefetch]
policy = "policies.prefetch:Next"
options = { depth = 8 }

[placement]
policy = "exclusive"
options = { ratio = 3 }
[trace]
path = "/var/lib/tierd/trace"
size = "1GiB"

[tenants.alice]
uids = [1000, 1001]
share = 0.75
[tenants.bob]
uids = [1002]
share = 0.25

[[rules]]
policy = "fifo"
[[rules]]
tier = "ssd"
tenant = "bob"
model = "a b"
attention = "window"
layers = "0-9"
policy = "s3fifo"
options = { small = 0.2 }
"""

FULL_CONFIG = Config(
    socket=Path("/run/user/7/tierd.sock"),
    grace=10.0,
    quarantine_grace=2.5,
    max_frame=MIB,
    device=DeviceConfig(size=96 * MIB),
    host=HostConfig(size=128 * MIB, policy="policies.lru:LRU"),
    ssd=SsdConfig(
        path=Path("/var/cache/tierd"),
        size=1_500_000_000,
        min_free=0,
        slab=16 * MIB,
        store="ssd",
        admission="second-hit",
        admission_options={"memory": 1000},
    ),
    blocks=BlocksConfig(
        policy="hierarchical",
        options={"sizes": {"0-9": 64, "12": 32}, "default": 16},
        granule=8,
    ),
    prefetch=PrefetchConfig(policy="policies.prefetch:Next", options={"depth": 8}),
    placement=PlacementConfig(policy="exclusive", options={"ratio": 3}),
    trace=TraceConfig(path=Path("/var/lib/tierd/trace"), size=GIB),
    tenants={
        "alice": TenantConfig(uids=(1000, 1001), share=0.75),
        "bob": TenantConfig(uids=(1002,), share=0.25),
    },
    rules=(
        Rule(policy="fifo"),
        Rule(
            tier=TierName.SSD,
            tenant="bob",
            model="a b",
            attention=Attention.WINDOW,
            layers="0-9",
            policy="s3fifo",
            options={"small": 0.2},
        ),
    ),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tierd.toml"


def test_a_full_file_is_read_key_by_key(file: Path) -> None:
    file.write_text(FULL)
    assert Config.load(file) == FULL_CONFIG


def test_an_empty_file_is_the_default(file: Path) -> None:
    file.write_text("")
    assert Config.load(file) == Config.default()


def test_the_default_is_a_device_and_a_host_tier_for_oneself() -> None:
    config = Config.default()
    assert (config.grace, config.quarantine_grace, config.max_frame) == (30.0, 60.0, 16 * MIB)
    assert config.device == DeviceConfig(store="cpu", size=GIB, policy="lru", options={})
    assert config.host == HostConfig(size=4 * GIB, policy="lru", options={})
    assert config.ssd is None
    assert config.blocks == BlocksConfig(policy="uniform", options={}, granule=None)
    assert config.prefetch == PrefetchConfig(policy="none", options={})
    assert config.placement == PlacementConfig(policy="inclusive", options={})
    assert config.tenants == {"default": TenantConfig(uids=(os.getuid(),), share=1.0)}


def test_an_ssd_section_needs_only_a_path(file: Path) -> None:
    file.write_text('[ssd]\npath = "~/kv"')
    ssd = Config.load(file).ssd
    assert ssd == SsdConfig(
        path=Path.home() / "kv", size=16 * GIB, min_free=GIB, slab=64 * MIB, store="ssd"
    )


@pytest.mark.parametrize("size", ["0", '"0"', '"0MiB"'])
def test_a_host_size_of_zero_leaves_the_tier_out(file: Path, size: str) -> None:
    file.write_text(f"[host]\nsize = {size}")
    assert Config.load(file).host is None
    assert Config(host=HostConfig(size=0)).host is None


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("4194304", 4 * MIB),
        ('"4194304"', 4 * MIB),
        ('"96MiB"', 96 * MIB),
        ('"2 GiB"', 2 * GIB),
        ('"1.5GiB"', 3 * GIB // 2),
        ('"1TiB"', 1024 * GIB),
        ('"0.1GiB"', 102 * MIB),
        ('"100MB"', 94 * MIB),
        ('"3MiB"', 2 * MIB),
        ('"4194303B"', 2 * MIB),
    ],
)
def test_a_size_is_bytes_or_has_a_unit_and_is_rounded_down_to_extents(
    file: Path, size: str, nbytes: int
) -> None:
    file.write_text(f"device.size = {size}\nhost.size = {size}")
    config = Config.load(file)
    assert config.device.size == nbytes
    assert config.host is not None
    assert config.host.size == nbytes


def test_what_code_makes_is_checked_as_what_a_file_says() -> None:
    with pytest.raises(ConfigError, match=r"^size = 5: must be from"):
        DeviceConfig(size=5)
    with pytest.raises(ConfigError, match=r"^policy = 'lur' is not installed"):
        HostConfig(policy="lur")


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Config.default().grace = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("config", [Config.default(), FULL_CONFIG, Config(host=None)])
def test_what_describe_prints_is_read_back_as_the_same(file: Path, config: Config) -> None:
    file.write_text(describe(config))
    assert Config.load(file) == config


def test_describe_shows_sizes_as_people_write_them() -> None:
    shown = describe(FULL_CONFIG)
    assert '[device]\nsize = "96MiB"\npolicy = "lru"\n' in shown
    assert 'watermarks = [0.05, 0.1]\nstore = "cpu"\n' in shown
    assert "size = 1500000000\n" in shown
    assert "[tenants.alice]\nuids = [1000, 1001]\nshare = 0.75\n" in shown


def test_what_differs_is_told_by_key_and_whether_it_is_live() -> None:
    new = replace(
        FULL_CONFIG,
        grace=20,
        host=replace(FULL_CONFIG.host, size=2 * MIB, reserve=GIB),
        ssd=None,
        tenants={"alice": replace(FULL_CONFIG.tenants["alice"], share=0.5)},
        models={"m": ModelConfig(floor=MIB)},
        rules=FULL_CONFIG.rules[:1],
    )
    found = {c.key: (c.old, c.new, c.live) for c in FULL_CONFIG.changes(new)}
    ssd = found.pop("ssd")
    assert ssd[0].startswith('{size = 1500000000, policy = "lru", path = "/var/cache/tierd"')
    assert ssd[1:] == ("", False)
    rules = found.pop("rules")
    assert rules[0].startswith('[{policy = "fifo"}, {tier = "ssd", tenant = "bob", model = "a b"')
    assert rules[1:] == ('[{policy = "fifo"}]', True)
    assert found == {
        "grace": ("10.0", "20.0", True),
        "host.size": ('"128MiB"', '"2MiB"', True),
        "host.reserve": ("", '"1GiB"', False),
        "tenants.alice.share": ("0.75", "0.5", False),
        "tenants.bob": ("{uids = [1002], share = 0.25}", "", False),
        "models.m": ("", '{weight = 1.0, floor = "1MiB"}', True),
    }
    assert not list(new.changes(new))


def test_taking_what_is_live_leaves_the_rest() -> None:
    new = replace(
        FULL_CONFIG,
        socket=Path("/elsewhere"),
        device=DeviceConfig(size=4 * MIB, reserve=8 * MIB, policy="fifo", watermarks=(0, 0)),
        models={"m": ModelConfig(weight=2)},
    )
    taken = FULL_CONFIG.taking(new)
    assert taken == replace(
        FULL_CONFIG,
        device=DeviceConfig(size=4 * MIB, policy="fifo", watermarks=(0, 0)),
        models=new.models,
    )
    assert {change.key for change in taken.changes(new)} == {"socket", "device.reserve"}


def test_the_socket_is_where_the_user_can_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERD_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert Config.default().socket == Path("/run/user/7/tierd/tierd.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert Config.default().socket == Path("/run/tierd/tierd.sock")
    monkeypatch.setattr(os, "getuid", lambda: 7)
    assert Config.default().socket == Path("/tmp/tierd-7/tierd.sock")


def test_the_example_file_is_good_and_says_something_of_every_key() -> None:
    config = Config.load(EXAMPLE)
    assert config.ssd is not None
    text = EXAMPLE.read_text()
    for section in (
        config,
        config.device,
        config.ssd,
        config.blocks,
        config.prefetch,
        *config.tenants.values(),
        ModelConfig(),
        Rule(policy="lru"),
        TraceConfig(path=Path("/trace")),
    ):
        for key in fields(section):
            assert f"{key.name} = " in text or f"[{key.name}" in text or f".{key.name}]" in text


def test_reading_a_configuration_does_not_import_torch(file: Path) -> None:
    file.write_text(FULL)
    code = (
        "import sys, pathlib; from tierd.daemon.config import Config;"
        "Config.load(pathlib.Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, cwd=EXAMPLE.parents[1])
