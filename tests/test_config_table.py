"""The README's table of the configuration says of every key what the code says."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from tierd.daemon.config import Config, ModelConfig, Rule, SsdConfig, TenantConfig, TraceConfig
from tierd.daemon.section import Section, is_live
from tierd.daemon.values import Size, form

README = Path(__file__).parents[1] / "README.md"
FULL = Config(
    ssd=SsdConfig(path=Path("/ssd")),
    trace=TraceConfig(path=Path("/trace")),
    tenants={"NAME": TenantConfig(uids=(1,))},
    models={"NAME": ModelConfig()},
    rules=(Rule(policy="lru"),),
)


def keys(section: Section, name: str = "", live: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Each key of a section and what is inside it: dotted, its field, and whether it is live."""
    for key in fields(section):
        dotted, value = f"{name}.{key.name}".lstrip("."), getattr(section, key.name)
        of = live or is_live(key)
        inside = value.values() if dotted in ("tenants", "models") else [value]
        if dotted == "rules":
            yield from keys(value[0], "rules", of)
        elif all(isinstance(part, Section) for part in inside):
            for part in inside:
                yield from keys(part, dotted + ".NAME" * (value is not part), of)
        else:
            yield dotted, key, of


def rows() -> Iterator[tuple[str, str, str]]:
    """Each key of the table, its default and when it changes."""
    table = README.read_text().split("| key | what it sets |")[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        names, _, default, when = (cell.strip() for cell in line.strip("|").split(" | "))
        for name in re.findall(r"`([^`]+)`", names):
            yield name, default, when


def default(key: Field[Any]) -> str | None:
    """What the table says where a key has a default that is always the same."""
    value = key.default if key.default_factory is MISSING else key.default_factory()
    if value in (MISSING, None) or key.name in ("socket", "tenants"):
        return None
    parser = key.type.__metadata__[0]  # type: ignore[union-attr]
    return Size.form(value) if isinstance(parser, Size) else form(value)


def test_every_key_is_in_the_table_once_and_nothing_else_is() -> None:
    assert sorted(name for name, _, _ in rows()) == sorted(name for name, _, _ in keys(FULL))


def test_the_table_says_what_is_live() -> None:
    said = {name: when.split(",")[0] for name, _, when in rows()}
    assert said == {name: "live" if live else "restart" for name, _, live in keys(FULL)}


def test_the_table_says_each_default() -> None:
    said = {name: told for name, told, _ in rows()}
    for name, key, _ in keys(FULL):
        if (right := default(key)) is not None:
            assert f"`{right}`" in said[name], name
