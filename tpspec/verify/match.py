"""The rule `match`: a draft token is accepted when it equals the target's own draw, which is what is emitted.

Exact for any drafter that does not look ahead, any tree, and even drafters that share the target's noise: the text is
a function of (prompt, seed) alone. One gather of 8 bytes a row; no q, no normaliser. Knows no shards: `pick` does.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from tpspec.tokens import NO_TOKEN, ROOT, Verdict
from tpspec.verify.draw import pick
from tpspec.verify.noise import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tpspec.tokens import TokenTree
    from tpspec.verify.noise import Noise
    from tpspec.verify.rows import Case, Listener, RowLogits


class Match:
    name = "match"
    draws_at_once = True

    def judge(
        self, cases: Sequence[Case], rows: RowLogits, noise: Noise, listener: Listener | None = None
    ) -> list[Verdict]:
        judged = rows.select([*chain.from_iterable(case.rows() for case in cases)])
        draws = [*chain.from_iterable(case.draws() for case in cases)]
        below = [children(case.tree) for case in cases]  # before anybody waits for what is drawn
        picks = iter(pick(judged, draws, noise, Stream.target, listener))
        return [walk(case, picks, of) for case, of in zip(cases, below, strict=True)]


def children(tree: TokenTree) -> dict[tuple[int, int], int]:
    """Nodes, by the node above and the token: the first of those that are alike."""
    return {(tree.parents[node], tree.tokens[node]): node for node in reversed(range(len(tree)))}


def walk(case: Case, picks: Iterator[int], children: Mapping[tuple[int, int], int]) -> Verdict:
    """Descend while the tree holds the target's draw. Takes one pick for each row of the case."""
    own = (*islice(picks, 1 + len(case.tree)),)
    node: int | None = ROOT
    path: list[int] = []
    tokens: list[int] = []
    while node is not None:
        if (token := own[node + 1]) == NO_TOKEN:
            return Verdict(case.seq, tuple(path), tuple(tokens), own, corrupt=True)
        tokens.append(token)
        if (node := children.get((node, token))) is not None:
            path.append(node)
    return Verdict(case.seq, tuple(path), tuple(tokens), own)
