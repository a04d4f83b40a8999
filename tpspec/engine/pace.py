"""How many draft tokens pay: as long as the next one brings more than it costs. The `auto` of a draft length.

A pure function of verdicts and of the lead's measured costs, which every rank hears as news: so all ranks agree. Must
not know a source, a clock or a placement. With no costs yet, everything is drafted and everything is verified.

A round of k draft tokens gives 1 + P1 + ... + Pk tokens, Pi the odds that the path to the i-th is accepted. The next
one pays if its P, per second that it adds, is more than the round gives per second without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from tpspec.tokens import ROOT, path_odds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpspec.comm.messages import Costs
    from tpspec.tokens import TokenTree, Verdict
    from tpspec.verify.rows import Case

MOST = 16  # draft tokens that are asked for at most
PROBE_ROUNDS = 32  # a source that does not pay is tried again after so many rounds without its drafts
PROBE_TOKENS = 2
# What a sequence accepts until it has shown it, worth so many tokens of evidence; and what it keeps of that each round.
BELIEF, BELIEF_WEIGHT, KEPT = 0.7, 4.0, 0.95


@dataclass(slots=True)
class _Record:
    """What a sequence accepted, of what was tried, of late; and rounds since the last draft."""

    accepted: float = BELIEF * BELIEF_WEIGHT
    tried: float = BELIEF_WEIGHT
    silent_rounds: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.tried


class Pace:
    """Decides for each sequence how many tokens are asked for, and how much of what came is verified.

    gives_odds: the source's trees say how likely their nodes are and cost next to nothing: it is asked for the most,
    and what does not pay is cut off afterwards. is_silent: it has none, and nothing is asked for.
    """

    is_whole = False  # whether trees are verified whole or not at all

    def __init__(self, *, gives_odds: bool, is_silent: bool = False) -> None:
        self.costs: Costs | None = None
        self.is_silent, self._gives_odds = is_silent, gives_odds
        self._records: dict[int, _Record] = {}

    def wanted(self, seq: int) -> int:
        """Draft tokens to ask for."""
        if self.is_silent:
            return 0
        if self._gives_odds or self.costs is None:
            return MOST
        record = self._records.setdefault(seq, _Record())
        paying = self._paying(record.acceptance, self.costs)
        return paying or (PROBE_TOKENS if record.silent_rounds >= PROBE_ROUNDS else 0)

    def cut(self, trees: Mapping[int, TokenTree], num_running: int) -> dict[int, TokenTree]:
        """The trees without the nodes that do not pay, over all sequences of the round. Nodes stand best first."""
        if self.costs is None:
            return dict(trees)
        odds = {seq: self._path_odds(seq, tree) for seq, tree in trees.items()}
        best_first = sorted((-p, index, seq) for seq, paths in odds.items() for index, p in enumerate(paths))
        sizes = dict.fromkeys(trees, 0)
        tokens, seconds = float(num_running), self.costs.seconds(num_running)
        for minus_p, _, seq in best_first:
            if -minus_p * seconds <= self.costs.row_s * tokens:
                break
            tokens -= minus_p
            seconds += self.costs.row_s
            sizes[seq] += 1
        return {seq: tree.pruned(self._probing(seq, sizes[seq])) for seq, tree in trees.items()}

    def learn(self, cases: Sequence[Case], verdicts: Sequence[Verdict]) -> None:
        """What became of the drafts of a round."""
        for case, verdict in zip(cases, verdicts, strict=True):
            if (record := self._records.get(case.seq)) is None:
                record = self._records[case.seq] = _Record()
            record.silent_rounds = 0 if case.tree else record.silent_rounds + 1
            if case.tree:
                good, end = len(verdict.path), verdict.path[-1] if verdict.path else ROOT
                record.accepted = record.accepted * KEPT + good
                record.tried = record.tried * KEPT + good + (end in case.tree.parents)

    def forget(self, seq: int) -> None:
        self._records.pop(seq, None)

    def _paying(self, acceptance: float, costs: Costs) -> int:
        """The chain length with the most tokens per second, 0 when none beats decoding plainly."""
        each, tokens, seconds = costs.row_s + costs.draft_s, 1.0, costs.round_s
        for length in range(MOST):
            more = acceptance ** (length + 1)
            # Nor does any beyond then: each brings less than the one before, and costs as much.
            if more * seconds <= tokens * each:
                return length
            tokens, seconds = tokens + more, seconds + each
        return MOST

    def _path_odds(self, seq: int, tree: TokenTree) -> list[float]:
        """Of each node, that it is accepted with all above it; never more than that of a node before it."""
        return list(accumulate(path_odds(tree.parents, self._odds(seq, tree)), min))

    def _odds(self, seq: int, tree: TokenTree) -> Sequence[float]:
        """Of each node, that it is accepted if its parent is.

        Where the tokens were drawn, their own odds must not decide: a draw that is dropped for its value no longer
        comes from the q that it is judged by. There, and where nobody gave odds, a node is as likely as what the
        sequence accepts, if none of its elder siblings is accepted.
        """
        if tree.odds is not None and tree.draws is None:
            return tree.odds
        acceptance = self._records.setdefault(seq, _Record()).acceptance
        elder = [tree.parents[:node].count(parent) for node, parent in enumerate(tree.parents)]
        return [acceptance * (1 - acceptance) ** num for num in elder]

    def _probing(self, seq: int, size: int) -> int:
        """A source without odds that was asked in order to be tried is tried."""
        record = self._records.get(seq)
        trying = not self._gives_odds and record is not None and record.silent_rounds >= PROBE_ROUNDS
        return max(size, PROBE_TOKENS) if trying else size
