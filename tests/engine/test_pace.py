"""The draft length that pays: no other is better by what is known, all ranks agree, and it is zero when it must be."""

from __future__ import annotations

from itertools import combinations, count, product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.checkpoints import tiny
from tests.draft.liar import Liar
from tests.worlds import serve, topology
from tpspec.comm.messages import Cancel, Costs, News, Submit, ToLead
from tpspec.engine.engine import Engine
from tpspec.engine.meter import Meter
from tpspec.engine.pace import MOST, PROBE_ROUNDS, PROBE_TOKENS, Pace
from tpspec.request import Delta, Request, Sampling
from tpspec.tokens import Draws, TokenTree, Verdict
from tpspec.verify.rows import Case

ODDS = st.lists(st.floats(0.0, 1.0), max_size=4)
ROUND = Costs(round_s=0.01, row_s=0.001, draft_s=0.0)


def pace(costs: Costs | None, *, gives_odds: bool = True) -> Pace:
    made = Pace(gives_odds=gives_odds)
    made.costs = costs
    return made


def chain(odds: list[float]) -> TokenTree:
    return TokenTree.chain(range(len(odds)), odds=odds)


def rate(kept: list[list[float]], costs: Costs) -> float:
    """Tokens per second of a round over these chains."""
    tokens = float(len(kept))
    for odds in kept:
        path = 1.0
        for p in odds:
            path *= p
            tokens += path
    return tokens / costs.seconds(len(kept) + sum(map(len, kept)))


def learned(made: Pace, drafted: int, accepted: int, rounds: int = 1, seq: int = 0) -> Pace:
    case = Case(seq, 0, TokenTree.chain(range(drafted)), (1,), 1, Sampling())
    for _ in range(rounds):
        made.learn([case], [Verdict(seq, tuple(range(accepted)), tuple(range(accepted + 1)))])
    return made


@given(chains=st.lists(ODDS, min_size=1, max_size=3), row_s=st.floats(0.0, 0.02))
def test_no_other_cut_gives_more_tokens_per_second(chains: list[list[float]], row_s: float) -> None:
    """A greedy rule that stopped a node early or late would lose speed on every text and fail no other test."""
    costs = Costs(0.01, row_s, 0.0)
    cut = pace(costs).cut({seq: chain(odds) for seq, odds in enumerate(chains)}, len(chains))
    got = rate([odds[: len(cut[seq])] for seq, odds in enumerate(chains)], costs)
    choices = product(*(range(len(odds) + 1) for odds in chains))
    best = max(rate([odds[:size] for odds, size in zip(chains, sizes, strict=True)], costs) for sizes in choices)
    assert got == pytest.approx(best, rel=1e-9)


def test_without_measured_costs_everything_is_verified() -> None:
    assert pace(None).cut({1: chain([0.01, 0.01])}, 1) == {1: chain([0.01, 0.01])}
    assert pace(None, gives_odds=False).wanted(1) == MOST


