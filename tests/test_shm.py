"""Shared memory: one object, however many map it, and nothing left when the last has gone."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tierd.shm import SharedMemory

MIB = 1 << 20


def mappings(name: str) -> int:
    return sum(f"memfd:{name}" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("nbytes", [4096, 2 * MIB, 5 * MIB])
def test_two_mappings_are_one_memory_at_multiples_of_two_mib(nbytes: int) -> None:
    made = SharedMemory.create("tierd-one", nbytes)
    mapped = SharedMemory(os.dup(made.fd), nbytes)
    assert made.array.size == mapped.array.size == nbytes
    assert {m.array.ctypes.data % (2 * MIB) for m in (made, mapped)} == {0}
    made.array[-1] = 7
    assert mapped.array[-1] == 7
    made.close()
    mapped.close()


def test_its_size_is_sealed() -> None:
    made = SharedMemory.create("tierd-sealed", MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(made.fd, 4096)
    made.close()


def test_a_view_keeps_the_mapping_and_the_last_one_ends_it() -> None:
    made = SharedMemory.create("tierd-views", 3 * MIB)
    view = made.array[MIB:].view(np.uint32)
    made.close()
    made.close()
    view[:] = 5
    assert mappings("tierd-views") == 1
    del view
    assert mappings("tierd-views") == 0


def test_populated_memory_has_its_pages_and_keeps_its_bytes() -> None:
    made = SharedMemory.create("tierd-populated", 6 * MIB)
    made.array[123] = 9
    huge = made.populate(threading.Event())
    assert 0 <= huge <= 6 * MIB  # the kernel decides
    assert os.fstat(made.fd).st_blocks * 512 == 6 * MIB
    assert made.array[123] == 9
    assert made.array.sum() == 9
    made.close()


def test_discarded_memory_is_the_systems_again_and_reads_as_zeros() -> None:
    made = SharedMemory.create("tierd-discarded", 6 * MIB)
    mapped = SharedMemory(os.dup(made.fd), 6 * MIB)
    made.array[:] = 7
    made.discard(2 * MIB, 2 * MIB)
    assert os.fstat(made.fd).st_blocks * 512 == 4 * MIB
    assert mapped.array.sum() == 7 * 4 * MIB
    mapped.array[3 * MIB] = 1
    assert made.array[3 * MIB] == 1
    for memory in (mapped, made):
        memory.close()
    with pytest.raises(OSError, match="cannot give memory back"):
        made.discard(0, MIB)


def test_only_a_part_is_populated_where_that_is_asked_for() -> None:
    made = SharedMemory.create("tierd-part", 6 * MIB)
    made.populate(threading.Event(), 2 * MIB, 2 * MIB)
    assert os.fstat(made.fd).st_blocks * 512 == 2 * MIB
    made.close()


def test_populating_stops_when_told_and_when_the_memory_is_closed() -> None:
    made, stop = SharedMemory.create("tierd-stopped", 2 * MIB), threading.Event()
    stop.set()
    assert made.populate(stop) == 0
    assert os.fstat(made.fd).st_blocks == 0
    made.close()
    assert made.populate(threading.Event()) == 0


def test_a_child_does_not_inherit_the_mapping() -> None:
    made = SharedMemory.create("tierd-fork", MIB)
    if (child := os.fork()) == 0:
        os._exit(mappings("tierd-fork"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mappings("tierd-fork") == 1
    made.close()


def test_what_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="cannot map"):
        SharedMemory(-1, MIB)
