"""What the policies of a namespace knew when it ended: a file, for the next time that it is made.

    lengths and checksum, a line of JSON | JSON, with keys as {"": number} | the keys, 16 bytes each

It appears whole, by a rename. It is only advice: a file that is torn, or of another kind of policy,
is as good as none. Everything here blocks, for seconds a million keys; nothing knows blocks.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import crc32c

from policies.base import EvictionPolicy
from tierd.block import HASH_NBYTES
from tierd.daemon import plugins
from tierd.daemon.rules import Choice

log = logging.getLogger("tierd.policies")

_DRAFT = ".new"  # the end of a name that is not yet the file's


@dataclass(frozen=True, slots=True)
class Remembered:
    """What one pool's policy knew, and which policy that was."""

    tier: str
    group: int
    policy: str  # "module:Class"
    options: Mapping[str, object]
    state: Mapping[str, Any]


def remember(tier: str, group: int, choice: Choice, policy: EvictionPolicy) -> list[Remembered]:
    """What the policy of a pool knows, or nothing if it cannot say; it may not change meanwhile."""
    known: list[Remembered] = []

    def ask() -> None:
        state = policy.state()
        known.append(Remembered(tier, group, _identity(choice), choice.options, state))

    _done(f"{tier}, group {group}: is not kept", ask)
    return known


def revive(known: Iterable[Remembered], tier: str, group: int, choice: Choice) -> EvictionPolicy:
    """A pool's policy that goes on from what it knew, if that is known; else one that begins."""
    for of in known:
        same = (tier, group, _identity(choice), json.dumps(choice.options, default=str))
        if same == (of.tier, of.group, of.policy, json.dumps(of.options)):
            policy = choice.make()
            if _done(f"{tier}, group {group}: begins anew", partial(policy.restore, of.state)):
                return policy
    return choice.make()


def _done(otherwise: str, call: Callable[[], object]) -> bool:
    """Call what may be a stranger's, and log if it fails."""
    try:
        call()
    # Broad, because a stranger's class may raise anything; no block is lost without its order.
    except Exception as error:
        log.warning("%s: %r", otherwise, error)
        return False
    return True


class PolicyFile:
    """The file of one namespace, called `name` in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name

    def write(self, known: Iterable[Remembered], most: int, min_free: int) -> None:
        """Replace the file; it takes at most `most` bytes and leaves `min_free` on the file system,
        or is left out. Raises OSError."""
        packed: list[bytes] = []
        if not _done(f"{self._path}: not kept", lambda: packed.append(_pack(known))):
            return
        (data,) = packed
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        if len(data) > most or shutil.disk_usage(self._path.parent).free < min_free + len(data):
            log.warning("%s: %d bytes are too many to be kept", self._path, len(data))
            self.remove()
            return
        draft = self._path.with_name(self._path.name + _DRAFT)
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def read(self) -> list[Remembered]:
        """What the file says; nothing if there is none, or none that is whole."""
        try:
            return list(_unpack(self._path.read_bytes()))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            log.warning("%s is of no use, policies begin anew: %s", self._path, error)
            return []

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def tidy(folder: Path, names: Iterable[str]) -> None:
    """Remove every file of `folder` that is not of one of `names`, such as a half written one."""
    known = set(names)
    for path in folder.glob("*"):
        if path.is_file() and path.name not in known:
            path.unlink()


def _identity(choice: Choice) -> str:
    found = plugins.policy(choice.policy)
    return f"{found.__module__}:{found.__qualname__}"


def _pack(known: Iterable[Remembered]) -> bytes:
    numbers: dict[bytes, int] = {}

    def number(key: object) -> dict[str, int]:
        if not isinstance(key, bytes) or len(key) != HASH_NBYTES:
            raise TypeError(f"{key!r} is no key, nor plain")
        return {"": numbers.setdefault(key, len(numbers))}

    # Not `asdict`: it copies a state, which takes four times as long as all else.
    plain = [{field.name: getattr(of, field.name) for field in fields(of)} for of in known]
    body = json.dumps(plain, default=number, separators=(",", ":")).encode()
    keys = b"".join(numbers)
    crc = crc32c.crc32c(keys, crc32c.crc32c(body))
    head = {"at": time.time(), "body": len(body), "keys": len(keys), "crc32c": crc}
    return json.dumps(head).encode() + b"\n" + body + keys


def _unpack(data: bytes) -> Iterator[Remembered]:
    """Raises ValueError."""
    line, _, rest = data.partition(b"\n")
    try:
        head = json.loads(line)
        if head["at"] > time.time():
            raise ValueError("it is of a time to come: the clock was set back")
        start, whole = head["body"], head["body"] + head["keys"]
        if len(rest) != whole or crc32c.crc32c(rest) != head["crc32c"]:
            raise ValueError("it is not whole")
        keys = [rest[at : at + HASH_NBYTES] for at in range(start, whole, HASH_NBYTES)]

        def plain(found: dict[str, Any]) -> Any:
            return keys[found[""]] if "" in found else found

        for of in json.loads(rest[:start], object_hook=plain):
            yield Remembered(**of)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it is none of ours: {error!r}") from error
