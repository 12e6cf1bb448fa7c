"""Bytes on their way in: they arrive in one buffer that is used again, and leave it as frames.

A frame that is not whole stays at the buffer's start, which grows for it, up to the largest frame
allowed, and is small again once it has left. It knows no socket, and not what a frame asks.
"""

from tierd.protocol import HEADER, MAX_FRAME, Frame, split

NBYTES = 1 << 16  # as much as is read at once: an allocation a read costs more than the read


class Inbox:
    """`space()` is where the next bytes go, `took(n)` says that `n` have come."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max_frame = max_frame
        self._small = self._buffer = memoryview(bytearray(NBYTES))
        self._filled = 0

    def space(self) -> memoryview:
        """Room for at least one byte. Valid until `took`."""
        return self._buffer[self._filled :] if self._filled else self._buffer

    def took(self, nbytes: int) -> list[Frame]:
        """The frames that are whole now. Raises ProtocolError for what is no frame."""
        filled, self._filled = self._filled + nbytes, 0
        frames, used = split(self._buffer, self._max_frame, filled)
        if used < filled:
            self._keep(used, filled)
        elif self._buffer is not self._small:
            self._buffer = self._small
        return frames

    def _keep(self, used: int, filled: int) -> None:
        """The rest goes to the start of a buffer that has room after it."""
        rest, self._filled = self._buffer[used:filled], filled - used
        if self._filled < len(self._small):
            target = self._small
        elif self._filled < len(self._buffer):
            target = self._buffer
        else:
            size = min(2 * len(self._buffer), HEADER.size + self._max_frame)
            target = memoryview(bytearray(size))
        target[: self._filled] = rest
        self._buffer = target
