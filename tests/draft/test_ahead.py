"""Drafting ahead against a model without a cache: whatever comes true, an answer is what that model would say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from tests.draft.table import VOCAB, StateTable, Table, ask, expected, logits_after, next_token, next_tokens
from tpspec.cache.pages import PagePool
from tpspec.comm.messages import Costs
from tpspec.draft.ahead import Ahead, Grown, Policy
from tpspec.draft.model import Drawing, ModelDrafter
from tpspec.draft.protocol import Ask
from tpspec.model.batch import Span
from tpspec.request import Sampling
from tpspec.tokens import NO_DRAFT, ROOT
from tpspec.verify.noise import CounterNoise

SERIAL, OPTIMISTIC, FAN_OUT = Policy(), Policy(ahead=True), Policy(ahead=True, width=3, max_rows=4)


def coupled(vocab: int = VOCAB) -> ModelDrafter:
    return ModelDrafter(CounterNoise(), "coupled", vocab)


def made(policy: Policy = SERIAL, run: Table | None = None, num_pages: int = 400, page: int = 4) -> Ahead:
    return Ahead(coupled(), run or Table(), PagePool(num_pages, page), policy)


def worked(ahead: Ahead, most: int = 100) -> int:
    """How often it read before there was nothing to read."""
    return next((count for count in range(most) if not ahead.work()), most)


@given(
    data=st.data(), policy=st.sampled_from([SERIAL, OPTIMISTIC, FAN_OUT]), table=st.sampled_from([Table, StateTable])
)
def test_an_answer_is_what_a_model_without_a_cache_would_say(
    data: st.DataObject, policy: Policy, table: type[Table]
) -> None:
    """Any mix of outcomes, foreseen or not, ragged lengths, work done in between, absence and forgetting. A model that
    keeps states says the same: against one that lacks a token, or has taken a draft in."""
    ahead = made(policy, table())
    texts = {seq: data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)) for seq in range(3)}
    for _ in range(data.draw(st.integers(1, 6))):
        asks = {}
        for seq in data.draw(st.lists(st.sampled_from(sorted(texts)), unique=True)):
            asks[seq] = ask(seq, texts[seq], data.draw(st.integers(0, 5)), temperature=0.9 * (seq % 2), seed=seq)
            ahead.hear(asks[seq])
        open = set(asks)
        while open:
            for answer in ahead.answers():
                open.remove(answer.seq)
                assert answer.base == len(texts[answer.seq])
                assert answer.tree.tokens == expected(asks[answer.seq])
                texts[answer.seq] += outcome(data, asks[answer.seq])
            ahead.work()
        for _ in range(data.draw(st.integers(0, 6))):
            ahead.work()
        ahead._pool.check_integrity()
        if data.draw(st.integers(0, 4)) == 0:
            ahead.forget(data.draw(st.sampled_from(sorted(texts))))


@pytest.mark.parametrize("policy", [SERIAL, FAN_OUT])
def test_a_text_with_a_token_that_the_model_lacks_is_left_alone(policy: Policy) -> None:
    """Whenever it comes, until the text is another. Against a client whose one token of padding, of which a target has
    more, ends the drafter of all texts."""
    ahead = made(policy)
    drafted = Grown(ahead)
    for texts in ([[1, VOCAB, 2], [3]], [[1, VOCAB, 2, 3], [3, 4, VOCAB]], [[1, 5, 2], [3, 4, VOCAB, 1]]):
        asks = [ask(seq, text) for seq, text in enumerate(texts)]
        for asked, tree in zip(asks, drafted.propose(asks), strict=True):
            assert tree.tokens == (() if VOCAB in asked.tokens else expected(asked))
        worked(ahead, 9)
        if texts[0][1] == VOCAB and len(texts[0]) == 4:
            drafted.forget(0)


class SureTable(Table):
    """Says one token, and that every other is so unlikely that its probability is no number above 0."""

    def _logits(self, span: Span) -> list[torch.Tensor]:
        return [torch.where(said == said.max(), 1e5, said) for said in super()._logits(span)]


def test_beside_a_token_that_is_sure_nothing_is_offered() -> None:
    """Stands against a division by what is left for the others."""
    ahead = Ahead(ModelDrafter(CounterNoise(), "sampled", VOCAB), SureTable(), PagePool(400, 4), FAN_OUT)
    (tree,) = Grown(ahead).propose([ask(0, [1, 2], 4, temperature=0.1)])
    assert len(tree) == 4
    assert tree.is_sound


class SpoiltTable(Table):
    """Says nothing that can be drawn from of texts that end in 7."""

    def _logits(self, span: Span) -> list[torch.Tensor]:
        nothing = torch.full((self.vocab,), torch.nan)
        return [nothing if span.tokens[-1] == 7 else said for said in super()._logits(span)]


@pytest.mark.parametrize("drawing", ["coupled", "sampled"])
@pytest.mark.parametrize("policy", [SERIAL, FAN_OUT])
def test_a_draft_ends_where_its_model_says_no_numbers(policy: Policy, drawing: Drawing) -> None:
    """Against a token that is none in a tree, for which whoever is sent it gives the drafter up."""
    ahead = Ahead(ModelDrafter(CounterNoise(), drawing, VOCAB), SpoiltTable(), PagePool(400, 4), policy)
    sizes = set()
    for seed in range(40):
        wanted = ask(seed, [seed % VOCAB], 8, temperature=0.8, seed=seed)
        (tree,) = Grown(ahead).propose([wanted])
        worked(ahead, 20)
        assert tree.is_sound
        assert 7 not in tree.tokens[:-1]
        assert len(tree) == 8 or (wanted.tokens[-1], *tree.tokens)[-1] == 7
        assert all(branch.is_sound and min(branch.tokens, default=0) >= 0 for branch in ahead.branches())
        sizes.add(len(tree))
        ahead.forget(seed)
    assert {0, 8} < sizes


def outcome(data: st.DataObject, asked: Ask) -> list[int]:
    """Some drafts accepted, and a token of the target's: often the one that the draft model finds next best."""
    accepted = list(expected(asked))[: data.draw(st.integers(0, asked.num_tokens))]
    best = next_token([*asked.tokens, *accepted], asked.sampling)
    return [*accepted, data.draw(st.sampled_from([best, (best + 1) % VOCAB, data.draw(st.integers(0, VOCAB - 1))]))]


