"""What a draft through the shards pays: an all-reduce for each sublayer that is left, and a gather, for each token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import tiny
from tests.counts.test_collectives import HIDDEN, LAYERS, Noted, Round
from tests.draft.kits import draft_section
from tests.worlds import serve, topology
from tpspec.comm.communicator import Purpose
from tpspec.engine.engine import Engine
from tpspec.published.shape import shape_of
from tpspec.request import Request, Sampling
from tpspec.topology.config import Topology
from tpspec.topology.rounds import collectives_per_draft, collectives_per_round

TOLD = 8 + 64 * 8  # bytes a row: its winner, and the likeliest ids of the shard


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"))


def measured(made: Topology, requests: list[Request]) -> list[Round]:
    notes: dict[int, Noted] = {}

    def note(rank: int, engine: Engine) -> None:
        notes[rank] = engine.target = Noted(engine.target, engine)

    serve(made, requests, begin=note)
    rounds = [noted.rounds() for noted in notes.values()]
    assert all(others == rounds[0] for others in rounds)
    return rounds[0]


def collectives_of_draft(made: Topology) -> tuple[int, int]:
    """Those of a drafted token, as `topology check` has them; and the sublayers that are left."""
    shape, (kind,) = shape_of(made.target.model), made.draft.kinds
    left_out = kind.left_out(made.draft.options, Path(made.target.model), shape)
    assert left_out is not None
    return collectives_per_draft(shape, len(made.target.ranks), left_out), 2 * LAYERS - len(left_out)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["layer_skip", "early_exit"])
def test_the_ledger_holds_what_the_formula_says(
    name: str, num_ranks: int, temperature: float, target: Path, tmp_path: Path
) -> None:
    """Against drafts that pass for rounds, a sublayer that is left out and summed, and two gathers for a token."""
    made = topology(target, num_ranks, draft=draft_section(name, target, tmp_path) | {"tokens": 4})
    rounds = measured(made, [Request(0, tuple(range(5, 25)), 24, Sampling(temperature=temperature, seed=2))])
    each, kept = collectives_of_draft(made)
    assert each == kept + 1
    for now, following in zip(rounds, [*rounds[1:], None], strict=True):
        drafted = 0 if following is None else following.logits - 1
        assert now.counts.get(Purpose.draft, 0) == drafted * each
        assert now.bytes.get(Purpose.draft, 0) == drafted * (kept * HIDDEN * 4 + TOLD)
        own = sum(count for purpose, count in now.counts.items() if purpose != Purpose.draft)
        assert own == collectives_per_round(shape_of(str(target)), num_ranks) == 2 * LAYERS + 1
    assert any(now.counts.get(Purpose.draft, 0) == 4 * each for now in rounds)


def test_texts_that_are_drafted_together_share_the_collectives(target: Path) -> None:
    """Against a forward for each text."""
    made = topology(target, 2, draft={"source": "early_exit", "tokens": 3})
    each, _ = collectives_of_draft(made)
    rounds = measured(made, [Request(i, (5 + i, 6, 7), 12) for i in range(4)])
    assert max(now.counts.get(Purpose.draft, 0) for now in rounds) == 3 * each
