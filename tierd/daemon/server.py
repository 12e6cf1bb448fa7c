"""The daemon: run, startup, serve, shutdown, in that order in this file.

It owns the socket, the threads, the tenants and the list of sessions. An engine is greeted on the
bare socket, because only there file descriptors can be passed; then the connection is a `Session`.
"""

import asyncio
import logging
import os
import resource
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tierd import protocol
from tierd.daemon import collector
from tierd.daemon.config import Config
from tierd.daemon.greeting import Peer, first_frame, peer_of
from tierd.daemon.lease import Lease
from tierd.daemon.listener import listening
from tierd.daemon.monitor import (
    LoopTurns,
    WatchedSelector,
    memlock_limit,
    memory_limit,
    memory_warnings,
    process_facts,
)
from tierd.daemon.namespace import Namespace
from tierd.daemon.recorder import Recorder
from tierd.daemon.reload import Reload, Reloaded
from tierd.daemon.session import Session
from tierd.daemon.tenant import Tenant
from tierd.errors import ConfigError, ProtocolError, Refused, TierdError
from tierd.protocol import Kind, Op
from tierd.shm import CudaMemory, SharedMemory

log = logging.getLogger("tierd.server")

_GREETING_S = 5.0  # an engine that has not said HELLO by then is hung up on
_DEAF_S = 0.1  # after an engine could not be let in
_ANSWERING_S = 5.0  # what running calls get at shutdown
_COPIERS = 2  # threads for copies between memory tiers


