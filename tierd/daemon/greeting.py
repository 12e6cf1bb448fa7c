"""Who is at the other end of a new connection, before a word is served.

File descriptors pass only over the bare socket, so the greeting happens there: the kernel says who
the peer is, the peer says HELLO, and nothing else may follow before that is answered.
"""

import asyncio
import os
import socket
import struct
from dataclasses import dataclass

from tierd import protocol
from tierd.errors import ProtocolError
from tierd.protocol import Op

_MAX_HELLO = 4096
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, by what the kernel says of the connection."""

    pid: int
    uid: int
    pidfd: int | None  # readable once the process is gone


def peer_of(connection: socket.socket) -> Peer:
    cred = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", cred)
    try:
        pidfd = struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0]
    except OSError:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            pidfd = None
    return Peer(pid, uid, pidfd)


async def first_frame(connection: socket.socket) -> protocol.Frame:
    """The HELLO. Nothing may follow it before it is answered."""
    loop, data = asyncio.get_running_loop(), b""
    while True:
        frames, used = protocol.split(data, max_frame=_MAX_HELLO)
        if frames:
            break
        if not (more := await loop.sock_recv(connection, _MAX_HELLO)):
            raise EOFError("hung up")
        data += more
    if frames[0].op != Op.HELLO or len(frames) > 1 or used < len(data):
        raise ProtocolError("a connection begins with HELLO, and waits for its answer")
    return frames[0]
