"""The law of a next token, exact at the ids a rule asks about and lumped elsewhere, and how shards agree on it.

Three kinds of rows become one kind of law: argmax (a point), truncated (a short list), and full rows, of which each
shard tells a sketch: the scores asked for, the mass of all its other ids, and a token drawn from those. Knows no trees.

Shapes: T rows, V ids of this shard, A ids asked about (the most of any row; -1 fills), N shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from tpspec.staged import sent
from tpspec.tokens import NO_TOKEN
from tpspec.verify.noise import Stream
from tpspec.verify.processors import process
from tpspec.verify.rows import take
from tpspec.verify.shards import (
    best_ids,
    exchange,
    hear_candidates,
    hear_winners,
    log_mass,
    merged_log_mass,
    tell_candidates,
    tell_winners,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpspec.verify.noise import Noise
    from tpspec.verify.rows import Draw, RowLogits
    from tpspec.verify.shards import Support


@dataclass(frozen=True, slots=True)
class Law:
    """probs: probability of each id asked about. rest: that of all other ids together; spare: one of them, drawn.

    spare was drawn from the law of the rest with noise that serves nothing else, so it may be emitted once.
    """

    probs: Mapping[int, float]
    rest: float
    spare: int

    def minus(self, q: Mapping[int, float]) -> Law:
        """norm(max(0, p - q)), for a q within the ids asked about; p itself where nothing would remain."""
        left = {token: max(0.0, p - q.get(token, 0.0)) for token, p in self.probs.items()}
        total = sum(left.values()) + self.rest
        if total <= 0:
            return self
        return Law({token: p / total for token, p in left.items()}, self.rest / total, self.spare)

    def draw(self, u: float) -> int:
        """A token of this law from a uniform number."""
        scaled = u * (sum(self.probs.values()) + self.rest)
        reached = 0.0
        last = self.spare
        for token, p in self.probs.items():
            if p <= 0:
                continue
            reached += p
            if scaled < reached:
                return token
            last = token
        return self.spare if self.rest > 0 else last  # `last` only where rounding left u above the sum


def laws(rows: RowLogits, draws: Sequence[Draw], asked: Sequence[Sequence[int]], noise: Noise) -> list[Law | None]:
    """The law of each row, exact at asked[i], in one gather (and a second where candidates cannot tell a support).

    None where a score is NaN or infinite, or all are -inf.
    """
    scores_TV = process(rows, draws)
    kinds = [_kind(draw) for draw in draws]
    cold, cut, full = ([i for i, kind in enumerate(kinds) if kind == wanted] for wanted in ("cold", "cut", "full"))
    parts: list[Tensor] = []  # nothing is computed for a kind that no row is of
    if cold:
        parts += tell_winners(take(scores_TV, cold), [draws[i] for i in cold], noise, Stream.residual, rows.start)
    if cut:
        cut_TV = take(scores_TV, cut)
        candidates = tell_candidates(cut_TV, rows.start)
        parts += candidates
    if full:
        full_TV, asked_TA = take(scores_TV, full), _padded([asked[i] for i in full])
        parts += tell_sketch(full_TV, sent(asked_TA, full_TV.device), [draws[i] for i in full], noise, rows.start)
    told = iter(exchange(rows, parts))
    known: dict[int, Law | None] = {}
    if cold:
        known.update(zip(cold, map(_point, hear_winners(next(told).numpy(), next(told).numpy())), strict=True))
    if cut:
        supports = hear_candidates(rows, cut_TV, [draws[i].sampling for i in cut], [*islice(told, len(candidates))])
        known.update(zip(cut, map(_listed, supports), strict=True))
    if full:
        known.update(zip(full, hear_sketch(asked_TA, [*told]), strict=True))
    return [known[i] for i in range(len(draws))]


def _kind(draw: Draw) -> str:
    if draw.sampling.temperature == 0:
        return "cold"
    return "cut" if draw.sampling.truncates else "full"


def _point(token: int) -> Law | None:
    return None if token == NO_TOKEN else Law({token: 1.0}, 0.0, token)


def _listed(support: Support) -> Law | None:
    ids = support.ids_S.tolist()
    if not ids:
        return None
    return Law(dict(zip(ids, support.scores_S.softmax(0).tolist(), strict=True)), 0.0, ids[0])


def _padded(asked: Sequence[Sequence[int]]) -> Tensor:
    """int64 [T, A], filled with -1."""
    width = max(map(len, asked), default=0)
    filled = [[*ids, *[-1] * (width - len(ids))] for ids in asked]
    return torch.tensor(filled, dtype=torch.int64).reshape(len(asked), width)


def tell_sketch(scores_TV: Tensor, asked_TA: Tensor, draws: Sequence[Draw], noise: Noise, start: int) -> list[Tensor]:
    """Of this shard: scores of the ids asked about (-inf where not held), mass of the others, the winner among them."""
    held_TA = (asked_TA >= start) & (asked_TA < start + scores_TV.shape[1])
    column_TA = (asked_TA - start).where(held_TA, 0)  # nowhere is it asked which ids are held: that would be a wait
    known_TA = scores_TV.gather(1, column_TA).masked_fill(~held_TA, -torch.inf)
    taken_TA = torch.full_like(known_TA, -torch.inf).masked_fill(~held_TA, torch.inf)
    other_TV = scores_TV.scatter_reduce(1, column_TA, taken_TA, "amin")
    return [known_TA, *log_mass(other_TV), *tell_winners(other_TV, draws, noise, Stream.residual, start)]


def hear_sketch(asked_TA: Tensor, told: Sequence[Tensor]) -> list[Law | None]:
    known_NTA, top_NT, sum_NT, value_NT, ids_NT = told
    known_TA = known_NTA.amax(0).double()
    rest_T = merged_log_mass(top_NT, sum_NT)
    log_total_T = torch.cat([known_TA, rest_T.unsqueeze(1)], 1).logsumexp(1)
    sound = log_total_T.isfinite().tolist()
    probs = (known_TA - log_total_T.unsqueeze(1)).exp().tolist()
    rests = (rest_T - log_total_T).exp().tolist()
    return [
        Law({token: p for token, p in zip(ids, row, strict=True) if token >= 0}, rest, spare) if is_sound else None
        for is_sound, ids, row, rest, spare in zip(
            sound, asked_TA.tolist(), probs, rests, best_ids(value_NT.numpy(), ids_NT.numpy()), strict=True
        )
    ]
