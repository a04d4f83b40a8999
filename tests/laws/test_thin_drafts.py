"""Drafts on the target's own cache leave the text alone where it is tight: few pages, few rows, other rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny
from tests.draft.kits import draft_section
from tests.laws.test_every_source import requests
from tests.worlds import Told, serve, topology
from tpspec.request import Sampling

SAMPLED = Sampling(temperature=0.8, seed=5)
SOURCES = ["layer_skip", "early_exit"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=6)


def told(name: str, target: Path, folder: Path, num_ranks: int = 2, tree: str = "chain", **keys: Any) -> Told:
    draft = draft_section(name, target, folder)
    if name != "none":
        draft |= {"tokens": 5, "tree": tree}
    made = topology(target, num_ranks, draft=draft, **keys)
    return serve(made, requests(4, SAMPLED), watch=lambda engine: engine.scheduler.check_integrity())


@pytest.mark.parametrize("name", SOURCES)
def test_texts_are_the_same_where_pages_run_out(name: str, target: Path, tmp_path: Path) -> None:
    """Against a draft that reads a preempted text, and one whose rows outlive the page they were written in."""
    cache = {"tokens": 84, "page": 4}
    found = told(name, target, tmp_path, cache=cache)
    assert found.texts() == told("none", target, tmp_path, cache=cache).texts()
    assert found.stats[-1].preemptions > 0
    assert found.stats[-1].drafted > 0


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_deterministic_draft_is_padded_like_a_round(name: str, tree: str, target: Path, tmp_path: Path) -> None:
    """Against a draft of more rows than a round has: what is too much would be cut off, silently."""
    keys: dict[str, Any] = {"deterministic": True, "engine": {"fixed_rows": 6}}
    found = told(name, target, tmp_path, tree=tree, **keys)
    assert found.texts() == told("none", target, tmp_path, num_ranks=2, **keys).texts()
    assert found.stats[-1].drafted > 0


@pytest.mark.parametrize("name", SOURCES)
def test_drawn_drafts_are_the_same_on_every_number_of_ranks(name: str, target: Path, tmp_path: Path) -> None:
    """Against a q of one shard's ids, and a total of one shard's mass."""
    one, *others = (told(name, target, tmp_path, num_ranks, accept="rejection") for num_ranks in (1, 2, 3))
    assert one.stats[-1].drafted > 0
    for other in others:
        assert other.texts() == one.texts()
        assert other.stats[-1].drafted == one.stats[-1].drafted
