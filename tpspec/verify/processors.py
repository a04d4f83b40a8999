"""From raw logits to scores: bias, penalties, ids withheld or not allowed, temperature; what top-k, top-p, min-p keep.

Pure functions of a row and the prefix before it, drafts on its path included, so that a draft changes nothing but
speed. Softmax of the scores that are kept is the law of the next token. Knows no rules, no noise, no other shard.

Shapes: T rows, V ids of this shard, S listed scores of one row, in descending order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.request import Sampling
    from tpspec.verify.rows import Draw, RowLogits


def process(rows: RowLogits, draws: Sequence[Draw]) -> Tensor:
    """Scores of each row after all but truncation, float32 [T, V]; -inf at padding. draws[i]: row i.

    The logits handed in are not changed. Rows at temperature 0 keep their scale.
    """
    scores_TV = _edited(rows.logits_TV.float(), rows.start, draws)
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
    """Bias, penalties, ids withheld and ids not allowed; a copy only when there are any."""
    edits = [i for i, draw in enumerate(draws) if draw.edits]
    if edits:
        logits_TV = logits_TV.clone()
    counted: dict[int, tuple[Tensor, Tensor]] = {}  # by context: the rows of a sequence share one, and it may be long
    for i in edits:
        _add_bias(logits_TV[i], start, draws[i].sampling.logit_bias)
        if draws[i].sampling.penalizes:
            if id(draws[i].context) not in counted:
                counted[id(draws[i].context)] = _counted(logits_TV[i], start, draws[i])
            logits_TV[i] = _penalized(logits_TV[i], start, draws[i], *counted[id(draws[i].context)])
        held = [token - start for token in draws[i].withheld if start <= token < start + logits_TV.shape[1]]
        if held:  # index_fill_, for torch waits for a card where it assigns a number by index
            logits_TV[i].index_fill_(0, sent(held, logits_TV.device), -torch.inf)
        if (ids := draws[i].allowed) is not None:
            allowed = sent(torch.from_numpy(ids[start : start + logits_TV.shape[1]]), logits_TV.device)
            logits_TV[i, : len(allowed)].masked_fill_(~allowed, -torch.inf)
    return logits_TV


def _add_bias(logits_V: Tensor, start: int, bias: dict[int, float]) -> None:
    held = {token - start: value for token, value in bias.items() if start <= token < start + len(logits_V)}
    if held:
        logits_V[sent([*held], logits_V.device)] += sent([*held.values()], logits_V.device)


def _penalized(logits_V: Tensor, start: int, draw: Draw, prompt_V: Tensor, output_V: Tensor) -> Tensor:
    """Repetition over prompt and output, then frequency and presence over the output; vLLM's order and signs.

    prompt_V, output_V: counts in the context; the drafts before the row are output too.
    """
    wanted = draw.sampling
    output_V = output_V + _counts(logits_V, start, draw.path)
    repeated_V = torch.where(logits_V > 0, logits_V / wanted.repetition_penalty, logits_V * wanted.repetition_penalty)
    logits_V = torch.where(output_V + prompt_V > 0, repeated_V, logits_V)
    return logits_V - wanted.frequency_penalty * output_V - wanted.presence_penalty * (output_V > 0)


def _counted(logits_V: Tensor, start: int, draw: Draw) -> tuple[Tensor, Tensor]:
    prompt, output = draw.context[: draw.num_prompt], draw.context[draw.num_prompt :]
    return _counts(logits_V, start, prompt), _counts(logits_V, start, output)


def _counts(logits_V: Tensor, start: int, tokens: Sequence[int]) -> Tensor:
    """How often each id of the shard occurs, float32 [V]."""
    columns = np.array(tokens, dtype=np.int64) - start  # numpy: torch reads a list in three times its time
    held = columns[(columns >= 0) & (columns < len(logits_V))]
    counts_V = np.bincount(held, minlength=len(logits_V)).astype(np.float32)
    return sent(torch.from_numpy(counts_V), logits_V.device)


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
