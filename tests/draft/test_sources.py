"""The registry, and what every source must do whatever it is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tests.checkpoints import tiny
from tests.draft.kits import KITS, draft_section
from tests.draft.table import ask
from tests.worlds import topology
from tpspec.draft.protocol import Drafter
from tpspec.draft.sources import SOURCES
from tpspec.model.loader import load_whole
from tpspec.model.target import ShardedTarget
from tpspec.published.shape import ModelShape, shape_of
from tpspec.roles.build_drafter import build_inline
from tpspec.roles.fit import target_pool
from tpspec.topology import sources
from tpspec.topology.sublayers import Sublayers

VOCAB = 263
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=2)


def made(section: dict[str, object], target: Path, accept: str = "match") -> Drafter:
    wanted = topology(target, draft=section, accept=accept)
    return build_inline(wanted, CPU, None, target_pool(wanted, ModelShape.of(target)), thinned(target))


def thinned(target: Path) -> Callable[[Sublayers], ShardedTarget]:
    shape = shape_of(str(target))
    decoder = load_whole(target, shape, torch.float32, CPU, 64)
    return ShardedTarget(decoder, range(VOCAB), VOCAB, VOCAB).thinned


@pytest.mark.parametrize("accept", ["match", "rejection"])
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_source_keeps_the_protocol(name: str, accept: str, target: Path, tmp_path: Path) -> None:
    """One tree an ask, in order, no longer than wanted, ids of the target's; forgetting the unknown is harmless."""
    if accept != "match" and sources.SOURCES[name].learns:
        with pytest.raises(ValidationError, match=f"does not tell {name} what the target says .*; should be match"):
            made(draft_section(name, target, tmp_path / "draft"), target, accept)
        return
    drafter = made(draft_section(name, target, tmp_path / "draft"), target, accept)
    asks = [ask(0, [1, 2, 1, 2], 3, temperature=1.0), ask(1, [3], 0), ask(2, [4, 4, 4], 9)]
    for _ in range(2):
        trees = drafter.propose(asks)
        assert len(trees) == len(asks)
        for asked, tree in zip(asks, trees, strict=True):
            assert len(tree) <= asked.num_tokens
            assert all(0 <= token < VOCAB for token in tree.tokens)
        drafter.observe([], None)
        drafter.forget(0)
        drafter.forget(77)
    assert drafter.propose([]) == []


def test_every_source_is_in_both_tables_and_has_a_kit() -> None:
    """A source that a topology cannot name, or that the law test does not know, would be found by users."""
    assert list(SOURCES) == list(sources.SOURCES)
    assert set(SOURCES) == set(KITS)


def test_only_the_rule_that_asks_is_told_from_what_was_drawn(target: Path, tmp_path: Path) -> None:
    """Shared noise under rejection is not exact; q under match is only weight on the wire."""
    section = draft_section("model", target, tmp_path)
    assert not made(section, target, "match").needs.gives_q
    assert made(section, target, "rejection").needs.gives_q


def test_options_reach_the_source_and_others_are_refused(target: Path) -> None:
    silent = made({"source": "ngram", "options": {"min_match": 3}}, target)
    assert len(silent.propose([ask(0, [1, 2, 1, 2])])[0]) == 0
    with pytest.raises(ValueError, match=r"match is none of source ngram; did you mean min_match\?"):
        made({"source": "ngram", "options": {"match": 3}}, target)
    with pytest.raises(ValueError, match="floor is 'low'; should be a whole number, from 0 to 100"):
        made({"source": "ngram", "options": {"floor": "low"}}, target)
    with pytest.raises(ValueError, match="skip is 3; should be a text"):
        made({"source": "layer_skip", "options": {"skip": 3}}, target)


@pytest.mark.parametrize(
    ("name", "option", "given", "right"),
    [
        ("ngram", "min_match", 0, "from 1 to 8"),
        ("ngram", "min_match", 9, "from 1 to 8"),
        ("ngram", "floor", -1, "from 0 to 100"),
        ("ngram", "floor", 101, "from 0 to 100"),
        ("suffix", "max_depth", 7, "8 or more"),
        ("suffix", "min_odds", 101, "from 0 to 100"),
        ("suffix", "kept_tokens", -1, "0 or more"),
        ("lookahead", "window", 0, "from 1 to 256"),
        ("lookahead", "level", 1, "from 2 to 64"),
        ("lookahead", "guesses", 257, "from 1 to 256"),
        ("pard", "places", 0, "from 1 to 64"),
        *(
            (name, "support", 0, "from 1 to 65536")
            for name, kind in sources.SOURCES.items()
            if "support" in kind.options
        ),
    ],
)
def test_what_an_option_cannot_be_is_refused_before_anything_starts(
    name: str, option: str, given: int, right: str, target: Path, tmp_path: Path
) -> None:
    """A topology was found right, and then no rank started; from a support of 0 nothing was ever drafted."""
    section = draft_section(name, target, tmp_path / "draft")
    options = {**section.get("options", {}), option: given}
    with pytest.raises(ValueError, match=f"{option} is {given}; should be a whole number, {right}"):
        made(section | {"options": options}, target)


def test_nothing_is_none_among_others(target: Path) -> None:
    """It was asked first, and never had anything to say."""
    with pytest.raises(ValueError, match="has none among others; should be none alone, or the others without it"):
        made({"source": ["none", "ngram"]}, target)


def test_of_several_sources_the_next_speaks_where_one_is_silent(target: Path, tmp_path: Path) -> None:
    """And one that is not asked must still read on when it is asked later."""
    section = draft_section("model", target, tmp_path)
    model, both = made(section, target), made(section | {"source": ["ngram", "model"]}, target)
    repeats, new = ask(0, [5, 6, 7, 5, 6, 7]), ask(1, [5, 6, 7])
    found, drafted = both.propose([repeats, new])
    assert found.tokens == (5, 6, 7, 5)
    assert drafted == model.propose([new])[0]
    again = ask(0, [*repeats.tokens, 9])
    assert both.propose([again]) == model.propose([again])
    with pytest.raises(ValueError, match=r"depth is none of source ngram or model; should be one of min_match"):
        made(section | {"source": ["ngram", "model"], "options": {"depth": 3}}, target)
