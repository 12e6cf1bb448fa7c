"""Which path each session used last, of so many; and who is expected back, by one timer."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from policies.base import NO_HINTS, Access, Hints
from policies.prefetch import Nothing
from tests.rig import DEVICE, HOST, NOW, SSD, Rig, chain
from tierd.block import HASH_NBYTES, BlockHash
from tierd.daemon import conversations
from tierd.daemon.conversations import Conversations, heard
from tierd.daemon.returns import Returns
from tierd.daemon.speed import Speeds
from tierd.daemon.upkeep import Prefetch, Upkeep
from tierd.hints import Hints as Said

A = Hints("a")


def names(prompt: str) -> list[BlockHash]:
    """As `chain`, as long as true names are."""
    return [BlockHash(name.ljust(HASH_NBYTES, b"_")) for name in chain(prompt)]


class Recorded(Upkeep):
    """Keeps what is to be brought, and brings nothing."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.cache, None, Nothing())  # type: ignore[arg-type]
        self.asked_for = asyncio.Event()

    def prefetch(self, prefetch: Prefetch) -> None:
        super().prefetch(prefetch)
        self.asked_for.set()

    @property
    def waiting(self) -> list[Prefetch]:
        return list(self._prefetches)


class Stage:
    def __init__(self, *capacities: int) -> None:
        self.rig = Rig(*capacities, at_once=True)
        self.upkeep = Recorded(self.rig)
        self.speeds = Speeds(lambda: 0.0)
        self.known = Conversations(self.rig.cache, self.upkeep, self.speeds)

    def request(self, prompt: str, hints: Hints = NO_HINTS, end: Hints | None = None) -> None:
        self.known.asked(hints, names(prompt))
        self.known.ended(end or hints, names(prompt))

    def say(self, hints: Hints, path: list[BlockHash] | None = None) -> None:
        self.known.advise(hints, self.upkeep.now(), path)

    def returns(self, session: str, seconds: float) -> Hints:
        return Hints(session, returns_at=self.upkeep.now() + seconds)

    @property
    def num_expected(self) -> int:
        expected: int = self.known.status()["expected"]
        return expected


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage(8, 8, 8)
    yield made
    made.known.close()


async def test_what_an_engine_says_is_what_policies_hear() -> None:
    said = Said("s", priority=2, returns_in=5.0, will_need=True)
    assert heard(said, 10.0) == Hints("s", priority=2, returns_at=15.0, will_need=True)
    assert heard(None, 10.0) is NO_HINTS


async def test_what_is_wanted_soon_is_brought_at_once(stage: Stage) -> None:
    stage.request("abc", A)
    stage.say(Hints("a", will_need=True))
    stage.say(Hints(will_need=True), names("xy"))
    stage.say(Hints("b", will_need=True))  # nobody knows what that is
    assert [(p.hashes, p.num_tokens) for p in stage.upkeep.waiting] == [
        (names("abc"), stage.rig.tokens("abc")),
        (names("xy"), stage.rig.tokens("xy")),
    ]


async def test_the_last_request_of_a_session_says_what_it_goes_on_with(stage: Stage) -> None:
    stage.request("ab", A)
    stage.request("abc", A)
    stage.request("x")
    stage.say(Hints("a", will_need=True))
    stage.say(Hints("a", will_need=True), names("other"))
    assert [p.hashes for p in stage.upkeep.waiting] == [names("other")]  # the latest word counts


async def test_who_is_about_to_return_is_used_and_brought(stage: Stage) -> None:
    host = stage.rig.pool(HOST)
    for name in (*names("ab"), *names("x"), *names("y")):
        (block,) = host.allocate(1)
        host.commit(block, name, None, NOW)
        host.unpin(block)
    stage.request("ab", A, stage.returns("a", 0.01))
    await stage.upkeep.asked_for.wait()
    assert [p.hashes for p in stage.upkeep.waiting] == [names("ab")]
    used = names("ab")
    assert [b.key for b in host.evictable()] == [*names("x"), *names("y"), *reversed(used)]
    assert stage.num_expected == 0


@pytest.mark.parametrize("how", ["a request", "its end"])
async def test_what_was_to_be_brought_for_a_return_is_left_out_then(stage: Stage, how: str) -> None:
    stage.request("ab", A, stage.returns("a", 0.01))
    await stage.upkeep.asked_for.wait()
    stage.known.asked(A, names("abc")) if how == "a request" else stage.say(Hints("a", closed=True))
    assert stage.upkeep.waiting == []


async def test_a_new_word_about_a_return_replaces_the_old_one(stage: Stage) -> None:
    stage.request("ab", A, stage.returns("a", 3600.0))
    stage.say(Hints("a", priority=1))  # silent about it
    assert stage.num_expected == 1
    stage.say(stage.returns("a", 0.01))
    assert stage.num_expected == 1
    await stage.upkeep.asked_for.wait()


