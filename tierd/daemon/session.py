"""One attached engine: frames become cache calls, and at hang-up its leases go back.

Requests are answered in `data_received`, without an await, unless they have to wait: for a place
whose old bytes are still on their way out, or for a new namespace. References come only from
messages, so a connection's end is all that is needed to know what to give back; what the engine
could still write is quarantined until its process is really gone (I7).
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from policies.base import Access
from tierd import protocol
from tierd.block import Block
from tierd.daemon.copy import Place
from tierd.daemon.lease import Lease
from tierd.daemon.namespace import Namespace
from tierd.daemon.tenant import Tenant
from tierd.errors import LeaseError, ProtocolError, TierdError
from tierd.layout import KVLayout
from tierd.protocol import Frame, Kind, LeaseState, Op

if TYPE_CHECKING:
    from tierd.daemon.server import Server

log = logging.getLogger("tierd.session")

_IN_FLIGHT = 1024  # unanswered requests of one engine before its socket is left unread


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, by what the kernel says of the connection."""

    pid: int
    uid: int
    pidfd: int | None  # readable once the process is gone


class Session(asyncio.Protocol):
    """Owns the connection, the peer's pidfd and every lease given out on it."""

    def __init__(self, server: "Server", tenant: Tenant, peer: Peer) -> None:
        self.peer, self.tenant = peer, tenant
        self.namespace: Namespace | None = None  # None again once the leases are given back
        self._resident: Namespace | None = None  # whose memory the engine may still write
        self.leases: dict[int, Lease] = {}
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._unanswered = 0
        self._unread = False  # what we wrote, by the engine
        self._quiet = False  # nothing is asked of us any more
        self._answered: set[int] = set()  # leases whose ACQUIRE has been answered
        self._tasks: set[asyncio.Task[None]] = set()
        self._attaching = False
        self._peer_alive = True
        self._clean = False  # the engine said goodbye
        self._quarantined: list[tuple[Namespace, int, Block]] = []
        self._grace: asyncio.TimerHandle | None = None
        if peer.pidfd is not None:
            self._loop.add_reader(peer.pidfd, self._peer_died)

    # -- the connection ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a Unix stream"
        self._transport = transport
        self._server.sessions.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            frames, self._buffer = protocol.split(self._buffer + data, self._server.max_frame)
            for frame in frames:
                self._serve(frame)
        except ProtocolError as error:
            self._server.protocol_errors += 1
            log.warning("pid %d broke the protocol: %s", self.peer.pid, error)
            self._reply(Op.HELLO, Kind.ERROR, 0, protocol.dump_error(error))
            self.close()

    def pause_writing(self) -> None:
        """The engine does not read its answers: it is not read either."""
        self._unread = True
        self._listen()

    def resume_writing(self) -> None:
        self._unread = False
        self._listen()

    def _listen(self) -> None:
        """Read the engine's requests, or not for now."""
        if self._transport and not self._transport.is_closing():
            if self._quiet or self._unread or self._unanswered >= _IN_FLIGHT:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._tasks:  # else when the attach under way has ended
            self._give_back()

    def close(self) -> None:
        """Hang up once what was answered is written."""
        if self._transport:
            self._transport.close()

    @property
    def idle(self) -> bool:
        """Whether every request has been answered, or nobody is left to answer to."""
        return not self._unanswered or self._transport is None or self._transport.is_closing()

    # -- requests ------------------------------------------------------------------------------

    def _serve(self, frame: Frame) -> None:
        """Answer one request; a TierdError is an answer, a ProtocolError the end."""
        serve = _SERVES.get(frame.op)
        if serve is None or frame.kind != Kind.REQUEST:
            raise ProtocolError(f"operation {frame.op} of kind {frame.kind} is none of ours")
        self._unanswered += 1
        if self._unanswered == _IN_FLIGHT:
            self._listen()
        try:
            serve(self, frame)
        except ProtocolError:
            raise
        except TierdError as error:
            self._answer(frame, protocol.dump_error(error), Kind.ERROR)
        # The session's top: one engine's surprise must not end the others.
        except Exception as error:
            self._break(frame, error)

    def _break(self, frame: Frame, error: BaseException) -> None:
        """A request met a fault of ours: the engine is told, the log has all of it."""
        log.error("pid %d: %s failed", self.peer.pid, Op(frame.op).name, exc_info=error)
        body = protocol.dump_error(TierdError(f"internal error: {error!r}"))
        self._answer(frame, body, Kind.ERROR)

    def _attach(self, frame: Frame) -> None:
        if self.namespace is not None or self._attaching:
            raise ProtocolError("this connection has attached a layout already")
        self._attaching = True
        self._spawn(frame, self._attach_later(frame))

    async def _attach_later(self, frame: Frame) -> None:
        try:
            values = protocol.parse(frame.body)
            layout = KVLayout.from_json(values.get("layout", {}))
            name = str(values.get("name") or layout.model)
            self.namespace = await self.tenant.attach(name, layout)
        except (TierdError, ValueError, OSError) as error:
            told = error if isinstance(error, TierdError) else ProtocolError(str(error))
            self._answer(frame, protocol.dump_error(told), Kind.ERROR)
            self._attaching = False
        else:
            self._resident = self.namespace
            self._answer(frame, protocol.dump({"layout": self.namespace.layout.to_json()}))

    def _acquire(self, frame: Frame) -> None:
        namespace = self._attached()
        number, num_tokens, room, hashes = protocol.parse_acquire(frame.body)
        if number in self.leases:
            raise LeaseError(f"lease {number} is in use")
        if not 1 <= num_tokens <= room:
            raise LeaseError(f"a prompt of {num_tokens} tokens in room for {room}")
        if len(hashes) < (num_tokens - 1) // namespace.layout.hash_step:
            raise LeaseError(f"{len(hashes)} hashes are too few for {num_tokens} tokens")
        if len(set(hashes)) != len(hashes):
            raise LeaseError("a prompt names a block twice")

        def notify(lease: Lease) -> None:
            self._push_ready(number, lease)

        lease = namespace.cache.acquire(hashes, num_tokens, room, self._now(), notify)
        self.leases[number] = lease

        def answer() -> None:
            if self.leases.get(number) is lease:
                self._answered.add(number)
                lease.shortened = False  # the tables that go out are the latest
                self._answer(frame, protocol.dump_lease(self._state(number, lease, tables=True)))

        self._when_idle(_places(lease.tables), answer)

    def _advance(self, frame: Frame) -> None:
        namespace = self._attached()
        requests = protocol.parse_steps(frame.body)
        steps = [(self._lease(r.lease), r.committed, r.hashes, r.room) for r in requests]
        added = namespace.cache.advance(steps, self._now())
        body = protocol.dump_added([[_ids(blocks) for blocks in step] for step in added])
        new = [place for step in added for place in _places(step)]
        self._when_idle(new, lambda: self._answer(frame, body))

    def _release(self, frame: Frame) -> None:
        namespace = self._attached()
        numbers = protocol.parse_leases(frame.body)
        leases = [self._lease(number) for number in numbers]
        if len(set(numbers)) != len(numbers):
            raise LeaseError("a lease is named twice in one message")
        for number, lease in zip(numbers, leases, strict=True):
            namespace.cache.release(lease, self._now())
            self._forget(number)
        self._answer(frame)

    def _status(self, frame: Frame) -> None:
        self._spawn(frame, self._status_later(frame))

    async def _status_later(self, frame: Frame) -> None:
        operator = self.peer.uid in (0, os.getuid())
        status = await self._server.status(None if operator else self.tenant)
        self._answer(frame, protocol.dump(status))

    def _goodbye(self, frame: Frame) -> None:
        self._clean = True
        self._give_back()
        self._answer(frame, protocol.dump({}))
        self.close()

    # -- answers -------------------------------------------------------------------------------

    def _push_ready(self, number: int, lease: Lease) -> None:
        """Tell the engine that a group is ready or that the hit was cut short."""
        if number not in self._answered:
            return  # the answer to the ACQUIRE will say so
        if not lease.shortened:
            self._push(number, lease)
        else:
            self._when_idle(_places(lease.tables), lambda: self._push(number, lease))

    def _push(self, number: int, lease: Lease) -> None:
        if self.leases.get(number) is lease:
            state = self._state(number, lease, tables=lease.shortened)
            lease.shortened = False
            self._write(protocol.encode(Op.READY, Kind.PUSH, 0, protocol.dump_lease(state)))

    def _state(self, number: int, lease: Lease, *, tables: bool) -> LeaseState:
        ready = sum(1 << group for group, waits in enumerate(lease.loading) if not waits)
        ids = [_ids(table) for table in lease.tables] if tables else None
        return LeaseState(number, lease.hit, lease.room, ready, ids)

    def _answer(self, frame: Frame, body: bytes = b"", kind: Kind = Kind.REPLY) -> None:
        self._unanswered -= 1
        if self._unanswered == _IN_FLIGHT - 1:
            self._listen()
        self._reply(Op(frame.op), kind, frame.request, body)
        if not self._unanswered:
            self._server.session_idle()

    def _reply(self, op: Op, kind: Kind, request: int, body: bytes) -> None:
        self._write(protocol.encode(op, kind, request, body))

    def _write(self, data: bytes) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.write(data)

    def _when_idle(self, places: Iterable[Place], call: Callable[[], None]) -> None:
        """Call when no demotion still reads `places`: only then may the engine write them."""
        if self._attached().transfer.when_idle(places, call):
            call()

    # -- leases --------------------------------------------------------------------------------

    def _attached(self) -> Namespace:
        if self.namespace is None:
            raise LeaseError("attach a layout first")
        return self.namespace

    def _lease(self, number: int) -> Lease:
        if (lease := self.leases.get(number)) is None:
            raise LeaseError(f"lease {number} is not one of this connection's, or is released")
        return lease

    def _forget(self, number: int) -> None:
        del self.leases[number]
        self._answered.discard(number)

    def _give_back(self) -> None:
        """Drop every lease; what the engine may still write is kept from use until it is gone."""
        namespace, self.namespace = self.namespace, None
        if namespace is not None:
            writable = self._peer_alive and not self._clean
            for number, lease in list(self.leases.items()):
                self._forget(number)
                if writable:
                    frozen = namespace.cache.abandon(lease, self._now())
                    self._quarantined += [(namespace, group, block) for group, block in frozen]
                else:
                    namespace.cache.release(lease, self._now())
        if not self._quarantined:
            self._depart()
        if self._quarantined and self.peer.pidfd is None and self._grace is None:
            self._grace = self._loop.call_later(self._server.quarantine_grace, self._peer_died)
        if not self._transport and not self._quarantined:
            self._end()

    def _depart(self) -> None:
        """Nothing of this engine is left in its namespace."""
        resident, self._resident = self._resident, None
        if resident is not None:
            resident.num_sessions -= 1

    def _peer_died(self) -> None:
        """The process is gone: nothing it held can be written any more."""
        self._peer_alive = False
        self._give_back()
        for namespace, group, block in self._quarantined:
            namespace.cache.thaw(group, block)
        self._quarantined.clear()
        self._depart()
        self.close()
        self._end()

    def _end(self) -> None:
        """Let go of the kernel's handles; nothing is left to wait for."""
        if self.peer.pidfd is not None and self in self._server.sessions:
            self._loop.remove_reader(self.peer.pidfd)
            os.close(self.peer.pidfd)
        if self._grace:
            self._grace.cancel()
        self._server.sessions.discard(self)
        self._server.session_idle()

    def quiesce(self) -> None:
        """The daemon ends: what was asked is answered, nothing more is read."""
        self._quiet = True
        self._listen()

    def shut(self) -> None:
        """The daemon ends: no death is waited for any more."""
        self._give_back()
        self._quarantined.clear()
        self.close()
        self._end()

    def _spawn(self, frame: Frame, work: Coroutine[Any, Any, None]) -> None:
        """Answer a request later: what has to wait is a task of this session's."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._spawned, frame))

    def _spawned(self, frame: Frame, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(frame, error)
        if not self._transport and not self._tasks:
            self._give_back()

    def _now(self) -> Access:
        return Access(self._loop.time())

    def status(self) -> dict[str, Any]:
        """Facts for `tierd status`, as JSON."""
        held = sum(b is not None for lease in self.leases.values() for t in lease.tables for b in t)
        return {
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "tenant": self.tenant.name,
            "namespace": self.namespace.name if self.namespace else None,
            "connected": self._transport is not None,
            "leases": len(self.leases),
            "blocks": held,
            "quarantined": len(self._quarantined),
        }


_SERVES: dict[int, Callable[[Session, Frame], None]] = {
    Op.ATTACH: Session._attach,
    Op.ACQUIRE: Session._acquire,
    Op.ADVANCE: Session._advance,
    Op.RELEASE: Session._release,
    Op.STATUS: Session._status,
    Op.GOODBYE: Session._goodbye,
}


def _ids(blocks: Iterable[Block | None]) -> list[int]:
    return [-1 if block is None else block.block_id for block in blocks]


def _places(tables: Iterable[Iterable[Block | None]]) -> list[Place]:
    """The places of the top tier that an engine may write."""
    return [
        Place(0, group, block.block_id)
        for group, table in enumerate(tables)
        for block in table
        if block is not None and block.key is None
    ]
