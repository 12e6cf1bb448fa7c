"""A table of the configuration as a frozen dataclass that is valid from the moment it exists.

Each field carries its parser in `Annotated`, so a value from a file and one from code pass the same
check; a table inside is a field whose parser is that section's `of`. An error is a `ConfigError`
that starts with the dotted key, seen from the section it is raised by. A field that is `LIVE`, with
all inside it, may change while a daemon runs by it. It knows none of our keys.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any, Final, Self, TypeVar

from tierd.daemon.values import Size, form, form_key
from tierd.errors import ConfigError

_Value = TypeVar("_Value")

LIVE: Final = "live"  # in a field's `Annotated`, after its parser


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs between two sections, as TOML ("" where there is none), and whether
    the new one may be taken while the old one is in use."""

    key: str
    old: str
    new: str
    live: bool


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
            if isinstance(value, Section | Mapping) or _several(value):
                inside.append((f"{name}.{key.name}".lstrip("."), value))
            elif value is not None:
                yield f"{key.name} = {_shown(key, value)}"
        for below, value in inside:
            yield from _table(below, value)

    def changes(self, new: Self, name: str = "", *, live: bool = False) -> Iterator[Change]:
        """What differs in `new`; `name` and `live` are those of the section itself."""
        for key in fields(self):
            was, now = getattr(self, key.name), getattr(new, key.name)
            if was != now:
                dotted = f"{name}.{key.name}".lstrip(".")
                yield from _changes(dotted, key, was, now, live or is_live(key))

    def taking(self, new: Self) -> Self:
        """This section with what is `LIVE` of `new`. Raises `ConfigError` if the two do not fit."""
        values: dict[str, Any] = {}
        for key in fields(self):
            was, now = getattr(self, key.name), getattr(new, key.name)
            if is_live(key):
                values[key.name] = now
            elif isinstance(was, Section) and isinstance(now, Section):
                values[key.name] = _inside(key.name, was, now)
        return replace(self, **values)


def _inside(name: str, was: Section, now: Section) -> Section:
    try:
        return was.taking(now)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from error


def is_live(key: Field[Any]) -> bool:
    return LIVE in key.type.__metadata__  # type: ignore[union-attr]


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


def _changes(name: str, key: Field[Any], was: Any, now: Any, live: bool) -> Iterator[Change]:
    if isinstance(was, Section) and isinstance(now, Section):
        yield from was.changes(now, name, live=live)
    elif _of_sections(was) or _of_sections(now):
        for item in dict.fromkeys([*was, *now]):
            a, b = was.get(item), now.get(item)
            if a != b:
                yield from _changes(f"{name}.{form_key(item)}", key, a, b, live)
    else:
        yield Change(name, _shown(key, was), _shown(key, now), live)


def _shown(key: Field[Any], value: Any) -> str:
    """A value as TOML, on one line; "" for None."""
    if value is None:
        return ""
    if isinstance(value, Section):
        keys = [(inner, getattr(value, inner.name)) for inner in fields(value)]
        shown = [f"{inner.name} = {_shown(inner, v)}" for inner, v in keys if v not in (None, {})]
        return f"{{{', '.join(shown)}}}"
    if _several(value):
        return f"[{', '.join(_shown(key, section) for section in value)}]"
    return Size.form(value) if _is_size(key) else form(value)


def _is_size(key: Field[Any]) -> bool:
    parser = _parser(key)
    return isinstance(getattr(parser, "__self__", parser), Size)


def _several(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, Section) for item in value)


def _of_sections(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Section) for v in value.values())


def _table(name: str, value: Any) -> Iterator[str]:
    if _several(value):
        for section in value:
            yield from ("", f"[[{name}]]", *section.lines(name))
    elif isinstance(value, Section):
        yield from ("", f"[{name}]", *value.lines(name))
    elif _of_sections(value):
        for key, item in value.items():
            yield from _table(f"{name}.{form_key(key)}", item)
    elif isinstance(value, Mapping) and value:
        yield from ("", f"[{name}]", *(f"{form_key(k)} = {form(v)}" for k, v in value.items()))
