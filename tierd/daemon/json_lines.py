"""Lines of JSON objects in a file, maybe compressed by gzip, as far as the file is whole.

One that breaks off gives every line before it, and then says so.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierd.errors import TierdError

SUFFIX = ".jsonl.gz"  # of the files of a recording
_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20


class TraceError(TierdError):
    """A file is no trace that can be replayed."""


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file. Raises TraceError at what is none, or OSError."""
    for line in _lines(path):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TraceError(f"is not lines of JSON: {error}") from error
        if not isinstance(record, dict):
            raise TraceError("a line is not an object")
        yield record


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, maybe gzip'ed; all that are whole before it breaks off."""
    rest = b""
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
        file.seek(0)
        unpack = zlib.decompressobj(wbits=31) if packed else None
        while chunk := file.read(_CHUNK):
            try:
                text = unpack.decompress(chunk) if unpack else chunk
            except zlib.error as error:
                raise TraceError(f"is not whole: {error}") from error
            *lines, rest = (rest + text).split(b"\n")
            yield from filter(None, lines)
            while unpack and unpack.eof and unpack.unused_data:  # another member of the file
                unpack, more = zlib.decompressobj(wbits=31), unpack.unused_data
                *lines, rest = (rest + unpack.decompress(more)).split(b"\n")
                yield from filter(None, lines)
    if rest:
        yield rest
    if unpack and not unpack.eof:
        raise TraceError("is not whole: it breaks off")