@given(data=st.data(), branches=st.integers(1, 3), ahead=st.booleans(), num_left=st.integers(2, 40))
def test_a_tree_of_a_model_that_keeps_states_holds_what_one_without_a_cache_would_say(
    data: st.DataObject, branches: int, ahead: bool, num_left: int
) -> None:
    """Rows of one tree that several nodes need, as many at a time as are left beside a state; no tree is deeper. Which
    of its futures a tree holds hangs on what was read before, so it is not compared with another drafter's."""
    one = made(Policy(ahead=ahead, branches=branches, width=3, max_rows=4), StateTable(num_left=num_left))
    texts = {seq: data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)) for seq in range(3)}
    for _ in range(data.draw(st.integers(1, 5))):
        asks = [
            ask(seq, texts[seq], data.draw(st.integers(0, min(num_left, 9))), temperature=0.9 * (seq % 2), seed=seq)
            for seq in data.draw(st.lists(st.sampled_from(sorted(texts)), unique=True))
        ]
        for asked, tree in zip(asks, Grown(one).propose(asks), strict=True):
            assert len(tree) == asked.num_tokens
            for parent in (ROOT, *range(len(tree))):
                path, children = ([tree.tokens[node] for node in of(parent)] for of in (tree.path, tree.children))
                said = next_tokens([*asked.tokens, *path], asked.sampling, branches)
                assert len(set(children)) == len(children)
                assert set(children) <= set(said)
            texts[asked.seq] += outcome(data, asked)
        worked(one, 5)
        one._pool.check_integrity()


def test_a_state_takes_in_text_alone_and_drafts_are_read_again_with_each() -> None:
    """Against a draft that is wrong and stays in a state, and against a text that is read anew with every draft."""
    run = StateTable()
    ahead = made(run=run)
    (tree,) = Grown(ahead).propose([ask(0, [1, 2, 3], 3)])
    assert [(call[0].start, len(call[0].tokens)) for call in run.calls] == [(0, 3), (2, 2), (2, 3)]
    Grown(ahead).propose([ask(0, [1, 2, 3, *tree.tokens, 5], 1)])
    assert run.calls[-1][0].tokens == (3, *tree.tokens, 5)


