"""What one shard of a row tells the others, and what all of them then know. One gather, whatever is told.

Three things can be told of a row: its winner (8 bytes), its largest scores (when top-k, top-p or min-p need the whole
row), or a sketch (verify/law.py). Everything after the gather is arithmetic on the same bytes on every rank. A NaN in
any shard survives all of it, so that every rank knows a row that cannot be drawn from, without a word more.

Shapes: T rows, V ids of this shard, N shards, C candidates of a shard, S ids that may be drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpspec.staged import Fetched, sent
from tpspec.tokens import NO_TOKEN
from tpspec.verify.largest import largest, some_largest
from tpspec.verify.processors import num_kept
from tpspec.verify.rows import take, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tpspec.request import Sampling
    from tpspec.verify.noise import Noise, Stream
    from tpspec.verify.rows import Draw, RowLogits

NUM_CANDIDATES = 64
NO_ID = np.iinfo(np.int32).max
NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("f4"), torch.float64: np.dtype("f8"),
    torch.int32: np.dtype("i4"), torch.int64: np.dtype("i8"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Support:
    """The ids that may be drawn at a truncated row, int64 [S], and their scores, float64 [S], in descending order.

    Empty at a row that cannot be drawn from.
    """

    ids_S: Tensor
    scores_S: Tensor


def exchange(rows: RowLogits, parts: Sequence[Tensor]) -> list[Tensor]:
    """Several tensors of 4- or 8-byte elements in one gather: [*shape] each -> [N, *shape] each, on the CPU."""
    return [torch.from_numpy(told) for told in Exchange(rows, parts).here()]


class Exchange:
    """The same for numpy: torch takes several times as long for a few numbers, and every round comes by here. From the
    beginning on all has been asked of the device."""

    def __init__(self, rows: RowLogits, parts: Sequence[Tensor]) -> None:
        self._parts = parts
        self._coming: Fetched | None = None
        if rows.gather is whole and not any(part.is_cuda for part in parts):  # a drafter's, alone with its vocabulary
            return
        self._coming = Fetched(rows.gather(_in_line([part.contiguous().view(torch.int32).flatten() for part in parts])))

    def here(self) -> list[NDArray[Any]]:
        """Waits for the device. What comes behind the wait stands between a verdict and the next round: least of it."""
        if self._coming is None:
            return [part.unsqueeze(0).numpy() for part in self._parts]
        words_NW = self._coming.place.numpy()
        ends = accumulate((part.nbytes // 4 for part in self._parts), initial=0)
        told = [
            words_NW[:, start:end].view(NUMPY[part.dtype]).reshape(len(words_NW), *part.shape)  # which is a view, too
            for (start, end), part in zip(pairwise(ends), self._parts, strict=True)
        ]
        self._coming.here()
        return [part if part.itemsize == 4 else part.copy() for part in told]  # torch takes none from an odd word on


def _in_line(parts: Sequence[Tensor]) -> Tensor:
    """One behind the other; not copied where they stand so, as a card's winners do."""
    first, behind = parts[0], parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != first.untyped_storage()._cdata or part.storage_offset() != behind:
            return torch.cat([*parts])
        behind += len(part)
    return first.as_strided((behind - first.storage_offset(),), (1,))


def tell_winners(
    scores_TV: Tensor, draws: Sequence[Draw], noise: Noise, stream: Stream, start: int
) -> tuple[Tensor, Tensor]:
    """The best (score, id) of this shard, float32 [T] and int32 [T]: by noise, or plainly at temperature 0."""
    warm = [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]
    cold = [i for i, draw in enumerate(draws) if draw.sampling.temperature == 0]
    if not warm:
        value, ids = largest(scores_TV, start)
        return value, ids.int()
    seeds = [draws[i].sampling.seed for i in warm]
    positions = [draws[i].position for i in warm]
    if not cold:
        value, ids = noise.best(scores_TV, seeds, positions, stream, start)
        return value, ids.int()
    value = scores_TV.new_empty(len(draws), dtype=torch.float32)
    ids = torch.empty_like(value, dtype=torch.int32)
    cold_at, warm_at = (sent(rows, value.device) for rows in (cold, warm))
    value[cold_at], first = largest(scores_TV[cold_at], start)
    value[warm_at], best = noise.best(scores_TV[warm_at], seeds, positions, stream, start)
    ids[cold_at], ids[warm_at] = first.int(), best.int()
    return value, ids


def hear_winners(value_NT: NDArray[np.float32], ids_NT: NDArray[np.int32]) -> list[int]:
    """The best of all shards, ties to the lowest id; NO_TOKEN where the best is no finite number."""
    top_T, ids_T = _best(value_NT, ids_NT)
    values: list[float] = top_T.tolist()
    ids: list[int] = ids_T.tolist()
    if all(map(isfinite, values)):
        return ids
    return [best if isfinite(value) else NO_TOKEN for best, value in zip(ids, values, strict=True)]


def best_ids(value_NT: NDArray[np.float32], ids_NT: NDArray[np.int32]) -> list[int]:
    """Some id even where there is nothing to draw."""
    ids: list[int] = _best(value_NT, ids_NT)[1].tolist()
    return ids


