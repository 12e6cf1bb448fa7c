"""What happens while nobody waits: cold blocks are made clean, expected prompts come nearer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.base import Key
from policies.lru import LRU
from tests.content import BLOCK, BLOCKS, LAYOUT, ask, prompt
from tests.daemon import Daemon, Status, tiers
from tests.rig import DEVICE, HOST, NOW, SSD, Rig, chain
from tierd.block import State
from tierd.daemon.pool import BlockPool

HOUR = 3600.0


def marked(*capacities: int, low: float, high: float) -> Rig:
    rig = Rig(*capacities, at_once=True)
    for tier in rig.tiers:
        tier.watermarks = (low, high)
    return rig


def test_cold_blocks_are_copied_down_before_anybody_needs_their_places() -> None:
    rig = marked(4, 8, low=0.25, high=0.5)
    for name in "abcd":
        rig.place(DEVICE, name)
    copies = rig.cache.reclaim(16)
    assert [copy.key for copy in copies] == [b"a", b"b"]  # the coldest, up to the high mark
    assert rig.found(DEVICE) == {"a", "b", "c", "d"}  # where they were they stay
    assert rig.found(HOST) == {"a", "b"}
    moved = len(rig.transfer.copies)
    rig.acquire("xyz", num_tokens=3)  # two blocks: the first two go, and no byte moves
    assert len(rig.transfer.copies) == moved


@pytest.mark.parametrize("at_hand", ["free", "clean"])
def test_above_the_low_watermark_nothing_is_copied(at_hand: str) -> None:
    rig = marked(4, 8, low=0.25, high=0.5)
    for name in "abc":
        rig.place(DEVICE, name)
    if at_hand == "clean":
        rig.place(DEVICE, "d")
        rig.place(HOST, "a")
    assert rig.cache.reclaim(16) == []


def test_a_block_in_use_is_not_made_clean() -> None:
    rig = marked(2, 8, low=0.5, high=1.0)
    rig.write("a")
    lease = rig.acquire("a")
    assert [copy.key for copy in rig.cache.reclaim(16)] == []
    rig.release(lease)


def test_a_request_may_take_the_place_of_a_block_that_is_being_made_clean() -> None:
    rig = Rig(1, 4)
    rig.tiers[DEVICE].watermarks = (1.0, 1.0)
    rig.place(DEVICE, "a")
    assert len(rig.cache.reclaim(16)) == 1  # and it is still under way
    rig.acquire("", num_tokens=1)  # so there is no shortage
    rig.transfer.run()
    assert rig.found(HOST) == {"a"}


def test_so_many_at_once_and_no_more() -> None:
    rig = marked(8, 8, low=1.0, high=1.0)
    for name in "abcdefgh":
        rig.place(DEVICE, name)
    assert len(rig.cache.reclaim(3)) == 3
    assert len(rig.cache.reclaim(16)) == 5


class Contrary(LRU):
    """Gives up first what came last."""

    def victims(self) -> Iterator[Key]:
        return reversed(self._order)


def test_a_tier_that_gives_up_at_once_what_comes_down_is_not_asked_again_and_again() -> None:
    rig = marked(6, 2, low=1.0, high=1.0)
    rig.tiers[HOST].pools = [BlockPool(Contrary(2))]
    rig.tiers[HOST].pools[0].grow(range(2))
    for name in "abcdef":
        rig.place(DEVICE, name)
    batches = 0
    while copies := rig.cache.reclaim(2):
        batches += 1
        assert len(copies) <= 2
        assert batches < 10, "it copies the same again and again"
    assert batches == 3  # each block once
    assert not rig.cache.ahead.lags()


def test_after_a_look_another_is_worth_it_once_so_many_places_were_taken() -> None:
    rig = marked(10, 20, low=0.2, high=0.5)
    assert rig.cache.ahead.lags()  # nobody has looked yet
    rig.cache.reclaim(16)
    lease = rig.acquire("abcdefgh", num_tokens=16)  # the two that remain are the low mark
    assert not rig.cache.ahead.lags()
    rig.commit(lease)
    rig.release(lease)
    assert not rig.cache.ahead.lags()
    other = rig.acquire("x", num_tokens=1)
    assert rig.cache.ahead.lags()
    assert [copy.key for copy in rig.cache.reclaim(16)]
    assert rig.cache.reclaim(16) == []
    assert not rig.cache.ahead.lags()
    rig.release(other)


def test_a_place_that_a_hit_holds_again_is_taken_too() -> None:
    rig = marked(10, 8, low=0.2, high=0.8)
    rig.write("abcd")
    rig.cache.reclaim(16)  # six are free: four more than the low mark
    lease = rig.acquire("xxx", num_tokens=7)
    assert not rig.cache.ahead.lags()
    rig.release(lease)
    rig.cache.reclaim(16)
    lease = rig.acquire("abcd")  # one place, and four that might have been evicted
    assert rig.cache.ahead.lags()
    rig.release(lease)


def test_every_tier_but_the_coldest_is_kept_clean() -> None:
    rig = marked(2, 2, 8, low=1.0, high=1.0)
    for name in "ab":
        rig.place(HOST, name)
    assert [(c.src_level, c.dst_level) for c in rig.cache.reclaim(16)] == [(HOST, SSD)] * 2


def test_a_prefetch_brings_a_prompt_from_the_ssd_into_host_memory() -> None:
    rig = Rig(8, 8, 8, at_once=True)
    rig.place(SSD, "abc")
    copies = rig.cache.prefetch(chain("abc"), rig.tokens("abc"), 2, NOW)
    assert [(c.key, c.src_level, c.dst_level) for c in copies] == [
        (b"a", SSD, HOST),
        (b"ab", SSD, HOST),
    ]
    assert len(rig.cache.prefetch(chain("abc"), rig.tokens("abc"), 2, NOW)) == 1
    assert rig.cache.prefetch(chain("abc"), rig.tokens("abc"), 2, NOW) == []
    assert rig.found(HOST) == {"a", "ab", "abc"}
    assert rig.found(DEVICE) == set()
    assert all(block.ref_cnt == 0 for level in (HOST, SSD) for block in rig.pool(level))


def test_a_prefetch_from_a_start_on_leaves_alone_what_lies_before() -> None:
    rig = Rig(8, 8, 8, at_once=True)
    rig.place(SSD, "abcd", first=1)
    copies = rig.cache.prefetch(chain("abcd"), rig.tokens("abcd"), 16, NOW, start=4)
    assert [copy.key for copy in copies] == [b"abc", b"abcd"]
    assert rig.cache.chain.counts.prefetched == 2


def test_a_prefetch_takes_no_place_that_would_be_missed() -> None:
    rig = Rig(8, 2, 8, at_once=True)
    rig.place(HOST, "a")  # of the very prompt, and on the SSD too
    rig.place(HOST, "x")  # only here
    rig.place(SSD, "ab")
    assert rig.cache.prefetch(chain("ab"), rig.tokens("ab"), 16, NOW) == []
    assert rig.found(HOST) == {"a", "x"}


def test_a_prompt_may_be_acquired_while_its_prefetch_is_under_way() -> None:
    rig = Rig(8, 8, 8)
    rig.place(SSD, "a")
    rig.cache.prefetch(chain("a"), rig.tokens("a"), 16, NOW)
    lease = rig.acquire("a")
    assert rig.transfer.routes == [("a", SSD, HOST), ("a", HOST, DEVICE)]  # one read of the SSD
    rig.transfer.run()
    assert lease.ready
    assert rig.pool(HOST).counts[State.COMMITTED] == 1


def told(status: Status, name: str) -> int:
    """A count of the one namespace there is."""
    return int(status["tenants"][0]["namespaces"][0][name])


def committed(status: Status, tier: str) -> int:
    return tiers(status)[tier][0]["committed"]


def test_a_daemon_writes_cold_blocks_to_the_ssd_while_nobody_waits(tmp_path: Path) -> None:
    more = "device.watermarks = [1.0, 1.0]\nhost.watermarks = [1.0, 1.0]\n"
    with Daemon(tmp_path, more=more) as daemon, daemon.client() as client:
        ask(client.attach(LAYOUT), prompt(1, BLOCKS * BLOCK))
        daemon.until(lambda status: committed(status, "ssd") == BLOCKS)
        assert committed(daemon.status(), "device") == BLOCKS


def test_a_second_use_is_what_makes_a_prompt_worth_a_write(tmp_path: Path) -> None:
    more = "device.watermarks = [1.0, 1.0]\nhost.watermarks = [1.0, 1.0]\nssd.admission = "
    once, twice = prompt(1, 8 * BLOCK), prompt(2, 8 * BLOCK)
    with Daemon(tmp_path, more=more + '"second-hit"\n') as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        ask(pool, once)
        ask(pool, twice)
        assert ask(pool, twice) == 7 * BLOCK  # one token is always computed
        daemon.until(lambda status: committed(status, "ssd") == 8)
        # All that went down is below by now, and of the other prompt nothing has moved on.
        status = daemon.until(lambda status: committed(status, "host") == 16)
        assert committed(status, "ssd") == 8
        assert told(status, "refused") == 0  # it is where it was
        for seed in range(3, 15):  # pushes everything out of the memory tiers
            ask(pool, prompt(seed, 8 * BLOCK))
        assert told(daemon.status(), "refused") >= 8
        assert ask(pool, once) == 0
        assert ask(pool, twice) == 7 * BLOCK


@pytest.mark.parametrize("through", [False, True])
def test_a_daemon_writes_new_blocks_through_where_it_is_told_to(
    tmp_path: Path, through: bool
) -> None:
    more = "device.watermarks = [0, 0]\nhost.watermarks = [0, 0]\n"
    more += 'placement.policy = "write-through"\n' if through else ""
    with Daemon(tmp_path, more=more) as daemon, daemon.client() as client:
        ask(client.attach(LAYOUT), prompt(1, 8 * BLOCK))
        if through:
            daemon.until(lambda status: committed(status, "host") == 8)
        assert committed(daemon.status(), "ssd") == 0


def test_a_prefetched_prompt_is_a_hit_in_host_memory(tmp_path: Path) -> None:
    tokens = prompt(1, 8 * BLOCK + 1)
    with Daemon(tmp_path) as daemon:
        with daemon.client() as client:
            ask(client.attach(LAYOUT), tokens)
        daemon.terminate()
        with daemon, daemon.client() as client:
            pool = client.attach(LAYOUT)
            assert committed(daemon.status(), "host") == 0
            pool.prefetch(tokens, within=HOUR)
            daemon.until(lambda status: committed(status, "host") == 8)
            assert ask(pool, tokens) == 8 * BLOCK


def test_a_prefetch_that_comes_too_late_is_left_out(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with daemon.client() as client:
            ask(client.attach(LAYOUT), prompt(1, 8 * BLOCK + 1))
        daemon.terminate()
        with daemon, daemon.client() as client:
            pool = client.attach(LAYOUT)
            pool.prefetch(prompt(1, 8 * BLOCK + 1), within=-1)
            ask(pool, prompt(2, BLOCK))  # whatever the prefetch began has its place by now
            assert committed(daemon.status(), "host") == 0