def test_a_branch_counts_as_much_as_its_own_path() -> None:
    """A sibling's odds multiplied into a node's would cut every tree to a chain."""
    tree = TokenTree((5, 6, 7), (-1, -1, 0), odds=(0.6, 0.3, 0.5))
    assert len(pace(ROUND).cut({1: tree}, 1)[1]) == 3
    assert len(pace(Costs(0.01, 0.005, 0.0)).cut({1: tree}, 1)[1]) == 1


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Of up to six nodes, best first, whose siblings share what odds there are."""
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 6)))]
    left = dict.fromkeys(range(-1, len(parents)), 1.0)
    paths: dict[int, float] = {-1: 1.0}
    odds = []
    for node, parent in enumerate(parents):
        before = paths[node - 1] if node else 1.0
        odds.append(draw(st.floats(0.05, 0.9)) * min(left[parent], before / paths[parent]))
        left[parent] -= odds[-1]
        paths[node] = odds[-1] * paths[parent]
    return TokenTree(tuple(range(len(parents))), tuple(parents), odds=tuple(odds))


def tree_rate(trees: list[TokenTree], kept: list[frozenset[int]], costs: Costs) -> float:
    tokens, rows = float(len(trees)), len(trees)
    for tree, nodes in zip(trees, kept, strict=True):
        assert tree.odds is not None
        tokens += sum(prod(tree.odds[above] for above in tree.path(node)) for node in nodes)
        rows += len(nodes)
    return tokens / costs.seconds(rows)


def parts(tree: TokenTree) -> list[frozenset[int]]:
    """Every set of nodes that holds the parents of its nodes."""
    sets = [frozenset(part) for size in range(len(tree) + 1) for part in combinations(range(len(tree)), size)]
    return [part for part in sets if all(tree.parents[node] in {-1, *part} for node in part)]


@given(drafts=st.lists(trees(), min_size=1, max_size=2), row_s=st.floats(0.0, 0.02))
def test_no_other_part_of_a_tree_gives_more_tokens_per_second(drafts: list[TokenTree], row_s: float) -> None:
    """And every node that is kept pays for its row: under `auto` a wide tree must not be wider than it earns."""
    costs = Costs(0.01, row_s, 0.0)
    cut = pace(costs).cut(dict(enumerate(drafts)), len(drafts))
    kept = [frozenset(range(len(cut[seq]))) for seq in range(len(drafts))]
    best = max(tree_rate(drafts, list(choice), costs) for choice in product(*map(parts, drafts)))
    assert tree_rate(drafts, kept, costs) == pytest.approx(best, rel=1e-9)


def test_siblings_without_odds_share_what_one_of_them_would_have() -> None:
    """Counted as if each were as likely as an only child, eight children of the root would promise six tokens."""
    bush = TokenTree(tuple(range(8)), (-1,) * 8)
    assert sum(pace(ROUND)._path_odds(0, bush)) < 1
    assert len(pace(ROUND).cut({0: bush}, 1)[0]) < 4


def test_a_path_that_ends_at_a_leaf_has_tried_nothing_more() -> None:
    """A short branch that was right to its end is no failure, however deep the others are."""
    tree = TokenTree((4, 5, 6, 7), (-1, -1, 0, 2))
    made, other = pace(ROUND, gives_odds=False), learned(pace(ROUND, gives_odds=False), 1, 1, rounds=50)
    for _ in range(50):
        made.learn([Case(0, 0, tree, (1,), 1, Sampling())], [Verdict(0, (1,), (5, 9))])
    assert made.wanted(0) == other.wanted(0) == MOST


def test_a_drawn_token_is_never_dropped_for_its_own_odds() -> None:
    """Bug 7 of the known ways to lose the law: what is left of the draws is no longer drawn from q."""
    drawn = TokenTree.chain([3, 4], draws=[Draws((3,), (1.0,)), Draws((4,), (1.0,))], odds=[0.0, 0.0])
    by_depth = TokenTree.chain([3, 4], draws=drawn.draws[:2] if drawn.draws else None)
    made = pace(ROUND)
    assert len(made.cut({1: drawn}, 1)[1]) == len(made.cut({1: by_depth}, 1)[1]) == 2


@given(accepted=st.integers(0, 4), row_s=st.floats(1e-4, 0.01), draft_s=st.floats(0.0, 0.01))
def test_the_length_asked_for_is_the_best_for_what_was_accepted(accepted: int, row_s: float, draft_s: float) -> None:
    costs = Costs(0.01, row_s, draft_s)
    made = learned(pace(costs, gives_odds=False), 4, accepted, rounds=200)
    a = accepted / min(accepted + 1, 4)
    rates = [sum(a**i for i in range(k + 1)) / (costs.round_s + k * (row_s + draft_s)) for k in range(MOST + 1)]
    assert rates[made.wanted(0)] == pytest.approx(max(rates), rel=1e-3)


def test_a_source_that_never_helps_is_asked_for_nothing_and_then_tried_again() -> None:
    """Throttled for ever, a drafter that would help with the next paragraph is lost; tried always, it costs."""
    made = learned(pace(ROUND, gives_odds=False), 4, 0, rounds=30)
    assert made.wanted(0) == 0
    learned(made, 0, 0, rounds=PROBE_ROUNDS - 1)
    assert made.wanted(0) == 0
    learned(made, 0, 0)
    assert made.wanted(0) == PROBE_TOKENS
    assert len(made.cut({0: TokenTree.chain(range(PROBE_TOKENS))}, 1)[0]) == PROBE_TOKENS
    learned(made, PROBE_TOKENS, 0)
    assert made.wanted(0) == 0
    learned(made, PROBE_TOKENS, PROBE_TOKENS, rounds=30)
    assert made.wanted(0) > PROBE_TOKENS


def test_a_sequence_that_has_gone_leaves_nothing_behind() -> None:
    made = learned(pace(ROUND, gives_odds=False), 4, 0, rounds=30, seq=3)
    made.forget(3)
    made.forget(4)
    assert made.wanted(3) == pace(ROUND, gives_odds=False).wanted(3)


@given(
    round_s=st.floats(1e-4, 1.0),
    share=st.floats(0.0, 0.3),
    rows=st.lists(st.integers(1, 17), min_size=40, max_size=80).filter(lambda rows: len(set(rows)) > 3),
)
def test_a_meter_finds_what_a_row_costs(round_s: float, share: float, rows: list[int]) -> None:
    meter, true = Meter(), Costs(round_s, share * round_s, 0.0)
    for num_rows in rows:
        meter.round(num_rows, true.seconds(num_rows))
    assert meter.costs is not None
    assert meter.costs.seconds(6) == pytest.approx(true.seconds(6), rel=0.1)


def test_a_hiccup_of_the_machine_is_no_price_of_rows() -> None:
    """One round of 100 ms while 8 rows were verified would silence the drafts of the next minute."""
    meter = Meter()
    for i in range(60):
        meter.round(1 + i % 8, 0.010 + 0.0002 * (i % 8))
    meter.round(8, 1.0)
    assert meter.costs is not None
    assert meter.costs.row_s < 0.0012


def test_nothing_is_known_before_the_first_round() -> None:
    assert Meter().costs is None


def test_drafting_costs_what_was_asked_for() -> None:
    meter = Meter()
    meter.round(1, 0.01)
    for _ in range(50):
        meter.drafting(4, 0.008)
    assert meter.costs is not None
    assert meter.costs.draft_s == pytest.approx(0.002)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_whose_clocks_differ_draft_alike_and_say_what_plain_decoding_says(target: Path, num_ranks: int) -> None:
    """Costs that each rank measured for itself would give each another draft length, and a hang or a divergence."""

    def odd_clock(rank: int, engine: Engine) -> None:
        ticks = iter(range(10**9))
        engine.clock = lambda: next(ticks) ** (1 + rank) * 1e-3
        engine.draft_tokens = None

    prompts = [(5, 6, 7) * 5, (9, 10, 11, 12, 9, 10)]
    requests = [Request(i, ids, 40) for i, ids in enumerate(prompts)]
    plain = serve(topology(target), requests).texts()
    ngram = topology(target, num_ranks, draft={"source": "ngram", "tokens": "auto"})
    assert serve(ngram, requests, begin=odd_clock).texts() == plain
    lied = serve(topology(target, num_ranks), requests, drafter=lambda: Liar(256), begin=odd_clock)
    assert lied.texts() == plain


def test_a_liar_is_silenced(target: Path) -> None:
    """Sixteen rows of nonsense in every round are what a fixed length would pay."""

    def constant_clock(rank: int, engine: Engine) -> None:
        ticks = iter(range(10**9))
        engine.clock = lambda: next(ticks) * 1e-3
        engine.draft_tokens = None

    told = serve(topology(target), [Request(0, (5, 6, 7), 120)], drafter=lambda: Liar(256), begin=constant_clock)
    assert told.stats[-1].drafted < 60


def test_drafts_cost_after_a_pause_what_they_cost_before_it(target: Path) -> None:
    """Stands against moments of looking for drafts while nobody asks: what had been drafted faded beside them, and
    after some minutes no draft seemed to pay."""
    costs: list[float] = []

    def noting_costs(rank: int, engine: Engine) -> None:
        ticks, hear = count(), engine.hear
        engine.clock = lambda: next(ticks) * 1e-3

        def noted(news: News) -> list[Delta]:
            if engine.is_idle and engine.meter.costs is not None:
                costs.append(engine.meter.costs.draft_s)
            return hear(news)

        engine.hear = noted  # type: ignore[method-assign]

    ngram = topology(target, draft={"source": "ngram", "tokens": 4})
    messages: dict[int, list[ToLead]] = {
        1: [Submit(Request(0, (5, 6, 7) * 9, 24))],
        900: [Submit(Request(1, (5, 6, 7), 2))],
    }
    serve(ngram, messages=messages, begin=noting_costs)
    assert len(costs) > 500
    assert 0 < costs[-1] == costs[0]


def test_what_passes_while_nobody_asks_is_no_time_of_a_round(target: Path) -> None:
    """Stands against a pause that counted where the last request was cancelled: for a hundred rounds then a second
    seemed to bring hardly a token, and any draft worth waiting for."""
    costs: list[Costs | None] = []

    def idle_clock(rank: int, engine: Engine) -> None:
        ticks, hear = count(), engine.hear
        engine.clock = lambda: next(ticks) * 1e-3

        def after_a_pause(news: News) -> list[Delta]:
            nonlocal ticks
            ticks = count(next(ticks) + 10**6 * bool(news.requests))
            return hear(news)

        engine.hear = after_a_pause  # type: ignore[method-assign]

    serve(
        topology(target),
        messages={1: [Submit(Request(0, (5, 6, 7), 40))], 4: [Cancel(0)], 6: [Submit(Request(1, (5, 6, 7), 8))]},
        begin=idle_clock,
        watch=lambda engine: costs.append(engine.meter.costs),
    )
    assert costs[0] is not None
    assert costs[0].rate > 1
