"""The leaves: resident stretches that no resident one goes on from, by class and last use.

A leaf may be listed late: most are none any more before anybody asks. Invariant: once settled,
every leaf is listed once, in the class that it is of. It knows no worth.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policies.base import Key
from policies.ranking import Ranking
from policies.stretch import Stretch

Rank = tuple[int, int]  # class and priority


class Leaves:
    """Stretches to give up, the oldest of each class first."""

    def __init__(self) -> None:
        self._ranked: dict[Rank, Ranking[Stretch]] = {}
        self._sprouting: Stretch | None = None

    def sprout(self, stretch: Stretch) -> None:
        """It is a leaf, or one of another class or use now. It is listed when the next one is: in
        most paths it is no leaf for long."""
        before, self._sprouting = self._sprouting, stretch
        if before is not None and before is not stretch:
            self._list(before)

    def wither(self, stretch: Stretch) -> None:
        """It is no leaf any more, if it was."""
        if stretch is self._sprouting:
            self._sprouting = None
        if stretch.listed is not None:
            ranking = self._ranked[stretch.listed]
            ranking.discard(stretch)
            if not len(ranking):
                del self._ranked[stretch.listed]
            stretch.listed = None

    def has(self, stretch: Stretch) -> bool:
        return stretch.listed is not None or stretch is self._sprouting

    def rankings(self) -> Iterable[tuple[Rank, Ranking[Stretch]]]:
        """Of each class and priority that has any, its leaves, the one used longest ago first.
        Valid until the next change."""
        self._settle()
        return self._ranked.items()

    def state(self) -> list[list[Key]]:
        """The first key of each, in an order that `restore` keeps."""
        return [[leaf.keys[0] for leaf in ranking] for _, ranking in self.rankings()]

    def restore(self, state: Sequence[Sequence[Key]], at: Mapping[Key, Any]) -> None:
        for keys in state:
            for key in keys:
                self._list(at[key])

    def _settle(self) -> None:
        """List the leaf that is left to be."""
        if self._sprouting is not None:
            self._list(self._sprouting)
            self._sprouting = None

    def _list(self, stretch: Stretch) -> None:
        rank = stretch.class_of, stretch.run.priority
        if stretch.listed not in (None, rank):
            sprouting = self._sprouting
            self.wither(stretch)
            self._sprouting = sprouting
        if (ranking := self._ranked.get(rank)) is None:
            ranking = self._ranked[rank] = Ranking()
        ranking.set(stretch, stretch.run.time)
        stretch.listed = rank
