"""The engine's side: connect, attach a layout, and lease blocks of the pool that is mapped here.

    with tierd.connect() as client, client.attach(layout) as pool:
        with pool.acquire(tokens) as lease:
            lease.wait()                      # the hit's bytes are in place
            ...                               # write K and V of tokens[lease.hit:], call the op
            lease.commit(len(tokens))         # others may share them now

It is synchronous and may be used from several threads, one call at a time. A client always knows
what it may write in place, so a decode step needs no message until a block fills. It knows no
tiers: where a block came from is the daemon's business.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from tierd import protocol
from tierd.errors import DaemonLost, LeaseError, ProtocolError
from tierd.layout import KVLayout
from tierd.pool import Pool
from tierd.protocol import Frame, Kind, Op
from tierd.shm import CudaMemory, SharedMemory


def connect(path: str | os.PathLike[str] | None = None, *, tenant: str = "") -> "Client":
    """Connect to the daemon at `path` (default: where `tierd serve` listens by default).

    Raises DaemonLost if there is none, Refused if it does not serve this user or tenant.
    """
    return Client(os.fspath(path or protocol.default_socket()), tenant)


class Client:
    """One connection. `boot` names the daemon's life: another id means another daemon."""

    def __init__(self, path: str, tenant: str = "", timeout: float = 60.0) -> None:
        self._path, self.lock, self._buffer = path, threading.RLock(), b""
        self._pid, self._request, self._lost = os.getpid(), 0, ""
        self._memory: SharedMemory | CudaMemory | None = None
        self.pool: Pool | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
            welcome = self._hello(tenant)
        except OSError as error:
            self._socket.close()
            if isinstance(error, DaemonLost | PermissionError) and error.errno is None:
                raise
            raise DaemonLost(f"no daemon answers at {path}: {error}") from None
        except ProtocolError:
            self._socket.close()
            raise
        self.boot: str = welcome["boot"]
        self.tenant: str = welcome["tenant"]

    def _hello(self, tenant: str) -> dict[str, Any]:
        """Say HELLO; the answer brings the device tier's file descriptor."""
        body = protocol.dump({"protocol": protocol.VERSION, "tenant": tenant})
        self._socket.sendall(protocol.encode(Op.HELLO, Kind.REQUEST, 0, body))
        data, fds, _, _ = socket.recv_fds(self._socket, 65536, 1)
        while not (frames := protocol.split(data)[0]):
            if not data or not (more := self._socket.recv(65536)):
                raise self._lose("hung up during the greeting")
            data += more
        if frames[0].kind == Kind.ERROR:
            raise protocol.parse_error(frames[0].body)
        welcome = protocol.parse(frames[0].body)
        device = welcome["device"]
        if device["kind"] == "cpu":
            self._memory = SharedMemory(fds[0], device["nbytes"])
        else:
            handle = bytes.fromhex(device["handle"])
            self._memory = CudaMemory.attach(handle, device["nbytes"], device["uuid"])
        return welcome

    def attach(self, layout: KVLayout, name: str | None = None) -> Pool:
        """Attach `layout` under `name` (default: its model); once a connection.

        Raises LayoutMismatch if engines have another layout attached under that name.
        """
        body = protocol.dump({"name": name or layout.model, "layout": layout.to_json()})
        reply = protocol.parse(self.call(Op.ATTACH, body))
        assert self._memory is not None, "the greeting maps the pool"
        self.pool = Pool(self, KVLayout.from_json(reply["layout"]), self._memory)
        return self.pool

    def status(self) -> dict[str, Any]:
        """What `tierd status --json` prints."""
        return protocol.parse(self.call(Op.STATUS, protocol.dump({})))

    def call(self, op: Op, body: bytes, take: Callable[[bytes], None] | None = None) -> bytes:
        """One request and its reply, which `take` gets before any push that came after it.

        Raises what the daemon answers, or DaemonLost.
        """
        with self.lock:
            self._check()
            self._request += 1
            self._send(protocol.encode(op, Kind.REQUEST, self._request, body))
            while (reply := self._receive(take)) is None:
                pass
            if reply.kind == Kind.ERROR:
                raise protocol.parse_error(reply.body)
            return reply.body

    def await_push(self, done: Callable[[], bool]) -> bool:
        """Unless `done()`, wait for the daemon to push something, and take it in; returns `done()`.

        Another thread's call may have taken in the push that is waited for, so it is asked first.
        """
        with self.lock:
            if not done():
                self._check()
                self._receive()
            return done()

    def _check(self) -> None:
        if self._lost:
            raise DaemonLost(self._lost)
        if os.getpid() != self._pid:
            raise LeaseError("a forked process must connect for itself")

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                while self._receive() is None:  # the daemon may have said why before it hung up
                    pass
            raise self._lose(str(error)) from None

    def _receive(self, take: Callable[[bytes], None] | None = None) -> Frame | None:
        """Wait for frames and take them in, in order; returns the reply to the last request."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            raise self._lose(str(error)) from None
        if not data:
            raise self._lose("it hung up")
        frames, self._buffer = protocol.split(self._buffer + data)
        reply = None
        for frame in frames:
            if frame.kind == Kind.PUSH:
                if self.pool:
                    self.pool.pushed(frame)
            elif frame.kind == Kind.ERROR and frame.request == 0:
                raise protocol.parse_error(frame.body)
            elif frame.request == self._request:
                reply = frame
                if take and frame.kind == Kind.REPLY:
                    take(frame.body)
        return reply

    def _lose(self, why: str) -> DaemonLost:
        self._lost = f"the daemon at {self._path} is gone: {why}"
        self._socket.close()
        return DaemonLost(self._lost)

    def close(self) -> None:
        """Say goodbye: views must be dropped, nothing may be written any more. May be repeated."""
        with self.lock:
            if not self._lost and os.getpid() == self._pid:
                with suppress(DaemonLost):  # it is gone already
                    self.call(Op.GOODBYE, protocol.dump({}))
            self._lost = self._lost or "this connection is closed"
            self._socket.close()
            if self.pool:
                self.pool.forget_views()
            if self._memory and os.getpid() == self._pid:  # a child does not have the mapping
                self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
