"""Shapes of trees: the best of every size, whole to the root, and the same for every source that can rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.checkpoints import tiny
from tests.draft.kits import draft_section
from tests.draft.table import VOCAB, Table, ask, logits_after
from tests.worlds import serve, topology
from tpspec.cache.pages import PagePool
from tpspec.draft.ahead import Ahead, Grown, Policy
from tpspec.draft.model import ModelDrafter
from tpspec.draft.shapes import PLAN_ROUNDS, Shape, closed, likeliest
from tpspec.engine.engine import Engine
from tpspec.engine.hosts import Gathered
from tpspec.errors import UserError
from tpspec.request import Request, Sampling
from tpspec.tokens import TokenTree
from tpspec.topology.config import TopologyError, load
from tpspec.topology.rank_paths import read_choices
from tpspec.verify.noise import CounterNoise

Path_ = tuple[int, ...]
# The beginning of Medusa's mc_sim_7b_63.
CHOICES = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 3], [4], [0, 4], [2, 0]]
ODDS = st.lists(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3), min_size=1, max_size=3)


def worth(paths: Sequence[Path_], odds: Sequence[Sequence[float]]) -> float:
    """Tokens that a tree is expected to win: each node adds the odds of its path."""
    return sum(prod(odds[depth][rank] for depth, rank in enumerate(path)) for path in paths)


@given(odds=ODDS, most=st.integers(0, 5))
def test_no_other_tree_of_that_size_wins_more(odds: list[list[float]], most: int) -> None:
    """Against a rule that takes the best level by level, or forgets that a node is worth nothing without its parent."""
    found = likeliest(odds, most)
    assert len(found) <= most
    assert_whole(found)
    widths = [range(len(level)) for level in odds]
    every = [path for depth in range(1, len(odds) + 1) for path in product(*widths[:depth])]
    trees = (tree for size in range(min(most, len(every)) + 1) for tree in combinations(every, size))
    best = max(worth(tree, odds) for tree in trees if all(path[:-1] in {(), *tree} for path in tree))
    assert worth(found, odds) == pytest.approx(best)


@given(odds=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3), most=st.integers(1, 7), depth=st.integers(1, 4))
def test_the_tree_wins_what_the_dynamic_programme_of_sequoia_does(odds: list[float], most: int, depth: int) -> None:
    """T[m][l][b] of its paper: m nodes with the root, l levels below it, b children of it, falling odds by rank."""
    odds = sorted(odds, reverse=True)
    found = likeliest([odds] * depth, most)
    assert 1 + worth(found, [odds] * depth) == pytest.approx(sequoia(odds, len(found) + 1, depth))


def sequoia(odds: Sequence[float], num_nodes: int, levels: int) -> float:
    def best(nodes: int, below: int) -> float:
        return max(table(nodes, below, children) for children in range(len(odds) + 1))

    def table(nodes: int, below: int, children: int) -> float:
        if children == 0:
            return 1.0 if nodes == 1 else float("-inf")
        if below == 0:
            return float("-inf")
        p = odds[children - 1]
        splits = (table(y, below, children - 1) + p * best(nodes - y, below - 1) for y in range(1, nodes))
        return max(splits, default=float("-inf"))

    return best(num_nodes, levels)


def assert_whole(paths: Sequence[Path_]) -> None:
    """Each once, and none before its parent."""
    seen: set[Path_] = {()}
    for path in paths:
        assert path not in seen
        assert path[:-1] in seen
        seen.add(path)


@given(paths=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=8))
def test_choices_lead_to_the_root(paths: list[Path_]) -> None:
    """Published lists stand in any order; a node whose parent is missing would be verified under another's."""
    assert_whole(closed(paths))
    assert set(paths) <= set(closed(paths))
    for most in range(9):
        assert_whole(Shape(2, paths, 4).paths(most))


def test_what_is_seen_decides_what_is_planned_and_only_now_and_then() -> None:
    """A plan that changed with every verdict would be no fixed shape; one that never did would be somebody else's."""
    shape, other = Shape(2, (), 3), Shape(2, (), 3)
    assert shape.paths(2) == [(0,), (0, 0)]
    for _ in range(PLAN_ROUNDS - 1):
        shape.saw([1, None])
    assert shape.paths(2) == other.paths(2)
    shape.saw([1, None])
    for _ in range(PLAN_ROUNDS):
        other.saw([1, None])
    assert shape.paths(2) == other.paths(2) == [(1,), (0,)]
    assert shape.odds((1,)) > 0.9


def test_of_the_choices_the_likeliest_come_first() -> None:
    """A draft of fewer nodes than are listed takes the best of them, and is cut from its end."""
    shape = Shape(4, [tuple(path) for path in CHOICES], 3)
    assert shape.branches == 5
    assert set(shape.paths(64)) == set(map(tuple, CHOICES))
    for _ in range(PLAN_ROUNDS):
        shape.saw([2, 0])
    assert shape.paths(2) == [(2,), (2, 0)]


