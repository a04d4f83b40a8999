"""A drafter in a process or a thread of its own, in real worlds of torchrun: whatever becomes of it, texts are those of
plain decoding, collectives are those of the target alone, and nothing is left behind.

Tiny checkpoints; the drafter is the target a little disturbed, so that drafts are often right and often wrong.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny, tiny_draft
from tests.slow import slowly
from tests.worlds import serve, topology
from tpspec.comm.gap import SWITCH
from tpspec.errors import OutOfMemory, UserError
from tpspec.request import Request, Sampling
from tpspec.roles import drafter
from tpspec.roles.drafter import Orders
from tpspec.roles.guard import COMMAND
from tpspec.topology.config import to_json

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
WORLDS = Path(__file__).parent / "worlds"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
LAYERS = 3
# Of a thread all, which is there at once; whichever process drafts, it is told the same.
POLICIES = {
    "dedicated": ("serial", "fan_out"),
    "gaps": ("optimistic", "fan_out"),
    "thread": ("serial", "optimistic", "fan_out"),
}
PLACEMENTS: dict[str, dict[str, int]] = {"dedicated": {"dedicated": 2}, "gaps": {"gaps": 1}, "thread": {"gaps": 1}}
# Gaps need something to wait for: what fills them has the lowest class, and starves beside a rank that never waits. A
# drafter of its own shares two cores with two ranks; without waits a text of this tiny model ends before it answers.
LINK = {"latency_us": 2000.0, "emulate": True}
NUM_RANKS = {"dedicated": 3, "gaps": 2, "thread": 2}
TEMPERATURES = (0.0, 0.8)
MARK = "TPSPEC_TEST_WORLD"  # in the environment of all processes of a world
SOON_S = 2  # for a process to die


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    folder = Path(shutil.copytree(target, tmp_path_factory.mktemp("draft") / "model"))
    noise = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    disturbed = {
        name: x + 0.1 * x.std() * torch.randn(x.shape, generator=noise) if x.dim() > 1 else x
        for name, x in tensors.items()
    }
    save_file(disturbed, folder / "model.safetensors", {"format": "pt"})
    return folder


def batches() -> list[list[Request]]:
    """One text and four together, greedy and drawn; ids are never used twice."""
    prompts = [(5, 6, 7, 8), tuple(range(20, 60)), (9,) * 11, tuple(range(100, 103))]
    asks = [(t, some) for t in TEMPERATURES for some in (prompts[:1], prompts)]
    return [
        [Request(10 * number + i, prompt, 16, Sampling(temperature=t, seed=7 + i)) for i, prompt in enumerate(some)]
        for number, (t, some) in enumerate(asks)
    ]


def keys(target: Path, draft: Path, placement: str, policy: str) -> dict[str, Any]:
    made = topology(
        target,
        2,
        draft={"source": "model", "model": str(draft), "tokens": 3, "placement": PLACEMENTS[placement]},
        pipeline={"policy": policy},
        link=LINK,
    )
    found: dict[str, Any] = json.loads(made.model_dump_json())
    return found


def torchrun(placement: str, mark: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """mark: some path by which the world's processes are known; none of them may be left."""
    num_ranks = str(NUM_RANKS[placement])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    env = ENV | {MARK: str(mark), SWITCH: placement if placement == "thread" else ""}
    ended = subprocess.run([*launch, *command], env=env, capture_output=True, text=True, timeout=120, check=False)
    deadline = time.monotonic() + SOON_S
    while left := [process for process in psutil.process_iter() if marked(process, mark)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    return ended


def marked(process: psutil.Process, mark: Path) -> bool:
    try:
        return process.environ().get(MARK) == str(mark)
    except psutil.Error:  # it is gone, or not ours
        return False


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest, target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the policies of a placement gave, in one world after another drafter."""
    folder, policies = tmp_path_factory.mktemp("world"), POLICIES[request.param]
    asks = msgspec.to_builtins(batches())
    jobs = [{"topology": keys(target, draft, request.param, policy), "batches": asks} for policy in policies]
    (folder / "in").write_text(json.dumps(jobs))
    command = [str(WORLDS / "drafted.py"), str(folder / "in"), str(folder / "out")]
    ended = torchrun(request.param, folder, *command)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return {"placement": request.param, **dict(zip(policies, json.loads((folder / "out").read_text()), strict=True))}


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[list[int]]]:
    return [serve(topology(target), requests).texts() for requests in batches()]


def cases(where: str) -> list[Any]:
    """Drafters in threads are in test_beside.py, too."""
    asks = [(where, policy) for policy in POLICIES[where]]
    return slowly(*asks) if where == "thread" else asks


in_every_world = pytest.mark.parametrize(
    ("world", "policy"),
    [case for where in PLACEMENTS for case in cases(where)],
    indirect=["world"],
    scope="module",  # else a world is made for every test
)


@in_every_world
def test_texts_are_those_of_plain_decoding(world: dict[str, Any], plain: list[list[list[int]]], policy: str) -> None:
    """Stands against an answer for another text, futures that leak into it, and ranks that verify different drafts."""
    assert world[policy]["texts"] == plain
    stats = world[policy]["stats"]
    assert 0 < stats["accepted"] < stats["drafted"]
    assert stats["elsewhere"]["hits"] + stats["elsewhere"]["misses"] > 0


@in_every_world
def test_work_inside_waits_is_counted_where_there_are_gaps_to_fill(world: dict[str, Any], policy: str) -> None:
    """Stands against sums that never reach the lead, which is not the rank with the gaps."""
    found = world[policy]["stats"]["elsewhere"]
    if world["placement"] == "gaps" and sys.platform == "linux":
        assert 0 < found["inside_s"] <= found["work_s"]
        assert found["delayed_s"] > 0
    else:
        assert found["inside_s"] == found["work_s"] == found["delayed_s"] == 0


@in_every_world
def test_the_drafter_adds_no_collective(world: dict[str, Any], policy: str) -> None:
    stats = world[policy]["stats"]
    counts = {purpose: tally["count"] for purpose, tally in stats["collectives"].items()}
    rounds = stats["rounds"]
    assert counts == {"attention": LAYERS * rounds, "mlp": LAYERS * rounds, "pick": rounds}


# Drafters that cannot be


def stranger(folder: Path) -> Path:
    """The same sizes, two tokens swapped."""
    draft = tiny("smollm2", folder / "stranger", num_hidden_layers=1)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    return draft


def nowhere(folder: Path) -> Path:
    return folder / "nowhere"


def enormous(folder: Path) -> Path:
    """A cache of some TiB; refused before anybody looks for the layers."""
    draft = tiny("llama", folder / "wide", num_hidden_layers=1, num_key_value_heads=6, head_dim=512)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 30_000}))
    return draft


CANNOT_BE: list[tuple[str, Callable[[Path], Path], int, str]] = [
    ("dedicated", stranger, UserError.exit_code, "tokenizer"),
    ("gaps", enormous, OutOfMemory.exit_code, "draft model"),
    ("thread", nowhere, UserError.exit_code, "no model"),
]


def test_orders_that_are_cut_short_end_a_drafter_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Stands against a traceback beside the news that the rank which gave them has ended."""
    monkeypatch.setattr(drafter, "end_with_parent", lambda: None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"topology": "')))
    assert drafter.main() == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("placement", "make", "code", "said"), CANNOT_BE)
def test_a_drafter_that_cannot_be_is_one_line_and_the_end_of_the_world(
    target: Path, tmp_path: Path, placement: str, make: Callable[[Path], Path], code: int, said: str
) -> None:
    """Stands against ranks that wait for a drafter that will never be ready, and a line from each of them."""
    path, folder = tmp_path / "topology.yaml", make(tmp_path)
    path.write_text(json.dumps(keys(target, folder, placement, "fan_out")))
    ended = torchrun(placement, tmp_path, "-m", "tpspec.generate", str(path), "--prompt", "a")
    ours = [line for line in ended.stderr.splitlines() if line.startswith("tpspec: ")]
    assert len(ours) == 1, ended.stderr
    assert said in ours[0]
    assert str(folder) in ours[0]
    assert f"exitcode  : {code} " in ended.stderr
    assert ended.stderr.count("Traceback") <= 1, ended.stderr  # torchrun's own


def test_a_drafter_that_cannot_be_and_has_nobody_to_tell_is_silent(target: Path, tmp_path: Path) -> None:
    """Stands against a traceback under the one line that the lead says, when it has seen the same fault first."""
    made = topology(target, 2, draft={"source": "model", "model": str(nowhere(tmp_path)), "placement": {"gaps": 1}})
    orders = Orders(to_json(made), f"ipc://{tmp_path}/drafts", os.getpid(), "cpu", is_filler=False)
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        COMMAND, input=msgspec.json.encode(orders), stdout=write, stderr=subprocess.PIPE, env=ENV, check=False
    )
    os.close(write)
    assert not ended.stderr, ended.stderr.decode()


def test_a_drafter_whose_shard_is_gone_when_it_has_loaded_is_silent(target: Path, tmp_path: Path) -> None:
    """Stands against a traceback of a file that went with the process whose it was."""
    draft = {"source": "model", "model": str(tiny_draft(tmp_path / "draft", target)), "placement": {"gaps": 1}}
    made, link = topology(target, 2, draft=draft), f"ipc://{tmp_path}/drafts"
    orders = Orders(to_json(made), link, os.getpid(), "cpu", is_filler=False, gap=str(tmp_path / "gone"))
    ended = subprocess.run(COMMAND, input=msgspec.json.encode(orders), capture_output=True, env=ENV, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
