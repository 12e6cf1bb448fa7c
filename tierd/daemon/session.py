"""One attached engine: what it asks becomes cache calls, and at hang-up its leases go back.

References come only from messages, so a connection's end is all that is needed to know what to
give back; what the engine could still write is quarantined until its process is really gone (I7).
An engine hears of a place only when no demotion still reads it.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from policies.base import NO_HINTS, Access, Hints
from tierd import protocol
from tierd.block import Block, BlockHash
from tierd.daemon.connection import Connection
from tierd.daemon.conversations import heard
from tierd.daemon.copy import Place
from tierd.daemon.gate import Gate
from tierd.daemon.greeting import Peer
from tierd.daemon.lease import Lease
from tierd.daemon.match import check_names
from tierd.daemon.namespace import Namespace
from tierd.daemon.steps import Step
from tierd.daemon.tenant import Tenant
from tierd.daemon.upkeep import Prefetch
from tierd.errors import ConfigError, LeaseError, OutOfBlocks, ProtocolError, Refused, TierdError
from tierd.fence import CudaFence
from tierd.hints import Advice, parse_advice, parse_hints
from tierd.layout import KVLayout
from tierd.protocol import AddedBlocks, Frame, LeaseState, Op

if TYPE_CHECKING:
    from tierd.daemon.server import Server

_T = TypeVar("_T")

_MOST_NAMES = 2048  # of released leases, before the loop may breathe


class Session(Connection):
    """Owns the peer's pidfd and every lease given out on its connection."""

    def __init__(self, server: "Server", tenant: Tenant, peer: Peer, level: int) -> None:
        """`level`: of the memory that the peer was given."""
        super().__init__(f"pid {peer.pid}", server.config.max_frame)
        self.peer, self.tenant, self.level = peer, tenant, level
        self.namespace: Namespace | None = None  # None again once the leases are given back
        self._resident: Namespace | None = None  # whose memory the engine may still write
        self.leases: dict[int, Lease] = {}
        self._server, self._recorder = server, server.recorder
        self._loop = asyncio.get_running_loop()
        self._answered: set[int] = set()  # leases whose ACQUIRE has been answered
        self._attaching = False
        self._gate: Gate | None = None  # where the engine's writes are a GPU stream's
        self._peer_alive = True
        self._clean = False  # the engine said goodbye
        self._quarantined: list[tuple[Namespace, int, Block]] = []
        self._grace: asyncio.TimerHandle | None = None
        if peer.pidfd is not None:
            self._loop.add_reader(peer.pidfd, self._peer_died)
        server.sessions.add(self)

    # -- requests ------------------------------------------------------------------------------

    def serve(self, frame: Frame) -> None:
        if (serve := _SERVES.get(frame.op)) is None:
            raise ProtocolError(f"operation {frame.op} of kind {frame.kind} is none of ours")
        try:
            serve(self, frame)
        except OutOfBlocks as shortage:
            if self.namespace is None or self.namespace.more_room is None:
                raise
            more = self._serve_with_more(frame, serve, self.namespace.more_room, shortage)
            self.answer_later(frame, more)

    async def _serve_with_more(
        self,
        frame: Frame,
        serve: "Callable[[Session, Frame], None]",
        more_room: Callable[[], Awaitable[bool]],
        shortage: OutOfBlocks,
    ) -> None:
        """Serve a request again each time that others, who had more than their share, gave way."""
        while await more_room() and self.namespace is not None:
            try:
                serve(self, frame)
            except OutOfBlocks as again:
                shortage = again
            except TierdError as error:
                self.refuse(frame, error)
                return
            else:
                return
        self.refuse(frame, shortage)

    def admits(self, frame: Frame) -> bool:
        return self._gate is None or self._gate.admits(frame)

    def left(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._give_back()

    def all_answered(self) -> None:
        self._server.session_idle()

    def broken(self, error: ProtocolError) -> None:
        self._server.protocol_errors += 1

    def _attach(self, frame: Frame) -> None:
        if self.namespace is not None or self._attaching:
            raise ProtocolError("this connection has attached a layout already")
        self._attaching = True
        self.answer_later(frame, self._attach_later(frame))

    async def _attach_later(self, frame: Frame) -> None:
        try:
            values = protocol.parse(frame.body)
            layout = KVLayout.from_json(values.get("layout", {}))
            name = str(values.get("name") or layout.model)
            if (handle := values.get("fence")) is not None:
                fence = CudaFence.attach(bytes.fromhex(handle), self.tenant.gpu)
                self._gate = Gate(fence, self._performed_late, self._fence_broke)
            self.namespace = await self.tenant.attach(name, layout)
        except (TierdError, ValueError, OSError) as error:
            told = error if isinstance(error, TierdError) else ProtocolError(str(error))
            self.refuse(frame, told)
            self._attaching = False
        else:
            self._resident = self.namespace
            self.answer(frame, protocol.dump({"layout": self.namespace.layout.to_json()}))

    def _performed_late(self, frame: Frame) -> None:
        try:
            self.perform(frame)
        except ProtocolError as error:
            self.refuse(frame, error)
            self.broken(error)
            self.close()

    def _fence_broke(self, frame: Frame, error: Exception) -> None:
        self.refuse(frame, TierdError(f"the engine's GPU stream failed: {error}"))

    def _acquire(self, frame: Frame) -> None:
        namespace = self._attached()
        number, num_tokens, room, prefill, hashes, said = protocol.parse_acquire(frame.body)
        hints = heard(parse_hints(said), self._loop.time()) if said else NO_HINTS
        if number in self.leases:
            raise LeaseError(f"lease {number} is in use")
        if not 1 <= num_tokens <= room:
            raise LeaseError(f"a prompt of {num_tokens} tokens in room for {room}")
        self._check_prompt(num_tokens, hashes)

        notify = partial(self._push_ready, number)
        most = namespace.shorter_hit(hashes, num_tokens, prefill, self.level)
        access = self._now(hints)
        lease = namespace.cache.acquire(hashes, num_tokens, room, access, notify, most, self.level)
        if said:
            namespace.conversations.asked(hints, hashes)
        if most is not None:
            namespace.upkeep.left_out(hashes, most, num_tokens)
        namespace.upkeep.asked(hashes)
        self._changed(namespace)
        self.tenant.asked(namespace, num_tokens)
        self.leases[number] = lease

        self._answer_lease(frame, number, lease)

    def _answer_lease(self, frame: Frame, number: int, lease: Lease) -> None:
        """Tell of a lease's tables, once the engine may write what is its own of them."""

        def answer() -> None:
            self._answered.add(number)
            lease.shortened = False  # the tables that go out are the latest
            self.answer(frame, protocol.dump_lease(self._state(number, lease, tables=True)))

        self._when_writable(number, lease, answer)

    def _advance(self, frame: Frame) -> None:
        namespace = self._attached()
        requests = protocol.parse_steps(frame.body)
        steps = [
            Step(self._lease(r.lease), r.committed, r.hashes, r.room, r.publish) for r in requests
        ]
        added = namespace.cache.advance(steps, self._now())
        if steps:
            self._changed(namespace)
        ids = [[AddedBlocks(start, _ids(blocks)) for start, blocks in step] for step in added]
        body = protocol.dump_added(ids)
        new = [place for step in added for place in self._places([blocks for _, blocks in step])]
        for step, tables in zip(steps, added, strict=True):  # a tail may have changed hands
            tails = zip(step.lease.tables, tables, strict=True)
            new += self._places([table[start - 1 : start] for table, (start, _) in tails])
        self._when_idle(new, lambda: self.answer(frame, body))

    def _fork(self, frame: Frame) -> None:
        namespace = self._attached()
        forks = protocol.parse_forks(frame.body)
        sources = [(self._lease(source), length) for _, source, length in forks]
        numbers = [number for number, _, _ in forks]
        if taken := [number for number in numbers if number in self.leases]:
            raise LeaseError(f"lease {taken[0]} is in use")
        if len(set(numbers)) != len(numbers):
            raise LeaseError("a lease is named twice in one message")
        tell = [partial(self._push_ready, number) for number in numbers]
        made = namespace.cache.fork(
            [(lease, length, notify) for (lease, length), notify in zip(sources, tell, strict=True)]
        )
        self.leases.update(zip(numbers, made, strict=True))
        self._answered.update(numbers)
        self.answer(frame)

    def _truncate(self, frame: Frame) -> None:
        namespace = self._attached()
        cuts = [(self._lease(number), length) for number, length in protocol.parse_cuts(frame.body)]
        rooms = namespace.cache.truncate(cuts)
        self.answer(frame, protocol.dump_rooms(rooms))

    def _suspend(self, frame: Frame) -> None:
        namespace = self._attached()
        (cut,) = _one(protocol.parse_cuts(frame.body))
        namespace.cache.suspend(self._lease(cut[0]), cut[1], self._now())
        self.answer(frame)

    def _resume(self, frame: Frame) -> None:
        namespace = self._attached()
        (number,) = _one(protocol.parse_leases(frame.body))
        lease = self._lease(number)
        namespace.cache.resume(lease, self._now())
        self._changed(namespace)
        self._answered.discard(number)  # what it hears next is the answer
        self._answer_lease(frame, number, lease)

    def _release(self, frame: Frame) -> None:
        namespace = self._attached()
        numbers = protocol.parse_leases(frame.body)
        leases = [(number, self._lease(number)) for number in numbers]
        if len(set(numbers)) != len(numbers):
            raise LeaseError("a lease is named twice in one message")
        if rest := self._release_some(namespace, leases):
            self.answer_later(frame, self._release_rest(frame, rest))
        else:
            self.answer(frame)

    def _release_some(
        self, namespace: Namespace, leases: Sequence[tuple[int, Lease]]
    ) -> Sequence[tuple[int, Lease]]:
        """Release as many as a turn of the loop has time for; returns the others."""
        names, at = 0, 0
        while at < len(leases) and names < _MOST_NAMES:
            number, lease = leases[at]
            if (hints := lease.hints) is not NO_HINTS:
                hints = namespace.conversations.ended(hints, lease.hashes)
            namespace.cache.release(lease, self._now(hints))
            namespace.upkeep.used(lease.hashes)
            self._forget(number, namespace)
            names, at = names + len(lease.hashes), at + 1
        if at:
            self._changed(namespace)
        return leases[at:]

    async def _release_rest(self, frame: Frame, leases: Sequence[tuple[int, Lease]]) -> None:
        while leases:
            await asyncio.sleep(0)
            if self.namespace is None:  # it has hung up, and they were given back
                return
            left = [(n, lease) for n, lease in leases if self.leases.get(n) is lease]
            leases = self._release_some(self.namespace, left)
        self.answer(frame)

    def _lookup(self, frame: Frame) -> None:
        first, hashes = protocol.parse_lookup(frame.body)
        self.answer(frame, self._attached().cache.match.lookup(first, hashes))

    def _prefetch(self, frame: Frame) -> None:
        namespace = self._attached()
        seconds, num_tokens, hashes = protocol.parse_prefetch(frame.body)
        self._check_prompt(num_tokens, hashes)
        check_names(hashes)
        namespace.upkeep.prefetch(Prefetch(hashes, num_tokens, self._loop.time() + seconds))
        self.answer(frame)

    def _advise(self, frame: Frame) -> None:
        namespace, now = self._attached(), self._loop.time()
        advice = parse_advice(frame.body)
        leases = {x.lease: self._lease(x.lease) for x in advice if x.lease is not None}
        others = [said for said in advice if said.lease is None]
        for said in advice:
            if said.lease is not None:
                leases[said.lease].hints = hints = heard(said.hints, now)
                namespace.conversations.spoken(hints)
        if others:
            self.answer_later(frame, self._advise_later(frame, others))
        else:
            self.answer(frame)

    async def _advise_later(self, frame: Frame, advice: Sequence[Advice]) -> None:
        """One path a turn of the loop: they may be long."""
        for said in advice:
            if self.namespace is None:
                break
            now = self._loop.time()
            self.namespace.conversations.advise(heard(said.hints, now), now, said.path)
            await asyncio.sleep(0)
        self.answer(frame)

    @staticmethod
    def _changed(namespace: Namespace) -> None:
        """Waking the upkeep costs more than a request: only if it may find something to do."""
        if namespace.cache.ahead.lags():
            namespace.upkeep.stir()

    def _status(self, frame: Frame) -> None:
        self.answer_later(frame, self._status_later(frame))

    async def _status_later(self, frame: Frame) -> None:
        status = await self._server.status(None if self._is_operator else self.tenant)
        self.answer(frame, protocol.dump(status))

    def _reload(self, frame: Frame) -> None:
        if not self._is_operator:
            raise Refused(f"uid {self.peer.uid} may not reload the configuration")
        self.answer_later(frame, self._reload_later(frame))

    async def _reload_later(self, frame: Frame) -> None:
        try:
            found = await self._server.reload()
        except ConfigError as error:
            self.refuse(frame, error)
        else:
            self.answer(frame, protocol.dump(found.to_json()))

    @property
    def _is_operator(self) -> bool:
        return self.peer.uid in (0, os.getuid())

    def _goodbye(self, frame: Frame) -> None:
        self._clean = True
        self._give_back()
        self.answer(frame, protocol.dump({}))
        self.close()

    # -- answers -------------------------------------------------------------------------------

    def _push_ready(self, number: int, lease: Lease) -> None:
        """Tell the engine that a group is ready or that the hit was cut short."""
        if number not in self._answered:
            return  # the answer to the ACQUIRE will say so
        if not lease.shortened:
            self._push(number, lease)
        else:
            self._when_writable(number, lease, lambda: self._push(number, lease))

    def _push(self, number: int, lease: Lease) -> None:
        if self.leases.get(number) is lease:
            state = self._state(number, lease, tables=lease.shortened)
            lease.shortened = False
            self.push(Op.READY, protocol.dump_lease(state))

    def _when_writable(self, number: int, lease: Lease, call: Callable[[], None]) -> None:
        """As `_when_idle`, for what the lease may write by then: while it waits, a load that fails
        may give it other places, which are read in their turn. Never, if it ends before."""

        def look() -> None:
            if self.leases.get(number) is lease:
                own = [
                    [block for block in table if block not in waits]
                    for table, waits in zip(lease.tables, lease.loading, strict=True)
                ]
                if self._attached().transfer.when_idle(self._places(own), look):
                    call()

        look()

    def _state(self, number: int, lease: Lease, *, tables: bool) -> LeaseState:
        ready = sum(1 << group for group, waits in enumerate(lease.loading) if not waits)
        ids = [_ids(table) for table in lease.tables] if tables else None
        return LeaseState(number, lease.hit, lease.room, ready, ids)

    def _when_idle(self, places: Iterable[Place], call: Callable[[], None]) -> None:
        """Call when no demotion still reads `places`: only then may the engine write them."""
        if self._attached().transfer.when_idle(places, call):
            call()

    def _places(self, tables: Iterable[Iterable[Block | None]]) -> list[Place]:
        """The places that the engine may write."""
        return [
            Place(self.level, group, block.block_id)
            for group, table in enumerate(tables)
            for block in table
            if block is not None and block.key is None
        ]

    # -- leases --------------------------------------------------------------------------------

    def _attached(self) -> Namespace:
        if self.namespace is None:
            raise LeaseError("attach a layout first")
        return self.namespace

    def _check_prompt(self, num_tokens: int, hashes: Sequence[BlockHash]) -> None:
        if len(hashes) < (num_tokens - 1) // self._attached().layout.hash_step:
            raise LeaseError(f"{len(hashes)} hashes are too few for {num_tokens} tokens")

    def _lease(self, number: int) -> Lease:
        if (lease := self.leases.get(number)) is None:
            raise LeaseError(f"lease {number} is not one of this connection's, or is released")
        return lease

    def _forget(self, number: int, namespace: Namespace) -> None:
        lease = self.leases.pop(number)
        self._answered.discard(number)
        if self._recorder is not None:
            self._recorder.record(self.tenant.name, namespace, lease, self._loop.time())

    def _give_back(self) -> None:
        """Drop every lease; what the engine may still write is kept from use until it is gone."""
        namespace, self.namespace = self.namespace, None
        if namespace is not None:
            writable = self._peer_alive and not self._clean
            for number, lease in list(self.leases.items()):
                self._forget(number, namespace)
                if writable:
                    frozen = namespace.cache.abandon(lease, self._now(lease.hints))
                    self._quarantined += [(namespace, group, block) for group, block in frozen]
                else:
                    namespace.cache.release(lease, self._now(lease.hints))
        if not self._quarantined:
            self._depart()
        if self._quarantined and self.peer.pidfd is None and self._grace is None:
            self._grace = self._loop.call_later(
                self._server.config.quarantine_grace, self._peer_died
            )
        if not self.connected and not self._quarantined:
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
            namespace.cache.thaw(self.level, group, block)
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

    def shut(self) -> None:
        """The daemon ends: no death is waited for any more."""
        self._give_back()
        self._quarantined.clear()
        self.close()
        self._end()

    def _now(self, hints: Hints = NO_HINTS) -> Access:
        return Access(self._loop.time(), hints)

    def status(self) -> dict[str, Any]:
        """Facts for `tierd status`, as JSON."""
        held = sum(b is not None for lease in self.leases.values() for t in lease.tables for b in t)
        return {
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "tenant": self.tenant.name,
            "namespace": self.namespace.name if self.namespace else None,
            "tier": self.tenant.memory_names[self.level],
            "connected": self.connected,
            "leases": len(self.leases),
            "blocks": held,
            "quarantined": len(self._quarantined),
        }


_SERVES: dict[int, Callable[[Session, Frame], None]] = {
    Op.ATTACH: Session._attach,
    Op.ACQUIRE: Session._acquire,
    Op.ADVANCE: Session._advance,
    Op.RELEASE: Session._release,
    Op.PREFETCH: Session._prefetch,
    Op.LOOKUP: Session._lookup,
    Op.FORK: Session._fork,
    Op.TRUNCATE: Session._truncate,
    Op.SUSPEND: Session._suspend,
    Op.RESUME: Session._resume,
    Op.ADVISE: Session._advise,
    Op.STATUS: Session._status,
    Op.GOODBYE: Session._goodbye,
    Op.RELOAD: Session._reload,
}


def _ids(blocks: Iterable[Block | None]) -> list[int]:
    return [-1 if block is None else block.block_id for block in blocks]


def _one(asked: list[_T]) -> list[_T]:
    if len(asked) != 1:
        raise LeaseError(f"one lease at a time, not {len(asked)}")
    return asked
