"""Drawing a next token for each row: `pick`, as the target draws (and drafters that share its noise), and `sample`,
as a drafter draws when the rule asks from what. Knows no trees and no rules.

Shapes: T rows, V ids of this shard, S ids that may be drawn.
"""

from __future__ import annotations

from itertools import islice
from math import exp, fsum, inf, isfinite
from typing import TYPE_CHECKING

import torch

from tpspec.tokens import NO_TOKEN, Draws
from tpspec.verify.largest import SHORT, some_largest
from tpspec.verify.noise import Stream
from tpspec.verify.processors import num_kept, process
from tpspec.verify.rows import Draw, RowLogits, take
from tpspec.verify.shards import (
    NUM_CANDIDATES,
    Exchange,
    exchange,
    hear_candidates,
    hear_top,
    hear_winners,
    log_mass,
    merged_log_mass,
    tell_candidates,
    tell_top,
    tell_winners,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.request import Sampling
    from tpspec.verify.noise import Noise
    from tpspec.verify.rows import Listener

__all__ = ["Draw", "pick", "rank", "sample"]

LISTED = 64  # likeliest ids among which a ranking looks
NOTHING = Draws((), ())


def pick(
    rows: RowLogits,
    draws: Sequence[Draw],
    noise: Noise,
    stream: Stream = Stream.target,
    listener: Listener | None = None,
) -> list[int]:
    """The next token of each row: argmax at temperature 0, else argmax of score + Gumbel noise of `stream`.

    draws[i] belongs to row i; NO_TOKEN where a score is NaN or infinite, or all are -inf. One gather of 8 bytes a row;
    rows that truncate tell their candidates in it instead.
    A drafter with logits of its own, unsharded, draws what the target would (Daliri, Musco, Suresh, arXiv 2408.07978).
    """
    if not draws:
        return []
    # A card looks for a winner among numbers of any such kind, and saves a copy.
    is_taken = rows.logits_TV.is_cuda and rows.logits_TV.dtype in SHORT
    truncates = any(draw.sampling.truncates for draw in draws)
    scores_TV = process(rows, draws, as_they_are=is_taken and not truncates)
    tokens, _ = _picked(rows, scores_TV, draws, noise, stream, listener=listener)
    return tokens


def is_told_once(sampling: Sampling) -> bool:
    """Whether one gather tells enough for a draw, or all but always: that of rows that keep few ids, or all."""
    return not sampling.truncates or 0 < sampling.top_k <= NUM_CANDIDATES // 2


def _picked(
    rows: RowLogits,
    scores_TV: Tensor,
    draws: Sequence[Draw],
    noise: Noise,
    stream: Stream,
    also: Sequence[Tensor] = (),
    listener: Listener | None = None,
) -> tuple[list[int], list[Tensor]]:
    """`pick` of scores, and what every shard tells `also` in the same gather."""
    plain = [i for i, draw in enumerate(draws) if not draw.sampling.truncates]
    cut = [i for i, draw in enumerate(draws) if draw.sampling.truncates]
    parts: list[Tensor] = []  # nothing is computed for a kind that no row is of
    if plain:
        parts += tell_winners(take(scores_TV, plain), [draws[i] for i in plain], noise, stream, rows.start)
    if cut:
        cut_TV = take(scores_TV, cut)
        if listener is not None and scores_TV is rows.logits_TV:
            cut_TV = cut_TV.clone()  # he may have these overwritten before all of them are asked for
        candidates = tell_candidates(cut_TV, rows.start)
        parts += candidates
    asked = Exchange(rows, [*parts, *also])
    if listener is not None:
        listener.asked()
    told = asked.here()
    tokens = hear_winners(told[0], told[1]) if plain else []
    rest = map(torch.from_numpy, told[2:] if plain else told)
    if cut:
        samplings, heard = [draws[i].sampling for i in cut], [*islice(rest, len(candidates))]
        supports = hear_candidates(rows, cut_TV, samplings, heard, None if listener is None else listener.given_up)
        best = dict(zip(plain, tokens, strict=True))
        for i, support in zip(cut, supports, strict=True):
            best[i] = _best_of(support.scores_S, support.ids_S, draws[i], noise, stream)
        tokens = [best[i] for i in range(len(draws))]
    if listener is not None:
        listener.drawn(tokens)  # before anything is let go of: a device's memory, too, takes its time
    return tokens, [*rest]


def _best_of(scores_S: Tensor, ids_S: Tensor, draw: Draw, noise: Noise, stream: Stream) -> int:
    if not len(ids_S):
        return NO_TOKEN
    return noise.best_of(scores_S, ids_S, draw.sampling.seed, draw.position, stream)


def rank(rows: RowLogits, draws: Sequence[Draw], width: int, noise: Noise) -> list[tuple[tuple[int, ...], list[float]]]:
    """For each row the token that `pick` gives and those next to it, at most `width`, with how likely each looks.

    Beyond the first, ranked among the likeliest ids by score plus the noise of the target's own draw; how likely is
    the softmax of that (at temperature 0 of the scores). Nothing of a row that cannot be drawn from. One gather, as
    `pick`, and 8 bytes for each id listed.
    """
    if not draws:
        return []
    rows = _spread(rows, draws)
    if rows.listed_V is not None:
        return _rank_listed(rows, draws, width, noise)
    scores_TV = process(rows, draws)
    winners, heard = _picked(rows, scores_TV, draws, noise, Stream.target, tell_top(scores_TV, rows.start, LISTED))
    scores_TS, ids_TS = hear_top(*heard)
    perturbed_TS = _perturbed(scores_TS, ids_TS, draws, noise).tolist()
    return [_ranked(*row, width) for row in zip(winners, ids_TS.tolist(), perturbed_TS, strict=True)]


def _spread(rows: RowLogits, draws: Sequence[Draw]) -> RowLogits:
    """Over the whole vocabulary where a request speaks of ids, else as they are: most ids have no logit there."""
    if rows.listed_V is None or not any(draw.edits for draw in draws):
        return rows
    spread_TV = rows.logits_TV.new_full((len(draws), rows.vocab), -torch.inf)
    spread_TV[:, rows.listed_V] = rows.logits_TV
    return RowLogits(spread_TV, rows.vocab)


def _rank_listed(
    rows: RowLogits, draws: Sequence[Draw], width: int, noise: Noise
) -> list[tuple[tuple[int, ...], list[float]]]:
    """`rank` of rows that list their ids. The first token too comes from the likeliest ids: a guess, and quick."""
    assert rows.listed_V is not None
    scores_TV = process(rows, draws)
    scores_TS, columns_TS = some_largest(scores_TV, min(LISTED, scores_TV.shape[1]))
    parts = [scores_TS.double(), rows.listed_V[columns_TS]]
    if any(draw.sampling.truncates for draw in draws):
        parts.append(scores_TV.double().logsumexp(1))
    scores_TS, ids_TS, *told = (part[0] for part in exchange(rows, parts))
    totals = told[0].tolist() if told else [0.0] * len(draws)
    perturbed_TS = _perturbed(scores_TS, ids_TS, draws, noise)
    ranked: list[tuple[tuple[int, ...], list[float]]] = []
    for i, draw in enumerate(draws):
        kept = num_kept(scores_TS[i], totals[i], False, draw.sampling) if draw.sampling.truncates else None
        ranked.append(_ranked(None, ids_TS[i, :kept].tolist(), perturbed_TS[i, :kept].tolist(), width))
    return ranked


def _perturbed(scores_TS: Tensor, ids_TS: Tensor, draws: Sequence[Draw], noise: Noise) -> Tensor:
    """With the noise of the target's own draw, in rows that have a temperature."""
    warm = [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if not warm:
        return scores_TS
    seeds, positions = [draws[i].sampling.seed for i in warm], [draws[i].position for i in warm]
    noise_WS = noise.gumbels(seeds, positions, Stream.target, take(ids_TS, warm))
    if len(warm) == len(draws):
        return scores_TS.double() + noise_WS
    return scores_TS.double().index_add(0, torch.tensor(warm), noise_WS)


def _ranked(
    winner: int | None, ids: Sequence[int], scores: Sequence[float], width: int
) -> tuple[tuple[int, ...], list[float]]:
    """winner: whose odds are those of the likeliest where it is not listed; None: that is the winner."""
    top = max(scores, default=-inf)
    if not isfinite(top) or winner == NO_TOKEN:
        return (), []
    masses = [exp(score - top) for score in scores]
    whole = fsum(masses)
    best = scores.index(top)
    winner = ids[best] if winner is None else winner
    first = ids.index(winner) if winner in ids else best
    # Ordered by scores, which are the same on all machines.
    ordered = sorted(range(len(ids)), key=scores.__getitem__, reverse=True) if width > 1 else []
    others = [i for i in ordered if ids[i] != winner and masses[i] > 0][: width - 1]
    return (winner, *(ids[i] for i in others)), [masses[i] / whole for i in (first, *others)]


def sample(rows: RowLogits, draws: Sequence[Draw], noise: Noise, support: int) -> list[tuple[int, Draws]]:
    """A token for each row, drawn from its `support` likeliest ids with the drafter's own noise, and exactly from what.

    For the `rejection` rule; at temperature 0 the draw is certain. NO_TOKEN, and nothing, of a row that cannot be drawn
    from. One gather.
    """
    if not draws:
        return []
    rows = _spread(rows, draws)
    scores_TV = process(rows, draws)
    scores_TC, ids_TC = tell_top(scores_TV, rows.start, support)
    if rows.listed_V is not None:
        ids_TC = rows.listed_V[ids_TC.clamp(max=scores_TV.shape[1] - 1)]  # beyond the last there is no score
    *top, peak_NT, sum_NT = exchange(rows, [scores_TC, ids_TC, *log_mass(scores_TV)])
    scores_TS, ids_TS = hear_top(*top)
    totals = merged_log_mass(peak_NT, sum_NT).tolist()
    return [_sampled(draw, ids_TS[i], scores_TS[i], totals[i], noise) for i, draw in enumerate(draws)]


def _sampled(draw: Draw, ids_S: Tensor, scores_S: Tensor, log_total: float, noise: Noise) -> tuple[int, Draws]:
    if not isfinite(log_total):
        return NO_TOKEN, NOTHING
    if draw.sampling.temperature == 0:
        token = int(ids_S[0])
        return token, Draws((token,), (1.0,))
    # None: the target's truncation reaches beyond the list, so the whole list is kept
    kept = num_kept(scores_S, log_total, False, draw.sampling)
    scores_S, ids_S = scores_S[:kept], ids_S[:kept]
    ids_S, order = ids_S[scores_S > -float("inf")].sort()
    scores_S = scores_S[scores_S > -float("inf")][order]
    token = _best_of(scores_S, ids_S, draw, noise, Stream.draft)
    return token, Draws(tuple(ids_S.tolist()), tuple(scores_S.softmax(0).tolist()))
