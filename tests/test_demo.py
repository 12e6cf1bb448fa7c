"""The demo holds in full, and leaves nothing where it ran."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "scripts" / "demo.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_that_the_demo_shows_holds(tmp_path: Path) -> None:
    found, place = tmp_path / "checks.json", tmp_path / "tmp"
    place.mkdir()
    environment = {**os.environ, "TMPDIR": str(place)}
    demo = subprocess.run(
        [sys.executable, DEMO, "--json", found], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert demo.returncode == 0, demo.stdout + demo.stderr
    checks = [json.loads(line) for line in found.read_text().splitlines()]
    assert {"check", "ours", "against", "ratio", "bar", "ok"} == set(checks[0])
    assert all(check["ok"] for check in checks)
    fast = [check["check"] for check in checks if check["ratio"] is not None]
    assert any("device hit" in name for name in fast)
    assert any("SSD hit" in name for name in fast)
    assert list(place.iterdir()) == []
