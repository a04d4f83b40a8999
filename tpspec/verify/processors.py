"""From raw logits to scores: bias, penalties, ids withheld or not allowed, temperature; what top-k, top-p, min-p keep.

Pure functions of a row and the prefix before it, drafts on its path included, so that a draft changes nothing but
speed. Softmax of the scores that are kept is the law of the next token. Knows no rules, no noise, no other shard.

Shapes: T rows, R of them of one sequence, V ids of this shard, S listed scores of one row, in descending order.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from tpspec.staged import sent
from tpspec.verify.occurring import Occurring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.request import Sampling
    from tpspec.verify.rows import Draw, RowLogits


def process(rows: RowLogits, draws: Sequence[Draw], *, as_they_are: bool = False) -> Tensor:
    """Scores of each row after all but truncation, float32 [T, V]; -inf at padding. draws[i]: row i.

    The logits handed in are not changed. Rows at temperature 0 keep their scale. as_they_are: logits that no request
    changes may be of another kind, whose numbers are the same.
    """
    if as_they_are and not any(draw.edits or draw.sampling.temperature not in (0, 1) for draw in draws):
        return without_padding(rows.logits_TV, rows)
    scores_TV = _edited(rows.logits_TV, rows.start, draws)
    temperatures = [draw.sampling.temperature or 1.0 for draw in draws]
    if any(temperature != 1 for temperature in temperatures):
        scores_TV = scores_TV / sent(temperatures, scores_TV.device).unsqueeze(1)
    return without_padding(scores_TV, rows)


def without_padding(scores_TV: Tensor, rows: RowLogits) -> Tensor:
    """-inf at ids that do not exist."""
    num_ids = max(0, rows.vocab - rows.start)
    if num_ids >= scores_TV.shape[1]:
        return scores_TV
    padding_V = torch.arange(scores_TV.shape[1], device=scores_TV.device) >= num_ids
    return scores_TV.masked_fill(padding_V, -torch.inf)


def _edited(logits_TV: Tensor, start: int, draws: Sequence[Draw]) -> Tensor:
    """In float32, with bias, penalties, ids withheld and ids not allowed; a copy where there are any."""
    edits = [draw.edits for draw in draws]
    if not any(edits):
        return logits_TV.float()
    logits_TV = logits_TV.to(torch.float32, copy=True)
    # The rows of a sequence stand together, want the same and follow the same text, which may be long.
    for (wanted, *_), alike in groupby(
        range(len(draws)), lambda i: (edits[i], id(draws[i].context), draws[i].sampling)
    ):
        rows = [*alike]
        if wanted:
            _edit(logits_TV[rows[0] : rows[-1] + 1], start, draws[rows[0] : rows[-1] + 1])
    return logits_TV


def _edit(logits_RV: Tensor, start: int, draws: Sequence[Draw]) -> None:
    """In place, rows of one sequence."""
    wanted, device, num_ids = draws[0].sampling, logits_RV.device, logits_RV.shape[1]
    if held := {token - start: value for token, value in wanted.logit_bias.items() if 0 <= token - start < num_ids}:
        logits_RV[:, sent([*held], device)] += sent([*held.values()], device)
    if wanted.penalizes:
        _penalize(logits_RV, start, draws)
    for logits_V, draw in zip(logits_RV, draws, strict=True):
        if columns := [token - start for token in draw.withheld if 0 <= token - start < num_ids]:
            logits_V.index_fill_(0, sent(columns, device), -torch.inf)  # for a number by index torch waits for a card
        if draw.allowed is not None:
            allowed = sent(torch.from_numpy(draw.allowed[start : start + num_ids]), device)
            logits_V[: len(allowed)].masked_fill_(~allowed, -torch.inf)


def _penalize(logits_RV: Tensor, start: int, draws: Sequence[Draw]) -> None:
    """Repetition over prompt and output, then frequency and presence over the output, of which the drafts before a row
    are part; vLLM's order and signs. The C ids that occur are few, and others stay as they are."""
    wanted, one = draws[0].sampling, draws[0]
    occurring = one.occurring or Occurring.wanted(one.context, one.num_prompt, wanted)
    assert occurring is not None, "it penalizes"
    counted = occurring.counts(range(start, start + logits_RV.shape[1]), [draw.path for draw in draws])
    columns_C, prompt_C, output_RC = (sent(torch.from_numpy(counts), logits_RV.device) for counts in counted)
    scores_RC = logits_RV[:, columns_C]
    repeated_RC = torch.where(
        scores_RC > 0, scores_RC / wanted.repetition_penalty, scores_RC * wanted.repetition_penalty
    )
    scores_RC = torch.where((output_RC > 0) | prompt_C, repeated_RC, scores_RC)
    scores_RC -= wanted.frequency_penalty * output_RC
    scores_RC -= wanted.presence_penalty * (output_RC > 0)
    logits_RV[:, columns_C] = scores_RC


def num_kept(scores_S: Tensor, log_total: float, complete: bool, sampling: Sampling) -> int | None:
    """How many of the listed scores top-k, then top-p, then min-p keep; None when that cannot be told from the list.

    scores_S: the largest scores of a row, float64, descending: all of them when `complete`, else every one above some
    bound that is unknown here. log_total: log of the sum of exp over the whole row. Top-k keeps whatever equals the
    k-th; top-p keeps the fewest whose mass is top_p; at least one is kept.
    """
    kept = len(scores_S) if complete else None
    if len(scores_S) == 0:
        return kept
    if 0 < sampling.top_k <= len(scores_S):
        kept = int((scores_S >= scores_S[sampling.top_k - 1]).sum())
    if sampling.top_p < 1:
        if sampling.top_k > 0:  # top-p is of the mass that top-k keeps
            if kept is None:
                return None
            log_total = float(scores_S[:kept].logsumexp(0))
        kept = _nucleus(scores_S, log_total, kept, sampling.top_p)
    return _near_best(scores_S, kept, sampling.min_p) if sampling.min_p > 0 else kept


def _nucleus(scores_S: Tensor, log_total: float, kept: int | None, top_p: float) -> int | None:
    mass_S = (scores_S[:kept] - log_total).exp().cumsum(0)
    if kept is None and mass_S[-1] < top_p:
        return None
    return 1 + int((mass_S[:-1] < top_p).sum())


def _near_best(scores_S: Tensor, kept: int | None, min_p: float) -> int | None:
    near = int((scores_S[:kept] >= scores_S[0] + math.log(min_p)).sum())
    # Nothing listed lies below the bound: unlisted ids may lie above it.
    return None if kept is None and near == len(scores_S) else near
