"""The configuration file: its tables, their keys, and what each allows.

Every section is valid from the moment it exists. Policies are found and made once here, so that a
wrong option is an error of the file and not of the first request. Nothing here knows a layout or
the machine: whether a size fits is found out by whoever asks for the memory. What is `LIVE` may
change while a daemon runs; the rest needs a restart.
"""

import inspect
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from storage.base import Durability
from tierd.daemon import plugins
from tierd.daemon.section import LIVE, Section, check_known, parsed
from tierd.daemon.values import (
    GIB,
    MIB,
    Integer,
    Number,
    Size,
    absolute,
    form,
    layer_range,
    optional,
    table,
    text,
    word,
)
from tierd.errors import ConfigError
from tierd.protocol import default_socket

_Class = TypeVar("_Class")

EXTENT = 2 * MIB  # what a memory tier is cut into

ADMISSION = "learned"  # what is worth writing to SSD, unless the file says otherwise

_CAPACITY = 1024  # of the policy that is made only to see whether its options are right
_MAX_SOCKET = 107  # bytes of a Unix socket's address


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig(Section):
    """What every tier has: a size, and a policy with its keyword arguments."""

    size: Annotated[int, Size(EXTENT, multiple=EXTENT), LIVE] = 1 * GIB
    policy: Annotated[str, text, LIVE] = "lru"
    options: Annotated[Mapping[str, object], table, LIVE] = field(default_factory=dict)

    def check(self) -> None:
        found = _named("policy", self.policy, plugins.policy)
        _check_options(found, self.options, capacity=_CAPACITY)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig(TierConfig):
    """A tier with one below it: it keeps so large a part of its places free or clean. Its size may
    grow up to what is reserved."""

    reserve: Annotated[int | None, Size(EXTENT, multiple=EXTENT).optional] = None
    watermarks: Annotated[tuple[float, float], Number(0, 1).rising, LIVE] = (0.05, 0.1)

    @property
    def reserved(self) -> int:
        """Bytes of address space."""
        return self.size if self.reserve is None else self.reserve

    def check(self) -> None:
        TierConfig.check(self)
        if self.reserved < self.size:
            raise ConfigError(
                f"reserve = {Size.form(self.reserved)}: must be at least the size, "
                f"{Size.form(self.size)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig(MemoryConfig):
    """The hottest tier: GPU memory, or shared memory in its place."""

    store: Annotated[str, text] = "cpu"

    def check(self) -> None:
        MemoryConfig.check(self)
        _named("store", self.store, plugins.store)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig(MemoryConfig):
    """Pinned memory. A size of 0 leaves the tier out."""

    size: Annotated[int, Size(EXTENT, multiple=EXTENT, or_zero=True), LIVE] = 4 * GIB

    @classmethod
    def unless_empty(cls, raw: object) -> "HostConfig | None":
        """As `of`, or None where there is to be no such tier."""
        host = None if raw is None else cls.of(raw)
        return host if host and host.size else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdConfig(TierConfig):
    """A folder: at most `size` bytes of it, a `slab` at a time, leaving `min_free` to others.
    `admission` says what is worth writing there."""

    path: Annotated[Path, absolute]
    size: Annotated[int, Size(1 * MIB), LIVE] = 16 * GIB
    min_free: Annotated[int, Size(0), LIVE] = 1 * GIB
    slab: Annotated[int, Size(1 * MIB)] = 64 * MIB
    sparse: Annotated[float, Number(0, 0.75), LIVE] = 0.25
    durability: Annotated[Durability, word(Durability)] = Durability.BATCH
    remember: Annotated[int, Integer(0, 2**31), LIVE] = 65536
    store: Annotated[str, text] = "ssd"
    admission: Annotated[str, text, LIVE] = ADMISSION
    admission_options: Annotated[Mapping[str, object], table, LIVE] = field(default_factory=dict)

    @classmethod
    def if_present(cls, raw: object) -> "SsdConfig | None":
        """As `of`, or None where there is to be no such tier."""
        return None if raw is None else cls.of(raw)

    def check(self) -> None:
        TierConfig.check(self)
        _named("store", self.store, plugins.volume)
        found = _named("admission", self.admission, plugins.admission)
        _check_options(found, self.admission_options, "admission_options")
        if self.slab > self.size:
            most = Size.form(self.size)
            raise ConfigError(f"slab = {Size.form(self.slab)}: must be at most the size, {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksConfig(Section):
    """How many tokens a block has, and how many lie between two hashes."""

    policy: Annotated[str, text] = "uniform"
    options: Annotated[Mapping[str, object], table] = field(default_factory=dict)
    granule: Annotated[int | None, Integer(1, 4096).optional] = None

    def check(self) -> None:
        found = _named("policy", self.policy, plugins.block_sizes)
        _check_options(found, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchConfig(Section):
    """What is brought from SSD into host memory before anybody asks for it."""

    policy: Annotated[str, text] = "none"
    options: Annotated[Mapping[str, object], table] = field(default_factory=dict)

    def check(self) -> None:
        found = _named("policy", self.policy, plugins.prefetch)
        _check_options(found, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig(Section):
    """Where copies of a block are kept along the tiers."""

    policy: Annotated[str, text] = "inclusive"
    options: Annotated[Mapping[str, object], table] = field(default_factory=dict)

    def check(self) -> None:
        found = _named("policy", self.policy, plugins.placement)
        _check_options(found, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig(Section):
    """A folder that gets what the daemon is asked; of its files the oldest go above `size`."""

    path: Annotated[Path, absolute]
    size: Annotated[int, Size(1 * MIB)] = 256 * MIB

    @classmethod
    def if_present(cls, raw: object) -> "TraceConfig | None":
        """As `of`, or None where nothing is to be recorded."""
        return None if raw is None else cls.of(raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig(Section):
    """The users whose engines share an arena and an index, and their share of every tier."""

    uids: Annotated[tuple[int, ...], Integer(0, 2**32 - 2).several]
    share: Annotated[float, Number(0, 1, above=True)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Section):
    """What a model gets of its tenant's memory beside others: a part by its weight, where all want
    more than there is, and never less than its floor of each tier, once it has it."""

    weight: Annotated[float, Number(0, 1e6, above=True)] = 1.0
    floor: Annotated[int, Size(0)] = 0


class TierName(StrEnum):
    """The tiers, by the names of their sections."""

    DEVICE = "device"
    HOST = "host"
    SSD = "ssd"


class Attention(StrEnum):
    """What the layers of a group look back at."""

    FULL = "full"
    WINDOW = "window"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Section):
    """The policy of the pools that fit all its conditions; one that is None fits every pool."""

    tier: Annotated[TierName | None, optional(word(TierName))] = None
    tenant: Annotated[str | None, optional(text)] = None
    model: Annotated[str | None, optional(text)] = None
    attention: Annotated[Attention | None, optional(word(Attention))] = None
    layers: Annotated[str | None, optional(layer_range)] = None
    policy: Annotated[str, text]
    options: Annotated[Mapping[str, object], table] = field(default_factory=dict)

    def check(self) -> None:
        found = _named("policy", self.policy, plugins.policy)
        _check_options(found, self.options, capacity=_CAPACITY)


def _rules(raw: object) -> tuple[Rule, ...]:
    if not isinstance(raw, list | tuple):
        raise ValueError("must be tables, each beginning with [[rules]]")
    return tuple(parsed(f"{at}", rule, Rule.of) for at, rule in enumerate(raw, 1))


def _models(raw: object) -> dict[str, ModelConfig]:
    return {
        name: parsed(_quoted(name), value, ModelConfig.of) for name, value in table(raw).items()
    }


def _quoted(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else f'"{name}"'


def _only_myself() -> dict[str, TenantConfig]:
    return {"default": TenantConfig(uids=(os.getuid(),))}


def _tenants(raw: object) -> dict[str, TenantConfig]:
    tenants = {}
    for name, value in table(raw).items():
        if not re.fullmatch("[A-Za-z0-9_-]{1,32}", name):
            raise ValueError(f"the name {name!r} must be 1 to 32 letters, digits, _ or -")
        tenants[name] = parsed(name, value, TenantConfig.of)
    total = sum(tenant.share for tenant in tenants.values())
    if not 0 < total <= 1 + 1e-9:
        raise ValueError(f"the shares sum to {total:g}; must be above 0 to 1")
    return tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Section):
    """All of it. `host` and `ssd` are None where the tier is left out."""

    socket: Annotated[Path, absolute] = field(default_factory=lambda: Path(default_socket()))
    grace: Annotated[float, Number(0, 86400), LIVE] = 30.0
    quarantine_grace: Annotated[float, Number(0, 86400), LIVE] = 60.0
    max_frame: Annotated[int, Size(64 * 1024, at_most=1 * GIB), LIVE] = 16 * MIB
    device: Annotated[DeviceConfig, DeviceConfig.of] = field(default_factory=DeviceConfig)
    host: Annotated[HostConfig | None, HostConfig.unless_empty] = field(default_factory=HostConfig)
    ssd: Annotated[SsdConfig | None, SsdConfig.if_present] = None
    blocks: Annotated[BlocksConfig, BlocksConfig.of] = field(default_factory=BlocksConfig)
    prefetch: Annotated[PrefetchConfig, PrefetchConfig.of, LIVE] = field(
        default_factory=PrefetchConfig
    )
    placement: Annotated[PlacementConfig, PlacementConfig.of, LIVE] = field(
        default_factory=PlacementConfig
    )
    trace: Annotated[TraceConfig | None, TraceConfig.if_present] = None
    tenants: Annotated[Mapping[str, TenantConfig], _tenants] = field(default_factory=_only_myself)
    models: Annotated[Mapping[str, ModelConfig], _models, LIVE] = field(default_factory=dict)
    rules: Annotated[tuple[Rule, ...], _rules, LIVE] = ()

    @classmethod
    def default(cls) -> Self:
        """What an empty file says."""
        return cls()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file at `path`; this blocks. Raises `ConfigError`."""
        try:
            return cls.of(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{path}: is not TOML: {error}") from error

    def check(self) -> None:
        if len(os.fsencode(self.socket)) > _MAX_SOCKET:
            raise ConfigError(f'socket = "{self.socket}": must be at most {_MAX_SOCKET} bytes long')
        for at, rule in enumerate(self.rules, 1):
            if rule.tenant is not None and rule.tenant not in self.tenants:
                known = ", ".join(self.tenants)
                raise ConfigError(
                    f"rules.{at}.tenant = {form(rule.tenant)}: there is no such tenant; there are "
                    f"{known}"
                )
            if rule.tier is not None and getattr(self, rule.tier) is None:
                raise ConfigError(f'rules.{at}.tier = "{rule.tier}": there is no such tier')


def describe(config: Config) -> str:
    """The configuration with every key that has a value, as TOML that `Config.load` reads back."""
    absent = [] if config.host else ["", "[host]", "size = 0"]
    return "\n".join([*config.lines(), *absent, ""])


def _named(key: str, name: str, find: Callable[[str], type[_Class]]) -> type[_Class]:
    try:
        return find(name)
    except ConfigError as error:
        raise ConfigError(f"{key} = {error}") from error


def _check_options(
    found: type, options: Mapping[str, object], key: str = "options", **given: Any
) -> None:
    """Raise `ConfigError` unless `found` can be made with `options`, the value of `key`, beside
    what we give it."""
    parameters = inspect.signature(found).parameters
    names = [name for name in parameters if name not in given]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        try:
            check_known(options, names, f"an option of {found.__name__}")
        except ConfigError as error:
            raise ConfigError(f"{key}.{error}") from error
    try:
        found(**given, **options)
    # Broad, because a stranger's class may raise anything at what it does not like.
    except Exception as error:
        raise ConfigError(f"{key} = {form(options)}: {error}") from error
