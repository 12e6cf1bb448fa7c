"""Sequences as a test writes and checks them, token by token, through a real daemon.

The granule is one token unless a test says otherwise: what a token's K and V are follows from its
name, so a stale or foreign byte shows wherever it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.daemon import Daemon
from tierd.layout import KVLayout
from tierd.lease import Lease
from tierd.pool import Pool

FINE = KVLayout("model", 4, 2, 64, "float32", revision="r1", granule=1)
QUARTERS = KVLayout("model", 4, 2, 64, "float32", revision="r1", granule=4)
WINDOW = KVLayout("model", 4, 2, 64, "float32", windows=(None, None, 24, 24), granule=1)


@dataclass
class Written:
    """A lease, and how many of its tokens have their K and V."""

    lease: Lease
    length: int = 0

    @classmethod
    def serve(cls, pool: Pool, tokens: list[int], room: int = 0) -> "Written":
        sequence = cls(pool.acquire(tokens, room=room))
        sequence.length = sequence.lease.wait()
        sequence.check()
        sequence.write(len(tokens))
        sequence.lease.commit(len(tokens))
        return sequence

    def write(self, upto: int) -> None:
        """Fill tokens up to a length, in every layer."""
        for position in range(self.length, upto):
            self._set(position)
        self.length = upto

    def go_on(self, tokens: list[int]) -> None:
        self.lease.append(tokens)
        self.lease.extend(self.length + len(tokens))
        self.write(self.length + len(tokens))

    def fork(self) -> "Written":
        return Written(self.lease.fork(self.length), self.length)

    def back(self, length: int) -> None:
        self.lease.truncate(length)
        self.length = length

    def check(self) -> None:
        """Every token that was written holds what its name says (I2)."""
        pool, hashes = self.lease._pool, self.lease._chain.hashes
        step = pool.layout.hash_step
        for group, of in enumerate(pool.layout.groups):
            view, table = pool.view(group), self.lease.tables[group]
            for position in range(self.length // step * step):
                if (block := int(table[position // of.block_size])) >= 0:
                    found = view[block, :, :, :, position % of.block_size]
                    right = _value(hashes[position // step], position)
                    assert (found == right).all(), f"token {position} of group {group} is wrong"

    def _set(self, position: int) -> None:
        pool = self.lease._pool
        step, hashes = pool.layout.hash_step, self.lease._chain.hashes
        if position // step >= len(hashes):
            return  # its granule is not full: it has no name yet
        for group, of in enumerate(pool.layout.groups):
            block = int(self.lease.tables[group][position // of.block_size])
            value = _value(hashes[position // step], position)
            pool.view(group)[block, :, :, :, position % of.block_size] = value


def _value(name: bytes, position: int) -> float:
    return float(int.from_bytes(name[:3], "little") + position % 7)


@contextmanager
def attached(daemon: Daemon, layout: KVLayout = FINE, tier: str = "device") -> Iterator[Pool]:
    with daemon.client(tier=tier) as client, client.attach(layout) as pool:
        yield pool
