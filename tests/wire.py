"""A bare connection to a daemon, for what no client of ours would send."""

import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.content import LAYOUT
from tierd import protocol
from tierd.block import BlockHash
from tierd.protocol import Frame, Kind, Op

HASHES = [BlockHash(bytes([number]) * 16) for number in range(1, 200)]


class Wire:
    """Sends bytes and takes frames; `attach` makes it a proper engine first."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20)
        self.socket.connect(str(path))
        self._data = b""
        self._frames: list[Frame] = []

    def send(self, op: int, body: bytes, *, kind: int = Kind.REQUEST, request: int = 7) -> None:
        self.socket.sendall(protocol.HEADER.pack(len(body), op, kind, 0, request) + body)

    def frame(self) -> Frame | None:
        """The next frame; None when the daemon has hung up."""
        while not self._frames:
            try:
                # Without room for file descriptors: the kernel closes those of the greeting.
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._frames, used = protocol.split(self._data + data)
            self._data = (self._data + data)[used:]
        return self._frames.pop(0)

    def ask(self, op: int, body: bytes) -> Frame:
        self.send(op, body)
        frame = self.frame()
        assert frame is not None, "the daemon hung up"
        return frame

    def hello(self, **values: Any) -> Frame:
        body = {"protocol": protocol.VERSION, "tenant": ""} | values
        return self.ask(Op.HELLO, protocol.dump(body))

    def attach(self) -> Self:
        assert self.hello().kind == Kind.REPLY
        body = protocol.dump({"name": "model", "layout": LAYOUT.to_json()})
        assert self.ask(Op.ATTACH, body).kind == Kind.REPLY
        return self

    def acquire(self, lease: int, num_tokens: int, room: int, hashes: list[BlockHash]) -> Frame:
        return self.ask(Op.ACQUIRE, protocol.dump_acquire(lease, num_tokens, room, hashes))

    def hung_up(self) -> bool:
        return self.frame() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.socket.close()


def told(frame: Frame | None) -> str:
    """The error a frame tells, as `Kind: message`."""
    assert frame is not None, "the daemon hung up without a word"
    assert frame.kind == Kind.ERROR, f"no error: {frame}"
    values = protocol.parse(frame.body)
    return f"{values['error']}: {values['message']}"
