"""What a drafter has read ahead, as the lead was told: so that an outcome that was foreseen finds its draft at home.

A copy without a cache. It may lack what was lost on the way, and is never wrong about a text: paths are checked against
what the text has become. Must not know links or clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.draft.growth import Growth
from tpspec.draft.protocol import Offer
from tpspec.tokens import NO_DRAFT, ROOT, Branch

if TYPE_CHECKING:
    from tpspec.draft.growth import Node
    from tpspec.draft.protocol import Ask
    from tpspec.tokens import TokenTree


class Foreseen:
    """The futures of every sequence that has been told of. branches: as of the drafter's `Policy`."""

    def __init__(self, branches: int = 1) -> None:
        self._branches = branches
        self._growths: dict[int, Growth] = {}

    def tell(self, ask: Ask) -> None:
        """What a text has become."""
        growth = self._growths.get(ask.seq)
        if growth is None:
            self._growths[ask.seq] = Growth(ask)
        elif new := ask.tokens[len(growth.text) :]:
            growth.commit(new)

    def learn(self, branch: Branch) -> None:
        """Unless the text has gone another way."""
        growth = self._growths.get(branch.seq)
        node = None if growth is None else _reached(growth, branch)
        if growth is not None and node is not None and node.children is None:
            growth.learn(node, Offer(branch.tokens, branch.odds, branch.draws), branch.odds)

    def adopt(self, seq: int, base: int, tree: TokenTree) -> None:
        """What came as an answer: what was lost of it on the way must not hide what follows it."""
        for node in (ROOT, *range(len(tree))):
            if children := tree.children(node):
                tokens = tuple(tree.tokens[child] for child in children)
                odds = tuple(tree.odds[child] if tree.odds is not None else 1.0 for child in children)
                path = tuple(tree.tokens[above] for above in tree.path(node))
                self.learn(Branch(seq, base, path, tokens, odds, tree.draws[node + 1] if tree.draws else None))

    def tree(self, seq: int, most: int) -> TokenTree:
        """The draft for a text as it is; empty when it was not foreseen."""
        growth = self._growths.get(seq)
        return NO_DRAFT if growth is None else growth.tree(most, self._branches)

    def forget(self, seq: int) -> None:
        self._growths.pop(seq, None)


def _reached(growth: Growth, branch: Branch) -> Node | None:
    """The node that `branch` follows, when what the text has gained since lies on its path."""
    since = growth.text[branch.base :]
    if branch.base > len(growth.text) or list(branch.path[: len(since)]) != since:
        return None
    nodes = growth.follow(branch.path[len(since) :])
    if len(nodes) < len(branch.path) - len(since):
        return None
    return nodes[-1] if nodes else growth.root
