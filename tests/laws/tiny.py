"""Tiny models, the law they should have, written plainly and apart from the package, and a loop that speculates.

A model is a function from a prefix to a row of logits. Drafters return trees; each names what it stands for.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from tests.laws.exact import BranchingNoise, every
from tpspec.request import Sampling
from tpspec.tokens import Draws, TokenTree
from tpspec.verify.draw import Draw, pick, sample
from tpspec.verify.noise import Stream
from tpspec.verify.rows import Case, RowLogits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tests.laws.exact import Choices, Known
    from tpspec.verify.allowed import Constraint
    from tpspec.verify.noise import Noise
    from tpspec.verify.rows import Rule

    State = tuple[tuple[int, ...], Known]
    Drafter = Callable[[Sequence[int], Sampling, Noise], TokenTree]

VOCAB = 3
PROMPT = (2, 0)
PLAIN = Sampling(temperature=1.0)
MANY = Sampling(
    temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5, logit_bias={1: 0.6}
)
TRUNCATED = [
    Sampling(temperature=0.7, top_k=2),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.1, min_p=0.3),
    Sampling(temperature=0.9, top_k=2, top_p=0.85, min_p=0.1, repetition_penalty=1.2),
]


@cache
def target(prefix: tuple[int, ...]) -> Tensor:
    return _logits(prefix, 1)


@cache
def other(prefix: tuple[int, ...]) -> Tensor:
    """A model that agrees with the target in part."""
    return 0.5 * target(prefix) + _logits(prefix, 2)


def _logits(prefix: tuple[int, ...], salt: int) -> Tensor:
    state = np.random.default_rng([salt, *prefix])
    return torch.tensor(state.normal(size=VOCAB), dtype=torch.float32)


def law_after(prefix: tuple[int, ...], num_prompt: int, wanted: Sampling) -> np.ndarray:
    """The target's law of the next token: the processors as a reader of the API would write them."""
    row = target(prefix).numpy().copy()
    output = prefix[num_prompt:]
    for token, bias in wanted.logit_bias.items():
        row[token] += np.float32(bias)
    for token in set(prefix):
        factor = np.float32(wanted.repetition_penalty)
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(output):
        row[token] -= np.float32(wanted.frequency_penalty) * np.float32(output.count(token))
        row[token] -= np.float32(wanted.presence_penalty)
    if wanted.temperature == 0:
        return np.eye(VOCAB)[int(row.argmax())]
    probs = _softmax(row / np.float32(wanted.temperature))
    if wanted.top_k:
        probs = _kept(probs, [p >= sorted(probs)[-min(wanted.top_k, VOCAB)] for p in probs])
    probs = _kept(probs, [sum(q for q in probs if q > p) < wanted.top_p for p in probs])
    return _kept(probs, [p >= wanted.min_p * max(probs) for p in probs])


def _softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64))
    return weights / weights.sum()


def _kept(probs: np.ndarray, kept: Sequence[bool]) -> np.ndarray:
    probs = np.where(kept, probs, 0.0)
    return probs / probs.sum()


