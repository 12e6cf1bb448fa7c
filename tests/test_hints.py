"""Hints: what makes sense, how it crosses the socket, and what a real daemon does about it."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierd
from tests.content import BLOCK, BLOCKS, LAYOUT, ask, prompt, serve
from tests.daemon import NOT_AHEAD, Daemon, Status
from tests.healthy import nothing_lost
from tests.rig import HOST
from tests.test_guesses import CLEAN, push_out
from tests.test_upkeep import committed
from tests.wire import HASHES, Wire, told
from tierd import protocol
from tierd.errors import LeaseError, ProtocolError, TierdError
from tierd.hints import (
    MOST_ADVICE,
    Advice,
    Hints,
    dump_advice,
    dump_hints,
    parse_advice,
    parse_hints,
)
from tierd.pool import Pool
from tierd.protocol import NOWHERE, Kind, Op

sessions = st.text(min_size=1, max_size=16)
words = st.sampled_from([{}, {"will_need": True}, {"dont_need": True}])
seconds = st.none() | st.floats(0, 1e9, width=32)
hints = st.builds(
    lambda session, priority, returns_in, word: Hints(session, priority, returns_in, **word),
    sessions,
    st.integers(-128, 127),
    seconds,
    words,
) | st.just(Hints("s", closed=True))
paths = st.lists(st.sampled_from(HASHES), max_size=4)
of_leases = st.tuples(hints, st.integers(0, 2**64 - 1), st.none())
of_others = st.tuples(hints, st.none(), st.none() | paths)
advice = (of_leases | of_others).map(lambda said: Advice(*said))


@given(said=hints)
def test_hints_cross_unchanged(said: Hints) -> None:
    assert parse_hints(dump_hints(said)) == said


@given(said=st.lists(advice, max_size=5))
def test_advice_crosses_unchanged(said: list[Advice]) -> None:
    assert parse_advice(dump_advice(said)) == said


@given(data=st.binary(max_size=80))
def test_no_bytes_break_the_parsers_otherwise(data: bytes) -> None:
    for parse in (parse_hints, parse_advice):
        with suppress(TierdError):
            parse(data)


def test_more_advice_than_one_message_takes_is_refused() -> None:
    said = [Advice(Hints("s"))] * MOST_ADVICE
    assert len(parse_advice(dump_advice(said))) == MOST_ADVICE
    with pytest.raises(ProtocolError, match="more than 256"):
        parse_advice(dump_advice([*said, said[0]]))


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"session": ""}, "session: '' is not text of 1 to 64 bytes"),
        ({"session": "ü" * 33}, "is not text of 1 to 64 bytes"),
        ({"session": "\ud800"}, "is not text of 1 to 64 bytes"),
        ({"session": b"s"}, "is not text of 1 to 64 bytes"),
        ({"priority": 128}, "priority: 128 is not an integer from -128 to 127"),
        ({"priority": 1.0}, "priority: 1.0 is not an integer"),
        ({"session": "s", "returns_in": -1.0}, "returns_in: -1.0 is not so many seconds"),
        ({"session": "s", "returns_in": float("nan")}, "returns_in: nan is not so many"),
        ({"session": "s", "returns_in": float("inf")}, "returns_in: inf is not so many"),
        ({"will_need": True, "dont_need": True}, "at most one can be true"),
        ({"session": "s", "closed": True, "returns_in": 1.0}, "is closed does not return"),
    ],
)
def test_hints_that_make_no_sense_are_the_callers_mistake(
    values: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        Hints(**values)


@pytest.mark.parametrize("anonymous", [Hints(returns_in=1.0), Hints(closed=True)])
def test_only_a_session_closes_or_returns(anonymous: Hints) -> None:
    with pytest.raises(ValueError, match="session: without one nobody knows who has closed"):
        dump_hints(anonymous)
    assert parse_hints(dump_hints(anonymous.after(Hints("s")))) == anonymous.after(Hints("s"))


def test_what_is_said_later_adds_to_what_was_said_before() -> None:
    before = Hints("s", priority=2, dont_need=True)
    assert Hints(priority=3).after(before) == Hints("s", priority=3, dont_need=True)
    assert Hints("s", closed=True).after(before) == Hints("s", priority=2, closed=True)
    assert Hints(will_need=True).after(None) == Hints(will_need=True)


# -- a real daemon ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon takes it all."""
    with Daemon(tmp_path_factory.mktemp("advised"), ssd=None) as running:
        yield running