def _best(value_NT: NDArray[np.float32], ids_NT: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The largest value, and the lowest id that has it; some id where the largest is NaN."""
    if len(value_NT) == 1:
        return value_NT[0], ids_NT[0]
    top_T = value_NT.max(0)
    return top_T, np.where(value_NT < top_T, NO_ID, ids_NT).min(0)


def log_mass(scores_TV: Tensor) -> tuple[Tensor, Tensor]:
    """(largest score, sum of exp above it) of each row, float32 [T] and float64 [T]; a row of -inf gives (-inf, 0)."""
    top_T = scores_TV.amax(1)
    shift_T = top_T.double().masked_fill(top_T.isneginf(), 0.0)
    return top_T, (scores_TV - shift_T.unsqueeze(1)).exp_().sum(1)  # in float64, as the shift is


def merged_log_mass(top_NT: Tensor, sum_NT: Tensor) -> Tensor:
    """log of the sum of exp over all shards, float64 [T]; log 0 = -inf makes an empty shard count for nothing."""
    return (top_NT.double() + sum_NT.log()).logsumexp(0)


def tell_top(scores_TV: Tensor, start: int, num: int) -> list[Tensor]:
    """The `num` largest scores of this shard with their ids; -inf where it holds fewer."""
    num_short = max(0, num - scores_TV.shape[1])
    padded_TV = torch.nn.functional.pad(scores_TV, (0, num_short), value=-torch.inf) if num_short else scores_TV
    scores_TC, columns_TC = some_largest(padded_TV, num)
    return [scores_TC, (columns_TC + start).int()]


def hear_top(scores_NTC: Tensor, ids_NTC: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of all shards, as many as each has told: scores, float64 and descending, and ids."""
    scores_TS, ids_TS = _descending(scores_NTC.transpose(0, 1).flatten(1), ids_NTC.transpose(0, 1).flatten(1))
    num = scores_NTC.shape[2]
    return scores_TS[:, :num], ids_TS[:, :num]


def tell_candidates(scores_TV: Tensor, start: int) -> list[Tensor]:
    """The C largest scores of this shard with their ids, and its mass; -inf where it holds fewer."""
    return [*tell_top(scores_TV, start, NUM_CANDIDATES), *log_mass(scores_TV)]


def hear_candidates(
    rows: RowLogits,
    scores_TV: Tensor,
    samplings: Sequence[Sampling],
    told: Sequence[Tensor],
    before_more: Callable[[], None] | None = None,
) -> list[Support]:
    """What each row keeps. Rows whose candidates cannot tell are gathered whole, all in one further collective.

    Which rows those are follows from what was gathered, so every rank agrees. before_more: called before that.
    """
    scores_NTC, ids_NTC, top_NT, sum_NT = told
    floor_T = scores_NTC[:, :, -1].amax(0)  # a shard may hold more ids that score up to its last candidate
    totals = merged_log_mass(top_NT, sum_NT).tolist()  # finite at a row that can be drawn from, and at no other
    supports = _supports(scores_NTC, ids_NTC, floor_T, totals, samplings)
    unclear = [i for i, support in enumerate(supports) if support is None]
    if unclear:
        if before_more is not None:
            before_more()
        whole = _whole_rows(rows, take(scores_TV, unclear), [samplings[i] for i in unclear])
        for i, support in zip(unclear, whole, strict=True):
            supports[i] = support
    return [support for support in supports if support is not None]


def _supports(
    scores_NTC: Tensor, ids_NTC: Tensor, floor_T: Tensor, totals: Sequence[float], samplings: Sequence[Sampling]
) -> list[Support | None]:
    """What each row keeps of its scores above the floor; None where what lies below may be kept too."""
    scores_TS, ids_TS = _descending(scores_NTC.transpose(0, 1).flatten(1), ids_NTC.transpose(0, 1).flatten(1))
    num_above = (scores_TS > floor_T.unsqueeze(1)).sum(1).tolist()
    complete = floor_T.isneginf().tolist()
    supports: list[Support | None] = []
    for i, sampling in enumerate(samplings):
        if not isfinite(totals[i]):
            supports.append(Support(ids_TS[i, :0], scores_TS[i, :0]))
            continue
        kept = num_kept(scores_TS[i, : num_above[i]], totals[i], complete[i], sampling)
        supports.append(None if kept is None else Support(ids_TS[i, :kept], scores_TS[i, :kept]))
    return supports


def _descending(scores_TS: Tensor, ids_TS: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of each row, float64, from the largest down, and their ids; ties by id."""
    ids_TS, by_id_TS = ids_TS.long().sort(1)
    scores_TS, by_score_TS = scores_TS.double().gather(1, by_id_TS).sort(dim=1, descending=True, stable=True)
    return scores_TS, ids_TS.gather(1, by_score_TS)


def _whole_rows(rows: RowLogits, scores_TV: Tensor, samplings: Sequence[Sampling]) -> list[Support | None]:
    """The same from every score of the rows, where nothing lies below."""
    num_short = max(0, rows.width - scores_TV.shape[1])
    padded_TV = torch.nn.functional.pad(scores_TV, (0, num_short), value=-torch.inf)
    start = torch.full((1,), rows.start, dtype=torch.int32, device=scores_TV.device)
    scores_NTV, start_N1 = exchange(rows, [padded_TV, start])
    ids_NV = start_N1 + torch.arange(scores_NTV.shape[2], dtype=torch.int32)
    totals = scores_NTV.double().logsumexp((0, 2))
    floor_T = torch.full_like(totals, -torch.inf)
    return _supports(scores_NTV, ids_NV.unsqueeze(1).expand_as(scores_NTV), floor_T, totals.tolist(), samplings)
