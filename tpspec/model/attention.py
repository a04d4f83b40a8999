"""Attention of a round's rows over their sequences' pages. Sees slots and masks, never a draft policy.

A row sees the cached tokens of its sequence and, among the rows beside it, its ancestors and itself: a tree of rows is
a mask. The query heads that share a kv head are folded into rows, so uneven groups need no copy of keys or values.

A head may have a sink: a score that belongs to no key and takes its part of the softmax (Xiao et al., arXiv
2309.17453). Scores may be capped (Gemma 2, arXiv 2408.00118, 2).

Shapes: T rows of a span, G kv heads, F query heads folded onto each (the widest group), E head dim, S keys in view.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from tpspec.model.batch import along, lines
from tpspec.model.linear import capped
from tpspec.model.picked import Choosing
from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.cache.store import Cells, Slots
    from tpspec.model.batch import Runs, Span
    from tpspec.model.indexer import Asked
    from tpspec.model.sight import Sight

MORE_NUMBERS = 8  # of a head that has a sink; kernels like multiples of 8
KEY_BLOCK = 64  # `stable` reads whole blocks of keys, so that sums are split the same way at every length


class Attend(Protocol):
    """How queries meet keys; `fused` and `stable` are the two ways."""

    def __call__(
        self, q_GRE: Tensor, k_GSE: Tensor, v_GSE: Tensor, mask_RS: Tensor | None, scale: float,
        sinks_GR: Tensor | None = None, cap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """R = T x F folded rows; mask is added to the scores (0 or -inf), None sees all. sinks: float32. cap: scores y
        become cap tanh(y / cap) before. Returns [G, R, E]."""


def fused(
    q_GRE: Tensor, k_GSE: Tensor, v_GSE: Tensor, mask_RS: Tensor | None, scale: float,
    sinks_GR: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """torch's fused kernel, which knows no cap; a row's last bits may depend on the rows beside it."""
    if cap is not None:
        return stable(q_GRE, k_GSE, v_GSE, mask_RS, scale, sinks_GR, cap)
    dim = q_GRE.shape[2]
    if sinks_GR is not None:
        q_GRE, k_GSE, v_GSE = _with_sinks(q_GRE, k_GSE, v_GSE, sinks_GR / scale)
        mask_RS = None if mask_RS is None else F.pad(mask_RS, (1, 0))
    return F.scaled_dot_product_attention(
        q_GRE.unsqueeze(0), k_GSE.unsqueeze(0), v_GSE.unsqueeze(0), attn_mask=mask_RS, scale=scale
    ).squeeze(0)[..., :dim]


def _with_sinks(q_GRE: Tensor, k_GSE: Tensor, v_GSE: Tensor, sinks_GR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A key before the others whose only number meets a number of the query's that no other key has; its value is
    nothing."""
    q_GRX, k_GSX, v_GSX = (F.pad(x, (0, MORE_NUMBERS)) for x in (q_GRE, k_GSE, v_GSE))
    q_GRX[..., -1] = sinks_GR
    k_GSX, v_GSX = F.pad(k_GSX, (0, 0, 1, 0)), F.pad(v_GSX, (0, 0, 1, 0))
    k_GSX[:, 0, -1] = 1
    return q_GRX, k_GSX, v_GSX


