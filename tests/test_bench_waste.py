"""What the benchmark of waste says is what leases of a real daemon hold."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.content import prompt
from tests.daemon import Daemon
from tierd.layout import KVLayout

SIZES = [32, 16, 32, 16]
MIXED = KVLayout("mixed", 4, 1, 64, "float32", windows=(None, 40, None, 40))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    yield import_module("bench_waste")
    for name in ("bench_waste", "bench_granule", "bench_report", "bench_rounds"):
        sys.modules.pop(name, None)


def test_a_lease_holds_the_blocks_that_the_arithmetic_has(bench: Any, tmp_path: Path) -> None:
    layout = MIXED.with_block_sizes(SIZES)
    running = Daemon(tmp_path, device="8MiB")
    with running as daemon, daemon.client() as client, client.attach(layout) as pool:
        for length in (1, 16, 39, 40, 41, 47, 48, 64, 65, 200):
            with pool.acquire(prompt(length, length)) as lease:
                lease.wait()
                lease.commit(length)
                held = [int((table >= 0).sum()) for table in lease.tables]
            counted = bench._hold(layout, [length])
            assert counted.blocks == sum(held), f"{length} tokens: {held}"
            blocks = zip(held, range(2), strict=True)
            assert counted.nbytes == sum(n * layout.block_nbytes(group) for n, group in blocks)


def test_padding_and_forgotten_windows_waste_more_than_sizes_of_their_own(bench: Any) -> None:
    wasted = bench.waste(bench.MODELS["Gemma 3 1B"], [3000, 5000])
    assert 0 < wasted[bench.UNIFORM] < wasted[bench.AUTO] < wasted[bench.AS_MANY]
    assert wasted[bench.PADDED] > 10 * wasted[bench.AUTO]
    assert wasted[bench.WHOLE] > 10 * wasted[bench.AUTO]
    alone = bench.waste(KVLayout("m", 6, 1, 256, "bfloat16"), [1600])
    assert alone[bench.UNIFORM] == alone[bench.PADDED] == alone[bench.WHOLE] == 0
