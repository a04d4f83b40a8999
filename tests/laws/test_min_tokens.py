"""Ids that are withheld until a text is long enough: the law is the target's without them, by enumeration.

The minimum is of the row, not of the round: a draft may reach beyond it.
"""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest
import torch

from tests.laws.exact import distance
from tests.laws.tiny import (
    MANY,
    PLAIN,
    PROMPT,
    VOCAB,
    certain_chain,
    certain_tree,
    coupled_chain,
    law_after,
    sampled_chain,
    silent,
    speculative_law,
)
from tpspec.request import Sampling
from tpspec.verify import RULES, rule
from tpspec.verify.processors import process
from tpspec.verify.rows import Draw, RowLogits

WITHHELD = 1
PAIRS = [(name, drafter) for name in RULES for drafter in (silent, certain_chain, certain_tree)]
PAIRS += [("match", coupled_chain), ("rejection", sampled_chain)]  # those that share the rule's noise, or tell it q


def plain_law(wanted: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """Softmax over the ids that are not withheld is the law given that none of them comes."""
    law = {}
    for text in product(range(VOCAB), repeat=length):
        odds = 1.0
        for i, token in enumerate(text):
            probs = law_after(PROMPT + text[:i], len(PROMPT), wanted)
            if i < wanted.min_tokens:
                probs = np.where(np.arange(VOCAB) == WITHHELD, 0.0, probs)
            odds *= float(probs[token] / probs.sum())
        law[text] = odds
    return law


@pytest.mark.parametrize("minimum", [1, 2])
@pytest.mark.parametrize("wanted", [PLAIN, MANY], ids=["plain", "penalties"])
@pytest.mark.parametrize(("name", "drafter"), PAIRS)
def test_a_minimum_keeps_the_law_of_the_target(name: str, drafter, wanted: Sampling, minimum: int) -> None:
    """Stands against a minimum counted from the root, and a draft of a withheld id that is accepted."""
    held = msgspec.structs.replace(wanted, min_tokens=minimum, withheld=frozenset({WITHHELD}))
    length = 3 if drafter in (silent, certain_chain) else 2
    law = speculative_law(rule(name), drafter, held, length)
    assert distance(law, plain_law(held, length)) < 1e-12


def test_ids_are_withheld_by_the_shard_that_has_them_up_to_the_minimum_and_not_in_place() -> None:
    held = Sampling(min_tokens=2, withheld=frozenset({5, 6, 90}))
    logits = torch.zeros(4, 3)
    draws = [Draw((1, 2), 1, held, path) for path in [(), (7,), (7, 7)]]  # one token of output, and the drafts
    scores = process(RowLogits(logits[:3], 100, start=4), draws)
    assert scores.isneginf().tolist() == [[False, True, True], [False] * 3, [False] * 3]
    assert not logits.isneginf().any()
