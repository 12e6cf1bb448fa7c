"""What a policy is: a decision over opaque keys and plain numbers, and nothing else.

An eviction policy never sees a block, a byte or a reference count, and has no clock of its own.
The pool tells it what happened (`insert`, `touch`, `remove`) and asks whom it would give up first
(`victims`); which of those may really go is the pool's business. `victims` changes nothing, so a
failed allocation changes nothing. The pool then says `evict(key)` for each one it gave up.

A block-size policy decides once per namespace, from the layers and what is known of the machine and
its requests; what it answers for the same facts is always the same.

What a policy knows it can say (`state`), so that a restart need not begin from nothing.

A prefetch policy is told the requests' paths and guesses how later ones go on; whether that is
worth a copy, or possible, is the daemon's business.

An admission policy is told the requests' paths too, and is asked what is worth writing to a tier
when it would go down there. A placement policy says where the copies of a block are kept along the
tiers, which are numbers to it, hottest first.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

Key = Hashable

GRANULE = 16  # tokens between two names of a prompt, at most, unless somebody says otherwise


@dataclass(frozen=True, slots=True)
class Hints:
    """What an engine chose to say of a request, a path or a key; a policy may act on it or not
    (cf. madvise). For policies that do not, `policies.hinted` does."""

    session: str | None = None  # requests of one conversation have the same
    closed: bool = False  # the session ends with this request
    priority: int = 0  # higher is worth more
    returns_at: float | None = None  # when the session is expected back, on the clock of `time`
    will_need: bool = False  # the path is wanted again soon
    dont_need: bool = False  # it is not

    @property
    def tells_worth(self) -> bool:
        """Whether it says what the path is worth, and not only whose it is."""
        return self.closed or self.dont_need or self.will_need or self.priority != 0


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Access:
    """One request, as far as a policy may know it: when it came (seconds, any origin, never
    backwards), and what the engine said of it."""

    time: float
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer as a block-size policy sees it: bytes of K and V a token, and its window."""

    index: int
    nbytes_per_token: int
    window: int | None  # tokens a sliding-window layer looks back; None for full attention


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """What bringing blocks up by one tier takes, in seconds: for a burst of them, for each block
    beside its bytes, and for each byte."""

    latency: float
    seconds_per_block: float
    seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class SizingFacts:
    """What is known of the machine and its requests when block sizes are chosen.

    `lengths`: how many requests had so many tokens. `routes`: all that a block in the coldest tier
    goes through on its way to the hottest, at least one. `granule`: tokens between two names of a
    prompt, which every size must then be a multiple of; None: chosen by the sizes, at most
    `GRANULE`.
    `memory_nbytes`: what the hottest tier holds.
    """

    lengths: Mapping[int, float]
    routes: Sequence[RouteFacts]
    granule: int | None = None
    memory_nbytes: float = inf
    page_nbytes: int = 4096  # a block takes whole ones


