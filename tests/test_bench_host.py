"""The script that measures what a card waits for the host, tried without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.serving import ROOT, environment
from tests.checkpoints import tiny

pytest.importorskip("triton")
NUM_CASES = 11


def test_every_kind_of_round_and_draft_is_measured(tmp_path: Path) -> None:
    """Stands against a loop that has changed under the script."""
    model, to = tiny("smollm2", tmp_path / "model", num_hidden_layers=1), tmp_path / "told.json"
    command = [sys.executable, "scripts/bench_host.py", "--model", model, "--tokens", "400", "--json", to]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
    found = json.loads(to.read_text())
    assert len(found) == NUM_CASES
    assert all(0 < first <= median <= third < 1e5 for first, median, third in found.values())
