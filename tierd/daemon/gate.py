"""A gate: an engine's frames wait until its GPU stream has done what came before them.

The daemon neither reads, publishes nor reuses blocks that a kernel may still write (DESIGN §5, When
bytes are done). Frames that could make it do so wait for the fence, and those behind them for
their turn; usually it is passed already, for an engine that knows its next token has done the work
for it. The gate owns the task that waits; it does not know what frames ask.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from tierd.fence import Fence
from tierd.protocol import Frame, Op

_FENCED = frozenset(
    (Op.ADVANCE, Op.RELEASE, Op.FORK, Op.TRUNCATE, Op.SUSPEND, Op.GOODBYE)
)  # they publish, read or give away what an engine has written


class Gate:
    """`serve` gets each kept frame in its turn; `broken` what went wrong, if the fence did."""

    def __init__(
        self,
        fence: Fence,
        serve: Callable[[Frame], None],
        broken: Callable[[Frame, Exception], None],
    ) -> None:
        self._fence, self._serve, self._broken = fence, serve, broken
        self._kept: deque[Frame] = deque()
        self._task: asyncio.Task[None] | None = None

    def admits(self, frame: Frame) -> bool:
        """Whether the frame may be served now; if not, it is kept and served in its turn."""
        if self._task is None and (frame.op not in _FENCED or self._fence.passed()):
            return True
        self._kept.append(frame)
        if self._task is None:
            self._task = asyncio.create_task(self._open())
        return False

    async def _open(self) -> None:
        try:
            while self._kept:
                try:
                    await asyncio.to_thread(self._fence.wait)
                except (OSError, RuntimeError) as error:  # CUDA's own
                    self._broken(self._kept.popleft(), error)
                else:
                    self._serve(self._kept.popleft())
        finally:
            self._task = None

    def close(self) -> None:
        """The connection is gone: nobody waits for an answer."""
        self._kept.clear()
        if self._task is not None:
            self._task.cancel()