def test_a_text_without_a_state_to_be_had_waits_for_nothing() -> None:
    """Against a draft model that hangs, or forgets another's text, when more run than it was made for."""
    ahead = made(run=StateTable(num_seats=1))
    trees = Grown(ahead).propose([ask(0, [1, 2], 2), ask(1, [3, 4], 2)])
    assert [len(tree) for tree in trees] == [2, 0]
    ahead.forget(0)
    assert [len(tree) for tree in Grown(ahead).propose([ask(1, [3, 4, 5], 2)])] == [2]


@pytest.mark.parametrize("table", [Table, StateTable])
def test_a_long_text_is_read_in_pieces_by_any_model(table: type[Table]) -> None:
    """Against a state that goes on before a piece, or after it."""
    text = [number % VOCAB for number in range(700)]
    asked = ask(0, text, 3)
    assert [tree.tokens for tree in Grown(made(run=table())).propose([asked])] == [expected(asked)]


def test_the_cache_is_fed_only_what_it_lacks() -> None:
    run = Table()
    ahead = made(run=run)
    grown = Grown(ahead)
    (tree,) = grown.propose([ask(0, [1, 2, 3], 3)])
    grown.propose([ask(0, [1, 2, 3, *tree.tokens, 5], 1)])  # all accepted: the last draft was never read
    fed = [(call[0].start, len(call[0].tokens)) for call in run.calls]
    assert fed == [(0, 3), (3, 1), (4, 1), (5, 2)]


def test_asks_share_a_forward_while_they_want_more() -> None:
    """One forward for each depth, not for each sequence."""
    run = Table()
    Grown(made(run=run)).propose([ask(0, [1], 1), ask(1, [2, 3], 3), ask(2, [4], 0)])
    assert [[span.seq for span in call] for call in run.calls] == [[0, 1], [1], [1]]


def test_serial_reads_nothing_that_nobody_asked_for() -> None:
    ahead = made(SERIAL)
    Grown(ahead).propose([ask(0, [1, 2], 3)])
    assert not ahead.work()


def test_full_acceptance_is_answered_at_once_when_it_was_hoped_for() -> None:
    """The whole gain of drafting ahead: the target's next verification finds its draft ready."""
    for policy in (OPTIMISTIC, FAN_OUT):
        ahead = made(policy)
        first = ask(0, [1, 2], 3)
        (tree,) = Grown(ahead).propose([first])
        worked(ahead)
        text = [1, 2, *tree.tokens]
        ahead.hear(ask(0, [*text, next_token(text, Sampling())], 3))
        (answer,) = ahead.answers()
        assert answer.foreseen
        assert len(answer.tree) == 3


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_fan_out_has_answers_for_rejections_too(accepted: int) -> None:
    """With the second-best token of the draft model in place of its draft, which is what a target usually says."""
    for policy, foreseen in ((OPTIMISTIC, False), (FAN_OUT, True)):
        ahead = made(policy)
        (tree,) = Grown(ahead).propose([ask(0, [1, 2], 3)])
        worked(ahead)
        logits = logits_after([1, 2, *tree.tokens[:accepted]])
        (second,) = logits.topk(2).indices.tolist()[1:]
        ahead.hear(ask(0, [1, 2, *tree.tokens[:accepted], second], 1))
        assert [answer.foreseen for answer in ahead.answers()] == ([True] if foreseen else [])


def test_the_likeliest_future_is_read_first() -> None:
    """Reading in any other order would have the wrong futures ready when the verdict comes early."""
    run = Table()
    ahead = made(Policy(ahead=True, width=3, max_rows=1), run)
    Grown(ahead).propose([ask(0, [1, 2], 2)])
    growth = ahead._growths[0]
    for _ in range(12):
        best = max(node.path_odds for node in growth.unread() if node.depth < ahead._horizon[0])
        before = set(growth.unread())
        assert ahead.work()
        (read,) = (node for node in before if node.children is not None)
        assert read.path_odds == best


def test_a_draft_ends_where_more_does_not_pay() -> None:
    """Drafting on through unlikely tokens makes every round late."""

    def drafted(draft_s: float) -> int:
        asked = ask(0, [3, 1, 4], 10)
        costs = Costs(round_s=0.1, row_s=0.001, draft_s=draft_s)
        (tree,) = Grown(made()).propose([Ask(0, asked.tokens, 1, 10, asked.sampling, costs)])
        return len(tree)

    lengths = [drafted(draft_s) for draft_s in (0.0, 0.02, 0.05, 0.2)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] == 0


