"""A layer's linear attention, Gated DeltaNet (Yang et al., arXiv 2412.06464), of one shard: value heads, and the key
heads that these read. Ends in one partial sum, as attention does.

Rows of a forward are those of spans, and before them those that a span's text has kept of its last forward, which the
state takes in now (cache/states.py says why). Knows rows and slots; must not know drafts, ranks or the rule (that is
delta_rule.py).

Shapes: T rows of the round; B spans, W rows of each that are looked at, filled up: those before, C that follow each
other and are taken in, N that may be a tree; M numbers of a row that the convolution sees, H value heads, G key heads,
K and V of a key and a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tpspec.model.delta_rule import CHUNK, Rows, looked_at, one_by_one, taken_in
from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.model.batch import Span
    from tpspec.model.linear import Linear
    from tpspec.model.steps import Norm

LEAST = 1e-6  # in the length of a query or key, as transformers
NOBODY = -1  # the slot of a text of which nothing is kept


@dataclass(frozen=True, slots=True)
class Mixer:
    """What is between a layer's norm and its all-reduce. mixed: [D] -> [M], queries and keys [G K], values [H V].
    rates: [D] -> [2 H], of writes and of decays. gate: [D] -> [H V]. out: [H V] -> [D], a partial sum.

    kernel: [kernel, M], the newest row last. key_of: the local key head, of num_keys, that each local value head reads.
    decays, biases: [H] of this shard, float32, and norm: [V]. whole: a row's bits may not depend on the others.
    """

    mixed: Linear
    rates: Linear
    gate: Linear
    out: Linear
    kernel: Tensor
    key_of: Tensor
    num_keys: int
    key_dim: int
    decays_H: Tensor
    biases_H: Tensor
    norm: Norm
    whole: bool

    def __call__(self, x_TD: Tensor, layer: int, round: Round) -> Tensor:
        row_TX = torch.cat([self.mixed(x_TD), self.rates(x_TD)], 1)
        H, V = len(self.decays_H), self.norm.weight.shape[0]
        answers_THV = row_TX.new_zeros(len(x_TD), H, V)
        for group in round.groups:
            self._answer(row_TX, layer, round.store, group, answers_THV)
        gate_THV = F.silu(self.gate(x_TD).view(-1, H, V).float())
        return self.out((self.norm(answers_THV) * gate_THV).to(x_TD.dtype).flatten(1))

    def _answer(self, row_TX: Tensor, layer: int, store: StateStore, group: Group, answers_THV: Tensor) -> None:
        """Of the group's rows, into their places; their states go on."""
        held, (B, C), W = store.of(layer), (len(group.slots_B), group.num_chained), group.width
        rows_WX = row_TX.new_zeros(B * W, row_TX.shape[1])
        if len(group.left_to):
            rows_WX[group.left_to] = held.left.flatten(0, 1)[group.left_from]
        rows_WX[group.new_to] = row_TX[group.new_from]
        rows = self._rows(rows_WX, group)
        state = held.states[group.slots_B].masked_fill_(group.fresh_B[:, None, None, None], 0)
        chain, tree = rows.part(0, C), rows.part(C, rows.k.shape[2])
        if self.whole:
            state, chained = _in_turn(state, chain)
            looked = one_by_one(state, tree, group.parents_BN)[1]
        else:
            state, chained = taken_in(state, chain)
            looked = looked_at(state, tree, group.paths_BNN)
        held.states[group.slots_B] = state
        held.left[group.slots_B, : group.kept_BL.shape[1]] = rows_WX[group.kept_BL]
        told = torch.cat([chained, looked], 2).transpose(1, 2).flatten(0, 1)
        answers_THV[group.told_to] = told[group.told_from].to(answers_THV.dtype)

    def _rows(self, rows_WX: Tensor, group: Group) -> Rows:
        """Of [B W], the C + N behind those before."""
        M, G, dtype = self.kernel.shape[1], self.num_keys, rows_WX.dtype
        seen = rows_WX[group.sights, :M]
        mixed = F.silu((seen.float() * self.kernel).sum(2).to(dtype)).float()
        q, k, v = torch.split(mixed, [G * self.key_dim, G * self.key_dim, M - 2 * G * self.key_dim], 2)
        q, k = (_of_one(x.view(*x.shape[:2], G, -1))[:, :, self.key_of] for x in (q, k))
        rates = rows_WX[group.sights[:, :, -1], M:]
        writes, steps = rates.chunk(2, 2)
        decays = -self.decays_H * F.softplus(steps.float() + self.biases_H)
        return Rows(
            (q * self.key_dim**-0.5).transpose(1, 2),
            k.transpose(1, 2),
            v.view(*v.shape[:2], len(self.decays_H), -1).transpose(1, 2),
            decays.masked_fill(group.absent[..., None], 0).transpose(1, 2),
            writes.sigmoid().float().transpose(1, 2),
        )


