"""A memory tier's arena as a space that pools share: its parts are runs of extents."""

from collections.abc import Iterable

from tierd.daemon.arena import Arena
from tierd.daemon.holder import Holder, Part


class Extents:
    """The `Space` of one arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    def held(self, holder: Holder) -> int:
        return self._arena.held(holder.owner)

    def parts(self, holder: Holder, needy: Holder) -> list[Part]:
        size = max(self._arena.least(needy.block_nbytes), self._arena.step // 4)
        return [
            self._part(holder, start, min(start + size, last))
            for first, last in self._arena.runs(holder.owner)
            for start in range(first, last, size)
        ]

    def _part(self, holder: Holder, start: int, stop: int) -> Part:
        ids = self._arena.touching(start, stop, holder.block_nbytes)
        return Part(start, stop, ids, (stop - start) * self._arena.extent_nbytes)

    def grow(self, holder: Holder) -> Iterable[int] | None:
        return self._arena.grow(holder.owner, holder.block_nbytes)

    async def give_back(self, holder: Holder, part: Part) -> None:
        self._arena.give_back(holder.owner, part.start, part.stop)
