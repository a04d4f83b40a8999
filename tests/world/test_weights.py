"""`target.weights: auto`, from what ranks say of themselves to a world that runs with what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny
from tests.worlds import topology
from tpspec.published.shape import ModelShape
from tpspec.roles.weights import _waits_s, capacity, with_weights
from tpspec.topology.balance import Capacity
from tpspec.topology.config import Topology
from tpspec.topology.links import link_for

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
CPU = torch.device("cpu")
SLOW, FAST = {"latency_us": 100000.0}, {"latency_us": 0.0}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"))


def auto(target: Path, /, **keys: Any) -> Topology:
    made = topology(target, 2, **keys)
    return made.model_copy(update={"target": made.target.model_copy(update={"weights": "auto"})})


def with_gaps(target: Path, link: dict[str, float]) -> Topology:
    return auto(target, draft={"source": "model", "model": str(target), "placement": {"gaps": 1}}, link=link)


def weights(made: Topology) -> tuple[float, ...] | None:
    return with_weights(made, [capacity(made, rank, CPU, (0, 1)) for rank in (0, 1)]).target.fixed_weights


def test_equal_ranks_get_equal_weights(target: Path) -> None:
    assert weights(auto(target)) == (1.0, 1.0)


def test_a_drafter_that_does_not_fit_into_the_waits_lightens_its_shard(target: Path) -> None:
    """Else its rank would be late in every collective, and all others wait for it."""
    found = weights(with_gaps(target, FAST))
    assert found is not None
    assert found[1] < 0.5 * found[0]


def test_a_slot_means_the_box_of_as_many_cards_here_too(target: Path) -> None:
    """Stands against waits of a box of eight, for the gaps of two: on pcie3 they are three times as long."""
    made = with_gaps(target, {"table": "pcie3"})
    waits_s = _waits_s(made, ModelShape.of(target), 5)
    reduces, row_bytes = 2 * ModelShape.of(target).num_layers, 4 * ModelShape.of(target).hidden
    assert waits_s == pytest.approx(reduces * link_for("pcie3", 2).seconds(5 * row_bytes))


def test_a_drafter_that_fits_into_the_waits_costs_its_shard_nothing(target: Path) -> None:
    assert weights(with_gaps(target, SLOW)) == (1.0, 1.0)


def test_weights_are_those_of_the_cards(target: Path) -> None:
    cards = [Capacity(1e12, 1008e9), Capacity(1e12, 936e9)]
    assert with_weights(auto(target), cards).target.fixed_weights == (1.0, 0.929)


def test_beside_a_mixture_a_drafter_weighs_more(tmp_path: Path) -> None:
    """Five rows read 1 - (7/8)^5 = 49% of the experts. Stands against a shard lightened by the bytes of the drafter
    alone, to 82% of the other, when its rank then is the last in every collective."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"intermediate_size": 8192, "num_local_experts": 8, "num_experts_per_tok": 1, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **sizes, **experts}))
    (tmp_path / "model.safetensors").touch()
    made = auto(tmp_path, draft={"source": "ngram", "tokens": 4}, cache={"tokens": 16})
    held = 2 * 8 * 3 * 64 * 8192 * 4
    cards = [Capacity(1e12, 1e9, aside=0.1 * held), Capacity(1e12, 1e9)]
    found = with_weights(made, cards).target.fixed_weights
    assert found == (pytest.approx((1 - 0.1 / 0.487) / (1 + 0.1 / 0.487), abs=0.01), 1.0)


def test_what_is_made_of_other_ranks_heads_is_no_part_that_could_be_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against a rank that is filled to the last byte by its part, and then is to hold that, too."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo3", **sizes, "intermediate_size": 96}))
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("tpspec.roles.weights.free_bytes", lambda device: 1 << 30)
    reduces, replicates = (
        capacity(auto(tmp_path, target={"qk_norm": way}, draft={"source": "none"}), 0, CPU, (0, 1))
        for way in ("reduce", "replicate")
    )
    others = 3 * (4 + 2) * 8 * 64 * 4
    assert (reduces.aside, replicates.aside) == (0, others)
    assert reduces.room - replicates.room == others


def test_a_world_runs_with_weights_that_it_found_itself(target: Path, tmp_path: Path) -> None:
    """Against ranks that come to different slices, or a rank that is not told."""
    file = tmp_path / "box.yaml"
    file.write_text(
        f"name: box\ntarget: {{model: {target}, ranks: [0, 1], dtype: float32, weights: auto}}\n"
        f"draft: {{source: model, model: {target}, placement: {{gaps: 1}}}}\ndevice: cpu\ncache: {{tokens: 256}}\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    asked = ["tpspec.generate", str(file), "--prompt", "the cat", "--max-tokens", "8", "--json"]
    runs = [
        subprocess.run([*command, *asked, *more], env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=120)
        for more in ((), ("--set", "target.weights=equal"))
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    found, equal = (json.loads(run.stdout.splitlines()[0])["text"] for run in runs)
    assert found == equal != ""
