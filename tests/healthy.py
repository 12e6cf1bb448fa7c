"""A healthy engine beside whatever else a test does to the daemon."""

from collections.abc import Iterator
from contextlib import contextmanager

import tierd
from tests.content import BLOCK, LAYOUT, ask, check, prompt, serve
from tests.daemon import Daemon, Status, tiers


@contextmanager
def nothing_lost(daemon: Daemon) -> Iterator[tierd.Pool]:
    """It is served before, holds a lease meanwhile and is served after; afterwards as many places
    are held as before, and none is missing (I4)."""
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        with serve(pool, prompt(1, 4 * BLOCK)) as lease:
            before = _held(client.status())

            def as_before(status: Status) -> bool:
                attached = [s["leases"] for s in status["sessions"] if s["namespace"]]
                return _held(status) == before and attached == [1]

            yield pool
            daemon.until(as_before)
            check(lease)
        assert ask(pool, [*prompt(1, 4 * BLOCK), 7]) == 4 * BLOCK


def _held(status: Status) -> list[list[int]]:
    """Places by tier and group that are not free or committed, by state."""
    found = []
    for groups in tiers(status).values():
        for group in groups:
            states = [group[state] for state in ("private", "loading", "quarantined")]
            assert group["free"] + group["committed"] + sum(states) == group["capacity"]
            found.append(states)
    return found
