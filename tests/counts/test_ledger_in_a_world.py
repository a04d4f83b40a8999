"""The ledger of a whole run against a counter inside torch.distributed, on both ranks of a real gloo world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.checkpoints import tiny
from tests.worlds import topology
from tpspec.request import Request

WORLD = Path(__file__).parent / "worlds" / "counted.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank's counter and ledger hold after two texts with drafts, one of a long prompt."""
    folder = tmp_path_factory.mktemp("world")
    made = topology(tiny("smollm2", folder / "model"), 2, draft={"source": "ngram", "tokens": 4})
    requests = [Request(0, tuple(range(5, 45)), 12), Request(1, (7, 8, 9) * 4, 16)]
    job = {"topology": json.loads(made.model_dump_json()), "requests": msgspec.to_builtins(requests)}
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command += [str(WORLD), str(folder / "job.json"), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_ledger_holds_what_torch_distributed_was_asked_to_do(ranks: list[dict[str, Any]]) -> None:
    """Against a collective that goes round the wrapper, one that is counted twice, and bytes of another message."""
    for found in ranks:
        assert found["seen"].keys() == {"all_reduce", "gather_into"}  # both ways to a sum occurred, and no other verb
        for key in ("count", "bytes"):
            seen = sum(verb[key] for verb in found["seen"].values())
            assert sum(tally[key] for tally in found["ledger"].values()) == seen > 0


def test_no_second_is_measured_twice(ranks: list[dict[str, Any]]) -> None:
    """Against a wrapper in a wrapper: collectives happen in forwards, so their seconds are part of those."""
    for found in ranks:
        assert 0 < sum(tally["seconds"] for tally in found["ledger"].values()) < found["forward_s"]
