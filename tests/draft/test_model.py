"""The model drafter against a table model that checks every feed: no position is read that was written otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpspec.cache.pages import OutOfPages
from tpspec.draft.model import ModelDrafter
from tpspec.draft.protocol import Ask, Feed
from tpspec.request import Sampling
from tpspec.tokens import NO_DRAFT
from tpspec.verify.draw import Draw, pick
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import RowLogits

VOCAB = 11


def logits_after(text: Sequence[int], vocab: int) -> torch.Tensor:
    """Depends on every token before: one stale position changes the draft."""
    seed = hash(tuple(text)) % (2**31)
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


class Table:
    """A `Run` whose cache is lists of tokens. room: tokens that all sequences may hold together."""

    def __init__(self, vocab: int = VOCAB, room: int = 10**9) -> None:
        self.vocab, self.room = vocab, room
        self.cache: dict[int, list[int]] = {}
        self.calls: list[list[Feed]] = []

    def __call__(self, feeds: Sequence[Feed]) -> torch.Tensor:
        assert len({feed.seq for feed in feeds}) == len(feeds)
        assert all(feed.tokens and feed.start <= len(self.cache.get(feed.seq, [])) for feed in feeds)
        held = self.cache | {feed.seq: [*self._kept(feed), *feed.tokens] for feed in feeds}
        if sum(map(len, held.values())) > self.room:
            raise OutOfPages("full")
        self.cache = held
        self.calls.append(list(feeds))
        return torch.stack([logits_after(held[feed.seq], self.vocab) for feed in feeds])

    def forget(self, seq: int) -> None:
        self.cache.pop(seq, None)

    def _kept(self, feed: Feed) -> list[int]:
        return self.cache.get(feed.seq, [])[: feed.start]


def ask(seq: int, tokens: Sequence[int], num_tokens: int = 4, **sampling: float) -> Ask:
    return Ask(seq, list(tokens), 1, num_tokens, Sampling(**sampling))  # type: ignore[arg-type]


def coupled(vocab: int = VOCAB) -> ModelDrafter:
    return ModelDrafter(CounterNoise(), "coupled", vocab)


def expected(asked: Ask, vocab: int = VOCAB) -> tuple[int, ...]:
    """What a model without a cache would draft."""
    drafts: tuple[int, ...] = ()
    for _ in range(asked.num_tokens):
        rows = RowLogits(logits_after([*asked.tokens, *drafts], vocab).unsqueeze(0), VOCAB)
        draw = Draw(asked.tokens, asked.num_prompt, asked.sampling, drafts)
        drafts = (*drafts, *pick(rows, [draw], CounterNoise()))
    return drafts


@given(data=st.data())
def test_drafts_as_if_it_had_no_cache(data: st.DataObject) -> None:
    """Any mix of acceptance, rejection, ragged lengths, absent sequences and forgetting."""
    drafter, run = coupled(), Table()
    texts = {seq: data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)) for seq in range(3)}
    for _ in range(data.draw(st.integers(1, 5))):
        seqs = data.draw(st.lists(st.sampled_from(sorted(texts)), unique=True))
        temperature = data.draw(st.sampled_from([0.0, 0.9]))
        asks = [ask(seq, texts[seq], data.draw(st.integers(0, 4)), temperature=temperature, seed=seq) for seq in seqs]
        for asked, tree in zip(asks, drafter.propose(asks, run), strict=True):
            assert tree.tokens == expected(asked)
            assert tree.draws is None
            accepted = data.draw(st.integers(0, len(tree)))
            texts[asked.seq] = [*asked.tokens, *tree.tokens[:accepted], data.draw(st.integers(0, VOCAB - 1))]
            if data.draw(st.booleans()):
                drafter.forget(asked.seq)
                run.forget(asked.seq)


def test_feeds_only_what_the_cache_lacks() -> None:
    drafter, run = coupled(), Table()
    (tree,) = drafter.propose([ask(0, [1, 2, 3], 3)], run)
    drafter.propose([ask(0, [1, 2, 3, *tree.tokens, 5], 1)], run)  # all accepted: the last draft was never fed
    drafter.propose([ask(0, [1, 2, 3, tree.tokens[0], (tree.tokens[1] + 1) % VOCAB], 1)], run)  # one accepted
    fed = [(call[0].start, len(call[0].tokens)) for call in run.calls]
    assert fed == [(0, 3), (3, 1), (4, 1), (5, 2), (4, 1)]


def test_asks_share_a_forward_while_they_want_more() -> None:
    """One forward for each depth, not for each sequence."""
    run = Table()
    coupled().propose([ask(0, [1], 1), ask(1, [2, 3], 3), ask(2, [4], 0)], run)
    assert [[feed.seq for feed in call] for call in run.calls] == [[0, 1], [1], [1]]


def test_two_continuations_of_one_sequence_do_not_mix() -> None:
    """Asked what follows two outcomes, both would be written to the same slots of the cache."""
    asks = [ask(0, [1, 2, 3]), ask(1, [4]), ask(0, [1, 2, 9])]
    trees = coupled().propose(asks, Table())
    assert [tree.tokens for tree in trees] == [expected(asked) for asked in asks]


def test_ids_that_only_one_model_has_are_never_drafted() -> None:
    """Padding differs within a family of models: an id beyond the target's table would crash it."""
    for draft_vocab, target_vocab in ((VOCAB + 40, VOCAB), (VOCAB, VOCAB + 40)):
        drafter, run = coupled(target_vocab), Table(draft_vocab)
        for temperature in (0.0, 3.0):
            (tree,) = drafter.propose([ask(0, [1, 2], 40, temperature=temperature)], run)
            assert max(tree.tokens) < VOCAB


def test_without_room_a_draft_is_empty_and_the_others_are_whole() -> None:
    drafter, run = coupled(), Table(room=14)
    asks = [ask(0, [1] * 50), ask(1, [2, 3]), ask(2, [4, 5])]
    trees = drafter.propose(asks, run)
    assert trees[0] == NO_DRAFT
    assert [tree.tokens for tree in trees[1:]] == [expected(asked) for asked in asks[1:]]
    assert 0 not in run.cache
    run.room = 1000
    assert drafter.propose(asks, run)[0].tokens == expected(asks[0])


def test_what_was_drafted_before_the_room_ended_is_kept() -> None:
    drafter, run = coupled(), Table(room=4)
    asked = ask(0, [1, 2], 6)
    (tree,) = drafter.propose([asked], run)
    assert tree.tokens == expected(asked)[:3]
    assert run.cache == {}


def test_sampled_says_from_what() -> None:
    drafter = ModelDrafter(CounterNoise(), "sampled", VOCAB, support=4)
    assert drafter.needs.gives_q
    (tree,) = drafter.propose([ask(0, [1, 2], 5, temperature=1.0)], Table())
    assert tree.draws is not None
    assert tree.draws[-1] is None
    for token, draws in zip(tree.tokens, tree.draws[:-1], strict=True):
        assert draws is not None
        assert token in draws.ids
        assert len(draws.ids) == 4
        assert sum(draws.probs) == pytest.approx(1)


def test_sampled_is_argmax_at_temperature_zero() -> None:
    asked = ask(0, [1, 2], 5)
    (tree,) = ModelDrafter(CounterNoise(), "sampled", VOCAB).propose([asked], Table())
    assert tree.tokens == expected(asked)


def test_a_missing_model_is_a_mistake_of_the_house() -> None:
    with pytest.raises(ValueError, match="must be handed its model"):
        coupled().propose([ask(0, [1])], None)
