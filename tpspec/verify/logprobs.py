"""How likely tokens were by the target's raw logits, before any processor, and which ids were likeliest.

Raw as vLLM's default (`raw_logprobs`): they say what the model thinks, whatever a request asks of its sampling. Apart
from verdicts, which need none of this: nobody pays for it who does not ask. Knows no trees and no requests.

Shapes: T rows, V ids of this shard, N shards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tpspec.request import Logprob
from tpspec.staged import sent
from tpspec.verify.processors import without_padding
from tpspec.verify.shards import exchange, hear_top, log_mass, merged_log_mass, tell_top

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.verify.rows import RowLogits

BLOCK = 32  # rows at a time: masses are summed in float64, of which a chunk of a prompt would need gigabytes


def logprobs(rows: RowLogits, tokens: Sequence[int], num_top: int) -> list[Logprob]:
    """Log-softmax of row i at tokens[i], and its num_top likeliest ids. One gather, by `gather_logits`, or none."""
    if not tokens:
        return []
    parts = [_tell(rows, first, tokens[first : first + BLOCK], num_top) for first in range(0, len(tokens), BLOCK)]
    told = exchange(replace(rows, gather=rows.gather_logits), [torch.cat(part) for part in zip(*parts, strict=True)])
    own_NT, scores_NTC, ids_NTC, top_NT, sum_NT = told
    totals_T = merged_log_mass(top_NT, sum_NT)
    owns = (own_NT.amax(0).double() - totals_T).tolist()
    scores_TS, ids_TS = hear_top(scores_NTC, ids_NTC)
    values = (scores_TS - totals_T.unsqueeze(1)).tolist()
    return [_logprob(*row, num_top) for row in zip(owns, ids_TS.tolist(), values, strict=True)]


def _tell(rows: RowLogits, first: int, tokens: Sequence[int], num_top: int) -> list[Tensor]:
    """Of some rows of this shard: the score of each row's own token (-inf where not held), the largest, the mass."""
    scores_TV = without_padding(rows.logits_TV[first : first + len(tokens)].float(), rows)
    columns_T = sent(tokens, scores_TV.device) - rows.start
    held_T = (columns_T >= 0) & (columns_T < scores_TV.shape[1])
    own_T = scores_TV.gather(1, columns_T.where(held_T, 0).unsqueeze(1)).squeeze(1).masked_fill(~held_T, -torch.inf)
    return [own_T, *tell_top(scores_TV, rows.start, max(num_top, 1)), *log_mass(scores_TV)]


def _logprob(own: float, ids: list[int], values: list[float], num_top: int) -> Logprob:
    top = zip(ids[:num_top], values[:num_top], strict=True)
    return Logprob(own, tuple((token, value) for token, value in top if value > -torch.inf))
