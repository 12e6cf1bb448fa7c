"""`tierd inspect` and `tierd verify`: what a folder of the SSD tier holds, while no daemon runs.

It reads a tenant's folder, or each of several below one, through a survey that changes nothing,
and says what attributes and tags mean: model, layer group, a block's name and its parent's. What a
block must hold is decided in storage; here it is only told.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from storage.survey import InUse, Survey, SurveyedArray
from tierd.daemon.tag import unpack as tag_names
from tierd.errors import TierdError

_PROGRESS_S = 0.5
_FILLS = 4  # classes of slabs by how full they are


class NoInspection(TierdError):
    """A folder that cannot be looked at."""


@contextmanager
def surveys(path: Path) -> Iterator[list[Survey]]:
    """The volume at `path`, or those directly below it. Raises NoInspection, OSError."""
    folders = [path] if (path / "store.zarr").exists() else sorted(path.glob("*/"))
    folders = [folder for folder in folders if (folder / "store.zarr" / "zarr.json").exists()]
    if not folders:
        raise NoInspection(f"{path}: no folder of the SSD tier, nor one with tenants' folders")
    with ExitStack() as opened:
        yield [opened.enter_context(_survey(folder)) for folder in folders]


def _survey(folder: Path) -> Survey:
    try:
        return Survey(folder)
    except InUse as error:
        who = f"process {error.pid}" if error.pid else "another process"
        raise NoInspection(f"{folder} is in use by a daemon, {who}; stop it first") from None
    except ValueError as error:
        raise NoInspection(f"{folder}: {error}") from error


def facts(survey: Survey, *, blocks: bool) -> dict[str, Any]:
    """What a volume says of itself, as JSON; `blocks`: each of them too."""
    return {
        "path": str(survey.path),
        "catalog": "sound" if survey.has_catalog else "lost",
        "policies": _policies(survey.path / "policies"),
        "arrays": [_array(array, blocks=blocks) for array in survey.arrays],
        "unreadable": survey.unreadable,
    }


def _policies(folder: Path) -> list[dict[str, Any]]:
    """The files of what policies knew, by the arrays they are of."""
    return [
        {"of": file.name, "nbytes": file.stat().st_size, "written_at": file.stat().st_mtime}
        for file in sorted(folder.glob("*"))
    ]


def _array(array: SurveyedArray, *, blocks: bool) -> dict[str, Any]:
    told = {key: array.attributes.get(key) for key in ("model", "tenant", "layout", "group")}
    found = {
        "name": array.name,
        **told,
        "block_nbytes": array.geometry.block_nbytes,
        "slots": array.num_slots,
        "blocks": len(array.blocks),
        "slabs": len(array.slabs),
        "slabs_by_fill": array.slabs_by_fill(_FILLS),
        "slabs_not_whole": sum(not slab.is_whole for slab in array.slabs.values()),
        "nbytes": array.nbytes,
        "written_at": array.written_at,
    }
    if blocks:
        found["block_list"] = [
            {"slot": block.slot, "seq": block.seq, **_named(block.tag)} for block in array.blocks
        ]
    return found


def _named(tag: bytes) -> dict[str, str | None]:
    named = tag_names(tag)
    if named is None:
        return {"name": None, "parent": None}
    return {"name": named.key.hex(), "parent": named.parent.hex() if named.parent else None}


def report(volume: dict[str, Any]) -> Iterator[str]:
    """The facts of a volume, for a person."""
    lost = "" if volume["catalog"] == "sound" else "; the catalog is lost, the slots were read"
    yield f"{volume['path']}: {len(volume['arrays'])} arrays{lost}"
    for array in volume["arrays"]:
        written = array["written_at"]
        when = datetime.fromtimestamp(written).isoformat(" ", "seconds") if written else "never"
        yield f"  {array['name']}"
        yield f"    model {array['model']}, group {array['group']}, {_shape(array['layout'])}"
        yield (
            f"    {array['blocks']} blocks of {array['block_nbytes']} bytes in {array['slots']} "
            f"slots, {array['nbytes']} bytes on disk, last written {when}"
        )
        fills = array["slabs_by_fill"]
        steps = ", ".join(f"{n} to {at / len(fills):.0%}" for at, n in enumerate(fills, 1))
        yield f"    {array['slabs']} slabs, full {steps}"
        if array["slabs_not_whole"]:
            yield f"    {array['slabs_not_whole']} of {array['slabs']} slabs are not whole"
        for block in array.get("block_list", ()):
            parent = block["parent"] or "-"
            yield f"    slot {block['slot']:>7}  seq {block['seq']}  {block['name']} after {parent}"
    for file in volume["policies"]:
        yield f"  policies of {file['of']}: {file['nbytes']} bytes of what they knew"
    for name, why in volume["unreadable"].items():
        yield f"  {name}: unreadable: {why}"


def _shape(layout: Any) -> str:
    if not isinstance(layout, dict):
        return "layout unknown"
    get = layout.get
    return (
        f"{get('num_layers')} layers x {get('num_kv_heads')} heads x {get('head_dim')}, "
        f"{get('dtype')}, revision {get('revision') or '-'}"
    )


def verify(found: Sequence[Survey], progress: TextIO) -> dict[str, Any]:
    """Read every block and check it: how many there are, and the damaged ones, as JSON."""
    damaged: list[dict[str, Any]] = []
    meter = _Meter(sum(len(array.blocks) for survey in found for array in survey.arrays), progress)
    for survey in found:
        for name, why in survey.unreadable.items():
            damaged.append({"path": str(survey.path), "array": name, "slot": None, "what": why})
        for array in survey.arrays:
            tags = {block.slot: block.tag for block in array.blocks}
            where = {"path": str(survey.path), "array": array.name}
            for count, wrong in array.check():
                damaged += [
                    {**where, "slot": slot, "what": wrong[slot], **_named(tags[slot])}
                    for slot in sorted(wrong)
                ]
                meter.add(count, len(damaged))
    meter.end(len(damaged))
    return {"blocks": meter.done, "damaged": damaged}


def describe(damage: dict[str, Any]) -> str:
    """One damaged block, for a person."""
    if damage["slot"] is None:
        return f"{damage['path']}: array {damage['array']}: {damage['what']}"
    return (
        f"{damage['path']}: array {damage['array']}, slot {damage['slot']}, block "
        f"{damage['name']}: {damage['what']}"
    )


class _Meter:
    """Progress, said now and then; on a terminal in one line."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self.done = 0
        self._total, self._stream, self._said = total, stream, time.monotonic()

    def add(self, count: int, damaged: int) -> None:
        self.done += count
        if time.monotonic() - self._said >= _PROGRESS_S:
            self._say(damaged, "\r" if self._stream.isatty() else "\n")

    def end(self, damaged: int) -> None:
        self._say(damaged, "\n")

    def _say(self, damaged: int, end: str) -> None:
        self._said = time.monotonic()
        text = f"{self.done} of {self._total} blocks checked, {damaged} damaged"
        print(text, end=end, file=self._stream, flush=True)