GARBAGE = [
    b"\x01",
    b"\xf0" + bytes(5),  # flags
    b"\x01\x00\x00\x00\xc0\x7fs",  # a NaN
    b"\x01\x00\x00\x00\x80\xbfs",  # seconds ago
    bytes(6) + b"\xff\xfe",  # no UTF-8
    bytes(6) + b"x" * 65,
    b"\x08" + bytes(5),  # closed, but who?
    b"\x06" + bytes(5),  # will be needed, and will not
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_for_hints_is_refused_and_the_connection_goes_on(
    daemon: Daemon, garbage: bytes
) -> None:
    with nothing_lost(daemon), Wire(daemon.socket).attach() as wire:
        asked = protocol.dump_acquire(1, BLOCK, BLOCK, HASHES[:1], 0.0, garbage)
        assert told(wire.ask(Op.ACQUIRE, asked)).startswith("TierdError: hints: ")
        good = dump_advice([Advice(Hints("s"))])
        bad = good[:13] + bytes([len(garbage)]) + garbage
        assert told(wire.ask(Op.ADVISE, bad)).startswith("TierdError: hints: ")
        assert wire.ask(Op.ADVISE, good).kind == Kind.REPLY
        assert wire.acquire(1, BLOCK, BLOCK, HASHES[:1]).kind == Kind.REPLY
        assert wire.ask(Op.RELEASE, protocol.dump_leases([1])).kind == Kind.REPLY


def test_nothing_is_said_of_who_is_not_there(daemon: Daemon) -> None:
    with nothing_lost(daemon) as pool, Wire(daemon.socket).attach() as wire:
        before = heard(daemon.status())
        both = [Advice(Hints("s", priority=1), 1), Advice(Hints("s", priority=1), 99)]
        assert wire.acquire(1, BLOCK, BLOCK, HASHES[:1]).kind == Kind.REPLY
        assert "lease 99 is not one of this" in told(wire.ask(Op.ADVISE, dump_advice(both)))
        assert heard(daemon.status()) == before  # of the other nothing was heard either
        assert wire.ask(Op.RELEASE, protocol.dump_leases([1])).kind == Kind.REPLY
        pool.close_session("never heard of")  # that is no mistake
        with pool.acquire(prompt(1, BLOCK)) as lease:
            pass
        with pytest.raises(LeaseError, match="is released"):
            lease.advise(Hints("s"))
        with pytest.raises(ValueError, match="session: of which one"):
            pool.advise_many([(None, Hints(priority=1))])
        with pytest.raises(ValueError, match="hints: 2 for 0 leases"):
            pool.release([], [None, None])


def heard(status: Status) -> dict[str, int]:
    found: dict[str, int] = status["tenants"][0]["namespaces"][0]["hints"]
    return found


def levels(pool: Pool, seed: int, blocks: int) -> list[int]:
    return pool.lookup(prompt(seed, blocks * BLOCK)).tolist()


def chat(pool: Pool, seed: int, blocks: int, hints: Hints, end: Hints | None = None) -> None:
    """One request of a session: the prompt is written, and more is known at its end."""
    tokens = prompt(seed, blocks * BLOCK)
    lease = pool.acquire(tokens, hints=hints)
    lease.wait()
    lease.commit(len(tokens))
    lease.release(end)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """The device tier alone: what goes first is gone."""
    with Daemon(tmp_path, host="0B", ssd=None) as running, running.client() as client:
        yield client.attach(LAYOUT)


A, B = Hints("a"), Hints("b")


@pytest.mark.parametrize("how", ["acquire", "release", "advise", "close_session", "path"])
def test_a_closed_session_goes_before_an_older_open_one(pool: Pool, how: str) -> None:
    half = BLOCKS // 2
    closed = Hints("b", closed=True)
    chat(pool, 1, half, A)
    chat(pool, 2, half, closed if how == "acquire" else B, closed if how == "release" else None)
    if how == "close_session":
        pool.close_session("b")
    elif how == "advise":
        pool.advise_many([(None, Hints("b", dont_need=True))])
    elif how == "path":
        pool.advise(prompt(2, half * BLOCK), closed)
    chat(pool, 3, half, Hints("c"))
    assert levels(pool, 1, half) == [0] * half
    assert levels(pool, 2, half) == [NOWHERE] * half


def test_another_connection_may_close_a_session_and_one_that_asks_again_is_open(pool: Pool) -> None:
    half = BLOCKS // 2
    chat(pool, 1, half, A)
    chat(pool, 2, half, B)
    with tierd.connect(pool.client._path) as client:
        router = client.attach(LAYOUT)
        router.close_session("a")
        router.close_session("b")
    chat(pool, 2, half, B)
    chat(pool, 3, half, Hints("c"))
    assert levels(pool, 1, half) == [NOWHERE] * half
    assert levels(pool, 2, half) == [0] * half


def test_a_session_that_is_closed_while_a_request_of_it_goes_on_is_over_then(pool: Pool) -> None:
    half = BLOCKS // 2
    chat(pool, 1, half, A)
    lease = pool.acquire(prompt(2, half * BLOCK), hints=B)
    lease.commit(half * BLOCK)
    pool.close_session("b")
    lease.release()
    chat(pool, 3, half, Hints("c"))
    assert levels(pool, 1, half) == [0] * half


def test_a_prompt_that_two_sessions_share_stays_when_one_of_them_closes(pool: Pool) -> None:
    shared = prompt(1, 8 * BLOCK)
    for seed, hints in ((2, A), (3, B)):
        with pool.acquire([*shared, *prompt(seed, 8 * BLOCK)], hints=hints) as lease:
            lease.wait()
            lease.commit(16 * BLOCK)
    pool.close_session("a")
    chat(pool, 4, 16, Hints("c"))  # eight were free, eight of a's own go
    assert levels(pool, 1, 8) == [0] * 8
    assert pool.lookup([*shared, *prompt(3, 8 * BLOCK)]).tolist() == [0] * 16


def test_a_lower_priority_goes_first_and_a_higher_one_last(pool: Pool) -> None:
    for seed, priority in ((1, 5), (2, 0), (3, -5)):
        chat(pool, seed, 8, Hints(priority=priority))
    chat(pool, 4, 16, Hints(priority=0))
    assert levels(pool, 3, 8) == [NOWHERE] * 8
    chat(pool, 5, 8, Hints(priority=0))
    assert levels(pool, 2, 8) == [NOWHERE] * 8
    assert levels(pool, 1, 8) == [0] * 8


def test_a_fork_is_of_its_sources_session(pool: Pool) -> None:
    half = BLOCKS // 2
    chat(pool, 1, half, A)
    lease = pool.acquire(prompt(2, half * BLOCK), hints=B)
    lease.commit(half * BLOCK)
    (fork,) = pool.fork([(lease, half * BLOCK)])
    pool.release([lease, fork])
    pool.close_session("b")
    chat(pool, 3, half, Hints("c"))
    assert levels(pool, 1, half) == [0] * half
    assert levels(pool, 2, half) == [NOWHERE] * half


def test_closed_blocks_that_go_down_go_first_there_too(tmp_path: Path) -> None:
    with Daemon(tmp_path, ssd=None, more=NOT_AHEAD) as daemon, daemon.client() as client:
        pool, half = client.attach(LAYOUT), BLOCKS // 2
        chat(pool, 1, half, A)
        chat(pool, 2, half, B)
        chat(pool, 3, half, Hints("c"))  # the older one goes down
        pool.close_session("b")
        chat(pool, 4, half, Hints("c"))
        assert levels(pool, 1, half) == levels(pool, 2, half) == [HOST] * half
        chat(pool, 5, half, Hints("c"))
        assert levels(pool, 1, half) == [HOST] * half
        assert levels(pool, 2, half) == [NOWHERE] * half


RETURNS = [
    pytest.param(Hints("a", returns_in=0.2), id="soon"),
    pytest.param(Hints("a", returns_in=1.5), id="later"),
    pytest.param(Hints("a", will_need=True), id="now"),
]


@pytest.mark.parametrize("hints", RETURNS)
def test_who_said_it_comes_back_finds_its_blocks_in_host_memory(
    tmp_path: Path, hints: Hints
) -> None:
    with Daemon(tmp_path, more=CLEAN) as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        with serve(pool, prompt(1, 12 * BLOCK)) as lease:
            lease.advise(A)
        push_out(pool)
        daemon.until(lambda status: committed(status, "ssd") == 12 + 4 * 30 - BLOCKS)
        assert set(levels(pool, 1, 12)) == {HOST + 1}
        pool.advise_many([(None, hints)])
        daemon.until(lambda status: levels(pool, 1, 12) == [HOST] * 12)
        assert ask(pool, prompt(1, 12 * BLOCK + 1)) == 12 * BLOCK


@pytest.mark.parametrize("how", ["asks again", "closes"])
def test_who_came_back_or_never_will_is_not_expected_any_more(tmp_path: Path, how: str) -> None:
    with Daemon(tmp_path) as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        chat(pool, 1, 12, A, Hints(returns_in=3600.0))
        assert heard(daemon.status())["expected"] == 1
        if how == "closes":
            pool.close_session("a")
        else:
            pool.acquire(prompt(1, 13 * BLOCK), hints=A).release()
        assert heard(daemon.status())["expected"] == 0


def test_the_status_counts_what_was_heard(pool: Pool) -> None:
    chat(pool, 1, 2, Hints("a", priority=1), Hints(returns_in=9.0))
    chat(pool, 2, 2, Hints(dont_need=True))
    pool.advise(prompt(1, 2 * BLOCK), Hints(will_need=True))
    pool.close_session("a")
    facts = heard(pool.client.status())
    assert facts == {
        "session": 3,
        "priority": 2,
        "returns_in": 1,
        "will_need": 1,
        "dont_need": 1,
        "closed": 1,
        "sessions": 1,
        "expected": 0,
    }


def test_a_return_counts_from_the_end_of_a_request_that_said_so_at_its_beginning(
    pool: Pool,
) -> None:
    returns = Hints("a", returns_in=9.0)
    chat(pool, 1, 2, returns)
    chat(pool, 1, 2, returns, Hints(priority=1))
    chat(pool, 1, 2, returns, Hints("a", closed=True))
    facts = heard(pool.client.status())
    assert (facts["returns_in"], facts["priority"], facts["closed"]) == (5, 1, 1)


def test_sessions_of_two_models_are_not_one(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, device="4MiB", host="0B", ssd=None)
    with daemon, daemon.client() as one, daemon.client() as two:
        pool, other = one.attach(LAYOUT), two.attach(replace(LAYOUT, model="other"))
        chat(pool, 1, 8, A)
        other.close_session("a")
        namespaces = daemon.status()["tenants"][0]["namespaces"]
        assert [namespace["hints"]["sessions"] for namespace in namespaces] == [1, 0]
