"""The text does not depend on who drafts, how many ranks there are, or who else is served."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny, tiny_draft
from tests.draft.liar import Liar
from tests.slow import slowly
from tests.worlds import CPU, Script, Told, serve, topology
from tpspec.comm.channel import thread_channels
from tpspec.comm.communicator import Communicator, OneRank
from tpspec.comm.messages import Cancel, News, Stats, Submit, ToLead
from tpspec.comm.threads import ThreadWorld
from tpspec.draft.protocol import Ask, Drafter, Needs
from tpspec.errors import Unread, WorldFailure
from tpspec.model.batch import Span
from tpspec.model.target import ShardedTarget
from tpspec.request import Delta, Request, Sampling
from tpspec.roles.build import build_engine
from tpspec.roles.target import follow_rounds, lead_rounds
from tpspec.tokens import TokenTree, Verdict
from tpspec.verify.rows import RowLogits

GREEDY, WARM = Sampling(), Sampling(temperature=0.8, seed=7)
PICKY = Sampling(
    temperature=1.1, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.4, seed=3
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return tiny_draft(tmp_path_factory.mktemp("draft"), target)


def prompts(count: int = 4) -> list[tuple[int, ...]]:
    """Texts with repetitions, so that n-grams find something; the longest takes several chunks."""
    source = random.Random(5)
    phrase = [source.randrange(3, 263) for _ in range(9)]
    return [tuple(phrase * (1 + 4 * i) + [source.randrange(3, 263) for _ in range(i)]) for i in range(count)]


def requests(sampling: Sampling, count: int = 4) -> list[Request]:
    return [Request(i, prompt, 12 + 5 * i, sampling) for i, prompt in enumerate(prompts(count))]


class Bushy:
    """Drafts trees that contain the right text: siblings of nonsense before and after each token of it."""

    needs = Needs()

    def __init__(self, texts: dict[int, list[int]]) -> None:
        self.texts = texts

    def propose(self, asks: list[Ask]) -> list[TokenTree]:
        return [self.tree(ask) for ask in asks]

    def tree(self, ask: Ask) -> TokenTree:
        done = len(ask.tokens) - ask.num_prompt
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for right in self.texts[ask.seq][done : done + ask.num_tokens]:
            siblings = [(right + 1) % 263, right, (right + 2) % 263]
            tokens += siblings
            parents += [parent] * 3
            parent = len(tokens) - 2
        return TokenTree(tuple(tokens), tuple(parents))

    def observe(self, verdicts: list[Verdict], taps: Any) -> None:
        return

    def forget(self, seq: int) -> None:
        return


class Broken(Bushy):
    """Raises, always."""

    def __init__(self) -> None:
        super().__init__({})

    def tree(self, ask: Ask) -> TokenTree:
        raise RuntimeError("a source that raises")


def plain(target: Path, sampling: Sampling) -> list[list[int]]:
    return serve(topology(target), requests(sampling)).texts()


@pytest.mark.parametrize("num_ranks", [1, 3, *slowly(2)])
@pytest.mark.parametrize("sampling", [GREEDY, WARM, PICKY], ids=["greedy", "warm", "picky"])
@pytest.mark.parametrize("source", ["none", "ngram", "model", "liar", "bushy"])
def test_match_gives_the_text_of_plain_decoding(
    target: Path, draft: Path, source: str, sampling: Sampling, num_ranks: int
) -> None:
    """Stands against keys of rejected drafts that are read, noise keyed by round, a tree path not moved home."""
    expected = plain(target, sampling)
    makers: dict[str, Callable[[], Drafter]] = {
        "liar": lambda: Liar(300),
        "bushy": lambda: Bushy(dict(enumerate(expected))),
    }
    named = source if source not in makers else "none"
    model = str(draft) if named == "model" else None
    made = topology(target, num_ranks, draft={"source": named, "model": model, "tokens": 5})
    told = serve(made, requests(sampling), drafter=makers.get(source))
    assert told.texts() == expected
    if source == "bushy":
        assert told.stats[-1].accepted > 0.2 * told.stats[-1].drafted


@pytest.mark.parametrize("source", ["none", "ngram", "model"])
def test_rejection_is_greedy_at_temperature_0(target: Path, draft: Path, source: str) -> None:
    """Stands against a ratio test where q is a point mass and p has no probabilities at all."""
    made = topology(
        target, 2, accept="rejection", draft={"source": source, "model": str(draft) if source == "model" else None}
    )
    assert serve(made, requests(GREEDY)).texts() == plain(target, GREEDY)


def test_a_source_that_raises_costs_speed_only(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = serve(topology(target, 2), requests(WARM), drafter=Broken)
    assert told.texts() == plain(target, WARM)
    assert sum("draft source failed" in record.message for record in caplog.records) == 2  # once on each rank


def test_what_a_round_gave_is_told_of_even_if_the_next_one_fails(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against tokens that wait for a card to be busy, and go down with it."""
    engine, script = build_engine(topology(target), OneRank(), CPU).engine, Script({1: [Submit(requests(GREEDY)[0])]})
    monkeypatch.setattr(ShardedTarget, "runs_alone", lambda *of_a_round: True)
    logits, good = engine.target.logits, iter(range(3))

    def failing(spans: Sequence[Span]) -> RowLogits:
        if next(good, None) is None:
            raise WorldFailure("the card fell off the bus")
        return logits(spans)

    monkeypatch.setattr(engine.target, "logits", failing)
    with pytest.raises(WorldFailure):
        lead_rounds(engine, thread_channels(1)[0], script)
    assert script.told.texts() == [plain(target, GREEDY)[0][:3]]


