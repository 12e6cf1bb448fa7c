"""One line of the GPU check: what we measured, against what, and the bar it has to reach.

`ratio` is always the better the larger, so a line is ok when it is at least `bar`; a line without a
bar only informs.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """`ours` and `against` in the unit that the name says; None where there is no number."""

    check: str
    ours: float | None
    against: float | None
    ratio: float | None
    bar: float | None
    ok: bool
    note: str = ""


def at_least(
    name: str, ours: float, against: float, ratio: float, bar: float | None, note: str = ""
) -> Check:
    return Check(name, ours, against, ratio, bar, bar is None or ratio >= bar, note)


def rate(name: str, ours: float, against: float, bar: float | None) -> Check:
    """Two rates, of which the larger is better."""
    return at_least(name, ours, against, ours / against, bar)


def time(name: str, ours: float, against: float, bar: float | None) -> Check:
    """Two times, of which the smaller is better."""
    return at_least(name, ours, against, against / ours, bar)


def holds(name: str, ok: bool, note: str = "") -> Check:
    """A statement that is true or not."""
    return Check(name, None, None, None, None, ok, "" if ok else note)


def informs(name: str, note: str) -> Check:
    return Check(name, None, None, None, None, True, note)


def emit(check: Check) -> None:
    print(json.dumps(asdict(check)), flush=True)


def table(checks: Sequence[Check]) -> str:
    width = max(len(check.check) for check in checks)
    lines = [f"{'check':{width}}  {'ours':>10} {'against':>10} {'ratio':>7} {'bar':>5}"]
    for each in checks:
        numbers = f"{_form(each.ours):>10} {_form(each.against):>10} {_form(each.ratio):>7}"
        state = "ok" if each.ok else "FAILED"
        lines.append(
            f"{each.check:{width}}  {numbers} {_form(each.bar):>5}  {state} {each.note}".rstrip()
        )
    return "\n".join(lines)


def _form(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"
