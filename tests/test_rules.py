"""Which policy a pool gets: the last rule all of whose conditions fit it."""

import os
from pathlib import Path

import pytest

from tests.content import LAYOUT
from tests.daemon import Daemon, tiers
from tierd.daemon.config import Attention, Config, DeviceConfig, Rule, TierName
from tierd.daemon.rules import Choice, PoolFacts, choices, choose, fits
from tierd.layout import KVLayout

POOL = PoolFacts(TierName.DEVICE, "a", "m", Attention.WINDOW, (2, 3, 5))


@pytest.mark.parametrize(
    ("conditions", "fit"),
    [
        ({}, True),
        ({"tier": "device"}, True),
        ({"tier": "host"}, False),
        ({"tenant": "a"}, True),
        ({"tenant": "b"}, False),
        ({"model": "m"}, True),
        ({"model": "M"}, False),
        ({"attention": "window"}, True),
        ({"attention": "full"}, False),
        ({"layers": "2-5"}, True),
        ({"layers": "0-99"}, True),
        ({"layers": "3-9"}, False),
        ({"layers": "2-4"}, False),
        ({"layers": "2"}, False),
        ({"tier": "device", "tenant": "a", "model": "m", "layers": "0-5"}, True),
        ({"tier": "device", "tenant": "a", "model": "n", "layers": "0-5"}, False),
    ],
)
def test_a_rule_fits_if_all_its_conditions_do(conditions: dict[str, str], fit: bool) -> None:
    assert fits(Rule.of({**conditions, "policy": "fifo"}), POOL) is fit


def test_the_last_rule_that_fits_counts_and_else_the_tiers_own() -> None:
    rules = tuple(
        Rule.of(raw)
        for raw in (
            {"tier": "host", "policy": "lfu"},
            {"policy": "s3fifo", "options": {"small": 0.3}},
            {"model": "m", "policy": "fifo"},
        )
    )
    config = Config(device=DeviceConfig(policy="arc"), rules=rules)
    assert choose(config, POOL).why == "rules.3"
    other = choose(config, PoolFacts(TierName.HOST, "a", "n", Attention.FULL, (0,)))
    assert (other, other.why) == (Choice("s3fifo", {"small": 0.3}, "whatever"), "rules.2")
    own = choose(Config(device=DeviceConfig(policy="arc")), POOL)
    assert (own.policy, own.why) == ("arc", "device.policy")


def test_each_layer_group_is_chosen_for_alone() -> None:
    layout = KVLayout("m", 4, 2, 64, "float32", windows=(None, 24, None, 24))
    rule = Rule.of({"attention": "window", "policy": "fifo"})
    found = choices(
        Config(rules=(rule,)), "device", "default", "m", layout.with_block_sizes([16] * 4)
    )
    assert [choice.policy for choice in found] == ["lru", "fifo"]


def test_a_tenant_has_policies_of_its_own(tmp_path: Path) -> None:
    more = f"""
        [tenants.a]
        uids = [{os.getuid()}]
        share = 0.5
        [tenants.b]
        uids = [{os.getuid()}]
        share = 0.5
        [[rules]]
        tenant = "b"
        policy = "gdsf"
        options = {{ slope = 0.5 }}
    """
    sizes = {"device": "4MiB", "host": "4MiB", "ssd": "8MiB"}
    with Daemon(tmp_path, **sizes, more=more) as daemon:  # type: ignore[arg-type]
        with daemon.client("a") as a, daemon.client("b") as b:
            a.attach(LAYOUT)
            b.attach(LAYOUT)
            status = daemon.status()
        found = [tiers(status, tenant)["host"][0]["policy"] for tenant in range(2)]
        assert found == ["LRU", "GDSF"]
