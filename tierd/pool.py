"""A tier as one engine sees it: mapped blocks, and the leases this engine has of them.

A request is one message for a whole batch. It knows what a block holds only by its name.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from tierd import protocol
from tierd.block import BlockHash
from tierd.errors import LeaseError, TierdError
from tierd.hints import MOST_ADVICE, Advice, Hints, dump_advice, dump_hints
from tierd.layout import KVLayout
from tierd.lease import Lease
from tierd.prefix import PrefixChain, Tokens, token_array
from tierd.protocol import MOST_LOOKED_UP, Frame, Op, StepRequest, dump_lookup
from tierd.shm import CudaMemory, SharedMemory

if TYPE_CHECKING:
    import torch

    from tierd.client import Client

_FASTEST = 1e18  # tokens a second, beyond any engine


class Pool:
    """The tier that this engine has mapped: `layout`, and its blocks as torch tensors."""

    def __init__(
        self, client: "Client", layout: KVLayout, memory: SharedMemory | CudaMemory
    ) -> None:
        self.client, self.layout = client, layout
        self._memory = memory
        self._root = layout.root(client.tenant)
        self._leases: dict[int, Lease] = {}
        self._next = 0
        self._views: dict[int, torch.Tensor] = {}

    def view(self, group: int) -> "torch.Tensor":
        """All blocks of a group, without a copy.

        Shape `[num_blocks, layers of the group, 2 (K, V), num_kv_heads, block_size, head_dim]`;
        block i of the first axis is the place with BlockId i.
        """
        if group not in self._views:
            import torch

            flat = (
                self._memory.tensor
                if isinstance(self._memory, CudaMemory)
                else torch.from_numpy(self._memory.array)
            ).view(getattr(torch, self.layout.dtype))
            shape = self.layout.block_shape(group)
            stride = self.layout.block_nbytes(group) // flat.element_size()
            inner = torch.empty(shape, device="meta").stride()
            size = (flat.numel() // stride, *shape)
            self._views[group] = flat.as_strided(size, (stride, *inner))
        return self._views[group]

    def kv(self, layer: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """The K and V caches of one layer, for the op: `[num_blocks, heads, block_size, dim]`."""
        group, index = self.layout.group_of(layer)
        view = self.view(group)
        return view[:, index, 0], view[:, index, 1]

    def acquire(
        self,
        tokens: Tokens,
        *,
        room: int = 0,
        extra: Mapping[int, bytes] | None = None,
        prefill: float = 0.0,
        hints: Hints | None = None,
    ) -> Lease:
        """Lease the blocks of a prompt, its longest known prefix filled or being filled.

        `room`: tokens to have places for, the prompt's length if smaller. `extra`: position to
        bytes that also decide the K and V there (an image's hash). `prefill`: tokens a second that
        this engine computes; where loading a part of the prefix would take longer than computing
        it, that part is left out. 0: unknown, all is loaded. `hints`: what is known of the request,
        and holds until it is released. Raises OutOfBlocks.
        """
        ids = token_array(tokens)
        if not len(ids):
            raise ValueError("tokens: a prompt has at least one")
        if not 0 <= prefill < _FASTEST:
            raise ValueError(f"prefill: {prefill} tokens a second is no speed")
        chain = PrefixChain(self._root, self.layout.hash_step, extra)
        chain.append(ids)
        with self.client.lock:
            self._next += 1
            lease = Lease(self, self._next, chain, len(ids), hints)
            self._leases[lease.number] = lease
            places = max(room, len(ids))
            asked = (lease.number, len(ids), places, chain.hashes, prefill, dump_hints(hints))
            body = protocol.dump_acquire(*asked)
            try:
                self.client.call(Op.ACQUIRE, body, lease.answered)
            except TierdError:
                del self._leases[lease.number]
                raise
        return lease

    def prefetch(
        self, tokens: Tokens, *, within: float = 60.0, extra: Mapping[int, bytes] | None = None
    ) -> None:
        """Say that this prompt is expected within so many seconds: what it would hit on SSD is
        brought into host memory meanwhile. A hint: nothing is leased, nothing promised."""
        ids = token_array(tokens)
        chain = PrefixChain(self._root, self.layout.hash_step, extra)
        chain.append(ids)
        self.client.call(Op.PREFETCH, protocol.dump_prefetch(within, len(ids), chain.hashes))

    def advise(
        self, tokens: Tokens, hints: Hints, *, extra: Mapping[int, bytes] | None = None
    ) -> None:
        """Say `hints` of a prompt's path, whoever used it; of one that its session is to go on
        with, if they name one."""
        self.advise_many([(self.hashes(tokens, extra=extra), hints)])

    def advise_many(self, said: Iterable[tuple[Lease | Sequence[BlockHash] | None, Hints]]) -> None:
        """Say something of leases, of paths by their `hashes`, and (None) of what the session that
        the hints name used last: of many in one message, in order.

        Raises LeaseError, and of that message nothing was heard, for a lease that is released; what
        the daemon does not know (any more) is passed over.
        """
        advice = [_advice(of, hints) for of, hints in said]
        for start in range(0, len(advice), MOST_ADVICE):
            self.client.call(Op.ADVISE, dump_advice(advice[start : start + MOST_ADVICE]))

    def close_session(self, session: str) -> None:
        """Say that a session is over: what it alone has used is given up first."""
        self.advise_many([(None, Hints(session, closed=True))])

    def lookup(
        self, tokens: Tokens, *, extra: Mapping[int, bytes] | None = None
    ) -> npt.NDArray[np.uint8]:
        """From which level each granule of a prompt would be served, 0 the hottest; `NOWHERE` where
        none holds it for every layer group. It changes nothing, and promises nothing."""
        return self.lookup_many([self.hashes(tokens, extra=extra)])[0]

    def lookup_many(self, prompts: Sequence[Sequence[BlockHash]]) -> list[npt.NDArray[np.uint8]]:
        """As `lookup`, for many prompts by their `hashes`, without waiting for each answer."""
        bodies = [
            dump_lookup(at, hashes[at : at + MOST_LOOKED_UP])
            for hashes in prompts
            for at in range(0, len(hashes), MOST_LOOKED_UP)
        ]
        answers = b"".join(self.client.call_many(Op.LOOKUP, bodies))
        ends = np.cumsum([len(hashes) for hashes in prompts])
        return np.split(np.frombuffer(answers, np.uint8), ends)[:-1]

    def hashes(
        self, tokens: Tokens, *, extra: Mapping[int, bytes] | None = None
    ) -> list[BlockHash]:
        """The names of a prompt's full granules."""
        chain = PrefixChain(self._root, self.layout.hash_step, extra)
        chain.append(token_array(tokens))
        return chain.hashes

    def advance(self, steps: Sequence[tuple[Lease, int, int]]) -> None:
        """For each `(lease, committed, room)` of a batch: freeze its first `committed` tokens and
        have places for `room`, in one message, or none if no block fills and none is needed.

        All or nothing. Raises OutOfBlocks, LeaseError.
        """
        self._advance([r for lease, committed, room in steps if (r := lease.step(committed, room))])

    def publish(self, steps: Sequence[tuple[Lease, int]]) -> None:
        """`Lease.publish` the first `num_tokens` of each of a batch, in one message."""
        requests = [lease.step(num_tokens, 0, publish=True) for lease, num_tokens in steps]
        self._advance([request for request in requests if request])

    def _advance(self, requests: Sequence[StepRequest]) -> None:
        if not requests:
            return
        with self.client.lock:
            reply = self.client.call(Op.ADVANCE, protocol.dump_steps(requests))
            added = protocol.parse_added(reply, len(requests), len(self.layout.groups))
            for request, tables in zip(requests, added, strict=True):
                self._leases[request.lease].advanced(request, tables)

    def fork(self, forks: Sequence[tuple[Lease, int]]) -> list[Lease]:
        """`Lease.fork` each `(lease, num_tokens)` of a batch, in one message; all or nothing."""
        for lease, _ in forks:
            lease.wait()
        with self.client.lock:
            new = []
            for lease, num_tokens in forks:
                self._next += 1
                new.append(lease.forked(self._next, num_tokens))
            body = [(x.number, s.number, n) for x, (s, n) in zip(new, forks, strict=True)]
            self.client.call(Op.FORK, protocol.dump_forks(body))
            self._leases |= {lease.number: lease for lease in new}
        return new

    def truncate(self, cuts: Sequence[tuple[Lease, int]]) -> None:
        """`Lease.truncate` each `(lease, num_tokens)` of a batch, in one message or none."""
        ask = [(lease, num_tokens) for lease, num_tokens in cuts if not lease.cut(num_tokens)]
        if not ask:
            return
        with self.client.lock:
            body = protocol.dump_cuts([(lease.number, n) for lease, n in ask])
            rooms = protocol.parse_rooms(self.client.call(Op.TRUNCATE, body))
            for (lease, num_tokens), room in zip(ask, rooms, strict=True):
                lease.back(num_tokens, room)

    def suspend(self, leases: Sequence[tuple[Lease, int]]) -> None:
        """`Lease.suspend` each `(lease, num_tokens)`, in their order; those before one that finds
        no room are suspended."""
        for lease, num_tokens in leases:
            lease.wait()
            with self.client.lock:
                self.client.call(Op.SUSPEND, protocol.dump_cuts([(lease.number, num_tokens)]))
                lease.gone(num_tokens)

    def resume(self, leases: Sequence[Lease]) -> None:
        """`Lease.resume` each, in their order; those before one that finds no room are back."""
        for lease in leases:
            if lease.released or not lease.suspended:
                raise LeaseError(f"lease {lease.number} is not suspended")
            self.client.call(Op.RESUME, protocol.dump_leases([lease.number]), lease.come)

    def release(
        self, leases: Sequence[Lease], hints: Hints | Sequence[Hints | None] | None = None
    ) -> None:
        """Give leases back in one go; what they committed stays in the cache. `hints`: what is
        known at their end, of all or of each."""
        for lease in leases:
            if lease.released:
                raise LeaseError(f"lease {lease.number} is released")
        advice = _last_words(leases, hints)
        if not leases:
            return
        release = protocol.dump_leases([lease.number for lease in leases])
        if advice:
            said = [advice[at : at + MOST_ADVICE] for at in range(0, len(advice), MOST_ADVICE)]
            words = [(Op.ADVISE, dump_advice(some)) for some in said]
            self.client.call_all([*words, (Op.RELEASE, release)])
        else:
            self.client.call(Op.RELEASE, release)
        for lease in leases:
            lease.released = True
            del self._leases[lease.number]

    def pushed(self, frame: Frame) -> None:
        """Take in what the daemon pushed."""
        state = protocol.parse_lease(frame.body, len(self.layout.groups))
        if (lease := self._leases.get(state.lease)) is not None:
            lease.update(state)

    def forget_views(self) -> None:
        self._views.clear()

    def close(self) -> None:
        """Detach: the connection ends with it."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _last_words(
    leases: Sequence[Lease], hints: Hints | Sequence[Hints | None] | None
) -> list[Advice]:
    """What is to be said before leases go: a return that was announced counts from then."""
    if hints is None and not any(lease.hints for lease in leases):
        return []
    each = list(hints) if isinstance(hints, Sequence) else [hints] * len(leases)
    if len(each) != len(leases):
        raise ValueError(f"hints: {len(each)} for {len(leases)} leases")
    words = []
    for lease, said in zip(leases, each, strict=True):
        if said is None and lease.hints is not None and lease.hints.returns_in is not None:
            said = lease.hints
        if said is not None:
            words.append(_advice(lease, said))
    return words


def _advice(of: Lease | Sequence[BlockHash] | None, hints: Hints) -> Advice:
    """What is said of one; a lease keeps what still holds."""
    if isinstance(of, Lease):
        of.check_held()
        hints = hints.after(of.hints)
        hints.check_whose()
        of.hints = hints
        return Advice(hints, of.number)
    if of is None and hints.session is None:
        raise ValueError("session: of which one?")
    return Advice(hints, path=of)
