"""Real gloo worlds: the same bits on every rank, and an end within the time limit when a rank is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from scripts.serving import free_port
from tests.slow import slowly
from tpspec.comm import distributed
from tpspec.comm.communicator import OneRank, Purpose, sum_in_order
from tpspec.comm.distributed import Place, join_world
from tpspec.comm.messages import Tally
from tpspec.comm.threads import ThreadWorld
from tpspec.errors import UserError

pytestmark = pytest.mark.alone

WORLDS = Path(__file__).parent / "worlds"
ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(num_ranks: int, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*launch, str(WORLDS / script), *args]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120, check=False)


def two_ranks(script: str, *args: str) -> list[tuple[int, str]]:
    """Exit code and output of two ranks that no agent watches, so that one outlives the other. The second one's input
    ends when the first has."""
    shared = {**ENV, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORLDS / script), *args],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outs = [rank.communicate(timeout=120)[0] for rank in ranks]
    return [(rank.returncode, out) for rank, out in zip(ranks, outs, strict=True)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    ended = torchrun(3, "sums.py", str(folder))
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture
def found(world: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(world / f"{rank}.pt", weights_only=True) for rank in range(3)]


def rows(rank: int, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(rank)).bfloat16()


@pytest.mark.parametrize("name", ["small", "large", "gathered"])
def test_all_ranks_hold_the_same_bits(found: list[dict[str, torch.Tensor]], name: str) -> None:
    """Lockstep by determinism ends where one rank's sum differs in the last bit."""
    assert torch.equal(found[0][name], found[1][name])
    assert torch.equal(found[0][name], found[2][name])


@pytest.mark.parametrize(("name", "num_rows"), [("small", 5), ("large", 4096)])
def test_gloo_equals_threads(found: list[dict[str, torch.Tensor]], name: str, num_rows: int) -> None:
    """An ordered group adds in rank order, also where gloo would use a ring: threads do, and get the same bits."""
    threads = ThreadWorld(3).run(lambda comm: comm.all_reduce(rows(comm.rank, num_rows), Purpose.mlp))
    assert torch.equal(found[0][name], threads[0])


def test_a_row_has_the_same_bits_wherever_it_stands(found: list[dict[str, torch.Tensor]]) -> None:
    """A ring adds each chunk of a message in an order of its own: a row's bits then depend on its neighbours."""
    parts = [rows(rank, 4096) for rank in range(3)]
    alone = [sum_in_order([part[i] for part in parts], torch.empty(48).bfloat16()) for i in range(0, 4096, 97)]
    assert torch.equal(found[0]["large"][::97], torch.stack(alone))


def test_two_ranks_need_no_order(found: list[dict[str, torch.Tensor]]) -> None:
    assert torch.equal(found[0]["pair"], rows(0, 4096) + rows(2, 4096))
    assert torch.equal(found[0]["pair"], found[2]["pair"])
    assert found[1]["pair"] is None


def test_announcements_reach_every_rank(found: list[dict[str, object]]) -> None:
    assert [rank["note"] for rank in found] == ["ipc:///tmp/somewhere"] * 3


def test_the_ledger_counts_payload_bytes(world: Path) -> None:
    for rank in range(3):
        totals = msgspec.json.decode((world / f"{rank}.json").read_bytes(), type=dict[Purpose, Tally])
        assert {purpose: (tally.count, tally.bytes) for purpose, tally in totals.items()} == {
            Purpose.mlp: (1, 5 * 48 * 2),
            Purpose.attention: (1, 4096 * 48 * 2),
            Purpose.pick: (1, 2 * 48 * 2),
        }
        assert all(tally.seconds > 0 for tally in totals.values())


def test_news_arrives_in_order_and_complete() -> None:
    """A PUB socket loses what is sent before its readers have joined."""
    ended = torchrun(3, "news.py")
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 heard True" in ended.stdout
    assert "rank 2 heard True" in ended.stdout


@pytest.mark.parametrize("transport", ["auto", *slowly("gloo")])
@pytest.mark.parametrize(("how", "least", "most"), [("dies", 0.0, 3.0), ("hangs", 2.0, 5.0)])
def test_a_lost_rank_ends_the_world_within_the_limit(how: str, least: float, most: float, transport: str) -> None:
    """The default limit of torch.distributed is half an hour."""
    (code, out), (other, _) = two_ranks("loss.py", how, transport)
    seconds, _, message = out.partition(" ")
    assert (code, other) == (4, 9)
    assert least <= float(seconds) <= most
    assert message.startswith("rank 0 of 2, collective for mlp: another rank is gone or late (")
    assert message.count("\n") == 1
    assert len(message) < 160


def test_alone_nothing_is_initialised() -> None:
    with join_world(Place.from_env({}), torch.device("cpu")) as world:
        assert not distributed.dist.is_initialized()
        assert isinstance(world.group([0]), OneRank)
        assert world.announce("here") == "here"


def test_place_is_read_from_what_torchrun_sets() -> None:
    assert Place.from_env({"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}) == Place(2, 3, 1, 3)
    second_host = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Place.from_env(second_host).ranks_here == range(4, 8)
    assert Place.from_env({}) == Place(0, 1, 0)
    with pytest.raises(UserError, match="RANK='two'"):
        Place.from_env({"RANK": "two"})
