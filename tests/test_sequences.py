"""Sequences that branch, go back, rest and are published, through a real daemon.

Every token is checked.
"""

from pathlib import Path

import pytest

from tests.content import BLOCK, BLOCKS, LAYOUT, prompt
from tests.daemon import NOT_AHEAD, Daemon, held
from tests.engine import Engine
from tests.written import FINE, QUARTERS, WINDOW, Written, attached
from tierd.errors import LeaseError, OutOfBlocks
from tierd.layout import KVLayout


def in_use(daemon: Daemon) -> int:
    """Places of the device tier that are somebody's own."""
    (namespace,) = daemon.status()["tenants"][0]["namespaces"]
    return sum(group["private"] for group in namespace["tiers"][0]["groups"])


def test_a_fork_shares_every_block_until_one_of_them_goes_on(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        parent = Written.serve(pool, prompt(1, 2 * BLOCK + 5), room=3 * BLOCK)
        fork = parent.fork()
        assert [list(table) for table in fork.lease.tables] == [
            list(table[:3]) for table in parent.lease.tables
        ]
        before = in_use(daemon)
        fork.go_on([1, 2, 3])
        assert in_use(daemon) == before + 1  # a copy of the tail, and nothing else
        assert fork.lease.tables[0][2] != parent.lease.tables[0][2]
        parent.go_on([9, 8])
        fork.check()
        parent.check()


def test_the_last_holder_of_a_tail_writes_it_without_a_copy(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        parent = Written.serve(pool, prompt(1, BLOCK + 5))
        fork = parent.fork()
        tail = parent.lease.tables[0][1]
        parent.lease.release()
        fork.go_on([1, 2])
        assert fork.lease.tables[0][1] == tail
        fork.check()


def test_forks_cost_no_block_and_those_that_go_on_one_each(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        parent = Written.serve(pool, prompt(1, 10 * BLOCK + 3))
        before = in_use(daemon)
        forks = [
            Written(lease, parent.length)
            for lease in pool.fork([(parent.lease, parent.length)] * 16)
        ]
        assert in_use(daemon) == before
        for number, fork in enumerate(forks):
            fork.go_on([number])
        assert in_use(daemon) == before + 16
        for fork in [parent, *forks]:
            fork.check()


def test_forks_made_in_one_message_are_each_a_sequence_of_its_own(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        parents = [Written.serve(pool, prompt(seed, 2 * BLOCK + 5)) for seed in (1, 2)]
        cuts = 2 * [(parent, length) for length in (BLOCK + 3, 2 * BLOCK + 5) for parent in parents]
        leases = pool.fork([(parent.lease, length) for parent, length in cuts])
        forks = [Written(lease, length) for lease, (_, length) in zip(leases, cuts, strict=True)]
        for number, fork in enumerate(forks):
            fork.go_on([number] * BLOCK)
        parents[0].lease.release()
        for sequence in [parents[1], *forks]:
            sequence.check()
        pool.release([parents[1].lease, *leases])
        assert in_use(daemon) == 0


def test_a_fork_of_a_fork_and_their_commits_are_found_by_others(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        first = Written.serve(pool, prompt(1, BLOCK + 2))
        second = first.fork()
        second.go_on([1] * BLOCK)
        third = second.fork()
        third.go_on([2] * BLOCK)
        for sequence in (first, second, third):
            sequence.check()
            sequence.lease.commit(sequence.length)
        tokens = [*prompt(1, BLOCK + 2), *[1] * BLOCK, *[2] * BLOCK]
        with pool.acquire([*tokens, 5]) as lease:
            again = Written(lease, lease.wait())
            assert again.length == 3 * BLOCK
            again.check()


def test_a_rejected_draft_costs_no_message(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        sequence = Written.serve(pool, prompt(1, BLOCK + 3), room=2 * BLOCK)
        requests = pool.client._request
        sequence.go_on([1, 2, 3, 4])
        sequence.back(BLOCK + 4)
        sequence.go_on([7, 7])
        assert pool.client._request == requests
        sequence.check()


def test_going_back_into_what_a_fork_has_leaves_it_to_the_fork(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        parent = Written.serve(pool, prompt(1, BLOCK + 7))
        fork = parent.fork()
        parent.back(BLOCK + 2)
        parent.go_on([5] * 4)
        fork.check()
        parent.check()
        assert parent.lease.tables[0][1] != fork.lease.tables[0][1]


def test_going_back_into_a_committed_block_leaves_it_to_everybody(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        tokens = prompt(1, 2 * BLOCK)
        sequence = Written.serve(pool, tokens)
        sequence.back(BLOCK + 6)
        sequence.go_on([5] * (BLOCK - 6))
        sequence.check()
        sequence.lease.commit(sequence.length)
        for known in (tokens, [*tokens[: BLOCK + 6], *[5] * (BLOCK - 6)]):
            with pool.acquire([*known, 1]) as lease:
                again = Written(lease, lease.wait())
                assert again.length == 2 * BLOCK
                again.check()


@pytest.mark.parametrize("host", ["2MiB", "0"])
def test_a_suspended_sequence_comes_back_whole_with_its_tail(tmp_path: Path, host: str) -> None:
    with Daemon(tmp_path, host=host) as daemon, attached(daemon) as pool:
        sequence = Written.serve(pool, prompt(1, 5 * BLOCK + 7))
        other = sequence.fork()
        other.go_on([3, 4])
        sequence.lease.suspend(sequence.length)
        other.lease.suspend(other.length)
        daemon.until(lambda _: in_use(daemon) == 0)  # the copies have been made
        # All of the device is somebody else's meanwhile.
        Written.serve(pool, prompt(2, (BLOCKS - 1) * BLOCK)).lease.release()
        for back in (sequence, other):
            back.lease.resume()
            assert back.lease.wait() == back.length
            back.check()
            back.go_on([1] * BLOCK)
            back.check()


def test_a_suspended_sequence_is_released_like_any_other(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        sequence = Written.serve(pool, prompt(1, 3 * BLOCK + 2))
        sequence.lease.suspend(sequence.length)
        sequence.lease.release()
        (namespace,) = daemon.status()["tenants"][0]["namespaces"]
        for tier in namespace["tiers"]:
            assert [group["private"] for group in tier["groups"]] == [0]
        assert Written.serve(pool, prompt(1, 3 * BLOCK + 2)).length == 3 * BLOCK + 2


def test_many_long_leases_are_released_in_one_message(daemon: Daemon) -> None:
    """Some thousand names: more than one turn of the loop takes."""
    with attached(daemon) as pool:
        tokens = prompt(1, 20 * BLOCK + 3)
        parent = Written.serve(pool, tokens)
        forks = pool.fork([(parent.lease, parent.length)] * 16)
        pool.release([parent.lease, *forks])
        assert in_use(daemon) == 0
        assert daemon.status()["sessions"][0]["leases"] == 0
        with pytest.raises(LeaseError, match="is released"):
            forks[-1].release()
        assert Written.serve(pool, tokens).lease.hit == 20 * BLOCK


def test_without_room_below_a_sequence_is_not_suspended_and_goes_on(tmp_path: Path) -> None:
    with Daemon(tmp_path, host="0", ssd=None) as daemon, attached(daemon) as pool:
        sequence = Written.serve(pool, prompt(1, BLOCK + 3))
        with pytest.raises(OutOfBlocks, match="no tier below"):
            sequence.lease.suspend(sequence.length)
        sequence.go_on([1, 2])
        sequence.check()


def test_another_process_finds_the_published_tail_and_writes_its_own(daemon: Daemon) -> None:
    with attached(daemon) as one, attached(daemon) as two:
        tokens = prompt(1, BLOCK + 9)
        first = Written.serve(one, tokens)
        first.lease.publish()
        second = Written.serve(two, [*tokens, 1])
        assert second.lease.hit == len(tokens)
        second.go_on([2] * BLOCK)
        first.go_on([3] * BLOCK)
        first.check()
        second.check()
        with one.acquire([*tokens, 9]) as lease:  # nobody has written into what was published
            again = Written(lease, lease.wait())
            assert again.length == len(tokens)
            again.check()


def test_a_fork_is_published_too(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        parent = Written.serve(pool, prompt(1, BLOCK + 3))
        fork = parent.fork()
        fork.lease.publish()
        parent.go_on([4] * 3)
        fork.go_on([5] * 3)
        parent.check()
        fork.check()


@pytest.mark.parametrize(
    ("layout", "hit"), [(LAYOUT, BLOCK), (QUARTERS, BLOCK + 4), (FINE, BLOCK + 7)]
)
def test_a_prompt_takes_the_part_of_a_block_that_it_shares(
    daemon: Daemon, layout: KVLayout, hit: int
) -> None:
    with attached(daemon, layout) as pool:
        tokens = prompt(1, 2 * BLOCK)
        Written.serve(pool, tokens).lease.release()
        other = Written.serve(pool, [*tokens[: BLOCK + 7], 1, 2, 3, 4])
        assert other.lease.hit == hit


def test_parts_of_blocks_are_found_after_a_restart(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, attached(daemon, QUARTERS) as pool:
        Written.serve(pool, prompt(1, 3 * BLOCK)).lease.release()
    with Daemon(tmp_path) as daemon, attached(daemon, QUARTERS) as pool:
        again = Written.serve(pool, [*prompt(1, 2 * BLOCK + 9), 1])
        assert again.lease.hit == 2 * BLOCK + 8


def test_blocks_that_slid_out_of_the_window_are_given_back(tmp_path: Path) -> None:
    with Daemon(tmp_path, device="8MiB") as daemon, attached(daemon, WINDOW) as pool:
        sequence = Written.serve(pool, prompt(1, 3 * BLOCK))
        full, window = sequence.lease.tables
        assert list(window[:1]) == [-1]
        assert -1 not in [*full, *window[1:]]
        with pytest.raises(LeaseError, match="window"):
            sequence.lease.fork(BLOCK)
        with pytest.raises(LeaseError, match="window"):
            sequence.lease.truncate(BLOCK)
        fork = sequence.fork()
        fork.go_on([1] * BLOCK)
        fork.check()
        sequence.check()


@pytest.mark.parametrize("verb", ["fork", "truncate", "suspend", "publish", "extend", "commit"])
def test_a_lease_that_is_gone_says_so(daemon: Daemon, verb: str) -> None:
    with attached(daemon) as pool:
        sequence = Written.serve(pool, prompt(1, BLOCK + 3))
        sequence.lease.suspend(sequence.length)
        with pytest.raises(LeaseError, match="is suspended"):
            getattr(sequence.lease, verb)(BLOCK)
        sequence.lease.release()
        with pytest.raises(LeaseError, match="is released"):
            getattr(sequence.lease, verb)(BLOCK)


def test_only_a_suspended_lease_is_resumed(daemon: Daemon) -> None:
    with attached(daemon) as pool:
        sequence = Written.serve(pool, prompt(1, BLOCK))
        with pytest.raises(LeaseError, match="not suspended"):
            sequence.lease.resume()


def test_what_forks_and_suspended_leases_held_is_free_when_their_engine_dies(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path, more=NOT_AHEAD) as daemon:
        with Engine(daemon.socket) as engine:
            engine.ask("branch", tokens=prompt(1, 4 * BLOCK + 3))
            engine.kill9()
        daemon.until(lambda status: not held(status))
