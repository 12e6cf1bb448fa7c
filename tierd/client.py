"""The engine's side: connect, attach a layout, and lease blocks of the pool that is mapped here.

    with tierd.connect() as client, client.attach(layout) as pool:
        with pool.acquire(tokens) as lease:
            lease.wait()                      # the hit's bytes are in place
            ...                               # write K and V of tokens[lease.hit:], call the op
            lease.commit(len(tokens))         # others may share them now

It is synchronous and may be used from several threads, one call at a time. A client always knows
what it may write in place, so a decode step needs no message until a block fills. It maps the
memory of one tier; where else a block is, or came from, is the daemon's business.
"""

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from tierd import protocol
from tierd.errors import DaemonLost, LeaseError, ProtocolError
from tierd.fence import CudaFence
from tierd.inbox import Inbox
from tierd.layout import KVLayout
from tierd.pool import Pool
from tierd.protocol import ERROR, PUSH, REPLY, REQUEST, Frame, Op, encode
from tierd.shm import CudaMemory, SharedMemory

_PIPELINED = 64  # requests on their way at once: their answers fit the socket, whoever waits


def connect(
    path: str | os.PathLike[str] | None = None, *, tenant: str = "", tier: str = "device"
) -> "Client":
    """Connect to the daemon at `path` (default: where `tierd serve` listens by default).

    `tier`: whose memory is mapped, and holds what is leased. An engine that computes elsewhere,
    and only offloads, takes "host". Raises DaemonLost if there is no daemon, Refused if it does
    not serve this user or tenant, or has no such tier.
    """
    return Client(os.fspath(path or protocol.default_socket()), tenant, tier)


class Client:
    """One connection. `boot` names the daemon's life: another id means another daemon."""

    def __init__(
        self, path: str, tenant: str = "", tier: str = "device", timeout: float = 60.0
    ) -> None:
        self._path, self.lock, self._inbox = path, threading.RLock(), Inbox()
        self._pid, self._lost = os.getpid(), ""
        self._first = self._request = 0  # of those that are waited for: the first and the last
        self._memory: SharedMemory | CudaMemory | None = None
        self._fence: CudaFence | None = None
        self.pool: Pool | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _limit_waits(self._socket, timeout)
        try:
            self._socket.connect(path)
            welcome = self._hello(tenant, tier)
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

    def _hello(self, tenant: str, tier: str) -> dict[str, Any]:
        """Say HELLO; the answer brings the file descriptor of the tier's memory."""
        body = protocol.dump({"protocol": protocol.VERSION, "tenant": tenant, "tier": tier})
        self._socket.sendall(encode(Op.HELLO, REQUEST, 0, body))
        data, fds, _, _ = socket.recv_fds(self._socket, 65536, 1)
        while not (frames := protocol.split(data)[0]):
            if not data or not (more := self._socket.recv(65536)):
                raise self._lose("hung up during the greeting")
            data += more
        if frames[0].kind == ERROR:
            raise protocol.parse_error(frames[0].body)
        welcome = protocol.parse(frames[0].body)
        lent = welcome["memory"]
        if lent["kind"] == "cpu":
            self._memory = SharedMemory(fds[0], lent["nbytes"])
        else:
            handle = bytes.fromhex(lent["handle"])
            self._memory = CudaMemory.attach(handle, lent["nbytes"], lent["uuid"])
            self._fence = CudaFence.create(self._memory.device)
        return welcome

    def attach(self, layout: KVLayout, name: str | None = None) -> Pool:
        """Attach `layout` under `name` (default: its model); once a connection.

        Raises LayoutMismatch if engines have another layout attached under that name.
        """
        asked: dict[str, Any] = {"name": name or layout.model, "layout": layout.to_json()}
        if self._fence is not None:
            asked["fence"] = self._fence.export().hex()
        reply = protocol.parse(self.call(Op.ATTACH, protocol.dump(asked)))
        assert self._memory is not None, "the greeting maps the pool"
        self.pool = Pool(self, KVLayout.from_json(reply["layout"]), self._memory)
        return self.pool

    def status(self) -> dict[str, Any]:
        """What `tierd status --json` prints."""
        return protocol.parse(self.call(Op.STATUS, protocol.dump({})))

    def reload(self) -> dict[str, Any]:
        """Have the daemon read its configuration again: what changed, what needs a restart.

        Only for the daemon's own user and root (Refused). Raises ConfigError: nothing changed.
        """
        return protocol.parse(self.call(Op.RELOAD, protocol.dump({})))

    def call(self, op: Op, body: bytes, take: Callable[[bytes], None] | None = None) -> bytes:
        """One request and its reply, which `take` gets before any push that came after it.

        Raises what the daemon answers, or DaemonLost.
        """
        with self.lock:
            self._check()
            if self._fence is not None:  # the daemon waits for what the stream was given so far
                self._fence.record()
            self._request = self._first = self._request + 1
            self._send(encode(op, REQUEST, self._request, body))
            while not (replies := self._receive(take)):
                pass
            reply = replies[0]
            if reply.kind == ERROR:
                raise protocol.parse_error(reply.body)
            return reply.body

    def call_many(self, op: Op, bodies: Sequence[bytes]) -> list[bytes]:
        """Many requests of one kind, several on their way at a time, and their replies.

        Raises as `call`, once what is on its way has been answered.
        """
        answers = []
        for start in range(0, len(bodies), _PIPELINED):
            answers += self.call_all([(op, body) for body in bodies[start : start + _PIPELINED]])
        return answers

    def call_all(self, requests: Sequence[tuple[Op, bytes]]) -> list[bytes]:
        """A few requests, on their way together and served in order; as `call_many` else."""
        with self.lock:
            self._check()
            if self._fence is not None:
                self._fence.record()
            self._first, self._request = self._request + 1, self._request + len(requests)
            numbered = enumerate(requests, self._first)
            self._send(b"".join([encode(op, REQUEST, at, body) for at, (op, body) in numbered]))
            replies: list[Frame] = []
            while len(replies) < len(requests):
                replies += self._receive()
            for reply in replies:
                if reply.kind == ERROR:
                    raise protocol.parse_error(reply.body)
            return [reply.body for reply in sorted(replies, key=lambda reply: reply.request)]

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
                while not self._receive():  # the daemon may have said why before it hung up
                    pass
            raise self._lose(_why(error)) from None

    def _receive(self, take: Callable[[bytes], None] | None = None) -> list[Frame]:
        """Wait for frames and take them in, in order; returns the replies that are waited for."""
        try:
            nbytes = self._socket.recv_into(self._inbox.space())
        except OSError as error:
            raise self._lose(_why(error)) from None
        if not nbytes:
            raise self._lose("it hung up")
        replies = []
        for frame in self._inbox.took(nbytes):
            if frame.kind == PUSH:
                if self.pool:
                    self.pool.pushed(frame)
            elif frame.request == 0:  # it hangs up
                raise protocol.parse_error(frame.body)
            elif frame.request >= self._first:
                replies.append(frame)
                if take and frame.kind == REPLY:
                    take(frame.body)
        return replies

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


def _limit_waits(connection: socket.socket, seconds: float) -> None:
    """By the kernel: Python's own timeout asks `poll` before every call."""
    whole = int(seconds)
    limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def _why(error: OSError) -> str:
    return "timed out" if isinstance(error, BlockingIOError) else str(error)
