"""The values of the configuration: each kind's parser, and the text it is shown as.

A parser takes what TOML has (or what code has, already parsed), and returns the value or raises
`ValueError` saying what is allowed. Types are strict: a boolean is no integer. A parser knows
neither the key nor the file it reads for.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TypeGuard, TypeVar

MIB = 2**20
GIB = 2**30

_Word = TypeVar("_Word", bound=StrEnum)
_Value = TypeVar("_Value")

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": MIB, "GiB": GIB, "TiB": 2**40}


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: an integer, or a string with a unit. Rounded down to a multiple of `multiple`."""

    at_least: int
    at_most: int = 2**53
    multiple: int = 1
    or_zero: bool = False

    def __call__(self, value: object) -> int:
        size = value if _is_int(value) else self._parsed(value)
        if size == 0 and self.or_zero:
            return 0
        if not self.at_least <= size <= self.at_most:
            zero = "0, or " if self.or_zero else ""
            raise ValueError(
                f"must be {zero}from {self.form(self.at_least)} to {self.form(self.at_most)}"
            )
        return size - size % self.multiple

    def optional(self, value: object) -> int | None:
        return None if value is None else self(value)

    @staticmethod
    def form(size: int) -> str:
        """`size` as a quoted string in its largest whole binary unit, or a plain number."""
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if size and size % _UNITS[unit] == 0:
                return f'"{size // _UNITS[unit]}{unit}"'
        return str(size)

    @staticmethod
    def _parsed(value: object) -> int:
        match = isinstance(value, str) and re.fullmatch(
            r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", value, re.ASCII
        )
        if not match or (match[2] or "B") not in _UNITS:
            raise ValueError(
                "must be a size: bytes as an integer, or a string such as "
                f'"96MiB", with one of {", ".join(_UNITS)}'
            )
        return int(Decimal(match[1]) * _UNITS[match[2] or "B"])


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer from `at_least` to `at_most`."""

    at_least: int
    at_most: int

    def __call__(self, value: object) -> int:
        if not _is_int(value) or not self.at_least <= value <= self.at_most:
            raise ValueError(f"must be an integer from {self.at_least} to {self.at_most}")
        return value

    def optional(self, value: object) -> int | None:
        return None if value is None else self(value)

    def several(self, value: object) -> tuple[int, ...]:
        """Parse a list that is not empty."""
        if not isinstance(value, list | tuple) or not value:
            raise ValueError("must be a list of one or more integers")
        return tuple(self(item) for item in value)


@dataclass(frozen=True, slots=True)
class Number:
    """A number from `at_least` to `at_most`, or `above` it."""

    at_least: float
    at_most: float
    above: bool = False

    def __call__(self, value: object) -> float:
        number = float(value) if _is_int(value) or isinstance(value, float) else math.nan
        low = number > self.at_least if self.above else number >= self.at_least
        if not (low and number <= self.at_most):
            start = "above" if self.above else "from"
            raise ValueError(f"must be a number {start} {self.at_least:g} to {self.at_most:g}")
        return number

    def rising(self, value: object) -> tuple[float, float]:
        """Parse a list of two such numbers, the first at most the second."""
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise ValueError("must be a list of two numbers")
        low, high = self(value[0]), self(value[1])
        if low > high:
            raise ValueError("must be a list of two numbers, the first not above the second")
        return low, high


def text(value: object) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("must be a string, and not empty")
    return value


def optional(parse: Callable[[object], _Value]) -> Callable[[object], _Value | None]:
    """The parser of what may also be left out."""
    return lambda value: None if value is None else parse(value)


def layer_range(value: object) -> str:
    """A range of layers, as "0-9", or one of them, as "12"."""
    match = isinstance(value, str) and re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", value)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise ValueError('must be a range of layers, such as "0-9", or one, such as "12"')
    return str(value)


def word(kind: type[_Word]) -> Callable[[object], _Word]:
    """The parser of one of the words of `kind`."""
    allowed = ", ".join(form(member) for member in kind)

    def parse(value: object) -> _Word:
        for member in kind:
            if value == member:
                return member
        raise ValueError(f"must be one of {allowed}")

    return parse


def table(value: object) -> Mapping[str, object]:
    """A table with any keys."""
    if not isinstance(value, Mapping):
        raise ValueError("must be a table")
    return value


def absolute(value: object) -> Path:
    """An absolute path; "~" is the home directory."""
    path = os.path.expanduser(value) if isinstance(value, str | Path) else ""
    if not os.path.isabs(path) or "\0" in str(path):
        raise ValueError("must be an absolute path, or start with ~/")
    return Path(path)


def form(value: object) -> str:
    """`value` as TOML writes it, on one line."""
    match value:
        case bool():
            return str(value).lower()
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(map(form, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{form_key(key)} = {form(value[key])}' for key in value)}}}"
        case _:
            return str(value)


def form_key(key: object) -> str:
    """`key` as TOML writes it: quoted only where it must be."""
    return str(key) if re.fullmatch("[A-Za-z0-9_-]+", str(key)) else form(str(key))


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
