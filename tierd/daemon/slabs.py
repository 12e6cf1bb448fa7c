"""A volume as a space that pools share: its parts are the slabs of their arrays."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from storage.base import Volume
from storage.batch import hop
from tierd.daemon.holder import Holder, Owner, Part


class Slabs:
    """The `Space` of one volume with a budget of `nbytes`, from `open` arrays of which pools take;
    `thread` is where slabs are deleted."""

    def __init__(self, volume: Volume, nbytes: int, thread: ThreadPoolExecutor) -> None:
        self._volume, self.nbytes, self._thread = volume, nbytes, thread

    def held(self, holder: Holder) -> int:
        name = array_name(holder.owner)
        return len(self._volume.slabs(name)) * self._volume.slab(name).nbytes

    def parts(self, holder: Holder, needy: Holder) -> list[Part]:
        name = array_name(holder.owner)
        nbytes = self._volume.slab(name).nbytes
        return [Part(ids.start, ids.stop, ids, nbytes) for ids in self._volume.slabs(name)]

    def grow(self, holder: Holder) -> Iterable[int] | None:
        return self._volume.grow(array_name(holder.owner))

    async def give_back(self, holder: Holder, part: Part) -> None:
        await hop(self._thread, self._volume.give_back, array_name(holder.owner), part.ids)


def array_name(owner: Owner) -> str:
    """The array of a layer group of a namespace."""
    root, group = owner
    return f"{root.hex()}-{group}"
