"""The registry, and what every source must do whatever it is called."""

from __future__ import annotations

import pytest

from tests.draft.liar import Liar
from tests.draft.table import VOCAB, Table, ask
from tpspec.cache.pages import PagePool
from tpspec.draft.ahead import Ahead, Grown, Policy
from tpspec.draft.protocol import Drafter, Extender
from tpspec.draft.sources import SOURCES, source
from tpspec.errors import UserError
from tpspec.topology.config import SOURCES_WITH_MODEL
from tpspec.verify.noise import CounterNoise

EVERY = [*sorted(SOURCES), "liar"]


def made(name: str, accept: str = "match") -> Drafter:
    if name == "liar":
        return Liar(VOCAB)
    drafter = source(name).make(noise=CounterNoise(), accept=accept, vocab=VOCAB)
    return Grown(Ahead(drafter, Table(), PagePool(40, 4), Policy())) if isinstance(drafter, Extender) else drafter


@pytest.mark.parametrize("accept", ["match", "rejection"])
@pytest.mark.parametrize("name", EVERY)
def test_every_source_keeps_the_protocol(name: str, accept: str) -> None:
    """One tree an ask, in order, no longer than wanted, ids of the target's; forgetting the unknown is harmless."""
    drafter = made(name, accept)
    asks = [ask(0, [1, 2, 1, 2], 3, temperature=1.0), ask(1, [3], 0), ask(2, [4, 4, 4], 9)]
    for _ in range(2):
        trees = drafter.propose(asks)
        assert len(trees) == len(asks)
        for asked, tree in zip(asks, trees, strict=True):
            assert max(tree.depths(), default=0) <= asked.num_tokens
            assert all(0 <= token < VOCAB for token in tree.tokens)
        drafter.observe([], None)
        drafter.forget(0)
        drafter.forget(77)
    assert drafter.propose([]) == []


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_what_a_source_needs_is_known_before_it_is_made(name: str) -> None:
    assert source(name).own_model == made(name).needs.own_model
    assert source(name).own_model == (name in SOURCES_WITH_MODEL)


def test_only_the_rule_that_asks_is_told_from_what_was_drawn() -> None:
    """Shared noise under rejection is not exact; q under match is only weight on the wire."""
    assert not made("model", "match").needs.gives_q
    assert made("model", "rejection").needs.gives_q


def test_a_misspelt_source_is_answered_with_the_choices() -> None:
    with pytest.raises(UserError, match=r"'ngrm' \(did you mean ngram\?\); there are none, ngram, model"):
        source("ngrm")


def test_options_reach_the_source_and_others_are_refused() -> None:
    kit = {"noise": CounterNoise(), "accept": "match", "vocab": VOCAB}
    assert source("ngram").options == {"min_match": 1, "floor": 10}
    silent = source("ngram").make(**kit, min_match=3)  # type: ignore[arg-type]
    assert len(silent.propose([ask(0, [1, 2, 1, 2])])[0]) == 0
    with pytest.raises(UserError, match=r"no option 'match'; its options: min_match, floor"):
        source("ngram").make(**kit, match=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="draft source ngram: need 1 <= min_match"):
        source("ngram").make(**kit, min_match=0)  # type: ignore[arg-type]
