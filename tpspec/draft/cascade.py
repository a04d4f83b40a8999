"""Several sources in order: where one says little, the next is asked, too. Knows no source by name."""

from __future__ import annotations

from itertools import count
from math import inf
from typing import TYPE_CHECKING

from tpspec.draft.protocol import Needs
from tpspec.errors import UserError
from tpspec.tokens import ROOT, TokenTree, path_odds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.draft.protocol import Ask, Drafter, Pays, Taps
    from tpspec.tokens import Verdict

HOPED = 2.0  # tokens that a source wins where those before it are weak, until it has shown what it does
KEPT = 0.9  # of that, after each time


class Cascade:
    """Asks the first source, then the next where those before it promise less than it usually does, and so on.

    What a source promises are the odds of its tree, less what verifying it takes. One that gives no odds, or whose
    drafts are drawn, is asked where all before it are silent, and is taken as it is: a draw must not be judged by what
    it is. merges: what two sources say of a text is verified as one tree; else the better one is. All of them see all
    taps; a source that needs others than another is refused.
    """

    def __init__(self, drafters: Sequence[Drafter], *, merges: bool = False) -> None:
        self._drafters, self._merges = tuple(drafters), merges
        needs = [drafter.needs for drafter in self._drafters]
        taps = {need.taps for need in needs if need.taps}
        if len(taps) > 1:
            raise UserError("two of the sources tap different layers of the target; should be one of them at most")
        self._hoped = [HOPED if need.gives_odds and not need.gives_q else None for need in needs]
        self.needs = Needs(
            own_model=any(need.own_model for need in needs),
            gives_q=any(need.gives_q for need in needs),
            gives_odds=all(need.gives_odds for need in needs),
            taps=taps.pop() if taps else (),
            whole=max(need.whole for need in needs),
        )

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        first, *rest = self._drafters
        trees = dict(zip((ask.seq for ask in asks), first.propose(asks), strict=True))
        for number, drafter in enumerate(rest, 1):
            weak = [ask for ask in asks if self._is_weak(trees[ask.seq], ask, number)]
            for ask, tree in zip(weak, drafter.propose(weak), strict=True):
                self._learn(number, tree, ask)
                trees[ask.seq] = self._joined(trees[ask.seq], tree, ask)
        return [trees[ask.seq] for ask in asks]

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        for drafter in self._drafters:
            drafter.observe(verdicts, taps)

    def forget(self, seq: int) -> None:
        for drafter in self._drafters:
            drafter.forget(seq)

    def _is_weak(self, tree: TokenTree, ask: Ask, number: int) -> bool:
        hoped = self._hoped[number]
        return not tree or (hoped is not None and promise(tree, ask.costs) < hoped)

    def _learn(self, number: int, tree: TokenTree, ask: Ask) -> None:
        """What there was to win by asking it."""
        hoped = self._hoped[number]
        if hoped is not None:
            drafting = 0.0 if ask.costs is None else ask.costs.draft_s * ask.costs.rate * len(tree)
            won = max(0.0, promise(tree, ask.costs) - drafting)
            self._hoped[number] = KEPT * hoped + (1 - KEPT) * won

    def _joined(self, before: TokenTree, tree: TokenTree, ask: Ask) -> TokenTree:
        if not before or not tree:
            return before or tree
        if self._merges:
            return merged(before, tree, ask.num_tokens)
        return max((before, tree), key=lambda one: promise(one, ask.costs))


def promise(tree: TokenTree, costs: Pays | None) -> float:
    """Tokens that a tree should win beyond what its rows take; infinite where nobody says, or may."""
    if not tree:
        return 0.0
    if tree.odds is None or tree.draws is not None:
        return inf
    price = 0.0 if costs is None else costs.row_s * costs.rate
    return sum(max(0.0, p - price) for p in path_odds(tree.parents, tree.odds))


def merged(one: TokenTree, other: TokenTree, most: int) -> TokenTree:
    """The likeliest nodes of two trees with odds, best first; what both propose is as likely as the likelier says."""
    paths: dict[tuple[int, ...], float] = {}
    for tree in (one, other):
        assert tree.odds is not None
        for node, odds in enumerate(tree.odds):
            tokens = tuple(tree.tokens[above] for above in tree.path(node))
            paths[tokens] = max(odds, paths.get(tokens, 0.0))
    likely: dict[tuple[int, ...], float] = {}
    for tokens in sorted(paths, key=len):
        likely[tokens] = paths[tokens] * likely.get(tokens[:-1], 1.0)
    kept = sorted(likely, key=lambda tokens: (-likely[tokens], len(tokens)))[:most]
    numbers = {(): ROOT} | dict(zip(kept, count()))
    return TokenTree(
        tuple(tokens[-1] for tokens in kept),
        tuple(numbers[tokens[:-1]] for tokens in kept),
        odds=tuple(paths[tokens] for tokens in kept),
    )