def test_a_grown_tree_has_the_shape_it_was_given() -> None:
    """And its tokens are those that the model ranks so, whatever their odds; three forwards for three levels."""
    run, shape = Table(), Shape(4, [(0,), (1,), (3,), (0, 2), (3, 0), (3, 0, 1)], 8)
    policy = Policy(branches=shape.branches, shape=shape)
    grown = Grown(Ahead(ModelDrafter(CounterNoise(), "coupled", VOCAB), run, PagePool(40, 4), policy))
    (tree,) = grown.propose([ask(0, [1, 2], 9)])
    assert set(ranks_of(tree, [1, 2])) == set(shape.paths(9))
    assert len(run.calls) == 3
    (small,) = grown.propose([ask(0, [1, 2, 7], 2)])
    assert ranks_of(small, [1, 2, 7]) == list(shape.paths(2))


def ranks_of(tree: TokenTree, text: list[int]) -> list[Path_]:
    """What the table's model ranks, by path."""
    paths = []
    for node in range(len(tree)):
        path, ranks = tree.path(node), []
        for depth, above in enumerate(path):
            before = [*text, *(tree.tokens[one] for one in path[:depth])]
            order = logits_after(before).argsort(descending=True).tolist()
            ranks.append(order.index(tree.tokens[above]))
        paths.append(tuple(ranks))
    return paths


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=3)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", ["medusa", "model"])
def test_trees_of_a_fixed_shape_leave_texts_alone(name: str, listed: bool, target: Path, tmp_path: Path) -> None:
    draft = draft_section(name, target, tmp_path / "draft") | {"tree": "static", "tokens": 7}
    (tmp_path / "choices.json").write_text(json.dumps(CHOICES))
    if listed:
        draft["options"] = {"choices": str(tmp_path / "choices.json")}
    requests = [Request(i, (8,) * (5 + i), 20, Sampling(temperature=0.8 * (i % 2), seed=3)) for i in range(3)]
    trees: list[TokenTree] = []

    def watched(rank: int, engine: Engine) -> None:
        gather = engine.host.gather

        def noted(ready: Sequence[int]) -> Gathered:
            gathered = gather(ready)
            trees.extend(gathered.trees.values())
            return gathered

        engine.host.gather = noted  # type: ignore[method-assign]

    told = serve(topology(target, 2, draft=draft), requests, begin=watched)
    assert told.texts() == serve(topology(target), requests).texts()
    assert any(len(tree) == 7 and not tree.is_chain for tree in trees)
    assert told.stats[-1].accepted > 0


def test_choices_that_are_none_are_refused(tmp_path: Path) -> None:
    """Stands against tracebacks, and a rank of which as many candidates are wanted as no machine holds."""
    file = tmp_path / "choices.yaml"
    for text in ("[]", "[[]]", "[[0], [-1]]", "[[0.5]]", "tree: yes", "[[0], 1]", "[[0]", "[[1000000000]]", 3000 * "["):
        file.write_text(text)
        with pytest.raises(UserError, match="choices"):
            read_choices(str(file))
    file.write_text("- [0]\n- [0, 63]\n")
    assert read_choices(str(file)) == [(0,), (0, 63)]
    for name in (str(tmp_path / "none.json"), "~nobody-here/choices.json"):
        with pytest.raises(UserError, match="cannot be read"):
            read_choices(name)


def test_choices_without_a_static_tree_are_refused(target: Path) -> None:
    """Otherwise a list that somebody made for his box does nothing, and he never learns. Stands against a check that
    finds nothing wrong, and a server that then does not start."""
    with pytest.raises(ValueError, match=r"choices is the shape of a fixed tree; should stand beside .*tree: static"):
        topology(target, draft={"source": "ngram", "options": {"choices": "choices.json"}})


@pytest.mark.parametrize(
    ("source", "accept", "able"),
    [("ngram", "match", "model or "), (["ngram", "suffix"], "match", "model or "), ("pard", "rejection", "medusa")],
)
def test_a_fixed_shape_of_trees_that_have_none_is_refused(source: str | list[str], accept: str, able: str) -> None:
    """Stands against `tree: static` beside what looks texts up, or draws chains: it did nothing, and said nothing."""
    model = "m" if source == "pard" else None
    with pytest.raises(ValueError, match=f"has a fixed shape; should be auto, or source {able}"):
        topology(Path("m"), draft={"source": source, "model": model, "tree": "static"}, accept=accept)
    topology(Path("m"), draft={"source": ["ngram", "medusa"], "model": "m", "tree": "static"}, accept=accept)


def test_a_fixed_shape_elsewhere_than_inline_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    target: dict[str, Any] = {"model": "m", "ranks": [0]}
    draft = {"source": "model", "model": "d", "tree": "static", "placement": {"dedicated": 1}}
    file.write_text(json.dumps({"name": "a", "target": target, "draft": draft}))
    with pytest.raises(TopologyError, match="should be dynamic, or draft inline"):
        load(file)
