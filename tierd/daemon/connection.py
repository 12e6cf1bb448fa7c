"""One connection of an engine: frames in, answers out, and how many are still owed.

A request is answered at once, later from a callback, or by a task; whichever, it is owed until it
is answered, and an engine with too many owed, or one that does not read, is not read either. This
knows frames, not what they ask: that is its subclass's.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from functools import partial
from typing import Any

from tierd import protocol
from tierd.errors import ProtocolError, TierdError
from tierd.inbox import Inbox
from tierd.protocol import ERROR, PUSH, REPLY, REQUEST, Frame, Kind, Op, encode

log = logging.getLogger("tierd.connection")

_IN_FLIGHT = 1024  # requests owed an answer before the socket is left unread


class Connection(asyncio.BufferedProtocol, ABC):
    """Owns the transport and the tasks that answer later. `who` names the other end in the log."""

    def __init__(self, who: str, max_frame: int) -> None:
        self._who, self._inbox = who, Inbox(max_frame)
        self._transport: asyncio.Transport | None = None
        self._owed = 0
        self._unread = False  # what we wrote, by the engine
        self._quiet = False  # nothing is asked of us any more
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def serve(self, frame: Frame) -> None:
        """Answer one request, now or later. A TierdError is an answer, a ProtocolError the end."""

    @abstractmethod
    def left(self) -> None:
        """The connection is gone, and nothing of it is under way any more."""

    @abstractmethod
    def all_answered(self) -> None:
        """The daemon ends, and nothing is owed any more."""

    @abstractmethod
    def broken(self, error: ProtocolError) -> None:
        """The engine broke the protocol; it is told, and hung up on."""

    @property
    def connected(self) -> bool:
        return self._transport is not None

    @property
    def idle(self) -> bool:
        """Whether every request has been answered, or nobody is left to answer to."""
        return not self._owed or self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """Hang up once what was answered is written."""
        if self._transport:
            self._transport.close()

    def quiesce(self) -> None:
        """The daemon ends: what was asked is answered, nothing more is read."""
        self._quiet = True
        self._listen()

    # -- what asyncio says -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a Unix stream"
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox.space()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._inbox.took(nbytes):
                self._receive(frame)
        except ProtocolError as error:
            log.warning("%s broke the protocol: %s", self._who, error)
            self._write(encode(Op.HELLO, ERROR, 0, protocol.dump_error(error)))
            self.broken(error)
            self.close()

    def pause_writing(self) -> None:
        self._unread = True
        self._listen()

    def resume_writing(self) -> None:
        self._unread = False
        self._listen()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._tasks:  # else when the last of them has ended
            self.left()

    # -- requests and answers --------------------------------------------------------------------

    def answer(self, frame: Frame, body: bytes = b"", kind: Kind = REPLY) -> None:
        """What a request gets, once."""
        self._owed -= 1
        if self._owed == _IN_FLIGHT - 1:
            self._listen()
        self._write(encode(frame.op, kind, frame.request, body))
        if self._quiet and not self._owed:
            self.all_answered()

    def refuse(self, frame: Frame, error: TierdError) -> None:
        """Answer with an error."""
        self.answer(frame, protocol.dump_error(error), ERROR)

    def push(self, op: Op, body: bytes) -> None:
        """Tell the engine something it did not ask for."""
        self._write(encode(op, PUSH, 0, body))

    def answer_later(self, frame: Frame, work: Coroutine[Any, Any, None]) -> None:
        """Answer from a task, which is this connection's to the end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done_later, frame))

    def _receive(self, frame: Frame) -> None:
        if frame.kind != REQUEST:
            raise ProtocolError(f"operation {frame.op} of kind {frame.kind} is none of ours")
        self._owed += 1
        if self._owed == _IN_FLIGHT:
            self._listen()
        if self.admits(frame):
            self.perform(frame)

    def admits(self, frame: Frame) -> bool:
        """Whether a request may be served now; if not, `perform` it later."""
        return True

    def perform(self, frame: Frame) -> None:
        """Serve a request, or answer with what stands against it. Raises ProtocolError."""
        try:
            self.serve(frame)
        except ProtocolError:
            raise
        except TierdError as error:
            self.refuse(frame, error)
        # The session's top: one engine's surprise must not end the others.
        except Exception as error:
            self._fail(frame, error)

    def _done_later(self, frame: Frame, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(frame, error)
        if not self._transport and not self._tasks:
            self.left()

    def _fail(self, frame: Frame, error: BaseException) -> None:
        """A request met a fault of ours: the engine is told, the log has all of it."""
        log.error("%s: %s failed", self._who, Op(frame.op).name, exc_info=error)
        self.refuse(frame, TierdError(f"internal error: {error!r}"))

    def _listen(self) -> None:
        """Read the engine's requests, or not for now."""
        if self._transport and not self._transport.is_closing():
            if self._quiet or self._unread or self._owed >= _IN_FLIGHT:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _write(self, data: bytes) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.write(data)
