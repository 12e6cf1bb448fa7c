"""What a daemon is told that it must not believe: garbage for a greeting, garbage for frames.

Each is an error that names the thing, the end of that connection, and no loss for anybody else.
"""

import resource
from collections.abc import Iterator
from pathlib import Path
from struct import pack

import pytest

from tests.content import BLOCK, LAYOUT, ask, prompt
from tests.daemon import Daemon, tiers
from tests.healthy import nothing_lost
from tests.wire import HASHES, Wire, told
from tierd import protocol
from tierd.errors import ProtocolError
from tierd.protocol import Kind, Op

HELLO = protocol.encode(Op.HELLO, Kind.REQUEST, 0, protocol.dump({"protocol": 1, "tenant": ""}))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon takes it all."""
    with Daemon(tmp_path_factory.mktemp("battered")) as running:
        yield running


# -- the greeting --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (protocol.dump({"protocol": 2}), "ProtocolError: protocol version 2; this daemon speaks 1"),
        (protocol.dump({}), "ProtocolError: protocol version None"),
        (protocol.dump({"protocol": 1, "tenant": "me"}), "Refused: there is no tenant 'me'"),
        (protocol.dump({"protocol": 1, "tenant": ["me"]}), "ProtocolError: the tenant"),
        (b"{", "ProtocolError: a body is not JSON"),
        (b"[1]", "ProtocolError: a body is a JSON list, not an object"),
        (b"\xff\xfe", "ProtocolError: a body is not JSON"),
        (b"[" * 4000, "ProtocolError: a body is not JSON"),
        (b'{"a":' * 700, "ProtocolError: a body is not JSON"),
    ],
)
def test_a_greeting_that_is_none_is_refused(daemon: Daemon, first: bytes, error: str) -> None:
    with nothing_lost(daemon), Wire(daemon.socket) as wire:
        assert error in told(wire.ask(Op.HELLO, first))
        assert wire.hung_up()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "a frame of 542393671 bytes"),
        (bytes([0, 0, 0, 0, 1, 9, 0, 0]) + bytes(8), "no frame of tierd's protocol"),
        (bytes([0, 0, 0, 0, 1, 0, 1, 0]) + bytes(8), "no frame of tierd's protocol"),
        (protocol.encode(Op.STATUS, Kind.REQUEST, 1, b"{}"), "begins with HELLO"),
        (HELLO + HELLO, "waits for its answer"),
        (HELLO + b"\0", "waits for its answer"),
        (protocol.HEADER.pack(4097, Op.HELLO, 0, 0, 0), "a frame of 4097 bytes; at most 4096"),
    ],
)
def test_garbage_instead_of_a_greeting_is_refused(daemon: Daemon, data: bytes, error: str) -> None:
    before = daemon.status()["protocol_errors"]
    with nothing_lost(daemon), Wire(daemon.socket) as wire:
        wire.socket.sendall(data)
        assert error in told(wire.frame())
        assert wire.hung_up()
    assert daemon.status()["protocol_errors"] == before + 1


def test_one_who_leaves_during_the_greeting_is_forgotten(daemon: Daemon) -> None:
    with nothing_lost(daemon) as pool:
        for data in (b"", b"\x10", HELLO[:-3], HELLO):
            with Wire(daemon.socket) as wire:
                wire.socket.sendall(data)
        fds = pool.client.status()["process"]["fds"]
        for _ in range(50):
            Wire(daemon.socket).socket.close()
        # Whoever asks has a socket and a pidfd there.
        daemon.until(lambda status: status["process"]["fds"] <= fds + 2)


def test_more_connections_than_the_daemon_may_open_do_not_make_it_deaf(daemon: Daemon) -> None:
    with nothing_lost(daemon) as pool:
        fds = pool.client.status()["process"]["fds"]
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (fds + 10, hard))
        crowd = [Wire(daemon.socket) for _ in range(40)]
        assert ask(pool, prompt(2, 2 * BLOCK)) == 0  # the others are served meanwhile
        for wire in crowd:
            wire.socket.close()
        assert daemon.status()["boot"] == pool.client.boot
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (hard, hard))


# -- frames --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xde\xad\xbe\xef" * 8, "a frame of 4022250974 bytes"),
        (pack("<IBBHQ", 17 << 20, Op.ACQUIRE, 0, 0, 1), "at most 16777216 are allowed"),
        (pack("<IBBHQ", 0, Op.STATUS, 0, 7, 1), "no frame of tierd's protocol"),
        (pack("<IBBHQ", 0, Op.STATUS, 4, 0, 1), "no frame of tierd's protocol"),
        (pack("<IBBHQ", 0, 99, 0, 0, 1), "operation 99 of kind 0 is none of ours"),
        (pack("<IBBHQ", 0, 0, 0, 0, 1), "operation 0 of kind 0"),
        (pack("<IBBHQ", 0, Op.STATUS, Kind.REPLY, 0, 1), "operation 7 of kind 1"),
        (pack("<IBBHQ", 0, Op.READY, 0, 0, 1), "operation 6 of kind 0"),
        (HELLO, "operation 1 of kind 0 is none of ours"),
        (pack("<IBBHQ", 3, Op.ACQUIRE, 0, 0, 1) + b"abc", "an ACQUIRE of 3 bytes"),
        (pack("<IBBHQ", 2, Op.ADVANCE, 0, 0, 1) + b"ab", "an ADVANCE without a count"),
        (pack("<IBBHQ", 4, Op.ADVANCE, 0, 0, 1) + b"\xff" * 4, "an ADVANCE of 4294967295 steps"),
        (pack("<IBBHQ", 5, Op.RELEASE, 0, 0, 1) + b"abcde", "a RELEASE of 5 bytes"),
        (pack("<IBBHQ", 2, Op.ATTACH, 0, 0, 1) + b"{}", "has attached a layout already"),
    ],
)
def test_a_frame_that_breaks_the_protocol_ends_its_connection(
    daemon: Daemon, data: bytes, error: str
) -> None:
    before = daemon.status()["protocol_errors"]
    with nothing_lost(daemon), Wire(daemon.socket).attach() as wire:
        wire.socket.sendall(data)
        assert error in told(wire.frame())
        assert wire.hung_up()
    assert daemon.status()["protocol_errors"] == before + 1


def test_a_daemon_ends_at_once_though_one_broke_the_protocol_and_lives_on(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Wire(daemon.socket).attach() as wire:
        assert wire.acquire(1, BLOCK, BLOCK, HASHES[:1]).kind == Kind.REPLY
        wire.send(Op.ACQUIRE, b"abc")
        assert "an ACQUIRE of 3 bytes" in told(wire.frame())
        assert tiers(daemon.status())["device"][0]["quarantined"] == 1
        daemon.terminate(seconds=3)


def test_a_truncated_frame_and_a_hang_up_lose_nothing(daemon: Daemon) -> None:
    whole = protocol.encode(
        Op.ACQUIRE, Kind.REQUEST, 1, protocol.dump_acquire(1, BLOCK, BLOCK, HASHES[:1])
    )
    with nothing_lost(daemon):
        for cut in (1, 15, 16, 20, len(whole) - 1):
            with Wire(daemon.socket).attach() as wire:
                wire.socket.sendall(whole[:cut])


def test_a_request_larger_than_the_daemon_takes_is_a_protocol_error_of_the_client(
    tmp_path: Path,
) -> None:
    with (
        Daemon(tmp_path, more='max_frame = "64KiB"\n') as daemon,
        nothing_lost(daemon),
        daemon.client() as client,
        client.attach(LAYOUT) as pool,
        pytest.raises(ProtocolError, match="at most 65536 are allowed"),
    ):
        pool.acquire(range(2_000_000))
