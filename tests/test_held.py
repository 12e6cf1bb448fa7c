"""A policy that is read elsewhere: it does not change, and hears of everything in the end."""

from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import Access, EvictionPolicy, Key
from policies.learned import Learned
from policies.lru import LRU
from policies.s3fifo import S3FIFO
from policies.testing import PolicyTests
from tierd.daemon.held import Held


class Holding(EvictionPolicy):
    """Is held most of the time, and told of two things whenever three have happened."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy.capacity)
        self._happened, self._held = 0, Held(policy)

    def _tell(self) -> None:
        self._happened += 1
        if self._happened % 3 == 0 and not self._held.tell(2 + self._happened % 5):
            self._held = Held(self._held.policy)

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._held.resize(capacity)

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._held.insert(key, parent, access)
        self._tell()

    def touch(self, path: Sequence[Key], access: Access) -> None:
        self._held.touch(path, access)
        self._tell()

    def remove(self, key: Key) -> None:
        self._held.remove(key)
        self._tell()

    def evict(self, key: Key) -> None:
        self._held.evict(key)
        self._tell()

    def victims(self) -> Iterator[Key]:
        return self._held.victims()


class TestHolding(PolicyTests):
    test_a_state_restores_the_order = None  # what is saved is what is held

    def make(self, capacity: int) -> EvictionPolicy:
        return Holding(S3FIFO(capacity))


class TestHoldingLearned(TestHolding):
    def make(self, capacity: int) -> EvictionPolicy:
        return Holding(Learned(capacity))


Operations = list[tuple[str, int]]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["insert", "touch", "evict", "remove"]), st.integers(0, 12)),
        max_size=60,
    ),
    st.integers(1, 5),
)
def test_what_it_hears_of_in_the_end_is_what_happened(operations: Operations, n: int) -> None:
    plain, policy, resident = LRU(8), LRU(8), list(range(6))
    for key in resident:
        plain.insert(key, None, Access(0.0))
        policy.insert(key, None, Access(0.0))
    state, held = policy.state(), Held(policy)
    for operation, key in operations:
        if operation == "insert" and key not in resident:
            resident.append(key)
            for of in (plain, held):
                of.insert(key, None, Access(1.0))
        elif operation == "touch":
            path = [k for k in (key, key + 1, key + 2) if k in resident]
            for of in (plain, held):
                of.touch(path, Access(1.0))
        elif operation in ("evict", "remove") and key in resident:
            resident.remove(key)
            for of in (plain, held):
                getattr(of, operation)(key)
        assert policy.state() == state, "it changed while it was held"
        assert list(held.victims()) == list(plain.victims())
    while held.tell(n):
        assert list(held.victims()) == list(plain.victims())
    assert list(policy.victims()) == list(plain.victims())
