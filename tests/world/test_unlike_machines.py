"""Ranks that round differently stay together: what decides is gathered, and what is gathered decides alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny
from tests.slow import slowly

ROOT = Path(__file__).parents[2]
WORLD = Path(__file__).parent / "worlds" / "unlike.py"
NUM_TOKENS = 300
DRAWN = ["--temperature", "1.1", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1", "--ignore-eos"]


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this CPU is no newer than AVX2")
@pytest.mark.parametrize("accept", ["match", *slowly("rejection")])
def test_an_older_cpu_beside_a_newer_one_says_the_same(accept: str, tmp_path: Path) -> None:
    """Stands against `this rank diverged`: exp, log and sums of AVX2 and of AVX-512 differ in their last bits.

    The draft goes through the shards of all ranks, which judge the texts and draft, each for itself.
    """
    topology = tmp_path / "topology.yaml"
    target = {"model": str(tiny("smollm2", tmp_path / "model")), "ranks": [0, 1], "dtype": "float32"}
    draft = {"source": "early_exit", "tokens": 3, "options": {"layer": 2}}
    made = {"name": "unlike", "target": target, "draft": draft, "accept": accept, "device": "cpu"}
    topology.write_text(json.dumps(made | {"cache": {"tokens": 512}}))  # JSON is YAML
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORLD)]
    command += [str(topology), "--prompt", "the cat", "--max-tokens", str(NUM_TOKENS), "--json", *DRAWN]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["tokens"] == NUM_TOKENS
    assert said["rounds"] < NUM_TOKENS