def test_ids_that_only_one_model_has_are_never_drafted() -> None:
    """Padding differs within a family of models: an id beyond the target's table would crash it."""
    for draft_vocab, target_vocab in ((VOCAB + 40, VOCAB), (VOCAB, VOCAB + 40)):
        run = Table(draft_vocab)
        for temperature in (0.0, 3.0):
            ahead = Ahead(coupled(target_vocab), run, PagePool(40, 4), Policy(ahead=True, width=30))
            (tree,) = Grown(ahead).propose([ask(0, [1, 2], 20, temperature=temperature)])
            worked(ahead, 10)
            assert max(tree.tokens) < VOCAB
            assert all(node.token < VOCAB for node in ahead._growths[0].unread())


def test_without_room_a_draft_is_empty_and_the_others_are_whole() -> None:
    ahead = made(num_pages=5)
    asks = [ask(0, [1] * 50), ask(1, [2, 3]), ask(2, [4, 5])]
    trees = Grown(ahead).propose(asks)
    assert trees[0] == NO_DRAFT or len(trees[0]) == 0
    assert [tree.tokens for tree in trees[1:]] == [expected(asked) for asked in asks[1:]]
    ahead._pool.check_integrity()


def test_a_future_that_finds_no_room_takes_nothing_from_anybody() -> None:
    ahead = made(Policy(ahead=True, width=4, max_rows=8), num_pages=3)
    (tree,) = Grown(ahead).propose([ask(0, [1, 2], 4)])
    assert tree.tokens == expected(ask(0, [1, 2], 4))
    worked(ahead)
    text = [1, 2, *tree.tokens[:2]]
    ahead.hear(ask(0, [*text, next_token(text, Sampling())], 2))
    (answer,) = Grown(ahead).propose([ask(0, [*text, next_token(text, Sampling())], 2)])
    assert answer.tokens == expected(ask(0, [*text, next_token(text, Sampling())], 2))


def test_a_draft_ends_where_its_model_ends() -> None:
    """Positions a model was not made for are accepted by nobody, or crash."""
    ahead = made(FAN_OUT, Table(max_positions=6))
    (tree,) = Grown(ahead).propose([ask(0, [1, 2, 3], 8)])
    assert len(tree) == 4  # after positions 2, 3, 4 and 5
    worked(ahead)
    assert all(span.start + len(span.tokens) <= 6 for call in ahead.run.calls for span in call)


def test_a_long_text_is_read_in_pieces() -> None:
    """A prompt of thousands of rows would otherwise keep everybody waiting for one forward."""
    run = Table()
    text = [i % VOCAB for i in range(600)]
    (tree,) = Grown(made(run=run)).propose([ask(0, text, 2)])
    assert [len(call[0].tokens) for call in run.calls] == [256, 256, 88, 1]
    assert tree.tokens == expected(ask(0, text, 2))


def test_sampled_says_from_what_and_its_alternatives_are_others() -> None:
    drafter = ModelDrafter(CounterNoise(), "sampled", VOCAB, support=4)
    ahead = Ahead(drafter, Table(), PagePool(40, 4), Policy(ahead=True, width=3))
    (tree,) = Grown(ahead).propose([ask(0, [1, 2], 5, temperature=1.0)])
    assert tree.draws is not None
    assert tree.draws[-1] is None
    for token, draws in zip(tree.tokens, tree.draws[:-1], strict=True):
        assert draws is not None
        assert token in draws.ids
        assert len(draws.ids) == 4
        assert sum(draws.probs) == pytest.approx(1)
    for node in ahead._growths[0].chain(5)[:-1]:
        assert len({child.token for child in node.children or ()}) == 3


def test_sampled_is_argmax_at_temperature_zero() -> None:
    asked = ask(0, [1, 2], 5)
    ahead = Ahead(ModelDrafter(CounterNoise(), "sampled", VOCAB), Table(), PagePool(40, 4), SERIAL)
    (tree,) = Grown(ahead).propose([asked])
    assert tree.tokens == expected(asked)
