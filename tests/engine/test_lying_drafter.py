"""A drafter elsewhere that answers at once and on time, with what is no draft: texts are those of plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import tiny
from tests.worlds import serve, topology
from tpspec.comm.messages import Draft, Drafts, Outcomes, Reach, ToDrafter
from tpspec.engine.engine import Engine
from tpspec.engine.remote import Elsewhere, RemoteHost, Way
from tpspec.request import Request, Sampling
from tpspec.tokens import Branch, Draws, TokenTree

NAN = float("nan")
CERTAIN = Draws((3, 4), (0.5, 0.5))
LIES = {
    "ids below 0": TokenTree.chain([-1, -1, 3]),
    "ids beyond the vocabulary": TokenTree.chain([3, 263, 3]),
    "huge ids": TokenTree.chain([2**62, 5]),
    "an id behind a bad one": TokenTree((5, -7, 6), (-1, 0, 1)),
    "a parent behind its child": TokenTree((3, 4), (1, -1)),
    "its own parent": TokenTree((3,), (0,)),
    "a parent below the root": TokenTree((3, 4), (-1, -5)),
    "no parents": TokenTree((3, 4), ()),
    "too few odds": TokenTree((3, 4), (-1, 0), None, (0.5,)),
    "odds that are none": TokenTree((3, 4), (-1, 0), None, (NAN, 7.0)),
    "too few draws": TokenTree((3, 4), (-1, 0), (CERTAIN,)),
    "draws without ids": TokenTree((3,), (-1,), (Draws((), (1.0,)), None)),
    "draws of NaN": TokenTree((3,), (-1,), (Draws((3, 4), (NAN, NAN)), None)),
    "draws beyond 1": TokenTree((3,), (-1,), (Draws((3, 4), (0.9, 0.9)), None)),
    "draws in disorder": TokenTree((3,), (-1,), (Draws((4, 3), (0.5, 0.5)), None)),
    "draws of strange ids": TokenTree((3,), (-1,), (Draws((-2, 3, 9999), (0.25, 0.5, 0.25)), None)),
    "the same sibling twice": TokenTree((3, 3), (-1, -1)),
}


class LyingLink:
    """The lead's end of a link to such a drafter."""

    num_messages = num_bytes = 0

    def __init__(self, lie: TokenTree) -> None:
        self._lie, self._answers = lie, list[Drafts]()

    def send(self, message: ToDrafter) -> bool:
        assert isinstance(message, Outcomes)
        of = [(outcome.seq, outcome.base + len(outcome.tokens)) for outcome in message.outcomes]
        drafts = tuple(Draft(seq, base, self._lie, False) for seq, base in of)
        ahead = tuple(Branch(seq, base, (), self._lie.tokens, self._lie.odds or (0.5,)) for seq, base in of)
        self._answers.append(Drafts(drafts, ahead=ahead, num_read=-1))
        return True

    def receive(self, timeout_s: float) -> list[Drafts]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=2)


def requests() -> list[Request]:
    return [Request(0, (5, 6, 7), 8), Request(1, tuple(range(20, 40)), 6, Sampling(temperature=0.8, seed=7))]


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return serve(topology(target), requests()).texts()


@pytest.mark.parametrize("accept", ["match", "rejection"])
@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_draft_costs_speed_only(target: Path, plain: list[list[int]], lie: str, accept: str) -> None:
    """Against ids that a table of embeddings does not hold, a tree without end, and a q that is no distribution; both
    where trees come as answers and where they are found at home."""

    def begin(rank: int, engine: Engine) -> None:
        ways = (Way(Reach(ahead=True, width=3)),)
        link = LyingLink(LIES[lie])
        engine.host = Elsewhere() if rank else RemoteHost(link, engine.clock, ways, 3)
        engine.draft_tokens = 3

    told = serve(topology(target, 2, accept=accept), requests(), begin=begin)
    assert list(told.finish.values()) == ["length"] * 2
    assert told.texts() == plain or accept == "rejection"
    assert told.texts()[0] == plain[0]  # at temperature 0 both rules say the same
