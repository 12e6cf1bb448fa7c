"""A table of the configuration as a frozen dataclass that is valid from the moment it exists.

Each field carries its parser in `Annotated`, so a value from a file and one from code pass the same
check; a table inside is a field whose parser is that section's `of`. An error is a `ConfigError`
that starts with the dotted key, seen from the section it is raised by. It knows none of our keys.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Self, TypeVar

from tierd.daemon.values import Size, form, form_key
from tierd.errors import ConfigError

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Section:
    """The base of every table."""

    @classmethod
    def of(cls, raw: object) -> Self:
        """The table `raw` as a section, or `raw` itself where it is one."""
        if isinstance(raw, cls):
            return raw
        if not isinstance(raw, dict):
            raise ValueError("must be a table")
        known = {key.name: key for key in fields(cls)}
        check_known(raw, known, "a key")
        for key in known.values():
            if key.default is key.default_factory is MISSING and key.name not in raw:
                raise ConfigError(f"{key.name}: is missing, and has no default")
        make: Callable[..., Self] = cls
        return make(**raw)

    def __post_init__(self) -> None:
        for key in fields(self):
            value = parsed(key.name, getattr(self, key.name), _parser(key))
            object.__setattr__(self, key.name, value)
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` where values that are valid alone are not so together."""

    def lines(self, name: str = "") -> Iterator[str]:
        """The section as TOML, keys first and then the tables inside; what is None is left out."""
        inside: list[tuple[str, object]] = []
        for key in fields(self):
            value = getattr(self, key.name)
            if isinstance(value, Section | Mapping):
                inside.append((f"{name}.{key.name}".lstrip("."), value))
            elif value is not None:
                shown = Size.form(value) if isinstance(_parser(key), Size) else form(value)
                yield f"{key.name} = {shown}"
        for below, value in inside:
            yield from _table(below, value)


def parsed(name: str, value: object, parser: Callable[[object], _Value]) -> _Value:
    """What `parser` makes of `value`; its error, with the key's name before it."""
    try:
        return parser(value)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from error
    except ValueError as error:
        raise ConfigError(f"{name} = {form(value)}: {error}") from error


def check_known(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise `ConfigError` for the first of `names` that is not known, with the closest that is."""
    known = list(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"{form_key(name)}: is not {what}; known: {', '.join(known) or 'none'}{hint}"
            )


def _parser(key: Field[Any]) -> Callable[[object], object]:
    parser: Callable[[object], object] = key.type.__metadata__[0]  # type: ignore[union-attr]
    return parser


def _table(name: str, value: object) -> Iterator[str]:
    if isinstance(value, Section):
        yield from ("", f"[{name}]", *value.lines(name))
    elif isinstance(value, Mapping) and any(isinstance(item, Section) for item in value.values()):
        for key, item in value.items():
            yield from _table(f"{name}.{form_key(key)}", item)
    elif isinstance(value, Mapping) and value:
        yield from ("", f"[{name}]", *(f"{form_key(k)} = {form(v)}" for k, v in value.items()))
