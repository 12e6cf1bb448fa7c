"""Whatever hypothesis thinks of, the daemon goes on, and whoever left holds nothing."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.daemon import Daemon, held
from tests.healthy import nothing_lost
from tests.wire import HASHES, Wire
from tierd import protocol
from tierd.block import BlockHash
from tierd.hints import Advice, Hints, dump_advice, dump_hints
from tierd.protocol import Kind, Op, StepRequest

QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def battered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon takes it all."""
    with Daemon(tmp_path_factory.mktemp("battered"), ssd=None) as running, nothing_lost(running):
        yield running


@QUICK
@given(data=st.binary(max_size=300), attached=st.booleans())
def test_no_bytes_kill_the_daemon(battered: Daemon, data: bytes, attached: bool) -> None:
    with Wire(battered.socket) as wire:
        if attached:
            wire.attach()
        wire.socket.sendall(data)
    assert battered.status()["boot"]


JUNK = st.one_of(
    st.binary(max_size=100),
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8)).map(protocol.dump),
)


@QUICK
@given(
    op=st.sampled_from([0, *Op, 99]),
    kind=st.sampled_from([Kind.REQUEST, Kind.REQUEST, Kind.REQUEST, *Kind]),
    body=JUNK,
    attached=st.booleans(),
)
def test_no_frame_with_junk_in_it_kills_the_daemon(
    battered: Daemon, op: int, kind: int, body: bytes, attached: bool
) -> None:
    """An attached engine is answered, or told why it is hung up on."""
    with Wire(battered.socket) as wire:
        wire.attach() if attached else wire.hello()
        wire.send(op, body, kind=kind)
        assert wire.frame() is not None
    assert battered.status()["boot"]


LEASE = st.integers(0, 3)
TOKENS = st.integers(0, 130)
ROOM = st.one_of(TOKENS, st.integers(0, 2**32 - 1))


def names(most: int) -> st.SearchStrategy[list[BlockHash]]:
    """Of a few trunks, or anything at all."""
    trunk = st.builds(
        lambda start, count: HASHES[8 * start : 8 * start + count],
        st.integers(0, 9),
        st.integers(0, most),
    )
    return trunk | st.lists(st.sampled_from(HASHES), max_size=most)


HINTS = st.sampled_from(
    [
        Hints("a"),
        Hints("b", priority=-5, returns_in=0.0),
        Hints("a", closed=True),
        Hints("b", dont_need=True),
        Hints(priority=3, will_need=True),
    ]
)
SAID = st.just(b"") | HINTS.map(dump_hints) | st.binary(max_size=20)
ADVICE = st.builds(Advice, HINTS, st.none() | LEASE, st.none() | names(8))
STEPS = st.lists(st.builds(StepRequest, LEASE, TOKENS, ROOM, names(3)), max_size=3)
REQUESTS = st.lists(
    st.one_of(
        st.tuples(
            st.just(Op.ACQUIRE),
            st.builds(protocol.dump_acquire, LEASE, TOKENS, ROOM, names(8), st.just(0.0), SAID),
        ),
        st.tuples(st.just(Op.ADVISE), st.lists(ADVICE, max_size=3).map(dump_advice)),
        st.tuples(st.just(Op.ADVANCE), STEPS.map(protocol.dump_steps)),
        st.tuples(st.just(Op.RELEASE), st.lists(LEASE, max_size=3).map(protocol.dump_leases)),
    ),
    max_size=12,
)


@QUICK
@given(requests=REQUESTS, at_once=st.booleans())
def test_no_order_of_requests_keeps_a_place_after_goodbye(
    battered: Daemon, requests: list[tuple[Op, bytes]], at_once: bool
) -> None:
    """Well-formed requests that make no sense; each is answered, or refused and changes nothing."""
    before = held(battered.status())
    with Wire(battered.socket).attach() as wire:
        for number, (op, body) in enumerate(requests, 1):
            wire.send(op, body, request=number)
            if not at_once:
                assert wire.frame() is not None
        with suppress(OSError):
            wire.send(Op.GOODBYE, b"{}")
        while wire.frame():
            pass
    battered.until(lambda status: held(status) == before)