def run(config: Config, path: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads the configuration from `path` again."""
    selector = WatchedSelector()
    _raise_file_limit()

    with asyncio.Runner(loop_factory=lambda: _Loop(selector)) as runner:
        runner.run(Server(config, selector, path).serve())


class _Loop(asyncio.SelectorEventLoop):
    """Its clock goes on from that of an earlier life, for what policies remember of times: from the
    seconds since 1970 at its start, it goes as the monotonic one."""

    _start = time.time() - time.monotonic()

    def time(self) -> float:
        return self._start + time.monotonic()


class Server:
    """One daemon. `sessions` holds every engine not yet known to be gone."""

    def __init__(
        self, config: Config, selector: WatchedSelector | None = None, path: Path | None = None
    ) -> None:
        self.config = config
        self.boot = uuid.uuid4().hex
        self.sessions: set[Session] = set()
        self.protocol_errors = 0
        self.refused = 0
        self.recorder: Recorder | None = None
        self._selector = selector
        self._started = time.time()
        self._tenants: dict[str, Tenant] = {}
        self._copiers = ThreadPoolExecutor(_COPIERS, "tierd-copy")
        self._greetings: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._all_idle = asyncio.Event()
        self._saving: asyncio.Task[int] | None = None
        self._reload, self._reloading = Reload(config, path), asyncio.Lock()
        self._reloads: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Startup, then serve until told to stop, then shutdown."""
        with listening(self.config) as listener, self._signals():
            try:
                await self._startup()
                accepting = asyncio.create_task(self._accept(listener))
                log.info("ready on %s", self.config.socket)
                _notify("READY=1")
                await self._stop.wait()
                _notify("STOPPING=1")
                accepting.cancel()
            finally:
                listener.close()
                await self._shutdown()

    def stop(self) -> None:
        """Begin to end; said twice, what is not yet saved to SSD is left out."""
        if self._stop.is_set() and self._saving:
            self._saving.cancel()
        self._stop.set()

    async def reload(self) -> Reloaded:
        """Read the configuration again and go on by it. Raises ConfigError, and nothing changed."""
        async with self._reloading:
            try:
                found = await self._reload.read(self.config)
            except ConfigError as error:
                log.warning("the configuration is as it was: %s", error)
                raise
            self.config = found.config
            for change in found.changes:
                when = "" if change.live else ", after a restart"
                log.info("%s: %s -> %s%s", change.key, change.old, change.new, when)
            for warning in _warnings(found.config):
                log.warning("%s", warning)
            for tenant in self._tenants.values():
                await tenant.reconfigure(found.config)
            log.info("%s is in force", found.path)
            return found

    def _hang_up(self) -> None:
        """SIGHUP: reload; whoever sent it finds what came of it in the log."""

        async def reload() -> None:
            with suppress(ConfigError):
                await self.reload()

        task = asyncio.create_task(reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    # -- startup and shutdown ------------------------------------------------------------------

    async def _startup(self) -> None:
        for warning in _warnings(self.config):
            log.warning("%s", warning)
        for name in self.config.tenants:
            self._tenants[name] = tenant = Tenant(name, self.config, self._copiers)
            await tenant.open()
        if self.config.trace:
            offset = time.time() - asyncio.get_running_loop().time()
            self.recorder = await asyncio.to_thread(Recorder.open, self.config.trace, offset)
        collector.spare_what_exists()
        if self._selector:
            self._selector.forget()

    async def _shutdown(self) -> None:
        """Answer what was asked, save what only memory holds, give everything back."""
        for task in self._greetings | self._reloads:
            task.cancel()
        for session in self.sessions:
            session.quiesce()
        self.session_idle()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_idle.wait(), _ANSWERING_S)
        for session in list(self.sessions):
            session.shut()
        await asyncio.sleep(0)  # the transports' own farewell
        if self.recorder:
            await asyncio.to_thread(self.recorder.close)
        await self._save()
        for tenant in self._tenants.values():
            await tenant.close()
        self._copiers.shutdown()
        log.info("stopped")

    async def _save(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.config.grace
        for tenant in self._tenants.values():
            self._saving = asyncio.create_task(tenant.save(deadline))
            try:
                left = await self._saving
            except asyncio.CancelledError:
                log.warning("%s: told to stop at once; not everything is saved", tenant.name)
                return
            if left:
                log.warning("%s: %d blocks were not saved in time", tenant.name, left)

    def session_idle(self) -> None:
        """A session has answered everything; at shutdown that is waited for."""
        if all(session.idle for session in self.sessions):
            self._all_idle.set()
        else:
            self._all_idle.clear()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        calls = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self._hang_up}
        for number, call in calls.items():
            with suppress(ValueError, RuntimeError):  # not the main thread: a test runs us
                loop.add_signal_handler(number, call)
        try:
            yield
        finally:
            for number in calls:
                with suppress(ValueError, RuntimeError):
                    loop.remove_signal_handler(number)

    # -- engines -------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, say; that passes
                log.warning("cannot accept an engine: %s", error)
                await asyncio.sleep(_DEAF_S)
                continue
            task = asyncio.create_task(self._greet(connection))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: socket.socket) -> None:
        """HELLO: who is there, which tenant; then hand the connection to a Session."""
        loop = asyncio.get_running_loop()
        peer: Peer | None = None
        try:
            connection.setblocking(False)
            peer = peer_of(connection)
            async with asyncio.timeout(_GREETING_S):
                frame = await first_frame(connection)
            hello = protocol.parse(frame.body)
            tenant = self._admit(hello, peer)
            level, memory = tenant.lend(hello.get("tier", "device"))
            body = protocol.dump(self._welcome(tenant, memory))
            fds = [] if isinstance(memory, CudaMemory) else [memory.fd]
            reply = protocol.encode(Op.HELLO, Kind.REPLY, frame.request, body)
            socket.send_fds(connection, [reply], fds)
            session = Session(self, tenant, peer, level)
            peer = None  # the session's now
            await loop.connect_accepted_socket(lambda: session, connection)
        except TierdError as error:
            self._refuse(connection, error)
        except (OSError, EOFError, TimeoutError) as error:
            log.info("an engine left during the greeting: %r", error)
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            if peer is not None and peer.pidfd is not None:
                os.close(peer.pidfd)

    def _admit(self, hello: dict[str, Any], peer: Peer) -> Tenant:
        if hello.get("protocol") != protocol.VERSION:
            raise ProtocolError(
                f"protocol version {hello.get('protocol')!r}; this daemon speaks {protocol.VERSION}"
            )
        asked = hello.get("tenant") or ""
        if not isinstance(asked, str):
            raise ProtocolError(f"the tenant {asked!r} is no name")
        served = {n: t for n, t in self.config.tenants.items() if peer.uid in t.uids}
        if asked and asked not in self.config.tenants:
            raise Refused(f"there is no tenant {asked!r}")
        if not served or (asked and asked not in served):
            raise Refused(f"uid {peer.uid} is not served" + (f" as {asked!r}" if asked else ""))
        return self._tenants[asked or next(iter(served))]

    def _welcome(self, tenant: Tenant, memory: SharedMemory | CudaMemory) -> dict[str, Any]:
        lent: dict[str, Any] = {"kind": "cpu", "nbytes": memory.nbytes}
        if isinstance(memory, CudaMemory):
            lent |= {"kind": "cuda", "handle": memory.export().hex(), "uuid": memory.uuid}
        return {
            "protocol": protocol.VERSION,
            "boot": self.boot,
            "pid": os.getpid(),
            "tenant": tenant.name,
            "memory": lent,
        }

    def _refuse(self, connection: socket.socket, error: TierdError) -> None:
        self.refused += isinstance(error, Refused)
        self.protocol_errors += isinstance(error, ProtocolError)
        log.warning("an engine was refused: %s", error)
        with suppress(OSError):  # it need not listen
            connection.send(protocol.encode(Op.HELLO, Kind.ERROR, 0, protocol.dump_error(error)))
        connection.close()

    async def status(self, only: Tenant | None = None) -> dict[str, Any]:
        """Facts for `tierd status`, as JSON; of one tenant, for an engine that is not ours."""
        turns = self._selector.turns if self._selector else LoopTurns()
        cpu = time.thread_time()
        process = await asyncio.to_thread(process_facts, turns, cpu)  # it reads /proc
        return {
            "boot": self.boot,
            "pid": os.getpid(),
            "uptime": time.time() - self._started,
            "socket": str(self.config.socket),
            "process": process,
            "protocol_errors": self.protocol_errors,
            "refused": self.refused,
            "trace": self.recorder.status() if self.recorder else None,
            "sessions": [s.status() for s in self.sessions if only in (None, s.tenant)],
            "tenants": [
                await t.describe(self._leases(t))
                for t in self._tenants.values()
                if only in (None, t)
            ],
        }

    def _leases(self, tenant: Tenant) -> dict[Namespace, list[Lease]]:
        """What the engines of a tenant hold, by namespace."""
        found: dict[Namespace, list[Lease]] = {}
        for session in self.sessions:
            if session.tenant is tenant and session.namespace is not None:
                found.setdefault(session.namespace, []).extend(session.leases.values())
        return found


def _warnings(config: Config) -> Iterator[str]:
    """What this process may not be able to have of the configured memory."""
    cuda = config.device.store == "cuda"
    host = config.host.size if config.host else 0
    shared = host + (0 if cuda else config.device.size)
    return memory_warnings(shared, host if cuda else 0, memory_limit(), memlock_limit())


def _raise_file_limit() -> None:
    """Each slab of the SSD tier is an open file: take as many as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _notify(state: str) -> None:
    """Tell systemd, if it listens; it need not."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            try:
                notify.connect("\0" + address[1:] if address[0] == "@" else address)
                notify.send(state.encode())
            except OSError as error:
                log.warning("cannot say %s to %s: %s", state, address, error)
