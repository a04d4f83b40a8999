"""Each known way to lose exactness, made on purpose: the enumerated law must show it.

What these tests stand against is a law test too weak to notice. Each mutant is the real rule with one thing wrong.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from tests.laws import tiny
from tests.laws.exact import BranchingNoise, Coin, distance
from tests.laws.tiny import MANY, PLAIN, certain_chain, plain_law, sampled_chain, sampled_tree, speculative_law
from tpspec.request import Sampling
from tpspec.tokens import TokenTree
from tpspec.verify import Match, Rejection, draw, law, rejection, shards
from tpspec.verify.law import Law
from tpspec.verify.processors import process
from tpspec.verify.rows import Case, RowLogits

SEEN = 3e-3  # a mutant must be at least this far off; the rules are within 1e-12


def error(drafter, rule=None, wanted: Sampling = PLAIN, length: int = 2, noise=BranchingNoise) -> float:
    return distance(speculative_law(rule or Rejection(), drafter, wanted, length, noise), plain_law(wanted, length))


def retold(tree: TokenTree, prefix, wanted, noise) -> TokenTree:
    """The same tokens, said to be drawn from the whole softmax. Asks no noise that counts."""
    silent = SimpleNamespace(best_of=lambda scores, ids, *_: int(ids[0]))
    prefixes = [(*prefix, *tree.tokens[:i]) for i in range(len(tree))]
    draws = [
        draw.sample(tiny.row(p), [draw.Draw(p, len(tiny.PROMPT), wanted)], silent, tiny.VOCAB)[0][1] for p in prefixes
    ]
    return TokenTree.chain(tree.tokens, draws)


def test_bug_1_a_draft_of_filtered_q_judged_by_raw_q() -> None:
    assert error(lambda *ask: retold(sampled_chain(*ask), *ask)) > SEEN


def test_bug_2_an_argmax_draft_judged_by_softmax_q() -> None:
    assert error(lambda *ask: retold(certain_chain(*ask), *ask)) > SEEN


def test_bug_3_a_residual_drawn_with_the_noise_of_the_drafter() -> None:
    class Shared(BranchingNoise):
        def uniform(self, seed, position, stream, index):
            if stream == rejection.Stream.residual:
                return Coin(self, self.key(seed, position, rejection.Stream.draft))
            return super().uniform(seed, position, stream, index)

    assert error(sampled_chain, noise=Shared) > SEEN


class Frozen(BranchingNoise):
    """Bug 5: the same numbers at every position and in every round."""

    remembers = True

    def key(self, seed, position, stream):
        return (0, seed, stream)


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=["match", "rejection"])
def test_bug_5_noise_reused_in_every_round(rule) -> None:
    assert error(certain_chain, rule, noise=Frozen) > SEEN


def test_bug_5_noise_reused_shows_only_in_several_rounds() -> None:
    """The first token is right: a test of one token could not see it."""
    assert error(certain_chain, Match(), length=1, noise=Frozen) < 1e-12


def raw_bonus(rows: RowLogits, draws, **how) -> torch.Tensor:
    deepest = max(len(wanted.path) for wanted in draws)
    raw = [replace(wanted, sampling=PLAIN) if len(wanted.path) == deepest and deepest else wanted for wanted in draws]
    return process(rows, raw, **how)


def blind_to_drafts(rows: RowLogits, draws, **how) -> torch.Tensor:
    return process(rows, [replace(wanted, path=()) for wanted in draws], **how)


@pytest.mark.parametrize("mutant", [raw_bonus, blind_to_drafts])
@pytest.mark.parametrize(("rule", "room"), [(Match(), draw), (Rejection(), law)], ids=["match", "rejection"])
def test_bugs_6_and_11_rows_without_their_processors(monkeypatch, mutant, rule, room) -> None:
    """A bonus row judged raw; penalties that do not see the drafts before the row."""
    monkeypatch.setattr(room, "process", mutant)
    assert error(certain_chain, rule, MANY, 3) > SEEN


def test_bug_7_a_sampled_draft_discarded_for_its_low_probability() -> None:
    def shy(*ask) -> TokenTree:
        tree = sampled_chain(*ask, length=1)
        drawn = tree.draws[0]
        return tree if drawn.probs[drawn.ids.index(tree.tokens[0])] > 0.5 else TokenTree()

    assert error(shy) > SEEN


class Zero(BranchingNoise):
    """u = 0, which a float32 generator gives once in 2^24."""

    def uniform(self, seed, position, stream, index):
        return 0.0


def test_bug_8_a_zero_coin_accepts_what_the_target_never_says(monkeypatch) -> None:
    only_best = Sampling(temperature=1.0, top_k=1)

    def impossible(*ask) -> TokenTree:
        return TokenTree.chain([(int(tiny.target(ask[0]).argmax()) + 1) % tiny.VOCAB])

    assert error(impossible, wanted=only_best, noise=Zero) < 1e-12
    monkeypatch.setattr(rejection, "accepts", lambda u, p, q: u * q <= p)
    assert error(impossible, wanted=only_best, noise=Zero) > SEEN


def test_bug_14_a_shard_of_nothing_spoils_the_normaliser(monkeypatch) -> None:
    empty = torch.full((1, 3), -torch.inf)
    assert shards.log_mass(empty)[1].item() == 0
    top_NT, sum_NT = torch.tensor([[1.0], [-torch.inf]]), torch.tensor([[2.0], [0.0]]).double()
    assert shards.merged_log_mass(top_NT, sum_NT).item() == pytest.approx(1 + torch.tensor(2.0).log().item())

    def unguarded(scores_TV):
        top_T = scores_TV.amax(1)
        return top_T, (scores_TV.double() - top_T.unsqueeze(1)).exp().sum(1)

    monkeypatch.setattr(law, "log_mass", unguarded)
    everything_asked = TokenTree((0, 1, 2), (-1, -1, -1))  # nothing is left outside: the rest is a row of -inf
    case = Case(0, 0, everything_asked, tiny.PROMPT, 2, PLAIN)
    rows = RowLogits(tiny.rows_of(case), tiny.VOCAB)
    found = law.laws(rows, case.draws(), [(0, 1, 2), (), (), ()], BranchingNoise(tiny_choices(), frozenset(), 0))
    assert found[0] is None  # a sound row taken for a corrupt one


def tiny_choices():
    return SimpleNamespace(choose=lambda weights: max(range(len(weights)), key=weights.__getitem__))


def test_draws_without_replacement_judged_as_if_with_replacement(monkeypatch) -> None:
    """It takes a q above p at one id only: with one id left in the residual the mutant is right by luck."""
    monkeypatch.setattr(tiny, "other", lambda prefix: -tiny.target(prefix))
    assert error(sampled_tree) < 1e-12
    monkeypatch.setattr(
        rejection,
        "proposals_of",
        lambda draws, tokens: [
            {t: 1.0} if draws is None else dict(zip(draws.ids, draws.probs, strict=True)) for t in tokens
        ],
    )
    assert error(sampled_tree) > SEEN


def test_a_refusal_that_takes_nothing_from_the_law(monkeypatch) -> None:
    monkeypatch.setattr(Law, "minus", lambda self, q: self)
    assert error(certain_chain) > SEEN


def test_a_residual_that_is_not_renormalised_between_siblings(monkeypatch) -> None:
    def clipped(self: Law, q) -> Law:
        return Law({t: max(0.0, p - q.get(t, 0.0)) for t, p in self.probs.items()}, self.rest, self.spare)

    monkeypatch.setattr(Law, "minus", clipped)
    assert error(sampled_tree) > SEEN


def test_a_match_rule_that_emits_the_draft_it_likes(monkeypatch) -> None:
    """Typical acceptance: lossy by design, and the reason why `match` emits the target's own draw alone."""

    class Lenient(Match):
        def judge(self, cases, rows, noise, listener=None):
            (verdict,) = super().judge(cases, rows, noise)
            tree = cases[0].tree
            likely = rows.logits_TV[0].softmax(0)[tree.tokens[0]] > 0.3
            return [replace(verdict, path=(0,), tokens=(tree.tokens[0], verdict.tokens[-1]))] if likely else [verdict]

    assert error(certain_chain, Lenient()) > SEEN
