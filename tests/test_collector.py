"""What the garbage collector is told to leave alone."""

import gc
from collections.abc import Iterator

import pytest

from tierd.daemon import collector


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*before)


def test_what_is_made_while_it_is_paused_is_never_walked() -> None:
    gc.collect()
    frozen = gc.get_freeze_count()
    with collector.paused():
        assert not gc.isenabled()
        made = [[number] for number in range(50_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(made)
    assert not any(one is made[0] for one in gc.get_objects())


def test_it_goes_on_after_a_pause_that_ended_badly() -> None:
    with pytest.raises(KeyError), collector.paused():
        raise KeyError
    assert gc.isenabled()


def test_a_full_collection_does_not_come_of_itself() -> None:
    collector.spare_what_exists()
    before = gc.get_stats()[2]["collections"]
    made = [[number] for number in range(500_000)]
    assert gc.get_stats()[2]["collections"] == before
    assert gc.get_stats()[1]["collections"] > 0
    del made
