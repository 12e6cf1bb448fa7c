"""A recording that is read: what `recording` wrote, as other traces say it.

Files are read one after the other, each as far as it is whole: a daemon that was killed leaves one
that breaks off. A granule has one id in all of them.
"""

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tierd.daemon.recording import granules_asked
from tierd.daemon.runs import PathTree, Run, beginning, disjoint, joined
from tierd.errors import TierdError


class Recorded(NamedTuple):
    """The requests of one namespace, as those of other traces are: `hash_runs`, and `asked` and
    `kept` in granules."""

    granule: int
    token_nbytes: int
    requests: Sequence[Mapping[str, Any]]


class Reading:
    """Puts the files of one recording together: a granule has one id in all of them."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._found: dict[tuple[str, str, str], tuple[dict[str, Any], list[dict[str, Any]]]] = {}

    def add(self, records: Iterator[dict[str, Any]]) -> None:
        """Take a file's records. Raises ValueError, KeyError or TypeError at one that is none of
        ours; what came before it is kept."""
        time = float(next(records)["time"])
        namespaces: dict[int, tuple[str, str, str]] = {}
        tree, runs = PathTree(), list[list[Run]]()
        next_id = 0
        for record in records:
            if "timestamp" not in record:
                key = (str(record["tenant"]), str(record["model"]), str(record["granule"]))
                self._found.setdefault(key, (record, []))
                namespaces[record["namespace"]] = key
                continue
            after = record.get("after")
            path = [beginning(runs[run], count) for run, count in tree.path(after)]
            if text := record.get("names"):
                names = np.frombuffer(b64decode(text), "<u8").tolist()
                tree.add(next_id, after)
                next_id += len(names)
                runs.append(self._runs(names))
                path.append(runs[-1])
            facts, requests = self._found[namespaces[record["namespace"]]]
            hash_runs = [run for piece in path for run in piece]
            if disjoint(hash_runs):
                requests.append(_plain(record, time, hash_runs, int(facts["granule"])))

    def recorded(self, model: str | None) -> Recorded:
        """The requests of one namespace in order of time. Raises TierdError unless there is only
        one that `model` fits: TENANT/NAME@GRANULE, or the name with or without its tenant's."""
        chosen = [key for key in self._found if model in (None, *_titles(*key))]
        if len(chosen) != 1:
            names = ", ".join(sorted(_titles(*key)[-1] for key in self._found)) or "nothing"
            if chosen:
                raise TierdError(f"holds more than one model: {names}; choose one")
            raise TierdError(f"does not hold {model or 'a model'}; it has {names}")
        facts, requests = self._found[chosen[0]]
        requests.sort(key=lambda request: float(request["timestamp"]))
        origin = requests[0]["timestamp"] if requests else 0.0
        moved = [{**r, "timestamp": r["timestamp"] - origin} for r in requests]
        return Recorded(int(facts["granule"]), int(facts["token_nbytes"]), moved)

    def _runs(self, names: Sequence[int]) -> list[Run]:
        """Names in order, as runs of ids that are the same in all files."""
        ids = self._ids
        return joined(ids.setdefault(name, len(ids)) for name in names)


def _titles(tenant: str, name: str, granule: str) -> tuple[str, str, str]:
    """By what a namespace may be called."""
    return name, f"{tenant}/{name}", f"{tenant}/{name}@{granule}"


def _plain(
    record: dict[str, Any], time: float, runs: Sequence[Run], granule: int
) -> dict[str, Any]:
    return {
        **record,
        "timestamp": time * 1e3 + float(record["timestamp"]),
        "hash_runs": runs,
        "asked": granules_asked(int(record["input_length"]), granule),
        "kept": int(record["kept"]) // granule,
    }
