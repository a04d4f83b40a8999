"""Whether the trees of a source pay that are verified whole or not at all, because what they show feeds the next ones.

The `auto` of such a source: as pace.py, a pure function of verdicts and of measured costs that every rank hears. Must
not know the source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.engine.pace import KEPT, PROBE_ROUNDS, Pace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpspec.tokens import TokenTree, Verdict
    from tpspec.verify.rows import Case

BELIEF, BELIEF_WEIGHT = 1.0, 4.0  # tokens that a tree wins until it has shown it, worth so many such trees
MOST_PATIENCE = 32 * PROBE_ROUNDS


class Whole(Pace):
    """size: tokens of a tree, at most.

    What trees won is remembered over all sequences: finding out costs too much for each. A source that does not pay is
    tried again now and then, and after each trial that wins too little, later.
    """

    is_whole = True

    def __init__(self, size: int) -> None:
        super().__init__(gives_odds=False)
        self._size = size
        self._won, self._nodes = BELIEF * BELIEF_WEIGHT, size * BELIEF_WEIGHT  # of late
        self._num_running = 1
        self._silent_rounds, self._patience = 0, PROBE_ROUNDS

    def wanted(self, seq: int) -> int:
        return self._size if self._pays or self._silent_rounds >= self._patience else 0

    def cut(self, trees: Mapping[int, TokenTree], num_running: int) -> dict[int, TokenTree]:
        return dict(trees)

    def learn(self, cases: Sequence[Case], verdicts: Sequence[Verdict]) -> None:
        drafted = [(case.tree, verdict.path) for case, verdict in zip(cases, verdicts, strict=True) if case.tree]
        for tree, path in drafted:
            self._won, self._nodes = self._won * KEPT + len(path), self._nodes * KEPT + len(tree)
        self._num_running = len(cases) or self._num_running
        if self._pays:
            self._patience = PROBE_ROUNDS
        elif drafted and self._silent_rounds:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._silent_rounds = 0 if drafted else self._silent_rounds + bool(cases)

    @property
    def _pays(self) -> bool:
        """Whether every sequence with a tree gives more tokens per second than without."""
        if self.costs is None:
            return True
        takes = self._nodes * (self.costs.row_s + self.costs.draft_s)
        return self._won * self.costs.seconds(self._num_running) > self._num_running * takes
