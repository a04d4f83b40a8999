"""Several tokens in one forward: against the same forward without a cache, and against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoModelForCausalLM

from tests.checkpoints import tiny
from tests.draft.table import VOCAB, Table, ask, logits_after
from tests.worlds import topology
from tpspec.comm.messages import Costs
from tpspec.draft.pard import Pard
from tpspec.draft.protocol import Ask
from tpspec.errors import UserError
from tpspec.model.batch import Span
from tpspec.published.shape import ModelShape
from tpspec.request import Sampling
from tpspec.roles.build_drafter import build_inline
from tpspec.roles.fit import target_pool
from tpspec.verify.draw import Draw, pick
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import RowLogits

MASK = 10
TOKENS = st.lists(st.integers(0, MASK - 1), min_size=1, max_size=9)


class Rows(Table):
    """A table that says something at each of the last rows of a span."""

    def _logits(self, span: Span) -> list[torch.Tensor]:
        seen = [self.slots[slot] for first, count in span.runs for slot in range(first, first + count)]
        assert len(seen) == span.start + len(span.tokens)
        return [logits_after(seen[: len(seen) - back]) for back in reversed(range(span.num_logits))]


def drafter(run: Table | None = None, num_slots: int = 2048, **options: int) -> Pard:
    return Pard(run or Rows(), num_slots, VOCAB, CounterNoise(), MASK, **options)


def expected(asked: Ask, most: int) -> tuple[int, ...]:
    text, said = list(asked.tokens), []
    for place in range(min(asked.num_tokens, most)):
        rows = RowLogits(logits_after([*text, *[MASK] * place]).unsqueeze(0), VOCAB)
        said += pick(rows, [Draw(text, 1, asked.sampling, (0,) * place)], CounterNoise())
    return tuple(said)


@given(
    rounds=st.lists(st.lists(TOKENS, min_size=2, max_size=2), min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_drafts_are_those_of_one_forward_over_the_text_and_its_masks(
    rounds: list[list[list[int]]], sizes: list[int], temperature: float
) -> None:
    """Keys of mask tokens that outlive their round, or a root that is read twice, change what is said next."""
    subject, texts = drafter(most=4), [[], []]
    for added, size in zip(rounds, sizes, strict=False):
        for text, new in zip(texts, added, strict=True):
            text += new
        asks = [ask(seq, text, size + seq, temperature=temperature, seed=7) for seq, text in enumerate(texts)]
        for asked, tree in zip(asks, subject.propose(asks), strict=True):
            assert tree.is_chain
            assert tree.tokens == expected(asked, 4)


def test_a_long_prompt_is_read_in_pieces() -> None:
    run, text = Rows(), [i % MASK for i in range(600)]
    (tree,) = drafter(run).propose([ask(0, text, 3)])
    assert tree.tokens == expected(ask(0, text, 3), 3)
    assert max(len(span.tokens) for spans in run.calls for span in spans) <= 256 + 2


def test_a_text_without_room_is_left_alone_and_others_go_on() -> None:
    """One long text must not silence the rest, nor may it keep what it cannot use."""
    subject = drafter(num_slots=64)
    long, short = ask(0, [1] * 70, 3), ask(1, [2, 3], 3)
    for _ in range(2):
        silent, tree = subject.propose([long, short])
        assert not silent
        assert tree.tokens == expected(short, 3)


def test_a_text_with_a_token_that_the_model_lacks_is_left_alone() -> None:
    """As padding of a larger table; against an error that costs all texts their drafts."""
    subject, sound = drafter(), ask(1, [2, 3], 3)
    for text in ([1, VOCAB, 2], [1, VOCAB, 2, 3]):
        silent, tree = subject.propose([ask(0, text, 3), sound])
        assert not silent
        assert tree.tokens == expected(sound, 3)


def test_no_place_is_filled_beyond_the_positions_of_the_model() -> None:
    subject = drafter(Rows(max_positions=6))
    sizes = [len(subject.propose([ask(0, [1, 2, 3, 4, 5, 6, 7][:size], 4)])[0]) for size in (3, 5, 6, 7)]
    assert sizes == [4, 2, 1, 0]


def test_places_with_several_candidates_make_a_tree_of_the_likeliest() -> None:
    (tree,) = drafter(most=3, branches=3).propose([ask(0, [1, 2, 3], 8)])
    assert len(tree) == 8
    assert not tree.is_chain
    chain = expected(ask(0, [1, 2, 3], 3), 3)
    assert tree.tokens[tree.children(-1)[0]] == chain[0]


def test_under_rejection_every_token_comes_with_what_it_was_drawn_from() -> None:
    (tree,) = drafter(gives_q=True, branches=3).propose([ask(0, [1, 2, 3], 4, temperature=1.0)])
    assert tree.is_chain
    assert tree.draws is not None
    for token, draws in zip(tree.tokens, tree.draws, strict=False):
        assert draws is not None
        assert token in draws.ids
        assert sum(draws.probs) == pytest.approx(1.0)


def test_what_comes_behind_the_places_that_were_filled_is_no_mistake() -> None:
    """Stands against a wrong place counted in every round whose drafts all came true: at two places, right two times
    in three."""
    subject, text = drafter(), [1, 2, 3]
    for _ in range(40):
        (tree,) = subject.propose([ask(0, text, 2)])
        text += [*tree.tokens, 0]
    pays_if_right = Costs(0.01, 0.0, 0.0075, 100.0)
    assert subject.propose([Ask(0, text, 1, 2, Sampling(), pays_if_right)])[0]


def test_a_model_that_is_never_right_is_asked_seldom() -> None:
    """Under `auto` a forward that wins nothing must not be paid for in every round."""
    run = Rows()
    subject, text = drafter(run), [1, 2, 3]
    costs = Costs(0.01, 0.001, 0.002, 100.0)
    for _ in range(200):
        asked = ask(0, text, 8)
        subject.propose([Ask(0, list(text), 1, 8, asked.sampling, costs)])
        text.append((expected(ask(0, text, 1), 1)[0] + 1) % MASK)
    assert len(run.calls) < 60


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("pard"), num_hidden_layers=2, pard_token=262)


def greedy(folder: Path, text: Sequence[int], num_places: int) -> list[int]:
    """The published loop: all places in one forward of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([[*text, *[262] * (num_places - 1)]])).logits[0]
    return logits[-num_places:].argmax(-1).tolist()


def test_a_published_layout_says_what_transformers_says(parallel: Path) -> None:
    wanted = topology(parallel, draft={"source": "pard", "model": str(parallel), "tree": "chain"})
    subject, text = (
        build_inline(wanted, torch.device("cpu"), None, target_pool(wanted, ModelShape.of(parallel))),
        [5, 9, 200, 31],
    )
    for new in ([], [7, 8], [44]):
        text = [*text, *new]
        assert list(subject.propose([ask(0, text, 5)])[0].tokens) == greedy(parallel, text, 5)


@pytest.mark.parametrize("config", [{}, {"pard_token": 263}, {"pard_token": "<mask>"}])
def test_a_model_without_a_mask_token_is_refused_by_name(config: dict[str, object], tmp_path: Path) -> None:
    """An ordinary model in its place would draft nonsense after the first token, and nobody would know why."""
    folder = tiny("smollm2", tmp_path, num_hidden_layers=1, **config)
    wanted = topology(folder, draft={"source": "pard", "model": str(folder)})
    with pytest.raises(UserError, match=f"{tmp_path}: config.json has pard_token"):
        build_inline(wanted, torch.device("cpu"), None, target_pool(wanted, ModelShape.of(folder)))
