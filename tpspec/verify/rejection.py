"""The rule `rejection`: accept a draft token with probability min(1, p/q), else draw from what q leaves of p.

Leviathan et al. (arXiv 2211.17192) on a chain; recursive rejection sampling over the children of a node on a tree,
without replacement (Sequoia, arXiv 2402.12374) or, where a row has no draws, against a point mass at each child.
Draws with noise of its own: the drafter's noise chose the token that is judged. Knows no shards: `laws` does.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from tpspec.tokens import ROOT, Verdict
from tpspec.verify.law import laws
from tpspec.verify.noise import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tpspec.tokens import Draws, TokenTree
    from tpspec.verify.law import Law
    from tpspec.verify.noise import Noise
    from tpspec.verify.rows import Case, Listener, RowLogits


class Rejection:
    name = "rejection"
    draws_at_once = False

    def judge(
        self, cases: Sequence[Case], rows: RowLogits, noise: Noise, listener: Listener | None = None
    ) -> list[Verdict]:
        if not cases:
            return []
        judged = rows.select([*chain.from_iterable(case.rows() for case in cases)])
        draws = [*chain.from_iterable(case.draws() for case in cases)]
        asked = [_asked(case.tree, node) for case in cases for node in range(ROOT, len(case.tree))]
        found = iter(laws(judged, draws, asked, noise))
        return [walk(case, found, noise) for case in cases]


def _asked(tree: TokenTree, node: int) -> list[int]:
    """The ids whose probability the judgement of a node's children needs."""
    children = tree.children(node)
    draws = _draws(tree, node)
    listed = draws.ids if draws is not None and children else ()
    return sorted({*listed, *(tree.tokens[child] for child in children)})


def _draws(tree: TokenTree, node: int) -> Draws | None:
    return None if tree.draws is None else tree.draws[node + 1]


def walk(case: Case, found: Iterator[Law | None], noise: Noise) -> Verdict:
    """Descend while a child is accepted. Takes one law for each row of the case."""
    own = [next(found) for _ in case.rows()]
    node: int | None = ROOT
    path: list[int] = []
    tokens: list[int] = []
    while node is not None:
        law, position = own[node + 1], len(case.context) + len(path)
        if law is None:
            return Verdict(case.seq, tuple(path), tuple(tokens), corrupt=True)
        node, token = judge_children(case, node, law, position, noise)
        path += [] if node is None else [node]
        tokens.append(token)
    return Verdict(case.seq, tuple(path), tuple(tokens))


def judge_children(case: Case, node: int, law: Law, position: int, noise: Noise) -> tuple[int | None, int]:
    """The accepted child of a node and its token, or None and a token of the law that all refusals leave."""
    tree, seed = case.tree, case.sampling.seed
    children = tree.children(node)
    tokens = [tree.tokens[child] for child in children]
    proposals = proposals_of(_draws(tree, node), tokens)
    for index, (child, token, q) in enumerate(zip(children, tokens, proposals, strict=True)):
        if q.get(token, 0.0) == 0:
            continue  # q could not have drawn it, so it says nothing: neither accepted nor counted as refused
        if accepts(noise.uniform(seed, position, Stream.accept, index), law.probs.get(token, 0.0), q[token]):
            return child, token
        law = law.minus(q)
    return None, law.draw(noise.uniform(seed, position, Stream.residual, 0))


def accepts(u: float, p: float, q: float) -> bool:
    """With probability min(1, p/q). Strict: p = 0 must lose to any u, be it 0."""
    return u * q < p


def proposals_of(draws: Draws | None, tokens: Sequence[int]) -> Iterator[Mapping[int, float]]:
    """The distribution each child was drawn from, given the children before it."""
    if draws is None:
        yield from ({token: 1.0} for token in tokens)
        return
    left = dict(zip(draws.ids, draws.probs, strict=True))
    for token in tokens:
        yield left
        left = _without(left, token)


def _without(q: Mapping[int, float], token: int) -> dict[int, float]:
    left = {other: p for other, p in q.items() if other != token}
    total = sum(left.values())
    return {other: p / total for other, p in left.items()} if total > 0 else {}
