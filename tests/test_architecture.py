"""The one rule of imports, what a process never loads, and what our code never uses (DESIGN §2)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("tierd", "storage", "policies")

# Where a broad `except` may stand, and why.
BROAD = {
    "tierd/daemon/connection.py": "its top: one engine's surprise must not end the others",
    "tierd/daemon/plugins.py": "importing a stranger's module",
    "tierd/daemon/config.py": "making a stranger's policy",
    "tierd/daemon/policy_file.py": "what a stranger's policy knows, said and taken",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module that is imported, anywhere, and every name taken from one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def package_of(name: str) -> str:
    return name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]


def side(module: str) -> str | None:
    """Which part of ours a module belongs to."""
    if module == "tierd.daemon" or module.startswith("tierd.daemon."):
        return "daemon"
    top = module.partition(".")[0]
    return top if top in (*PACKAGES, "tests", "scripts") else None


MAY_IMPORT = {
    "tierd": {"tierd"},
    "storage": {"storage"},
    "policies": {"policies"},
    "daemon": {"daemon", "tierd", "storage", "policies"},
}


def inside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ast.walk(node)


@pytest.mark.parametrize("name", FILES)
def test_a_module_imports_only_what_its_side_may(name: str) -> None:
    reached = {module: side(module) for module in imports(TREES[name], package_of(name))}
    allowed = MAY_IMPORT[side(name) or ""]
    if name == "tierd.__main__":
        allowed = allowed | {"daemon"}
    assert {module: of for module, of in reached.items() if of and of not in allowed} == {}


def test_the_command_line_imports_the_daemon_lazily() -> None:
    tree = TREES["tierd.__main__"]
    lazy = {id(node) for node in inside_functions(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in lazy:
            assert not any(side(name) for name in imports(node, "tierd"))


def test_reading_imports_sees_every_way_to_import() -> None:
    program = """
import storage.base as a
from policies import lru
from . import block
from .daemon import pool
def late():
    from storage.ssd import SsdVolume
    importlib.import_module("policies.base")
"""
    assert set(imports(ast.parse(program), "tierd")) == {
        "storage.base",
        "policies.lru",
        "tierd.block",
        "tierd.daemon.pool",
        "storage.ssd.SsdVolume",
        "policies.base",
    }
    assert set(imports(ast.parse("from .. import errors"), "tierd.daemon")) == {"tierd.errors"}


def loaded_by(module: str) -> set[str]:
    """Every module that a fresh process has after importing `module`."""
    program = f"import sys, {module}; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize("module", ["tierd", "tierd.client", "tierd.daemon.server"])
def test_importing_it_loads_no_torch(module: str) -> None:
    assert "torch" not in loaded_by(module)


@pytest.mark.parametrize("module", ["tierd", "tierd.client"])
def test_an_engine_loads_nothing_of_the_daemons(module: str) -> None:
    ours = {of for name in loaded_by(module) if (of := side(name))}
    assert ours == {"tierd"}


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_named_by_pythons_hash_or_pickled(name: str) -> None:
    used = {node.id for node in ast.walk(TREES[name]) if isinstance(node, ast.Name)}
    assert "hash" not in used
    tops = {module.partition(".")[0] for module in imports(TREES[name], package_of(name))}
    assert not tops & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def broad_handlers(tree: ast.AST) -> list[int]:
    """Lines of every `except` that catches whatever comes."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or any(
                isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")
                for kind in ast.walk(node.type)
            )
        )
    ]


@pytest.mark.parametrize("name", FILES)
def test_whatever_comes_is_caught_only_where_strangers_code_runs(name: str) -> None:
    lines = broad_handlers(TREES[name])
    path = FILES[name].relative_to(ROOT).as_posix()
    assert len(lines) <= (path in BROAD), f"{path}: lines {lines}"


@pytest.mark.parametrize("path", BROAD)
def test_every_exception_to_that_is_still_needed(path: str) -> None:
    assert broad_handlers(ast.parse((ROOT / path).read_text()))


def suppressed_broadly(tree: ast.AST) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and called(node) == "suppress"
        and any(isinstance(arg, ast.Name) and arg.id.endswith("Exception") for arg in node.args)
    ]


def test_nothing_suppresses_whatever_comes() -> None:
    assert {name: at for name, tree in TREES.items() if (at := suppressed_broadly(tree))} == {}