def test_who_cannot_be_told_leaves_no_rank_in_a_collective(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a lead that fails in the middle of a round: the others would wait for it in the next collective,
    and end with a fault of their own."""
    monkeypatch.setattr(ShardedTarget, "runs_alone", lambda *of_a_round: True)
    channels, codes = thread_channels(2), []
    told: list[Stats] = []

    def unread(script: Script, deltas: list[Delta], stats: Stats) -> None:
        told.append(stats)
        if len(told) > 2:
            raise Unread

    monkeypatch.setattr(Script, "report", unread)

    def rank(comm: Communicator) -> None:
        engine = build_engine(topology(target, 2), comm, CPU).engine
        if comm.rank:
            codes.append(follow_rounds(engine, channels[1]))
            return
        with pytest.raises(Unread):
            lead_rounds(engine, channels[0], Script({1: [Submit(requests(GREEDY)[0])]}))
        channels[0].share(News(round=0, stop=Unread.exit_code))  # as who leads a world does

    ThreadWorld(2).run(rank)
    assert codes == [Unread.exit_code]
    assert len(told) == 3  # nobody decodes for a reader who has gone


def test_a_small_cache_preempts_and_loses_nothing(target: Path) -> None:
    """Stands against recomputed tokens that are emitted twice, and drafts that take the last page."""
    made = topology(target, 2, cache={"tokens": 160, "page": 16}, draft={"source": "ngram", "tokens": 5})
    many = [Request(i, prompts()[i % 3][:40], 60, WARM) for i in range(6)]
    roomy = serve(topology(target), many)
    told = serve(made, many)
    assert told.texts() == roomy.texts()
    assert told.stats[-1].preemptions > 0
    assert told.stats[-1].pages_used == 0


def test_cancelled_requests_leave_the_others_alone(target: Path) -> None:
    made = topology(target, 2, draft={"source": "ngram"})
    messages: dict[int, list[ToLead]] = {
        1: [Submit(r) for r in requests(WARM)],
        4: [Cancel(1)],
        6: [Cancel(3), Cancel(9)],
    }
    told = serve(made, messages=messages)
    expected = plain(target, WARM)
    assert told.tokens[0] == expected[0]
    assert told.tokens[2] == expected[2]
    assert told.tokens[3] == expected[3][: len(told.tokens[3])] != expected[3]


def test_stop_tokens_and_impossible_requests_end_as_they_should(target: Path) -> None:
    expected = plain(target, GREEDY)[3]
    stop = expected[8]
    first = expected.index(stop)
    told: Told = serve(
        topology(target, draft={"source": "ngram"}),
        [
            Request(0, prompts()[3], 27, GREEDY, frozenset({stop})),
            Request(1, (5,) * 3000, 10, GREEDY),
            Request(2, (5, 6), 3, GREEDY),
        ],
    )
    assert told.tokens[0] == expected[: first + 1]
    assert told.finish == {0: "stop", 1: "error", 2: "length"}
    assert "512 positions" in next(delta.error or "" for delta in told.deltas if delta.id == 1)
