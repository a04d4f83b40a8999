"""The script that measures a card, where it can be tried without one."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType

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


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import scripts.bench_gpu

    return scripts.bench_gpu


def test_a_section_that_hangs_leaves_no_rank_behind(script: ModuleType, tmp_path: Path) -> None:
    """Stands against ranks that keep the card: torchrun starts each in a session of its own, so that a signal to the
    group of who started torchrun does not reach them."""
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
        script.end(worker)
    assert worker.returncode is not None
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started)


TELLING = """
import sys
print("from a library", file=sys.stderr)
print("bench_gpu: collectives go through gloo", file=sys.stderr)
print("bench_gpu: collectives go through gloo", file=sys.stderr)
print('{"ms": 1.5}')
"""


@pytest.mark.parametrize(
    ("worker", "limit", "found"),
    [
        (TELLING, 60.0, {"ms": 1.5, "said": ["bench_gpu: collectives go through gloo"]}),
        ("import sys; sys.exit('no memory')", 60.0, {"failed": ["no memory"]}),
        ("import time; time.sleep(600)", 1.0, {"failed": ["it took longer than 1 s (--limit)"]}),
    ],
    ids=["tells", "fails", "hangs"],
)
def test_a_section_tells_what_it_found_or_what_went_wrong(
    worker: str, limit: float, found: object, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against figures of slow collectives that look like those of fast ones: nobody sees a worker's errors."""
    fake = tmp_path / "worker.py"
    fake.write_text(worker)
    monkeypatch.setattr(script, "__file__", str(fake))
    options = Namespace(device="cpu", model="m", draft="d", tokens=4, limit=limit)
    assert script.section("decode", options, tmp_path) == found