async def test_nobody_is_expected_where_there_is_nothing_to_bring() -> None:
    stage = Stage(8, 8)
    stage.request("ab", A, stage.returns("a", 3600.0))
    assert stage.num_expected == 0


@pytest.mark.parametrize("bound", ["_MOST", "_MOST_NBYTES"])
async def test_so_many_sessions_are_known_and_the_oldest_is_forgotten(
    stage: Stage, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, bound, 2 if bound == "_MOST" else 3 * HASH_NBYTES)
    for number in range(4):
        stage.request("x", Hints(str(number)), stage.returns(str(number), 3600.0))
    known = 2 if bound == "_MOST" else 3  # of one block each
    assert stage.known.status()["sessions"] == stage.num_expected == known
    for number in range(4):
        stage.say(Hints(str(number), will_need=True))
    assert len(stage.upkeep.waiting) == known
    stage.request("abcd", A)  # longer than all there may be: known none the less, alone
    stage.say(Hints("a", closed=True))
    assert stage.known.status()["sessions"] <= known


async def test_a_return_is_prepared_the_earlier_the_longer_it_takes(stage: Stage) -> None:
    def lead() -> float:
        return stage.known._lead(1000)

    unmeasured = lead()
    nbytes = 1000 * stage.rig.layout.hash_step * stage.rig.layout.nbytes_per_token()
    stage.speeds.routes.clear()
    stage.speeds.begin((SSD, HOST), nbytes)
    stage.speeds.end((SSD, HOST), nbytes, moved=True)
    assert lead() == conversations._LEAST_LEAD_S < unmeasured
    for _ in range(100):
        stage.speeds.routes[SSD, HOST].took(nbytes, 3.0)
    assert lead() > conversations._HASTE * 0.3


async def test_every_tier_hears_what_is_said_of_a_path_and_none_of_what_it_lacks() -> None:
    rig = Rig(8, 8, 8, at_once=True)
    rig.place(DEVICE, "xy")
    rig.place(DEVICE, "ab")
    rig.place(HOST, "abc")
    before = {level: rig.found(level) for level in (DEVICE, HOST, SSD)}
    rig.cache.advise(chain("abcd"), Access(1.0, Hints(priority=-1)))  # nobody's own
    rig.cache.advise(chain("xyz"), Access(2.0, Hints(will_need=True)))
    assert [b.key for b in rig.pool(DEVICE).evictable()] == [b"a", b"ab", b"xy", b"x"]
    rig.cache.advise(chain("ab"), Access(3.0, Hints(priority=2)))
    assert [b.key for b in rig.pool(HOST).evictable()] == [b"abc", b"ab", b"a"]
    assert {level: rig.found(level) for level in before} == before


@pytest.mark.parametrize("when", ["with the request", "at its end", "later"])
async def test_whenever_a_session_closes_every_tier_gives_it_up_alike(when: str) -> None:
    """A replay says it with the request, an engine rather at its end."""
    rig, closed = Rig(4, 4, 4, at_once=True), Hints("a", closed=True)
    for turn, (prompt, hints) in enumerate([("ab", A), ("pqr", Hints("b")), ("xyz", Hints("c"))]):
        lease = rig.cache.acquire(
            chain(prompt), rig.tokens(prompt) - 1, rig.tokens(prompt) - 1, Access(turn, hints)
        )
        rig.commit(lease)
        rig.cache.release(lease, Access(turn, hints))
    said = closed if when == "with the request" else A
    lease = rig.cache.acquire(chain("abc"), rig.tokens("abc"), 7, Access(9.0, said))
    rig.commit(lease)
    rig.cache.release(lease, Access(9.0, closed if when == "at its end" else said))
    if when == "later":
        rig.cache.advise(chain("abc"), Access(9.5, closed))
    for level in (DEVICE, HOST, SSD):
        order = [b.key.decode() for b in rig.pool(level).evictable() if b.key]
        first = [name for name in order if name.startswith("a")]
        assert order[: len(first)] == first, f"tier {level}: {order}"


async def test_the_earliest_rings_first_and_one_that_is_forgotten_never() -> None:
    rung, all_rung = list[str](), asyncio.Event()

    def due(name: str) -> None:
        rung.append(name)
        if name == "last":
            all_rung.set()

    returns, now = Returns(due), asyncio.get_running_loop().time()
    for name, seconds in (("last", 0.05), ("b", 0.02), ("never", 0.01), ("a", -1.0), ("c", 9.0)):
        returns.expect(name, now + seconds)
    returns.expect("c", now + 0.03)
    returns.forget("never")
    returns.forget("who")
    await all_rung.wait()
    assert rung == ["a", "b", "c", "last"]
    assert len(returns) == 0
    returns.expect("later", now + 0.01)
    returns.close()
    assert len(returns) == 0
