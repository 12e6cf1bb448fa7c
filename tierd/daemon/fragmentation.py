"""Internal fragmentation: slots of the blocks that leases hold, beyond the tokens they are for.

It is looked at when somebody asks, some leases at a time, for there may be thousands. What lies
between blocks, in extents and slabs, those that share them out know.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from tierd.daemon.lease import Lease
from tierd.daemon.match import first_block
from tierd.layout import KVLayout

_LOOK = 64  # leases looked at before the loop may go on


async def internal(layout: KVLayout, leases: Sequence[Lease]) -> list[dict[str, Any]]:
    """By layer group: slots of the blocks that the tables of `leases` name, those of them past the
    room of their lease, and the bytes of these. A block that forks share is counted once a lease,
    its tail once."""
    found = []
    for group, of in enumerate(layout.groups):
        slots, unused, tails = 0, 0, set[int]()
        for start in range(0, len(leases), _LOOK):
            for lease in leases[start : start + _LOOK]:
                if lease.released or group >= len(lease.tables) or not lease.tables[group]:
                    continue
                table, tail = lease.tables[group], lease.tables[group][-1]
                first = first_block(lease.committed, layout.window(group), of.block_size)
                slots += (len(table) - min(first, len(table))) * of.block_size
                if tail is not None and tail.block_id not in tails:
                    tails.add(tail.block_id)
                    unused += max(0, len(table) * of.block_size - lease.room)
            await asyncio.sleep(0)
        per_slot = layout.block_nbytes(group) // of.block_size
        found.append({"slots": slots, "slots_unused": unused, "nbytes_unused": unused * per_slot})
    return found
