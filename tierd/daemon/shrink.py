"""A medium that shrinks: parts of it are emptied and given back until it is small enough.

It rests when nothing can be given: those who hold it say nothing when they let go. It owns the
task; who gives, and how a part is emptied, is decided elsewhere.
"""

import asyncio
from collections.abc import Awaitable, Callable

_REST_S = 0.5  # while all that is left is held


class Shrink:
    """Owns the task, from the first `start` to `close`. `over`: whether the medium is too large;
    `withdraw` gives one part back, or says that none can be; `given` is called after each."""

    def __init__(
        self,
        over: Callable[[], bool],
        withdraw: Callable[[], Awaitable[bool]],
        given: Callable[[], Awaitable[None]],
    ) -> None:
        self._over, self._withdraw, self._given = over, withdraw, given
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The medium may be too large."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the task. What it was emptying stays with its owner."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        await self._given()
        while self._over():
            if not await self._withdraw():
                await asyncio.sleep(_REST_S)
            await self._given()
