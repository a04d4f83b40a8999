"""A rank holds its slices and no more: resident memory of a process that loads one shard of the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import slowly
from tpspec.published.checkpoint import find
from tpspec.published.shape import shape_of
from tpspec.topology.shards import split
from tpspec.topology.sizes import weight_bytes

MIB = 2**20
FLOOR = 24 * MIB  # a layer as it is read, page tables and the library's own buffers
SLOTS = 256

LOAD = """
import json, sys
from pathlib import Path
import torch
from tpspec.comm.communicator import OneRank
from tpspec.model.spec import read_spec
from tpspec.model.loader import Loader
from tpspec.model.linear import can_pack
from tpspec.published.shape import shape_of
from tpspec.topology.shards import split

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

can_pack(torch.bfloat16)
read_spec(Path(sys.argv[1]))  # imports what reading a configuration needs
before = peak()
shard = split(shape_of("smollm2-135m"), json.loads(sys.argv[2]))[int(sys.argv[3])]
loader = Loader.open(Path(sys.argv[1]), shard, torch.bfloat16, torch.device("cpu"))
decoder = loader.decoder(OneRank(), int(sys.argv[4]))
print(peak() - before)
"""


@pytest.mark.real
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(("weights", "rank"), [((3, 1, 2), 1), *slowly(((1, 1), 1), ((1,), 0))], ids=str)
def test_a_rank_peaks_at_its_bytes(weights: tuple[int, ...], rank: int) -> None:
    """Stands against loading the whole checkpoint, keeping the plain weight beside the packed one, file pages that stay
    mapped, and holes that the allocator keeps (a fifth of the weights): SmolLM2 is 257 MiB, and the second of three
    shards a fifth of that."""
    shape = shape_of("smollm2-135m")
    shard = split(shape, weights)[rank]
    own = weight_bytes(shape, shard, "bfloat16") + 2 * 30 * len(shard.kv_heads) * 64 * 2 * SLOTS
    arguments = [str(find("smollm2-135m")), json.dumps(weights), str(rank), str(SLOTS)]
    run = subprocess.run(
        [sys.executable, "-c", LOAD, *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(run.stdout) < own + FLOOR
