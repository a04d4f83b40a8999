"""Log-probabilities of a round's tokens, for the requests that ask: which rows tell them, and the deltas they join.

A round in which nobody asks does nothing here. Must not know how a row becomes a log-probability, nor shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tpspec.request import Delta, Logprob
from tpspec.tokens import ROOT
from tpspec.verify.logprobs import logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.engine.plan import Owed, Plan
    from tpspec.tokens import Verdict
    from tpspec.verify.rows import Case, RowLogits


class Scored(NamedTuple):
    """Of one sequence: the tokens of its prompt that this round has read, and those of its verdict."""

    prompt: tuple[Logprob, ...]
    output: tuple[Logprob, ...]


def scored(plan: Plan, verdicts: Sequence[Verdict], rows: RowLogits) -> dict[int, Scored]:
    """By sequence. One gather, and none in a round in which nobody asks; rejected drafts are not in it."""
    if not plan.owed:
        return {}
    judged = {case.seq: (case, verdict) for case, verdict in zip(plan.cases, verdicts, strict=True)}
    wanted = [(owed, *_wanted(owed, judged.get(owed.seq))) for owed in plan.owed]
    row_ids = [row for _, of, _ in wanted for row in of]
    tokens = [token for _, _, of in wanted for token in of]
    told = logprobs(rows.select(row_ids), tokens, max(owed.num_top for owed in plan.owed))
    found: dict[int, Scored] = {}
    for owed, of, _ in wanted:
        mine, told = [_cut(logprob, owed.num_top) for logprob in told[: len(of)]], told[len(of) :]
        found[owed.seq] = Scored(tuple(mine[: len(owed.prompt)]), tuple(mine[len(owed.prompt) :]))
    return found


def joined(deltas: Sequence[Delta], found: dict[int, Scored]) -> list[Delta]:
    """Deltas with what was found; new ones for prompts that are still being read."""
    if not found:
        return list(deltas)
    without = {seq: Delta(seq, ()) for seq, of in found.items() if of.prompt}
    all_deltas = (without | {delta.id: delta for delta in deltas}).values()
    return [_joined(delta, found[delta.id]) if delta.id in found else delta for delta in all_deltas]


def _wanted(owed: Owed, judged: tuple[Case, Verdict] | None) -> tuple[list[int], list[int]]:
    """Rows, and the token that follows each."""
    rows, tokens = [*range(owed.row, owed.row + len(owed.prompt))], list(owed.prompt)
    if judged is not None:
        case, verdict = judged
        rows += [case.row + 1 + node for node in (ROOT, *verdict.path)][: len(verdict.tokens)]
        tokens += verdict.tokens
    return rows, tokens


def _cut(logprob: Logprob, num_top: int) -> Logprob:
    return Logprob(logprob.own, logprob.top[:num_top])


def _joined(delta: Delta, found: Scored) -> Delta:
    return msgspec.structs.replace(delta, logprobs=found.output[: len(delta.tokens)], prompt_logprobs=found.prompt)