def _of_one(x: Tensor) -> Tensor:
    """In float32: a vector of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LEAST)


def _in_turn(state: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """`taken_in`, row by row."""
    answers = [rows.v[:, :, :0]]
    for start in range(rows.k.shape[2]):
        states, answered = one_by_one(state, rows.part(start, start + 1), state.new_full((len(state), 1), -1).long())
        state = states[:, :, 0]
        answers.append(answered)
    return state, torch.cat(answers, 2)


@dataclass(frozen=True, slots=True)
class Group:
    """Spans that are computed together, as places of their rows: in [B W], where those before come first, in what is
    left in the slots (left), in the round's rows (new), and in the [B (C + N)] that are answered (told).

    sights: [B, C + N, kernel], what each row's convolution sees. absent: [B, C + N], no row. kept: [B, num_before + N],
    what is left in the slots now. parents: [B, N], paths: [B, N, N], of the tree.
    """

    num_chained: int
    width: int
    slots_B: Tensor
    fresh_B: Tensor
    left_from: Tensor
    left_to: Tensor
    new_from: Tensor
    new_to: Tensor
    sights: Tensor
    absent: Tensor
    kept_BL: Tensor
    told_from: Tensor
    told_to: Tensor
    parents_BN: Tensor
    paths_BNN: Tensor


@dataclass(frozen=True, slots=True)
class Round:
    """The spans of one forward, ready for every layer of linear attention."""

    store: StateStore
    groups: Sequence[Group]

    @classmethod
    def of(cls, spans: Sequence[Span], store: StateStore, device: torch.device) -> Round:
        """Short spans are computed together, and long ones, which would fill those up, alone."""
        firsts = accumulate((len(span.tokens) for span in spans), initial=0)
        placed = [_Placed(span, first) for span, first in zip(spans, firsts, strict=False)]
        short = [one for one in placed if len(one.chain) <= CHUNK]
        apart = [[one] for one in placed if len(one.chain) > CHUNK]
        return cls(store, [_group(some, store, device) for some in [short, *apart] if some])


class _Placed:
    """A span, and its first row in the round. chain: of rows that follow each other and are certain, the number in the
    round, or ~ of the number among those that are left; without the last, which is the root of the tree."""

    def __init__(self, span: Span, first: int) -> None:
        carried = span.carried
        num_certain = len(span.tokens) if carried is None else carried.num_certain
        if carried is None and span.start:
            raise ValueError(f"sequence {span.seq} has {span.start} tokens cached, and nothing carried of them")
        left = () if carried is None else carried.rows
        self.slot = NOBODY if carried is None else carried.slot
        self.is_fresh = not span.start
        self.chain = [*(~row for row in left), *range(first, first + num_certain - 1)]
        self.tree = range(first + num_certain - 1, first + len(span.tokens))
        parents = span.parents or range(-1, len(span.tokens) - 1)
        self.parents = [-1, *(parents[row] - num_certain + 1 for row in range(num_certain, len(span.tokens)))]


def _group(placed: Sequence[_Placed], store: StateStore, device: torch.device) -> Group:
    before, C, N = store.sizes.num_before, max(len(one.chain) for one in placed), max(len(one.tree) for one in placed)
    W, length, R = before + C + N, before + store.num_left, C + N
    copies: list[tuple[int, int]] = []  # (from, to), of what is left
    news: list[tuple[int, int]] = []
    told: list[tuple[int, int]] = []
    sights = [[[text * W + before + row] * (before + 1) for row in range(R)] for text in range(len(placed))]
    absent = [[True] * R for _ in placed]
    kept: list[list[int]] = []
    for text, one in enumerate(placed):
        base, slot = text * W, (one.slot if one.slot != NOBODY else store.num_states) * length
        line = [base + i for i in range(before)]
        if not one.is_fresh:
            copies += [(slot + i, base + i) for i in range(before)]
        for i, row in enumerate(one.chain):
            at = base + before + i
            line.append(at)
            sights[text][i], absent[text][i] = line[-before - 1 :], False
            if row < 0:
                copies.append((slot + before + ~row, at))
            else:
                news.append((row, at))
                told.append((text * R + i, row))
        lines: list[list[int]] = []
        for i, row in enumerate(one.tree):
            at = base + before + C + i
            above = line if one.parents[i] < 0 else lines[one.parents[i]]
            lines.append([*above[len(above) - before :], at])
            sights[text][C + i], absent[text][C + i] = lines[-1], False
            news.append((row, at))
            told.append((text * R + C + i, row))
        kept.append([*line[len(line) - before :], *(base + before + C + i for i in range(N))])
    parents, paths = _trees([one.parents for one in placed], N)

    def of(pairs: Sequence[tuple[int, int]], which: int) -> Tensor:
        return sent([pair[which] for pair in pairs], device)

    return Group(
        num_chained=C,
        width=W,
        slots_B=sent([one.slot if one.slot != NOBODY else store.num_states for one in placed], device),
        fresh_B=sent(torch.tensor([one.is_fresh for one in placed]), device),
        left_from=of(copies, 0),
        left_to=of(copies, 1),
        new_from=of(news, 0),
        new_to=of(news, 1),
        sights=sent(torch.tensor(sights), device),
        absent=sent(torch.tensor(absent), device),
        kept_BL=sent(torch.tensor(kept), device),
        told_from=of(told, 0),
        told_to=of(told, 1),
        parents_BN=sent(parents, device),
        paths_BNN=sent(paths, device),
    )


def _trees(parents: Sequence[Sequence[int]], num_rows: int) -> tuple[Tensor, Tensor]:
    """Parents [B, N] and paths [B, N, N], filled up by rows that see themselves."""
    filled = torch.full((len(parents), num_rows), -1)
    paths = torch.eye(num_rows, dtype=torch.bool).repeat(len(parents), 1, 1)
    for text, tree in enumerate(parents):
        filled[text, : len(tree)] = torch.tensor(tree)
        for row, parent in enumerate(tree):
            if parent >= 0:
                paths[text, row] |= paths[text, parent]
    return filled, paths
