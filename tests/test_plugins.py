"""Plug-ins: found by entry point or by module, and every mistake says what it is."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policies.admission import SecondHit
from policies.block_size import Uniform
from policies.lru import LRU
from policies.placement import Inclusive
from policies.prefetch import Next, Nothing
from policies.promising import Promising
from tierd.daemon import plugins
from tierd.errors import ConfigError

MODULE = """
from policies.base import EvictionPolicy
from policies.lru import LRU

class Mine(LRU):
    class Inner(LRU): ...

class Unfinished(EvictionPolicy):
    def remove(self, key): ...

number = 7
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with entry points, and modules, in a folder of its own."""
    monkeypatch.syspath_prepend(tmp_path)
    plugins._find.cache_clear()

    def install(group: str, distribution: str = "stranger", **points: str) -> None:
        folder = tmp_path / f"{distribution}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        lines = [f"{name} = {value}" for name, value in points.items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))

    (tmp_path / "stranger_policies.py").write_text(MODULE)
    (tmp_path / "stranger_broken.py").write_text("import not_installed_anywhere")
    (tmp_path / "stranger_invalid.py").write_text("def (")
    yield install
    monkeypatch.undo()
    plugins._find.cache_clear()


def test_our_own_come_through_the_same_door() -> None:
    assert plugins.policy("lru") is LRU
    assert plugins.block_sizes("uniform") is Uniform
    assert plugins.prefetch("next") is Next
    assert plugins.prefetch("none") is Nothing
    assert plugins.admission("learned") is Promising
    assert plugins.admission("second-hit") is SecondHit
    assert plugins.placement("inclusive") is Inclusive
    assert {"cpu", "cuda", "ssd"} <= set(plugins.installed(plugins.STORES))


def test_a_class_is_found_by_its_entry_point(install: Install) -> None:
    install("tierd.policies", mine="stranger_policies:Mine")
    assert plugins.policy("mine").__name__ == "Mine"
    assert "mine" in plugins.installed(plugins.POLICIES)


@pytest.mark.usefixtures("install")
def test_a_class_is_found_by_module_and_name() -> None:
    assert plugins.policy("stranger_policies:Mine").__name__ == "Mine"
    assert plugins.policy("stranger_policies:Mine.Inner").__name__ == "Inner"


def test_an_unknown_name_lists_what_is_installed(install: Install) -> None:
    install("tierd.policies", mine="stranger_policies:Mine")
    with pytest.raises(
        ConfigError, match=r"^'lur' is not installed in tierd.policies; installed: .*lru, .*mine"
    ):
        plugins.policy("lur")


def test_a_name_of_another_group_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"'lru' is not installed in tierd.block_sizes"):
        plugins.block_sizes("lru")


def test_two_distributions_may_not_give_one_name_to_different_classes(install: Install) -> None:
    install("tierd.policies", "first", mine="stranger_policies:Mine")
    install("tierd.policies", "second", mine="stranger_policies:Mine.Inner")
    with pytest.raises(ConfigError, match=r"'mine' is installed in tierd.policies more than once"):
        plugins.policy("mine")


def test_a_distribution_seen_twice_is_one(install: Install) -> None:
    install("tierd.policies", "first", mine="stranger_policies:Mine")
    install("tierd.policies", "second", mine="stranger_policies:Mine")
    assert plugins.policy("mine").__name__ == "Mine"


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:X", "'nowhere:X': cannot import nowhere: ModuleNotFoundError: No module named"),
        ("stranger_broken:X", "cannot import stranger_broken: ModuleNotFoundError: No module"),
        ("stranger_invalid:X", "cannot import stranger_invalid: SyntaxError"),
        ("stranger_policies:Min", "'stranger_policies:Min': stranger_policies has no Min"),
        ("stranger_policies:Mine.X", "stranger_policies has no Mine.X"),
        ("stranger_policies:number", "is 7, not a subclass of policies.base.EvictionPolicy"),
        ("builtins:dict", "is <class 'dict'>, not a subclass of policies.base.EvictionPolicy"),
        (
            "stranger_policies:Unfinished",
            "does not implement insert, touch, victims of policies.base.EvictionPolicy",
        ),
        (":Mine", "':Mine' is not of the form \"module:Class\""),
        ("stranger_policies:", "is not of the form"),
        (".relative:Mine", "cannot import .relative: TypeError"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plugins.policy(name)


def test_an_entry_point_that_leads_nowhere_says_where(install: Install) -> None:
    install("tierd.policies", gone="nowhere:Gone", module="stranger_policies")
    with pytest.raises(ConfigError, match="'gone': cannot import nowhere"):
        plugins.policy("gone")
    with pytest.raises(ConfigError, match="'module' is <module"):
        plugins.policy("module")


def test_a_tier_that_is_memory_wants_a_block_store_and_a_persistent_one_a_volume() -> None:
    with pytest.raises(ConfigError, match=r"not a subclass of storage\.base\.BlockStore"):
        plugins.store("policies.lru:LRU")
    with pytest.raises(ConfigError, match=r"not a subclass of storage\.base\.Volume"):
        plugins.volume("policies.lru:LRU")
