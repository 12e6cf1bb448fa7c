"""What a prefetch policy guesses is brought nearer, and what it learns comes from the requests."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from policies.base import Access, Key
from policies.prefetch import Next
from tests.content import BLOCK, BLOCKS, LAYOUT, ask, prompt
from tests.daemon import Daemon
from tests.rig import HOST, SSD, Rig
from tests.test_upkeep import committed, told
from tests.wire import HASHES, Wire
from tierd import protocol
from tierd.block import BlockHash
from tierd.daemon.transfer import StoreTransfer
from tierd.daemon.upkeep import Upkeep
from tierd.pool import Pool
from tierd.protocol import Kind, Op, StepRequest


class Pupil(Next):
    """Keeps what it was taught, and says when it was the head of a path."""

    def __init__(self, head: Key) -> None:
        super().__init__()
        self.pieces: list[Sequence[Key]] = []
        self.done = asyncio.Event()
        self._head = head

    def record(self, path: Sequence[Key], access: Access) -> None:
        super().record(path, access)
        self.pieces.append(path)
        if path[0] == self._head:
            self.done.set()


async def test_a_long_path_is_learnt_in_pieces_that_overlap_by_a_key() -> None:
    path = [BlockHash(bytes([number // 256, number % 256])) for number in range(1000)]
    policy, rig = Pupil(path[0]), Rig(8)
    upkeep = Upkeep(rig.cache, StoreTransfer([], lambda level: None), policy)
    upkeep.start()
    upkeep.used(path)
    await policy.done.wait()
    await upkeep.close()
    assert max(map(len, policy.pieces)) < 300
    assert [a[0] for a in policy.pieces[:-1]] == [b[-1] for b in policy.pieces[1:]]
    assert {key for piece in policy.pieces for key in piece} == set(path)


# Whatever has left the device tier goes to the SSD soon.
CLEAN = "device.watermarks = [0, 0]\nhost.watermarks = [1.0, 1.0]\n"
NEXT = CLEAN + 'prefetch.policy = "next"\n'


def push_out(pool: Pool) -> None:
    """Fill the device and the host tier with other prompts."""
    for seed in range(100, 104):
        ask(pool, prompt(seed, 30 * BLOCK))


def test_what_followed_in_an_earlier_request_is_brought_before_it_is_asked_for(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path, more=NEXT) as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        ask(pool, prompt(1, 12 * BLOCK + 1))
        push_out(pool)
        daemon.until(lambda status: committed(status, "ssd") == 12 + 4 * 30 - BLOCKS)
        assert told(daemon.status(), "prefetched") == 0
        ask(pool, prompt(1, 4 * BLOCK))
        daemon.until(lambda status: told(status, "prefetched") == 8)
        before = daemon.status()["tenants"][0]["namespaces"][0]["blocks_hit"]
        assert ask(pool, prompt(1, 12 * BLOCK + 1)) == 12 * BLOCK
        after = daemon.status()["tenants"][0]["namespaces"][0]["blocks_hit"]
        assert after[HOST] - before[HOST] == 8
        assert after[SSD] == before[SSD]


def test_a_chain_that_no_true_prompt_has_is_not_followed(tmp_path: Path) -> None:
    with Daemon(tmp_path, more=NEXT) as daemon, Wire(daemon.socket).attach() as wire:
        there_and_back = [HASHES[:2], HASHES[1::-1]]
        for lease, hashes in enumerate(there_and_back):
            assert wire.acquire(lease, 2 * BLOCK, 2 * BLOCK, hashes).kind == Kind.REPLY
            steps = [StepRequest(lease, 2 * BLOCK, 2 * BLOCK, ())]
            assert wire.ask(Op.ADVANCE, protocol.dump_steps(steps)).kind == Kind.REPLY
            assert wire.ask(Op.RELEASE, protocol.dump_leases([lease])).kind == Kind.REPLY
        with daemon.client() as client:
            pool = client.attach(LAYOUT)
            ask(pool, prompt(1, 8 * BLOCK + 1))
            push_out(pool)
            daemon.until(lambda status: committed(status, "ssd") == 2 + 8 + 4 * 30 - BLOCKS)
            assert wire.acquire(3, BLOCK, BLOCK, HASHES[:1]).kind == Kind.REPLY
            ask(pool, prompt(1, 4 * BLOCK))  # and the daemon still prefetches
            daemon.until(lambda status: told(status, "prefetched") == 4)
