"""The law that every source passes: whatever drafts, the text is that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.checkpoints import tiny
from tests.draft.kits import draft_section
from tests.draft.liar import Liar
from tests.slow import slowly
from tests.worlds import serve, topology
from tpspec.draft.protocol import Ask
from tpspec.draft.sources import SOURCES
from tpspec.request import Request, Sampling
from tpspec.tokens import TokenTree

SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=5)}
LENGTHS = (9, 31, 4, 18)  # of four prompts
LONG = 24  # tokens of an answer
LISTS = (("ngram", "eagle"), ("suffix", "model"))  # what both say of a text is one tree, or the better one is taken


class Raises(Liar):
    """Fails every other time, half way through."""

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        trees = super().propose(asks)
        if self._lies % 2:
            raise RuntimeError("a source that fails")
        return trees


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def sections(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    alone = {name: draft_section(name, target, tmp_path_factory.mktemp(name)) for name in SOURCES}
    return alone | {" and ".join(names): alone[names[-1]] | {"source": list(names)} for names in LISTS}


def requests(number: int, sampling: Sampling) -> list[Request]:
    """Prompts that repeat themselves now and then, so that what looks things up finds something."""
    texts = [[random.Random(length).randrange(3, 20) for _ in range(length)] for length in LENGTHS[:number]]
    return [Request(i, tuple(text), LONG, sampling) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def plain(target: Path):  # type: ignore[no-untyped-def]
    @cache
    def texts(number: int, sampling: str) -> list[list[int]]:
        return serve(topology(target), requests(number, SAMPLINGS[sampling])).texts()

    return texts


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
@pytest.mark.parametrize(
    ("tree", "num_ranks", "number"),
    [
        ("chain", 3, 1),
        ("dynamic", 2, 4),
        *slowly(*product(("chain", "dynamic"), (1,), (1, 4)), ("chain", 2, 4), ("dynamic", 3, 1)),
    ],
)
@pytest.mark.parametrize("name", [*sorted(SOURCES), *map(" and ".join, LISTS)])
def test_texts_are_those_of_plain_decoding(
    name: str, tree: str, num_ranks: int, number: int, sampling: str, target: Path, sections: dict, plain
) -> None:  # type: ignore[no-untyped-def, type-arg]
    """Stands against every way in which a draft can leak into a text: stale slots, wrong paths, noise used twice."""
    draft = sections[name] | {"tree": tree, "tokens": 5}
    told = serve(topology(target, num_ranks, draft=draft), requests(number, SAMPLINGS[sampling]))
    assert told.texts() == plain(number, sampling)
    assert name == "none" or told.stats[-1].drafted > 0


@pytest.mark.parametrize("drafter", [lambda: Liar(263), lambda: Raises(263)], ids=["liar", "raises"])
def test_a_source_that_lies_or_fails_costs_speed_only(drafter, target: Path, plain) -> None:  # type: ignore[no-untyped-def]
    told = serve(topology(target, 2), requests(4, SAMPLINGS["greedy"]), drafter=drafter)
    assert told.texts() == plain(4, "greedy")
    assert told.stats[-1].drafted > 0
