"""The target drafts for itself: n-grams that it makes in spare rows of its own rounds are the guesses of later ones.

Fu et al., "Lookahead decoding" (arXiv 2402.02057; github.com/hao-ai-lab/LookaheadDecoding). Beside the guesses, a round
reads a window of columns, each a few tokens that once followed one another in the target's mouth; what the target says
after each column makes it an n-gram, and the column moves on by a token (a Jacobi iteration). A column stands behind
the first tokens of the columns before it, so the window is a tree and needs no mask of its own.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tpspec.draft.protocol import Needs
from tpspec.tokens import ROOT, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.draft.protocol import Ask, Taps
    from tpspec.tokens import Verdict

STRIDE = 7919  # a prime: where in a text the first token of a column is taken from


class Lookahead:
    """Proposes n-grams that begin with the root, and a window to make new ones. Needs a rule that tells its picks.

    window: columns. level: n of the n-grams. guesses: of those that begin with one token, as many are kept and tried.
    """

    def __init__(self, *, window: int = 7, level: int = 5, guesses: int = 7) -> None:
        self.needs = Needs(whole=(window + guesses) * (level - 1))
        self._window, self._level, self._guesses = window, level, guesses
        self._texts: dict[int, _Text] = {}

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        return [self._propose(ask) for ask in asks]

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        for verdict in verdicts:
            if verdict.seq in self._texts:
                self._texts[verdict.seq].hear(verdict.picks)

    def forget(self, seq: int) -> None:
        self._texts.pop(seq, None)

    def _propose(self, ask: Ask) -> TokenTree:
        text = self._texts.get(ask.seq)
        if text is None:
            text = self._texts[ask.seq] = _Text(self._level, self._guesses)
        text.become(ask.tokens)
        return text.tree(self._window, ask.num_tokens)


class _Text:
    """Of one sequence the n-grams and the window."""

    def __init__(self, level: int, guesses: int) -> None:
        self._level, self._guesses = level, guesses
        self._tokens: list[int] = []
        self._pool: dict[int, dict[tuple[int, ...], None]] = defaultdict(dict)  # by first token, the latest last
        self._columns: list[list[int]] = []
        self._ends: list[int | None] = []  # of each column the last node, in the tree that is on its way

    def become(self, tokens: Sequence[int]) -> None:
        for token in tokens[len(self._tokens) :]:
            self._tokens.append(token)
            self._keep(tuple(self._tokens[-self._level :]))

    def tree(self, num_columns: int, most: int) -> TokenTree:
        """Guesses in at most half of it, and columns in the rest."""
        while len(self._columns) < num_columns:
            at = len(self._columns) * STRIDE % len(self._tokens)
            self._columns.append([self._tokens[at]])
        grown = _Lines()
        for guess in reversed(self._pool.get(self._tokens[-1], {})):
            grown.add(guess, most // 2)
        firsts = [column[0] for column in self._columns]
        lines = [(*firsts[: i + 1], *column[1:]) for i, column in enumerate(self._columns)]
        self._ends = [grown.add(line, most) for line in lines]
        return TokenTree(tuple(grown.tokens), tuple(grown.parents))

    def hear(self, picks: Sequence[int]) -> None:
        """The target's next token at the root and at each node that was verified: each column moves on."""
        for column, end in zip(self._columns, self._ends, strict=False):
            if end is not None and end + 1 < len(picks):
                column.append(picks[end + 1])
                if len(column) == self._level:
                    self._keep(tuple(column))
                    del column[0]
        self._ends = []

    def _keep(self, gram: tuple[int, ...]) -> None:
        if len(gram) == self._level:
            kept = self._pool[gram[0]]
            kept.pop(gram[1:], None)
            kept[gram[1:]] = None
            if len(kept) > self._guesses:
                del kept[next(iter(kept))]


class _Lines:
    """Lines of tokens as a tree: what they begin with in common stands once."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, line: Sequence[int], most: int) -> int | None:
        """The node at its end; None where the tree, with at most `most` nodes, has no room for all of it."""
        node = ROOT
        for token in line:
            if (node, token) not in self._nodes:
                if len(self.tokens) >= most:
                    return None
                self._nodes[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = self._nodes[node, token]
        return node
