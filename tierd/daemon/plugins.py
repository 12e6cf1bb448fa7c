"""Finding a policy or a store by the name the configuration gives it.

A name is that of an installed entry point, or "module:Class"; ours come through the same door as
everybody's. What is returned is always a class that can be made: every way to be wrong is a
`ConfigError` that says which. Nothing here knows what the classes do, or makes one.
"""

import inspect
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from policies.base import (
    AdmissionPolicy,
    BlockSizePolicy,
    EvictionPolicy,
    PlacementPolicy,
    PrefetchPolicy,
)
from storage.base import BlockStore, Volume
from tierd.errors import ConfigError

POLICIES = "tierd.policies"
BLOCK_SIZES = "tierd.block_sizes"
PREFETCHES = "tierd.prefetches"
ADMISSIONS = "tierd.admissions"
PLACEMENTS = "tierd.placements"
STORES = "tierd.stores"


def policy(name: str) -> type[EvictionPolicy]:
    """The eviction policy called `name`."""
    return _find(POLICIES, name, EvictionPolicy)


def block_sizes(name: str) -> type[BlockSizePolicy]:
    """The block-size policy called `name`."""
    return _find(BLOCK_SIZES, name, BlockSizePolicy)


def prefetch(name: str) -> type[PrefetchPolicy]:
    """The prefetch policy called `name`."""
    return _find(PREFETCHES, name, PrefetchPolicy)


def admission(name: str) -> type[AdmissionPolicy]:
    """The admission policy called `name`."""
    return _find(ADMISSIONS, name, AdmissionPolicy)


def placement(name: str) -> type[PlacementPolicy]:
    """The placement policy called `name`."""
    return _find(PLACEMENTS, name, PlacementPolicy)


def store(name: str) -> type[BlockStore]:
    """The store called `name`, for a tier that is memory."""
    return _find(STORES, name, BlockStore)


def volume(name: str) -> type[Volume]:
    """The store called `name`, for a tier that outlives the daemon."""
    return _find(STORES, name, Volume)


def installed(group: str) -> list[str]:
    """The names of the entry points of `group`."""
    return sorted(entry_points(group=group).names)


@cache  # what is installed does not change under a running daemon
def _find(group: str, name: str, base: type) -> type[Any]:
    module, colon, attribute = name.partition(":")
    if not colon:
        point = _entry_point(group, name)
        module, attribute = point.module, point.attr or ""
    elif not module or not attribute:
        raise ConfigError(f'{name!r} is not of the form "module:Class"')
    found = _load(module, attribute, name)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ConfigError(f"{name!r} is {found!r}, not a subclass of {_title(base)}")
    if missing := ", ".join(sorted(getattr(found, "__abstractmethods__", ()))):
        raise ConfigError(f"{name!r} does not implement {missing} of {_title(base)}")
    return found


def _entry_point(group: str, name: str) -> EntryPoint:
    # One distribution may be on the path twice, so only different values are a contradiction.
    points = {point.value: point for point in entry_points(group=group).select(name=name)}
    if not points:
        names = ", ".join(installed(group)) or "none"
        raise ConfigError(
            f'{name!r} is not installed in {group}; installed: {names}; or give "module:Class"'
        )
    if len(points) > 1:
        raise ConfigError(f"{name!r} is installed in {group} more than once: {', '.join(points)}")
    return next(iter(points.values()))


def _load(module: str, attribute: str, name: str) -> object:
    try:
        found: object = import_module(module)
    # Broad, because a stranger's module may raise anything, and a bad reload must not end us.
    except Exception as error:
        raise ConfigError(
            f"{name!r}: cannot import {module}: {type(error).__name__}: {error}"
        ) from error
    for part in filter(None, attribute.split(".")):
        if not hasattr(found, part):
            raise ConfigError(f"{name!r}: {module} has no {attribute}")
        found = getattr(found, part)
    return found


def _title(base: type) -> str:
    return f"{base.__module__}.{base.__qualname__}"
