"""The script that measures a card, where it can be tried without one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.serving import ROOT, environment

# A rank that hangs, and takes no notice of torchrun's first signal.
RANK = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""
WORKER = "import subprocess, sys; subprocess.run(sys.argv[1:], capture_output=True)"


def test_a_section_that_hangs_leaves_no_rank_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against ranks that keep the card: torchrun starts each in a session of its own, so that a signal to the
    group of who started torchrun does not reach them."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from scripts.bench_gpu import end

    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(rank)]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *launch, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(),
    )
    try:
        deadline = time.monotonic() + 60
        while not all((told := tmp_path / number).exists() and told.read_text() for number in "01"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started = psutil.Process(worker.pid).children(recursive=True)
        assert {int((tmp_path / number).read_text()) for number in "01"} <= {process.pid for process in started}
    finally:
        end(worker)
    assert worker.returncode is not None
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started)
