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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from tierd import protocol
from tierd.errors import DaemonLost, LeaseError, ProtocolError, TierdError
from tierd.layout import KVLayout
from tierd.prefix import PrefixChain, Tokens, token_array
from tierd.protocol import Frame, Kind, Op, StepRequest
from tierd.shm import CudaMemory, SharedMemory

if TYPE_CHECKING:
    import torch


def connect(path: str | os.PathLike[str] | None = None, *, tenant: str = "") -> "Client":
    """Connect to the daemon at `path` (default: where `tierd serve` listens by default).

    Raises DaemonLost if there is none, Refused if it does not serve this user or tenant.
    """
    return Client(os.fspath(path or protocol.default_socket()), tenant)


class Client:
    """One connection. `boot` names the daemon's life: another id means another daemon."""

    def __init__(self, path: str, tenant: str = "", timeout: float = 60.0) -> None:
        self._path, self._lock, self._buffer = path, threading.RLock(), b""
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
        self._device: dict[str, Any] = welcome["device"]

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

    def attach(self, layout: KVLayout, name: str | None = None) -> "Pool":
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
        with self._lock:
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
        with self._lock:
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
            data = self._socket.recv(1 << 20)
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
        with self._lock:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


class Pool:
    """The device tier as this engine sees it: `layout`, and its blocks as torch tensors."""

    def __init__(self, client: Client, layout: KVLayout, memory: SharedMemory | CudaMemory) -> None:
        self.client, self.layout = client, layout
        self._memory = memory
        self._root = layout.root(client.tenant)
        self._leases: dict[int, Lease] = {}
        self._next = 0
        self._views: dict[int, torch.Tensor] = {}

    def view(self, group: int) -> "torch.Tensor":
        """All blocks of a group, without a copy.

        Shape `[num_blocks, layers of the group, 2 (K, V), num_kv_heads, block_size, head_dim]`;
        block i of the first axis is the place with BlockId i.
        """
        if group not in self._views:
            import torch

            flat = (
                self._memory.tensor
                if isinstance(self._memory, CudaMemory)
                else torch.from_numpy(self._memory.array)
            ).view(getattr(torch, self.layout.dtype))
            shape = self.layout.block_shape(group)
            stride = self.layout.block_nbytes(group) // flat.element_size()
            inner = torch.empty(shape, device="meta").stride()
            size = (flat.numel() // stride, *shape)
            self._views[group] = flat.as_strided(size, (stride, *inner))
        return self._views[group]

    def kv(self, layer: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """The K and V caches of one layer, for the op: `[num_blocks, heads, block_size, dim]`."""
        group, index = self.layout.group_of(layer)
        view = self.view(group)
        return view[:, index, 0], view[:, index, 1]

    def acquire(
        self, tokens: Tokens, *, room: int = 0, extra: Mapping[int, bytes] | None = None
    ) -> "Lease":
        """Lease the blocks of a prompt, its longest known prefix filled or being filled.

        `room`: tokens to have places for, the prompt's length if smaller. `extra`: position to
        bytes that also decide the K and V there (an image's hash). Raises OutOfBlocks.
        """
        ids = token_array(tokens)
        if not len(ids):
            raise ValueError("tokens: a prompt has at least one")
        chain = PrefixChain(self._root, self.layout.hash_step, extra)
        chain.append(ids)
        with self.client._lock:
            self._next += 1
            lease = Lease(self, self._next, chain, len(ids))
            self._leases[lease.number] = lease
            body = protocol.dump_acquire(lease.number, len(ids), max(room, len(ids)), chain.hashes)
            try:
                self.client.call(Op.ACQUIRE, body, lease.answered)
            except TierdError:
                del self._leases[lease.number]
                raise
        return lease

    def prefetch(
        self, tokens: Tokens, *, within: float = 60.0, extra: Mapping[int, bytes] | None = None
    ) -> None:
        """Say that this prompt is expected within so many seconds: what it would hit on SSD is
        brought into host memory meanwhile. A hint: nothing is leased, nothing promised."""
        ids = token_array(tokens)
        chain = PrefixChain(self._root, self.layout.hash_step, extra)
        chain.append(ids)
        self.client.call(Op.PREFETCH, protocol.dump_prefetch(within, len(ids), chain.hashes))

    def advance(self, steps: Sequence[tuple["Lease", int, int]]) -> None:
        """For each `(lease, committed, room)` of a batch: freeze its first `committed` tokens and
        have places for `room`, in one message, or none if no block fills and none is needed.

        All or nothing. Raises OutOfBlocks, LeaseError.
        """
        requests = [r for lease, committed, room in steps if (r := lease.step(committed, room))]
        if not requests:
            return
        with self.client._lock:
            reply = self.client.call(Op.ADVANCE, protocol.dump_steps(requests))
            added = protocol.parse_added(reply, len(requests), len(self.layout.groups))
            for request, tables in zip(requests, added, strict=True):
                self._leases[request.lease].advanced(request, tables)

    def release(self, leases: Sequence["Lease"]) -> None:
        """Give leases back in one message; what they committed stays in the cache."""
        for lease in leases:
            lease.check()
        if not leases:
            return
        self.client.call(Op.RELEASE, protocol.dump_leases([lease.number for lease in leases]))
        for lease in leases:
            lease.released = True
            del self._leases[lease.number]

    def pushed(self, frame: Frame) -> None:
        """Take in what the daemon pushed."""
        state = protocol.parse_lease(frame.body, len(self.layout.groups))
        if (lease := self._leases.get(state.lease)) is not None:
            lease.update(state)

    def forget_views(self) -> None:
        self._views.clear()

    def close(self) -> None:
        """Detach: the connection ends with it."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


class Lease:
    """What this engine holds for one sequence.

        0 ......... hit ......... committed ......... room
        filled by the daemon | frozen, shared | may be written in place

    `tables[g]` are the block ids of group g in token order, int32. Until `wait` returns, `hit` is
    planned: a load that fails makes it shorter, and the tables then differ past it.
    """

    def __init__(self, pool: Pool, number: int, chain: PrefixChain, num_tokens: int) -> None:
        self.number = number
        self.hit = self.committed = self.room = 0
        self.num_tokens = num_tokens  # whose ids are known
        self.tables: list[npt.NDArray[np.int32]] = []
        self.released = False
        self._pool, self._chain = pool, chain
        self._ready = 0
        self._sent = len(chain.hashes)  # hashes the daemon knows
        self._frozen = 0  # tokens the daemon was told are committed

    def wait(self, group: int | None = None) -> int:
        """Wait until a group's (default: every group's) hit is in place; returns the hit.

        It is the one that stands as far as the groups waited for know. Where it is shorter than
        planned, compute from there on.
        """
        self.check()
        groups = len(self._pool.layout.groups)
        wanted = (1 << groups) - 1 if group is None else 1 << group
        while not self._pool.client.await_push(lambda: self._ready & wanted == wanted):
            pass
        if self.room < self.num_tokens and group is None:
            self.extend(self.num_tokens)  # a hit cut short under pressure gave its room back
        return self.hit

    def append(self, tokens: Tokens) -> None:
        """The sequence goes on with `tokens`, whose K and V are not (all) written yet."""
        ids = token_array(tokens)
        self._chain.append(ids)
        self.num_tokens += len(ids)

    def extend(self, room: int) -> None:
        """Have places for `room` tokens. Raises OutOfBlocks, nothing changed."""
        self._pool.advance([(self, self.committed, room)])

    def commit(self, num_tokens: int) -> None:
        """K and V of the first `num_tokens` are written in every layer: full blocks are frozen."""
        self._pool.advance([(self, num_tokens, 0)])

    def release(self) -> None:
        """Give the lease back; what it committed stays in the cache."""
        self._pool.release([self])

    def block_table(self, group: int) -> npt.NDArray[np.int32]:
        """`tables[group]`, safe for the op: a block past its window is named by another of ours."""
        table = self.tables[group]
        missing = table < 0
        if not missing.any():
            return table
        return np.where(missing, table.max(), table).astype(np.int32)

    def check(self) -> None:
        """Raise LeaseError unless the lease is held."""
        if self.released:
            raise LeaseError(f"lease {self.number} is released")

    def step(self, committed: int, room: int) -> StepRequest | None:
        """What the daemon must be asked; None if it need not be."""
        self.check()
        if committed > min(self.num_tokens, max(self.room, room)):
            raise LeaseError(
                f"cannot commit {committed} tokens: {self.num_tokens} are known and there is room "
                f"for {max(self.room, room)}"
            )
        layout = self._pool.layout
        fills = any(
            committed // group.block_size > self._frozen // group.block_size
            for group in layout.groups
        )
        if not fills and room <= self.room:
            self.committed = max(self.committed, committed)
            return None
        known = max(self._sent, committed // layout.hash_step)
        hashes = self._chain.hashes[self._sent : known]
        return StepRequest(self.number, max(committed, self._frozen), room, hashes)

    def advanced(self, request: StepRequest, added: protocol.Tables) -> None:
        """The daemon has done it."""
        self.tables = [
            np.append(table, np.asarray(ids, np.int32)) if ids else table
            for table, ids in zip(self.tables, added, strict=True)
        ]
        self.room = max(self.room, request.room)
        self._sent += len(request.hashes)
        self._frozen = max(self._frozen, request.committed)
        self.committed = max(self.committed, self._frozen)

    def answered(self, body: bytes) -> None:
        """The daemon has leased the blocks."""
        self.update(protocol.parse_lease(body, len(self._pool.layout.groups)))

    def update(self, state: protocol.LeaseState) -> None:
        """Where the daemon says the lease stands."""
        self._ready = state.ready
        if state.tables is not None:
            self.hit, self.room = state.hit, state.room
            self.committed = self._frozen = state.hit
            self.tables = [np.asarray(ids, np.int32) for ids in state.tables]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if not self.released and not isinstance(error, DaemonLost):
            self.release()