class EvictionPolicy(ABC):
    """An order over the resident keys of one pool."""

    # Whether it acts on `closed` and `dont_need` itself; else keys of which that was said go first.
    judges_ends: bool = False

    def __init__(self, capacity: int) -> None:
        """`capacity`: how many keys the pool can hold, a size for ghost lists; see `resize`."""
        self.capacity = capacity

    def resize(self, capacity: int) -> None:
        """The pool now holds up to `capacity` keys."""
        self.capacity = capacity

    def tick(self, time: float) -> None:  # noqa: B027
        """It is `time` now, before victims are asked for: an order may depend on how long nothing
        has happened."""

    @abstractmethod
    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        """`key` has become resident; `parent` precedes it in its sequence. No use yet; the hints
        are what was said of it, here or where it comes from."""

    @abstractmethod
    def touch(self, path: Sequence[Key], access: Access) -> None:
        """One request used `path`: resident keys, in token order, head of the sequence first."""

    def advise(self, path: Sequence[Key], access: Access) -> None:  # noqa: B027
        """Something was said of `path`, resident keys in token order, which is no use of it."""

    def said(self, key: Key) -> Hints:
        """What was said of a resident key and still holds, for the pool that it goes on to."""
        return NO_HINTS

    @abstractmethod
    def remove(self, key: Key) -> None:
        """`key` has left the pool for a reason that was not this policy's choice."""

    @abstractmethod
    def victims(self) -> Iterator[Key]:
        """Yield the resident keys, the first to give up first. Changes nothing.

        Valid until the next call of another method.
        """

    def residents(self) -> Iterator[Key]:
        """Yield the resident keys once each, about as `victims` does, but finding one takes no
        longer the more there are: for whoever takes all. Valid as `victims` is."""
        return self.victims()

    def evict(self, key: Key) -> None:
        """The pool gave up `key`, one of `victims()`. Ghost lists remember it here."""
        self.remove(key)

    def state(self) -> Mapping[str, Any]:
        """All that `restore` needs to go on from here, a copy.

        Made of dicts with text for keys, lists, text, numbers, None, and policy keys. A policy that
        does not say otherwise remembers its order.
        """
        return {"order": list(self.victims())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state` of this kind of policy. Only for a policy that holds nothing yet.

        What was resident then is resident now; the pool removes what it does not have any more.
        """
        for key in state["order"]:
            self.insert(key, None, Access(0.0))


class PrefetchPolicy(ABC):
    """A guess at what comes after a request, from the requests before it."""

    @abstractmethod
    def record(self, path: Sequence[Key], access: Access) -> None:
        """A request has used `path`: keys in token order, each the parent of the next.

        A long one comes in pieces, the tail first, each beginning with the key that the piece
        before it ends with. Two requests that share a key share all before it.
        """

    @abstractmethod
    def wanted(self, path: Sequence[Key]) -> Iterator[Sequence[Key]]:
        """Yield what may be wanted soon after a request for `path`, the likeliest first: keys that
        go on from its end, in token order. Changes nothing.

        Valid until the next `record`. Which of them are resident already it does not know.
        """


class AdmissionPolicy(ABC):
    """What is worth writing to a tier where a write costs something."""

    @abstractmethod
    def used(self, path: Sequence[Key], access: Access) -> None:
        """One request, which is over now, used `path`: keys in token order, each after its parent,
        whether they are resident anywhere or not. Its head may be left out."""

    @abstractmethod
    def worth(self, keys: Sequence[Key], access: Access) -> Sequence[bool]:
        """For each of `keys`, which are about to go down: whether that is worth a write. Those that
        are not are lost, unless another tier has them. Changes nothing.

        They may never have been part of a path that was `used`.
        """

    def gave_up(self, keys: Sequence[Key], access: Access) -> None:  # noqa: B027
        """The tier has given up `keys` for want of room: it could hold them so long, no longer."""


class PlacementPolicy(ABC):
    """Where copies of a block are kept along the tiers. Pure: it remembers nothing."""

    @abstractmethod
    def keeps(self, level: int, capacity: int, above: int) -> bool:
        """Whether the copy at `level` of a block that a hotter tier has too is kept like any other;
        else it goes first where room is needed there. `capacity`, `above`: the places there, and of
        all hotter tiers together, of blocks of one kind."""

    @abstractmethod
    def touches(self, level: int, num_levels: int) -> Collection[int]:
        """The levels below the top where a hit at `level` counts as a use, as far as they hold the
        block; the top one is used in any case."""

    @abstractmethod
    def writes_through(self, level: int) -> bool:
        """Whether what comes to `level` is written to the next level as soon as nobody waits; else
        only when its place is needed, or soon will be."""


class BlockSizePolicy(ABC):
    """Chooses how many tokens a block has, for each layer, once per namespace."""

    # Whether other facts may change the choice. A namespace of the same model that an earlier life
    # left on the SSD then keeps the sizes it has, or its blocks would not be found again.
    by_facts: ClassVar[bool] = False

    @abstractmethod
    def sizes(self, layers: Sequence[LayerShape], facts: SizingFacts) -> list[int]:
        """The block size in tokens of each of `layers`, in order.

        Layers with equal size and window become one layer group. Pure: equal arguments, equal
        answer. Raises ValueError for layers that it cannot serve.
        """
