"""Reading the configuration again: what differs, what of that may be taken now, and the new whole.

A file that is wrong, or does not fit what runs, changes nothing. The file is read in a thread; the
rest is pure. What is done with the new configuration is the business of whoever is configured.
"""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierd.daemon.config import Config
from tierd.daemon.section import Change
from tierd.errors import ConfigError

_GROWING = ("device", "host")  # up to what was reserved when the daemon began


@dataclass(frozen=True, slots=True)
class Reloaded:
    """`config` is what is in force now; `changes` says what differs in the file from before."""

    path: Path
    config: Config
    changes: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        def of(change: Change) -> dict[str, str]:
            return {"key": change.key, "old": change.old, "new": change.new}

        return {
            "path": str(self.path),
            "changed": [of(change) for change in self.changes if change.live],
            "needs_restart": [of(change) for change in self.changes if not change.live],
        }


class Reload:
    """Of the daemon that began with `config`, which the file at `path` said; None: no file."""

    def __init__(self, config: Config, path: Path | None) -> None:
        self._path = path.absolute() if path else None
        self._begun = config

    async def read(self, config: Config) -> Reloaded:
        """What the file says now, against `config`, which is in force. Raises ConfigError."""
        if self._path is None:
            raise ConfigError("the daemon was started without --config: there is no file to read")
        found = await asyncio.to_thread(Config.load, self._path)
        try:
            return self._merged(self._path, config, found)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}; as long as the rest is as it is") from error

    def _merged(self, path: Path, config: Config, found: Config) -> Reloaded:
        changes = list(config.changes(found))
        for name in _GROWING:
            tier, begun, new = (getattr(of, name) for of in (config, self._begun, found))
            if tier and new and new.size > begun.reserved:
                found = replace(found, **{name: replace(new, size=tier.size)})
                changes = [_not_live(c) if c.key == f"{name}.size" else c for c in changes]
        return Reloaded(path, config.taking(found), tuple(changes))


def _not_live(change: Change) -> Change:
    return replace(change, live=False)
