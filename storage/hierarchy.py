"""The Zarr v3 hierarchy of a volume: a group, and one array of blocks a name.

It writes `zarr.json` documents and nothing else of an array; importing zarr for four of them would
take longer than the daemon's start. A directory appears whole and goes whole, by one rename from or
to `tmp/`, which is emptied at the next open; so there is no half array to account for.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.slab import Geometry

VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CRC32C = {"name": "crc32c"}
_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, _CRC32C]


@dataclass(frozen=True, slots=True)
class ArrayDocument:
    """What an array's `zarr.json` says; it is declared to have `shape_slots` slots."""

    geometry: Geometry
    shape_slots: int
    attributes: Mapping[str, object]

    def to_json(self) -> dict[str, object]:
        block_nbytes, num_slots = self.geometry.block_nbytes, self.geometry.num_slots
        sharding = {
            "chunk_shape": [1, block_nbytes],
            "codecs": [{"name": "bytes"}, _CRC32C],
            "index_codecs": _INDEX_CODECS,
            "index_location": "start",
        }
        grid = {"chunk_shape": [num_slots, block_nbytes]}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [self.shape_slots, block_nbytes],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": grid},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {"tierd": dict(self.attributes)},
            "dimension_names": ["block", "byte"],
        }

    @classmethod
    def read(cls, path: Path) -> "ArrayDocument":
        document = _read(path)
        try:
            num_slots, block_nbytes = document["chunk_grid"]["configuration"]["chunk_shape"]
            shape_slots, attributes = document["shape"][0], document["attributes"]["tierd"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not an array of tierd: {error!r}") from error
        return cls(Geometry(block_nbytes, num_slots), shape_slots, attributes)


class Hierarchy:
    """The documents under one volume's path. Every method may block; one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._tmp = path / "tmp"
        self.root = path / "store.zarr"
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._tmp.mkdir()
        if not self.root.exists():
            tierd = {"version": VERSION, "uuid": str(uuid.uuid4())}
            group = {"zarr_format": 3, "node_type": "group", "attributes": {"tierd": tierd}}
            self._make(self.root, group)
        self.uuid = read_group(self.root)

    def names(self) -> list[str]:
        return array_names(self.root)

    def read(self, name: str) -> ArrayDocument:
        return ArrayDocument.read(self.root / name / "zarr.json")

    def create(self, name: str, document: ArrayDocument) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name an array: letters, digits, '.', '_' and '-'")
        self._make(self.root / name, document.to_json())

    def replace(self, name: str, document: ArrayDocument) -> None:
        _write(self._tmp / "zarr.json", document.to_json())
        os.replace(self._tmp / "zarr.json", self.root / name / "zarr.json")
        sync_directory(self.root / name)

    def drop(self, name: str) -> None:
        os.rename(self.root / name, self._tmp / name)
        sync_directory(self.root)
        shutil.rmtree(self._tmp / name)

    def _make(self, target: Path, document: dict[str, object]) -> None:
        draft = self._tmp / target.name
        draft.mkdir()
        _write(draft / "zarr.json", document)
        sync_directory(draft)
        os.rename(draft, target)
        sync_directory(target.parent)


def array_names(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/zarr.json"))


def read_group(root: Path) -> str:
    """The uuid of the volume whose group is at `root`."""
    group = _read(root / "zarr.json")
    try:
        version, uuid = (group["attributes"]["tierd"][key] for key in ("version", "uuid"))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{root}: not a volume of tierd: {error!r}") from error
    if version != VERSION:
        raise ValueError(f"{root}: version {version}; this is tierd's {VERSION}")
    return str(uuid)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(path: Path, document: dict[str, object]) -> None:
    with path.open("w") as file:
        json.dump(document, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Any:
    with path.open() as file:
        return json.load(file)
