"""The law of every rule is the target's, to rounding, over as many rounds as the text takes; by enumeration.

One round is not enough: noise reused in a later round shows only there (bugs 3 to 5 of test_mutants_are_caught.py).
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.laws.exact import distance
from tests.laws.tiny import (
    MANY,
    PLAIN,
    TRUNCATED,
    certain_chain,
    certain_tree,
    chain_of_one,
    coupled_chain,
    plain_law,
    sampled_chain,
    sampled_tree,
    silent,
    speculative_law,
)
from tests.slow import slowly
from tpspec.errors import UserError
from tpspec.request import Sampling
from tpspec.verify import RULES, rule

EXACT = 1e-12
DRAFTERS = [silent, certain_chain, certain_tree, coupled_chain, sampled_chain, sampled_tree]


# Noise that the rule does not share with the drafter multiplies the cases; two tokens are still several rounds.
LONG = {"match": {sampled_chain, sampled_tree}, "rejection": {coupled_chain, sampled_chain, sampled_tree}}


def length_of(name: str, drafter) -> int:
    return 2 if drafter in LONG[name] else 3


def check(name: str, drafter, wanted: Sampling, length: int) -> None:
    law = speculative_law(rule(name), drafter, wanted, length)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert distance(law, plain_law(wanted, length)) < EXACT


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        *product(RULES, [one for one in DRAFTERS if one is not coupled_chain]),
        ("match", coupled_chain),
        *slowly(("rejection", coupled_chain)),
    ],
)
def test_chains_and_trees_keep_the_law_of_the_target(name: str, drafter) -> None:
    check(name, drafter, PLAIN, length_of(name, drafter))


@pytest.mark.parametrize("drafter", [silent, certain_chain, certain_tree, sampled_chain])
@pytest.mark.parametrize("name", RULES)
def test_penalties_bias_and_temperature_keep_the_law_of_the_target(name: str, drafter) -> None:
    """Stands against bugs 6 and 11: a bonus or a draft row judged without its processors or its prefix."""
    check(name, drafter, MANY, length_of(name, drafter))


@pytest.mark.parametrize("wanted", TRUNCATED, ids=["top_k", "top_p", "min_p", "all"])
@pytest.mark.parametrize("drafter", [certain_tree, coupled_chain, sampled_chain, sampled_tree])
@pytest.mark.parametrize("name", RULES)
def test_truncation_keeps_the_law_of_the_target(name: str, drafter, wanted: Sampling) -> None:
    check(name, drafter, wanted, length_of(name, drafter))


@pytest.mark.parametrize("name", RULES)
def test_four_tokens_in_several_rounds_keep_the_law_of_the_target(name: str) -> None:
    check(name, chain_of_one, PLAIN, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "wanted"), [(sampled_tree, PLAIN), (sampled_chain, PLAIN), (sampled_chain, MANY)])
def test_three_tokens_of_sampled_drafts_keep_the_law_of_the_target(drafter, wanted: Sampling) -> None:
    check("rejection", drafter, wanted, 3)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", RULES)
def test_temperature_zero_is_argmax(name: str, drafter) -> None:
    check(name, drafter, Sampling(), 4)


def test_an_unknown_rule_is_refused_with_the_choices() -> None:
    with pytest.raises(UserError, match="match, rejection"):
        rule("typical")
