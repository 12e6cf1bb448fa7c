"""When sessions are expected back: the earliest rings first, and nothing is asked in between.

It knows names and times, on the loop's clock, and not what is done about them.
"""

import asyncio
from collections.abc import Callable

from policies.ranking import Ranking


class Returns:
    """Owns one timer, from the first `expect` to `close`."""

    def __init__(self, due: Callable[[str], None]) -> None:
        """`due` is told the name of each whose time has come, one a turn of the loop."""
        self._due = due
        self._times: Ranking[str] = Ranking()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._times)

    def expect(self, name: str, time: float) -> None:
        """`name` is due at `time`, whenever it was before."""
        self._times.set(name, time)
        self._wind()

    def forget(self, name: str) -> None:
        """`name` is due no more."""
        if name in self._times:
            self._times.discard(name)
            self._wind()

    def close(self) -> None:
        """Nothing is due any more."""
        self._times = Ranking()
        self._wind()

    def _wind(self) -> None:
        """Set the timer to the earliest time."""
        first = next(self._times.entries(), None)
        if self._timer is not None:
            if first is not None and self._timer.when() == first[0]:
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if first is None else loop.call_at(first[0], self._ring)

    def _ring(self) -> None:
        self._timer = None
        time, _, name = next(self._times.entries())
        if time <= asyncio.get_running_loop().time():
            self._times.discard(name)
            self._due(name)
        self._wind()