def plain_law(wanted: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The law of the first `length` tokens, decoded one by one."""
    law = {}
    for text in product(range(VOCAB), repeat=length):
        prefixes = [PROMPT + text[:i] for i in range(length)]
        law[text] = float(np.prod([law_after(p, len(PROMPT), wanted)[t] for p, t in zip(prefixes, text, strict=True)]))
    return law


def speculative_law(
    rule: Rule,
    drafter: Drafter,
    wanted: Sampling,
    length: int,
    noise: type[BranchingNoise] = BranchingNoise,
    bound: Callable[[], Constraint | None] = lambda: None,
) -> dict[tuple[int, ...], float]:
    """The exact law of the first `length` tokens of the real rule, over as many rounds as it takes.

    A state between rounds is the text and what is known of the noise to come; equal states are one. bound: makes the
    constraint of a text that has not begun, which then also cuts the drafts, as an engine has it.
    """
    law: dict[tuple[int, ...], float] = defaultdict(float)
    states: dict[State, float] = {(PROMPT, frozenset()): 1.0}
    while states:
        state = min(states, key=lambda state: len(state[0]))
        weight = states.pop(state)
        for (text, known), p in every(
            lambda choices, state=state: after_a_round(rule, drafter, wanted, state, noise, choices, bound())
        ).items():
            if len(text) >= len(PROMPT) + length:
                law[text[len(PROMPT) :][:length]] += weight * p
            else:
                states[text, known] = states.get((text, known), 0.0) + weight * p
    return law


def after_a_round(
    rule: Rule,
    drafter: Drafter,
    wanted: Sampling,
    state: State,
    noise: type[BranchingNoise],
    choices: Choices,
    bound: Constraint | None = None,
) -> State:
    text, known = state
    chance = noise(choices, known, len(text))
    text += round_of(rule, drafter, wanted, text, chance, bound)
    return text, chance.left(len(text))


def round_of(
    rule: Rule,
    drafter: Drafter,
    wanted: Sampling,
    text: tuple[int, ...],
    noise: Noise,
    bound: Constraint | None = None,
) -> tuple[int, ...]:
    """The tokens one round emits."""
    tree = drafter(text, wanted, noise)
    if bound is not None:
        tree = bound.draft(text[len(PROMPT) :], tree)
    case = Case(0, 0, tree, text, len(PROMPT), wanted, bound)
    verdict = rule.judge([case], RowLogits(rows_of(case), VOCAB), noise)[0]
    assert verdict.tokens[:-1] == tuple(tree.tokens[node] for node in verdict.path)
    assert list(verdict.path) == tree.path(verdict.path[-1] if verdict.path else -1)
    return verdict.tokens


def rows_of(case: Case) -> Tensor:
    return torch.stack([target((*draw.context, *draw.path)) for draw in case.draws()])


def row(prefix: Sequence[int]) -> RowLogits:
    return RowLogits(other(tuple(prefix)).unsqueeze(0), VOCAB)


def silent(prefix: Sequence[int], wanted: Sampling, noise: Noise) -> TokenTree:
    return TokenTree()


def certain_chain(prefix: Sequence[int], wanted: Sampling, noise: Noise) -> TokenTree:
    """Two argmax tokens."""
    first = int(other(tuple(prefix)).argmax())
    return TokenTree.chain([first, int(other((*prefix, first)).argmax())])


def certain_tree(prefix: Sequence[int], wanted: Sampling, noise: Noise) -> TokenTree:
    """The two likeliest tokens, and one or two more under each."""
    first, second = other(tuple(prefix)).argsort(descending=True).tolist()[:2]
    third = int(other((*prefix, first)).argmax())
    return TokenTree((first, second, third, (third + 1) % VOCAB, first), (-1, -1, 0, 0, 1))


def coupled_chain(prefix: Sequence[int], wanted: Sampling, noise: Noise) -> TokenTree:
    """Two tokens drawn with the target's own noise."""
    tokens: list[int] = []
    for _ in range(2):
        draw = Draw(tuple(prefix), len(PROMPT), wanted, tuple(tokens))
        tokens += pick(row((*prefix, *tokens)), [draw], noise)
    return TokenTree.chain(tokens)


def sampled_chain(
    prefix: Sequence[int], wanted: Sampling, noise: Noise, support: int = 2, length: int = 2
) -> TokenTree:
    """Tokens drawn from the `support` likeliest, with what they were drawn from."""
    tokens: list[int] = []
    drawn: list[Draws | None] = []
    for _ in range(length):
        draw = Draw(tuple(prefix), len(PROMPT), wanted, tuple(tokens))
        ((token, draws),) = sample(row((*prefix, *tokens)), [draw], noise, support)
        tokens, drawn = [*tokens, token], [*drawn, draws]
    return TokenTree.chain(tokens, drawn)


def sampled_tree(prefix: Sequence[int], wanted: Sampling, noise: Noise) -> TokenTree:
    """Two tokens drawn without replacement, and one more, certain, under the first."""
    draws = Draws(tuple(range(VOCAB)), tuple(other(tuple(prefix)).double().softmax(0).tolist()))
    first, second = without_replacement(draws, 2, wanted.seed, len(prefix), noise)
    third = int(other((*prefix, first)).argmax())
    return TokenTree((first, second, third), (-1, -1, 0), (draws, None, None, None))


def without_replacement(draws: Draws, num: int, seed: int, position: int, noise: Noise) -> list[int]:
    """Tokens drawn one after the other, each with a coin of its own."""
    left = dict(zip(draws.ids, draws.probs, strict=True))
    tokens: list[int] = []
    for index in range(num):
        tokens.append(_drawn(left, noise.uniform(seed, position, Stream.draft, index)))
        del left[tokens[-1]]
    return tokens


def _drawn(left: dict[int, float], coin: float) -> int:
    reached = 0.0
    for token, p in left.items():
        reached += p
        if coin * sum(left.values()) < reached:
            return token
    return token


def chain_of_one(prefix: Sequence[int], wanted: Sampling, noise: Noise) -> TokenTree:
    return sampled_chain(prefix, wanted, noise, length=1)


def seeded(wanted: Sampling, seed: int) -> Sampling:
    return msgspec.structs.replace(wanted, seed=seed)
