"""Exactly 2L + 1 collectives in every round, of exactly the bytes that the rows cost, whoever drafts.

Each round is compared with its own plan, so that a collective too many in one round cannot hide behind another's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny, tiny_draft
from tests.draft.liar import Liar
from tests.worlds import serve, topology
from tpspec.comm.communicator import Purpose
from tpspec.comm.messages import Tally
from tpspec.draft.protocol import Drafter
from tpspec.engine.engine import Engine, Target
from tpspec.model.batch import Moves, Span, StateCopy
from tpspec.published.shape import shape_of
from tpspec.request import Request, Sampling
from tpspec.topology.rounds import collectives_per_round, round_bytes
from tpspec.topology.target_shape import target_shape
from tpspec.verify.rows import RowLogits

LAYERS, HIDDEN = 3, 72  # of the smollm2 kind
MAX_ROWS = 24  # the longest prompt takes several rounds to read
WORLDS = [(1, 1), (1, 2), (3, 1, 2)]
DRAFTERS = ["none", "ngram", "model", "liar"]


@dataclass
class Round:
    """rows: what went through the layers. logits: rows judged. cost: all that the ledger gained by it."""

    rows: int
    logits: int
    spans: int
    cost: dict[Purpose, Tally]

    @property
    def counts(self) -> dict[Purpose, int]:
        return {purpose: tally.count for purpose, tally in self.cost.items()}

    @property
    def bytes(self) -> dict[Purpose, int]:
        return {purpose: tally.bytes for purpose, tally in self.cost.items()}


class Noted:
    """A target that notes what each of its forwards was asked for, and what the ledger held before it."""

    def __init__(self, inner: Target, engine: Engine) -> None:
        self._inner, self._engine, self.runs_alone = inner, engine, inner.runs_alone
        self.launches, self.launch, self.release = inner.launches, inner.launch, inner.release
        self._asked: list[tuple[int, int, int]] = []
        self._before: list[dict[Purpose, Tally]] = []

    def logits(self, spans: Sequence[Span]) -> RowLogits:
        rows = sum(len(span.tokens) for span in spans)
        self._asked.append((rows, sum(span.num_logits for span in spans), len(spans)))
        self._before.append(self._engine.ledger.totals())
        return self._inner.logits(spans)

    def taps(self) -> torch.Tensor | None:
        return self._inner.taps()

    def move(self, moves: Moves) -> None:
        self._inner.move(moves)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        self._inner.copy(copies)

    def rounds(self) -> list[Round]:
        """Everything between two forwards belongs to the first of them; nothing may be left over before the first."""
        assert not self._before[0]
        ends = [*self._before[1:], self._engine.ledger.totals()]
        costs = [_less(end, before) for before, end in zip(self._before, ends, strict=True)]
        return [Round(*asked, cost) for asked, cost in zip(self._asked, costs, strict=True)]


def _less(end: dict[Purpose, Tally], before: dict[Purpose, Tally]) -> dict[Purpose, Tally]:
    counted = {p: (t.count, t.bytes, before.get(p, Tally())) for p, t in end.items()}
    costs = {p: Tally(count - was.count, num - was.bytes) for p, (count, num, was) in counted.items()}
    return {purpose: cost for purpose, cost in costs.items() if cost.count}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return tiny_draft(tmp_path_factory.mktemp("draft"), target)


def requests(sampling: Sampling) -> list[Request]:
    source = random.Random(5)
    phrase = [source.randrange(3, 263) for _ in range(9)]
    return [
        Request(i, tuple(phrase * (9 - 4 * i)), 10 + 4 * i, sampling) for i in range(3)
    ]  # the longest is read first


def measure(
    target: Path, draft: Path, source: str, weights: tuple[int, ...], sampling: Sampling, **keys: Any
) -> list[Round]:
    """The rounds that the ranks ran, by the lead's ledger; all ranks must have counted the same. of_target: more keys
    of its section."""
    notes: dict[int, Noted] = {}

    def note(rank: int, engine: Engine) -> None:
        notes[rank] = Noted(engine.target, engine)
        engine.target = notes[rank]

    named = "none" if source == "liar" else source
    drafter: Callable[[], Drafter] | None = (lambda: Liar(300)) if source == "liar" else None
    made = topology(
        target,
        len(weights),
        target={"weights": tuple(map(float, weights))} | keys.pop("of_target", {}),
        draft={"source": named, "model": str(draft) if named == "model" else None, "tokens": 5},
        engine={"max_rows": MAX_ROWS},
        **keys,
    )
    told = serve(made, requests(sampling), drafter=drafter, begin=note)
    assert [told.finish[i] for i in range(3)] == ["length"] * 3
    rounds = [noted.rounds() for noted in notes.values()]
    assert all(others == rounds[0] for others in rounds)
    assert told.stats[-1].rounds == len(rounds[0])
    return rounds[0]


@pytest.mark.parametrize(
    ("kind", "keys", "sums"),
    [
        ("olmo3", {}, {Purpose.attention: LAYERS, Purpose.mlp: LAYERS, Purpose.norm: LAYERS}),
        ("olmo3", {"qk_norm": "replicate"}, {Purpose.attention: LAYERS, Purpose.mlp: LAYERS}),
        ("falcon_h1", {}, {Purpose.attention: LAYERS, Purpose.mlp: LAYERS}),
        ("olmo_hybrid", {}, {Purpose.attention: LAYERS, Purpose.mlp: LAYERS, Purpose.norm: 1}),
        ("cohere2", {}, {Purpose.mlp: LAYERS}),
        ("cohere2_moe", {}, {Purpose.mlp: LAYERS}),
        ("nemotron_h", {}, {Purpose.attention: 3, Purpose.mlp: 2}),
        ("granite_hybrid", {}, {Purpose.attention: LAYERS, Purpose.mlp: LAYERS}),
        ("lfm2", {}, {Purpose.attention: LAYERS, Purpose.mlp: LAYERS}),
    ],
)
def test_what_else_a_layer_may_cost_is_what_plans_say(
    kind: str, keys: dict[str, str], sums: dict[Purpose, int], draft: Path, tmp_path: Path
) -> None:
    """Norms of all heads together are eight bytes a row more, or nothing where every rank makes all heads, or two
    columns a rank beside a sum where they are made behind it; an MLP beside attention is summed with it, and layers may
    be one of the two."""
    folder = tiny(kind, tmp_path)
    rounds = measure(folder, draft, "ngram", (1, 2), Sampling(temperature=0.0), of_target=keys)
    shape = target_shape(topology(folder, 2, target=keys))
    assert all(r.counts == (sums | {Purpose.pick: 1} if r.logits else sums) for r in rounds)
    assert sum(sums.values()) + 1 == collectives_per_round(shape, 2)
    for r in rounds:
        expected = round_bytes(shape, 2, r.rows, 4, r.logits)
        assert r.bytes == {purpose: num for purpose, num in expected.items() if num}
    assert any(r.logits > r.spans for r in rounds)


@pytest.mark.parametrize("weights", WORLDS, ids=str)
@pytest.mark.parametrize("source", DRAFTERS)
@pytest.mark.parametrize(("rule", "temperature"), [("match", 0.0), ("match", 0.8), ("rejection", 0.8)])
def test_a_round_costs_two_collectives_a_layer_and_one_to_pick(
    target: Path, draft: Path, rule: str, temperature: float, source: str, weights: tuple[int, ...]
) -> None:
    """Stands against a drafter that communicates, a broadcast of verdicts, and a second gather for the draft's q.

    And in bytes: against gathered logits (263 values a row), padded rows, a float64 on the wire of `match`, and picks
    for rows that only read a prompt.
    """
    rounds = measure(target, draft, source, weights, Sampling(temperature=temperature, seed=3), accept=rule)
    judged = {Purpose.attention: LAYERS, Purpose.mlp: LAYERS, Purpose.pick: 1}
    read = {Purpose.attention: LAYERS, Purpose.mlp: LAYERS}
    assert all(r.counts == (judged if r.logits else read) for r in rounds)
    shape = shape_of(str(target))
    assert sum(judged.values()) == collectives_per_round(shape, len(weights)) == 7
    for r in rounds:
        hidden = LAYERS * r.rows * HIDDEN * 4
        sent = {"pick": 0} | r.bytes
        assert sent["attention"] == sent["mlp"] == hidden
        assert rule == "rejection" or sent["pick"] == 8 * r.logits
        assert rule == "rejection" or sent == round_bytes(shape, len(weights), r.rows, 4, r.logits)
    # Worth something only where all kinds of rounds occurred: reading alone, several texts, drafts.
    assert any(r.logits == 0 for r in rounds)
    assert any(r.spans > 1 for r in rounds)
    assert source == "none" or any(r.logits > r.spans for r in rounds)


def test_half_the_bytes_in_half_precision(target: Path, draft: Path) -> None:
    """Stands against sums that are sent in float32 whatever the topology says; picks stay exact."""
    made = topology(target, 2, target={"dtype": "bfloat16"})
    told = serve(made, [Request(0, tuple(range(5, 25)), 12)])
    (attention, mlp, pick) = (told.stats[-1].collectives[purpose] for purpose in ("attention", "mlp", "pick"))
    rows = 20 + 11  # the prompt in one round, then a row each; the last token is never run
    assert attention.bytes == mlp.bytes == LAYERS * rows * HIDDEN * 2
    assert pick.bytes == 8 * 12


@pytest.mark.parametrize("source", ["none", "ngram"])
def test_texts_that_cut_their_support_still_pick_in_one_collective(target: Path, draft: Path, source: str) -> None:
    """Stands against a gather for each request, and for each of top-k and the mass it is a share of."""
    sampling = Sampling(temperature=0.8, top_k=20, min_p=0.02, seed=3)
    for r in measure(target, draft, source, (1, 2), sampling):
        assert r.counts.get(Purpose.pick, 0) == (r.logits > 0)


def test_a_deterministic_round_is_padded_to_its_fixed_rows(target: Path, draft: Path) -> None:
    """`deterministic` pays for every row of every round; what it sends says so."""
    rounds = measure(target, draft, "ngram", (1, 1), Sampling(), deterministic=True)
    assert {r.bytes[Purpose.mlp] for r in rounds} == {LAYERS * 16 * HIDDEN * 4}
    assert all(sum(r.counts.values()) == 2 * LAYERS + (r.logits > 0) for r in rounds)


@pytest.mark.parametrize("source", DRAFTERS)
def test_one_rank_has_nobody_to_talk_to(target: Path, draft: Path, source: str) -> None:
    """Stands against figures of a plain single-card run that claim a bus was used."""
    rounds = measure(target, draft, source, (1,), Sampling(temperature=0.8, seed=3))
    assert all(r.cost == {} for r in rounds)
    assert collectives_per_round(shape_of(str(target)), 1) == 0