def stable(
    q_GRE: Tensor, k_GSE: Tensor, v_GSE: Tensor, mask_RS: Tensor | None, scale: float,
    sinks_GR: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Two products and a float32 softmax; the same bits for a row at any length, given one R and whole key blocks."""
    scores_GRS = torch.bmm(q_GRE, k_GSE.transpose(1, 2)).float() * scale
    if cap is not None:
        capped(scores_GRS, cap)
    if mask_RS is not None:
        scores_GRS += mask_RS
    odds_GRS = torch.softmax(scores_GRS, -1)
    if sinks_GR is not None:  # the largest odds are 1 / sum of e^(score - top), to which e^(sink - top) is to be added
        top_GR1, most_GR1 = scores_GRS.amax(2, keepdim=True), odds_GRS.amax(2, keepdim=True)
        odds_GRS /= 1 + (sinks_GR.unsqueeze(2) - top_GR1).exp() * most_GR1
    return torch.bmm(odds_GRS.to(q_GRE.dtype), v_GSE)


@dataclass(frozen=True, slots=True)
class Folding:
    """Which query head stands where when heads are folded onto their kv heads.

    kv_of: for each local query head the local kv head it reads, ascending. Uneven groups (a kv head on a boundary
    between shards) leave holes in the last columns; holes are computed and dropped.
    """

    num_kv_heads: int
    width: int
    to_folded: Tensor | None  # [G * F] index of the query head for each place, None when groups are even
    from_folded: Tensor | None  # [H] place of each query head

    @classmethod
    def of(cls, kv_of: Sequence[int], device: torch.device) -> Folding:
        counts = [list(kv_of).count(g) for g in range(max(kv_of) + 1)]
        width = max(counts)
        if min(counts) == width:
            return cls(len(counts), width, None, None)
        places = [g * width + kv_of[:h].count(g) for h, g in enumerate(kv_of)]
        heads = {place: head for head, place in enumerate(places)}
        to_folded = [heads.get(place, 0) for place in range(len(counts) * width)]
        return cls(len(counts), width, sent(to_folded, device), sent(places, device))

    def fold(self, q_THE: Tensor) -> Tensor:
        """[T, H, E] -> [G, T * F, E], rows in (row, folded head) order."""
        if self.to_folded is not None:
            q_THE = q_THE.index_select(1, self.to_folded)
        rows, _, dim = q_THE.shape
        return q_THE.view(rows, self.num_kv_heads, self.width, dim).transpose(0, 1).reshape(self.num_kv_heads, -1, dim)

    def unfold(self, out_GRE: Tensor) -> Tensor:
        """[G, T * F, E] -> [T, H * E]."""
        dim = out_GRE.shape[-1]
        out_TGFE = out_GRE.view(self.num_kv_heads, -1, self.width, dim).transpose(0, 1)
        out_THE = out_TGFE.reshape(out_TGFE.shape[0], -1, dim)
        if self.from_folded is not None:
            out_THE = out_THE.index_select(1, self.from_folded)
        return out_THE.reshape(out_THE.shape[0], -1)


class Seen(Protocol):
    """What some rows of a round see."""

    def chosen(self, asked: Asked, index: Cells) -> Seen:
        """What they attend to where an index chooses, if that is less. asked: by all rows of the round. index: its
        keys."""

    def attend(
        self, attend: Attend, q_THE: Tensor, keys: Cells, values: Cells, fold: Folding, scale: float,
        sinks_H: Tensor | None, cap: float | None,
    ) -> Tensor:  # fmt: skip
        """Of these rows, [T, H * E]; q_THE holds all rows of the round."""


@dataclass(frozen=True, slots=True)
class View:
    """What the rows of one span see in layers of one window: key slots, and a mask where rows see different keys.
    rows: of the round, a span's or some of them."""

    rows: slice | Tensor
    keys: Slots
    mask_RS: Tensor | None
    padding: int  # empty rows added below, so that R is the same in every round

    def chosen(self, asked: Asked, index: Cells) -> View:
        return self

    def attend(
        self, attend: Attend, q_THE: Tensor, keys: Cells, values: Cells, fold: Folding, scale: float,
        sinks_H: Tensor | None, cap: float | None,
    ) -> Tensor:  # fmt: skip
        q_THE = q_THE[self.rows]
        num_rows = q_THE.shape[0]
        if self.padding:
            q_THE = F.pad(q_THE, (0, 0, 0, 0, 0, self.padding))
        sinks_GR = None if sinks_H is None else fold.fold(sinks_H.expand(len(q_THE), -1).unsqueeze(2)).squeeze(2)
        k_GSE = keys.read(self.keys)
        v_GSE = k_GSE if values is keys else values.read(self.keys)
        out = attend(fold.fold(q_THE), k_GSE, v_GSE, self.mask_RS, scale, sinks_GR, cap)
        return fold.unfold(out)[:num_rows]


@dataclass(frozen=True, slots=True)
class Branches:
    """The rows of a tree, as those of a chain for each of its leaves: none has its sums split by keys that it does not
    see. taken: of each row, where it is among the chains'."""

    chains: tuple[Seen, ...]
    taken_T: Tensor

    def chosen(self, asked: Asked, index: Cells) -> Branches:
        return replace(self, chains=tuple(chain.chosen(asked, index) for chain in self.chains))

    def attend(
        self, attend: Attend, q_THE: Tensor, keys: Cells, values: Cells, fold: Folding, scale: float,
        sinks_H: Tensor | None, cap: float | None,
    ) -> Tensor:  # fmt: skip
        made = [chain.attend(attend, q_THE, keys, values, fold, scale, sinks_H, cap) for chain in self.chains]
        return torch.cat(made)[self.taken_T]


@dataclass(frozen=True, slots=True)
class Layout:
    """What is the same for every view of a model. fixed_rows: pad each span to so many rows, and have keys begin and
    end where blocks of them do (deterministic)."""

    mask_dtype: torch.dtype
    device: torch.device
    fixed_rows: int | None

    def views(self, span: Span, first_row: int, sight: Sight, fold_width: int) -> Seen:
        """As `view`, or `choosing`; where rows may not depend on each other, or some of a tree have a choice and others
        have none, of each path of the tree alone."""
        whole = slice(first_row, first_row + len(span.tokens))
        some_choose = sight.chosen is not None and span.start < sight.chosen < span.start + len(span.tokens)
        may_part = self.fixed_rows is not None or some_choose
        if not may_part or span.parents is None or span.num_chained() == len(span.tokens):
            return self._seen(span, whole, sight, fold_width)
        chains, taken, count = list[Seen](), dict[int, int](), 0
        for rows in lines(span.parents):
            there = sent([first_row + row for row in rows], self.device)
            chains.append(self._seen(along(span, rows), there, sight, fold_width))
            taken = {row: count + at for at, row in enumerate(rows)} | taken
            count += len(rows)
        return Branches(tuple(chains), sent([taken[row] for row in range(len(span.tokens))], self.device))

    def _seen(self, span: Span, rows: slice | Tensor, sight: Sight, fold_width: int) -> Seen:
        """rows: of the round, the span's."""
        most, num_rows = sight.chosen, len(span.tokens)
        if most is None or span.start + num_rows <= most:
            return self.view(span, rows, sight, fold_width)
        num_few = max(0, most - span.start)
        few = self.view(along(span, range(num_few)), _first(rows, num_few), sight, fold_width) if num_few else None
        own_TT = None if span.parents is None else on_paths(span.parents).to(self.device)
        keys = self._keys(*span.held(windowed=False), 0)
        return Choosing(few, rows, keys, most, range(span.start, span.start + num_rows), own_TT)

    def view(self, span: Span, rows: slice | Tensor, sight: Sight, fold_width: int) -> View:
        """The view of `span`, whose rows are those of the round. fold_width: query heads folded onto each kv head."""
        first_key = sight.first_seen(span.start)
        num_keys = span.start + len(span.tokens) - first_key
        held = span.held(windowed=sight.is_windowed)
        if self.fixed_rows is None and len(span.tokens) == 1:
            return View(rows, self._keys(*held, first_key), None, 0)
        seen_TS = _visible(span, first_key, sight)
        padding = before = extra = 0
        if self.fixed_rows is not None:
            before = first_key % KEY_BLOCK
            padding, extra = self.fixed_rows - len(span.tokens), -(before + num_keys) % KEY_BLOCK
            seen_TS = F.pad(seen_TS, (before, extra, 0, padding))
            seen_TS[len(span.tokens) :, 0] = True  # padding rows see one key, so that none of them is all -inf
        mask_TS = torch.zeros(seen_TS.shape, dtype=self.mask_dtype).masked_fill_(~seen_TS, float("-inf"))
        mask_TFS = sent(mask_TS, self.device).unsqueeze(1).expand(-1, fold_width, -1)  # there: it may be large
        mask_RS = mask_TFS.flatten(0, 1)
        return View(rows, self._keys(*held, first_key, before, extra), mask_RS, padding)

    def _keys(self, position: int, runs: Runs, first_key: int, before: int = 0, extra: int = 0) -> Slots:
        """Slots of the keys from `first_key` on, and as many before and behind that are masked. runs: slots from
        `position` on.

        Those too are its own: what is masked counts 0 times, and 0 times a NaN of another sequence is NaN.
        """
        first, count = runs[0]
        if len(runs) == 1 and not before and not extra:
            return slice(first + first_key - position, first + count)
        pieces = [torch.arange(first, first + count) for first, count in runs]
        slots = torch.cat(pieces)[first_key - position :]
        return sent(torch.cat([slots[:1].expand(before), slots, slots[:1].expand(extra)]), self.device)


def _first(rows: slice | Tensor, count: int) -> slice | Tensor:
    """Of those rows."""
    return slice(rows.start, rows.start + count) if isinstance(rows, slice) else rows[:count]


def on_paths(parents: Sequence[int]) -> Tensor:
    """[N, N] bool: of each row of a tree the rows on its path, itself among them."""
    made_NN = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            made_NN[row] |= made_NN[parent]
    return made_NN


def _visible(span: Span, first_key: int, sight: Sight) -> Tensor:
    """[T, S] bool: keys from `first_key` on that each row sees: the cache, its ancestors and itself, in its window."""
    num_rows = len(span.tokens)
    chain_TT = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    own_TT = chain_TT if span.parents is None else on_paths(span.parents)
    seen = torch.cat([torch.ones(num_rows, span.start - first_key, dtype=torch.bool), own_TT], 1)
    if not sight.is_windowed:
        return seen
    positions = span.positions()
    key_positions = torch.tensor([*range(first_key, span.start), *positions])
    return seen & (key_positions >= torch.tensor([[sight.first_seen(position)] for position in positions]))
