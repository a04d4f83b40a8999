"""Recorded forwards: a round is one replay, in an order that all ranks share, and its collectives are counted.

A card's recorder is replaced by one that does the work again into the same memory; everything else is what a card runs,
in Triton's interpreter where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from tests.checkpoints import tiny
from tests.worlds import serve, topology
from tpspec.comm.communicator import OneRank, Purpose
from tpspec.comm.ledger import Counted, Ledger
from tpspec.comm.messages import Submit, ToLead
from tpspec.engine.engine import Engine
from tpspec.model.batch import Span
from tpspec.model.embedding import Embedding
from tpspec.model.graphs import Forward, Graphs
from tpspec.model.target import ShardedTarget
from tpspec.request import Request, Sampling
from tpspec.topology.working import ROW_COUNTS, WIDE_COUNTS, most_verified, wide_counts

pytest.importorskip("triton")
from tpspec.model.card.steps import CardSteps
from tpspec.model.card.tilings import Tiling

CPU = torch.device("cpu")
HIDDEN = 4
TABLE_VD = torch.arange(1.0, 1 + 7 * HIDDEN).view(7, HIDDEN)
ONE_AT_A_TIME = Lock()  # Triton's interpreter knows one thread


class Steps(CardSteps):
    """Of ranks that are threads."""

    def add_norm(self, *given: Any) -> Any:
        with ONE_AT_A_TIME:
            return super().add_norm(*given)

    def attention(self, *given: Any) -> Any:
        with ONE_AT_A_TIME:
            return super().attention(*given)

    def gate(self, *given: Any) -> Any:
        with ONE_AT_A_TIME:
            return super().gate(*given)


class Again:
    """Keeps work to be done again; what it made stays where it was. Its collectives pass no ledger, as on a card."""

    def __init__(self, ledger: Ledger) -> None:
        self.rows: list[int] = []
        self.replays = 0
        self._ledger = ledger

    def _done(self, work: Callable[[], Any]) -> Any:
        made: list[Any] = []
        self._ledger.aside(lambda: made.append(work()))
        return made[0]

    def forget(self) -> None:
        self.rows.clear()

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        made = self._done(work)
        self.rows.append(len(made.logits_TV))

        @torch.inference_mode()
        def replay() -> None:
            self.replays += 1
            new = self._done(work)
            made.logits_TV.copy_(new.logits_TV)
            for tap, x_TD in new.tapped.items():
                made.tapped[tap].copy_(x_TD)

        return made, replay


class Door:
    """A gate before a recorder: what is replayed behind it is done when it opens, and until then whoever opens it goes
    no further, as no card would keep him."""

    def __init__(self, recorder: Again) -> None:
        self.num_waits = 0
        self._recorder, self._kept = recorder, list[Callable[[], None]]()
        self._is_open = True

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        made, replay = self._recorder.record(work)
        return made, lambda: replay() if self._is_open else self._kept.append(replay)

    def forget(self) -> None:
        self._recorder.forget()

    def wait(self) -> None:
        self._is_open = False
        self.num_waits += 1

    def open(self) -> None:
        self._is_open = True
        while self._kept:
            self._kept.pop(0)()


class Notes:
    """Steps that only note what a recording has fetched when its rows come."""

    def __init__(self) -> None:
        self.written_rows = self.put_rows = self.copied_rows = 0

    def fits(self, spans: Any, num_rows: int) -> bool:
        return True

    def write(self, spans: Any, num_rows: int) -> None:
        self.written_rows = num_rows

    def put(self) -> None:
        self.put_rows = self.written_rows

    def copy(self) -> None:
        self.copied_rows = self.put_rows

    def sent(self) -> None: ...
    def left(self) -> None: ...
    def is_copied_whole(self, spans: Any) -> bool:
        return True


class Doubling:
    """Recordings of a forward that doubles its rows, in place, after one collective."""

    def __init__(self, row_counts: Sequence[int] = ROW_COUNTS) -> None:
        self.ledger = Ledger()
        self.recorder = Again(self.ledger)
        self._comm = Counted(OneRank(), self.ledger)
        self.graphs = Graphs(
            Notes(), self.recorder, Embedding(TABLE_VD, torch.float32), torch.float32, CPU, self.ledger, row_counts
        )

    def _run(self, x_TD: torch.Tensor, steps: Notes, begun: None, taps: tuple[int, ...]) -> Forward:
        assert steps.copied_rows == len(x_TD)
        x_TD += self._comm.all_reduce(x_TD.clone(), Purpose.mlp)
        return Forward(x_TD.clone(), {tap: x_TD + tap for tap in taps})

    def prepare(self) -> None:
        self.graphs.prepare(self._run, (), bool)

    @torch.inference_mode()
    def forward(self, tokens: list[int], taps: tuple[int, ...] = ()) -> Forward:
        return self.graphs.forward(self._run, span(len(tokens)), tokens, taps)

    def close(self) -> None:
        self.graphs.close()


# Rows that twelve texts verify, by the keys of a topology.
VERIFIED: list[tuple[int, dict[str, Any]]] = [
    (12, {"draft": {"source": "none"}}),
    (12 * 8, {"draft": {"source": "ngram"}}),
    (12 * 4, {"draft": {"source": "ngram", "tokens": 3}}),
    (200, {"draft": {"source": "ngram", "tokens": 64}, "engine": {"max_rows": 200}}),
    (0, {"draft": {"source": "ngram"}, "deterministic": True}),
]


def span(num_rows: int, num_logits: int | None = None) -> list[Span]:
    return [Span(0, 0, (0,) * num_rows, ((0, num_rows),), num_rows if num_logits is None else num_logits)]


@given(sizes=st.lists(st.integers(1, ROW_COUNTS[-1]), min_size=1, max_size=8), taps=st.sampled_from([(), (0, 3)]))
def test_a_round_of_any_size_is_one_replay_of_the_least_recording_that_holds_it(
    sizes: list[int], taps: tuple[int, ...]
) -> None:
    """Stands against rows of the last round that stay in the padding, and a recording made twice."""
    made = Doubling()
    for turn, size in enumerate(sizes):
        tokens = [(turn + row) % len(TABLE_VD) for row in range(size)]
        told, x_TD = made.forward(tokens, taps), TABLE_VD[tokens]
        assert torch.equal(told.logits_TV, 2 * x_TD)
        assert {tap: torch.equal(x, 2 * x_TD + tap) for tap, x in told.tapped.items()} == dict.fromkeys(taps, True)
    rows = made.recorder.rows
    assert made.recorder.replays == len(sizes)
    assert set(rows) == {min(count for count in ROW_COUNTS if count >= size) for size in sizes}
    assert len(rows) == len(set(rows))


def test_what_is_prepared_is_recorded_once_from_the_largest_down() -> None:
    """On every rank alike. Stands against an order that follows the first rounds a rank happens to see."""
    made = Doubling()
    made.prepare()
    made.prepare()
    made.forward([0] * 5)
    assert made.recorder.rows == list(reversed(ROW_COUNTS))


def test_rounds_of_more_rows_are_replays_where_most_of_them_have_logits() -> None:
    """As far as a round may verify so many, beside those of few. Stands against chunks of prompts of which every row
    goes through the head, and recordings that no round of a topology could take."""
    assert [wide_counts(most) for most in (0, 64, 65, 96, 97)] == [(), (), (96,), (96,), (96, 128)]
    assert wide_counts(10_000) == WIDE_COUNTS
    for rows, keys in VERIFIED:
        assert most_verified(topology(Path("nowhere"), serve={"max_running": 12}, **keys)) == rows
    few, wide = Doubling(), Doubling(wide_counts(97))
    assert [few.graphs.fits(span(rows, 0), rows) for rows in (64, 65)] == [True, False]
    assert [wide.graphs.fits(span(100, some), 100) for some in (100, 50, 49)] == [True, True, False]
    assert not wide.graphs.fits(span(129), 129)
    tokens = [1] * 100
    assert torch.equal(wide.forward(tokens).logits_TV, 2 * TABLE_VD[tokens])
    assert wide.recorder.rows == [128]


def test_a_replay_is_counted_and_a_rehearsal_is_not() -> None:
    """Stands against collectives that vanish from the ledger because no call of theirs passes by it."""
    made = Doubling()
    made.prepare()
    assert made.ledger.totals() == {}
    for size in (3, 4, 9):
        made.forward([0] * size)
    told = made.ledger.totals()[Purpose.mlp]
    assert (told.count, told.bytes) == (3, (4 + 4 + 12) * HIDDEN * 4)


def test_nothing_recorded_outlives_the_world() -> None:
    """NCCL waits, at its end, for every recording that it is in. Stands against a world that hangs when all is done."""
    made = Doubling()
    made.forward([0])
    made.close()
    assert made.recorder.rows == []
    assert made.graphs._recordings == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there kernels run on the card: tests/gpu/test_rounds.py")
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_texts_are_those_of_plain_rounds(tree: str, tmp_path: Path) -> None:
    """The law, with every round of few rows recorded on two ranks: stands against a table or an embedding of another
    round. Ranks record the same row counts in the same order, and a round of one layer is three collectives."""
    folder = tiny("smollm2", tmp_path, num_hidden_layers=1)
    asks = [Request(i, (5, 6, 7, 8, 9 + i) * 2, 6, Sampling(temperature=0.7 * i, seed=i)) for i in range(2)]
    recorders: dict[int, Again] = {}

    def begin(rank: int, engine: Engine) -> None:
        assert isinstance(engine.target, ShardedTarget)
        decoder, recorders[rank] = engine.target.decoder, Again(engine.ledger)
        tilings = {heads: Tiling.of(heads.dim, 2, (8, 6)) for heads in decoder.shape.heads}
        decoder.record(Steps(decoder.shape, decoder.ropes, decoder.store, tilings), recorders[rank])

    plain = serve(topology(folder), asks)
    told = serve(topology(folder, 2, draft={"source": "ngram", "tokens": 3, "tree": tree}), asks, begin=begin)
    assert told.texts() == plain.texts()
    assert recorders[0].rows == recorders[1].rows
    last = told.stats[-1]
    assert recorders[0].replays == last.rounds
    counts = {purpose: tally.count for purpose, tally in last.collectives.items()}
    assert counts == {"attention": last.rounds, "mlp": last.rounds, "pick": last.rounds}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there kernels run on the card: tests/gpu/test_rounds.py")
@pytest.mark.parametrize("launches", [True, False], ids=["ahead", "in turn"])
def test_ranks_launch_the_same_rounds_before_the_verdicts_of_those_before_them(launches: bool, tmp_path: Path) -> None:
    """Two ranks; one text ends at its length, one at a stop token, one comes while another runs, and one once nobody
    does. Stands against a rank that goes on where another takes in who has come, collectives that meet another round's,
    rounds that are counted twice or not at all, and what was launched in vain: it passes for nobody's."""
    folder = tiny("smollm2", tmp_path, num_hidden_layers=1)
    prompts = [(5, 6, 7, 8, 9 + i) * 2 for i in range(4)]
    text = serve(topology(folder), [Request(0, prompts[2], 16)]).texts()[0]
    last_is_new = next(i for i in range(6, 16) if text[i] not in text[:i])
    first, other = Request(0, prompts[0], 6), Request(1, prompts[1], 8)
    late = Request(2, prompts[2], 40, stop_ids=frozenset({text[last_is_new]}))
    messages: dict[int, list[ToLead]] = {1: [Submit(first), Submit(other)], 5: [Submit(late)]}
    messages[40] = [Submit(Request(3, prompts[3], 5))]
    doors: dict[int, Door] = {}

    def begin(rank: int, engine: Engine) -> None:
        assert isinstance(engine.target, ShardedTarget)
        decoder, doors[rank] = engine.target.decoder, Door(Again(engine.ledger))
        tilings = {heads: Tiling.of(heads.dim, 2, (8, 6)) for heads in decoder.shape.heads}
        steps = Steps(decoder.shape, decoder.ropes, decoder.store, tilings)
        decoder.record(steps, doors[rank], doors[rank])
        engine.target.launches = launches

    keys: dict[str, Any] = {"draft": {"source": "none"}}
    told = serve(topology(folder, 2, **keys), messages=dict(messages), begin=begin)
    assert told.texts() == serve(topology(folder, **keys), messages=dict(messages)).texts()
    last = told.stats[-1]
    counts = {purpose: tally.count for purpose, tally in last.collectives.items()}
    in_vain = int(launches)  # behind the stop token
    assert counts == {"attention": last.rounds + in_vain, "mlp": last.rounds + in_vain, "pick": last.rounds}
    assert doors[0].num_waits == doors[1].num_waits
    assert bool(doors[0].num_waits) == launches
