"""A layer's linear attention, Gated DeltaNet (Yang et al., arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692)
or Mamba-2 (Dao, Gu, arXiv 2405.21060), of one shard: value heads, and the key heads that these read. What is between
its products is here in torch: the reference, and, on a CPU, what runs for many rows.

Knows rows and slots; must not know drafts, ranks, the rule (that is delta_rule.py) or whose a row is (courses.py).

Shapes: T rows of the round; B spans, C rows of each that follow each other and are taken in, and N that may be a tree
and are looked at, filled up; M numbers of a row that the convolution sees, H value heads, G key heads, K and V of a key
and a value, F decays of all heads, X = M + H + F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from tpspec.model.attention import on_paths
from tpspec.model.courses import NOTHING, courses
from tpspec.model.delta_rule import CHUNK, Rows, looked_at, one_by_one, taken_in
from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.model.batch import Span
    from tpspec.model.courses import Course
    from tpspec.model.late_norm import LateNorm
    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm

LEAST = 1e-6  # in the length of a query or key, as transformers
LEFT, ABSENT = -1, -2  # rows of a group that are not the round's: of an earlier one, and none

T = TypeVar("T")


class Made(NamedTuple):
    """What a mixer's products make of rows, but for `out`: mixed [T, M], rates [T, H + F], gate [T, H V]. squares: of a
    late norm, which is then not made: sums of those of each row's numbers are added there, [T] in float32; or None."""

    mixed_TM: Tensor
    rates_TH: Tensor
    gate_TX: Tensor
    squares_T: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Mixer:
    """What is between a layer's norm and its all-reduce. mixed: [D] -> [M], queries and keys [G K], values [H V].
    rates: [D] -> [H + F], of writes and of decays. gate: [D] -> [H V]. out: [H V] -> [D], a partial sum.

    kernel: [kernel, M], the newest row last. key_of: the local key head, of num_keys, that each local value head reads.
    decays: [H] and biases: [F] of this shard, float32, and norm: [V]. F is H, or H K where each number of a key is
    forgotten in its own way: Kimi Delta Attention, whose gates are sigmoids.

    skips: [H], float32, what its value counts in the answer of a row; where there are some, this is Mamba-2: both rates
    are one, queries and keys stay as long as they are, and what has passed the gate has a norm, of [H V], for all value
    heads of a key head together, or none: norm is None. late: that is made of the sum over ranks, which hold others of
    its heads; or None. conv_biases: [M], or None. most_written: see published/delta_net.py; where states do not sum.
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
    biases_F: Tensor
    norm: Norm | None
    skips_H: Tensor | None = None
    conv_biases_M: Tensor | None = None
    late: LateNorm | None = None
    most_written: int = 1

    @property
    def by_channel(self) -> bool:
        """Whether each number of a key has a decay."""
        return len(self.biases_F) > len(self.decays_H)

    @property
    def sums(self) -> bool:
        """See delta_rule.py."""
        return self.skips_H is not None

    def made(self, x_TD: Tensor) -> Made:
        products = self.mixed(x_TD), self.rates(x_TD), self.gate(x_TD)
        return Made(*products, None if self.late is None else torch.zeros(len(x_TD), device=x_TD.device))

    def rows(self, inputs_BRKX: Tensor, absent_BR: Tensor) -> Rows:
        """Of what the convolution of each row sees. absent: no rows, which change nothing."""
        M, G, dtype = self.kernel.shape[1], self.num_keys, inputs_BRKX.dtype
        convolved = (inputs_BRKX[..., :M].float() * self.kernel).sum(2)
        if self.conv_biases_M is not None:
            convolved += self.conv_biases_M
        mixed = F.silu(convolved.to(dtype)).float().masked_fill_(absent_BR[..., None], 0)
        q, k, v = torch.split(mixed, [G * self.key_dim, G * self.key_dim, M - 2 * G * self.key_dim], 2)
        q, k = (x.view(*x.shape[:2], G, -1) for x in (q, k))
        if not self.sums:
            q, k = _of_one(q) * self.key_dim**-0.5, _of_one(k)
        writes, steps = torch.split(inputs_BRKX[:, :, -1, M:], [len(self.decays_H), len(self.biases_F)], 2)
        passed = F.softplus(steps.float() + self.biases_F)
        decays = -self.decays_H[:, None] * passed.view(*passed.shape[:2], len(self.decays_H), -1)
        return Rows(
            q[:, :, self.key_of].transpose(1, 2),
            k[:, :, self.key_of].transpose(1, 2),
            v.view(*v.shape[:2], len(self.decays_H), -1).transpose(1, 2),
            decays.masked_fill(absent_BR[..., None, None], 0).transpose(1, 2),
            (passed if self.sums else writes.sigmoid().float() * self.most_written).transpose(1, 2),
        )

    def answered(self, answers_BHRV: Tensor, rows: Rows) -> Tensor:
        """Behind what a row's own value counts in it."""
        return answers_BHRV if self.skips_H is None else answers_BHRV + self.skips_H[:, None, None] * rows.v

    def rows_alone(self, inputs_1RKX: Tensor, absent_1R: Tensor) -> Rows:
        """`rows`, one after the other: torch's functions may give a number other bits at another place of a tensor."""
        alone = [self.rows(inputs_1RKX[:, row, None], absent_1R[:, row, None]) for row in range(absent_1R.shape[1])]
        return Rows(*(torch.cat(same, 2) for same in zip(*alone, strict=True)))

    def gated(self, answers_THV: Tensor, gate_TX: Tensor, squares_T: Tensor | None = None) -> Tensor:
        """What `out` reads, [T, H V]. squares: as of Steps."""
        gate_THV = gate_TX.view(answers_THV.shape).float()
        if self.by_channel:
            assert self.norm is not None, "none but Mamba-2 is without"
            normed_THV = F.rms_norm(answers_THV.float(), self.norm.weight.shape, self.norm.weight, self.norm.eps)
            return (normed_THV * gate_THV.sigmoid()).to(gate_TX.dtype).flatten(1)
        gate_THV = F.silu(gate_THV)
        if self.norm is None:
            return (answers_THV.float() * gate_THV).to(gate_TX.dtype).flatten(1)
        if not self.sums:
            return (self.norm(answers_THV) * gate_THV).to(gate_TX.dtype).flatten(1)
        passed_TGX = (answers_THV.float() * gate_THV).view(len(gate_TX), self.num_keys, -1)
        if squares_T is not None:
            squares_T.copy_(passed_TGX.square().sum((1, 2)))
            return (passed_TGX.flatten(1) * self.norm.weight).to(gate_TX.dtype)
        normed_TGX = F.rms_norm(passed_TGX, passed_TGX.shape[2:], eps=self.norm.eps)
        return (normed_TGX.flatten(1) * self.norm.weight).to(gate_TX.dtype)


def _of_one(x: Tensor) -> Tensor:
    """In float32: a vector of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LEAST)


@dataclass(frozen=True, slots=True)
class Round:
    """The spans of one forward, ready for every layer of linear attention.

    Inputs of a layer are the round's rows, behind them those of what is left in the slots that are seen (left), and a
    row of zeros. whole: a row's bits may not depend on the others.
    """

    store: StateStore
    left_L: Tensor
    groups: Sequence[Group]
    whole: bool

    @classmethod
    def of(cls, spans: Sequence[Span], store: StateStore, num_rows: int, device: torch.device, *, whole: bool) -> Round:
        """Short spans are computed together, and long ones, which would fill those up, alone; all where whole."""
        every = courses(spans, store)
        named = {name for course in every for seen in (*course.sights, course.before) for name in seen if name < 0}
        left = sorted(named - {NOTHING})
        places = {name: num_rows + at for at, name in enumerate([*left, NOTHING])}
        most = -1 if whole else CHUNK
        short = [one for one in every if one.num_kept + one.num_chained <= most]
        apart = [[one] for one in every if one.num_kept + one.num_chained > most]
        groups = [Group.of(some, places, device) for some in [short, *apart] if some]
        return cls(store, sent([~name for name in left], device), groups, whole)

    def answered(self, mixer: Mixer, layer: int, made: Made) -> Tensor:
        """What the mixer's `out` reads, [T, H V]; the states go on."""
        mixed_TM, rates_TH, gate_TX, squares_T = made
        row_TX = torch.cat([mixed_TM, rates_TH], 1)
        left_LX = self.store.of(layer).left.flatten(0, 1)[self.left_L]
        inputs = torch.cat([row_TX, left_LX, row_TX.new_zeros(1, row_TX.shape[1])])
        H = len(mixer.decays_H)
        V = gate_TX.shape[1] // H
        answers_THV = row_TX.new_zeros(len(row_TX), H, V)
        for group in self.groups:
            self._answer(mixer, layer, inputs, group, answers_THV)
        if not self.whole:
            return mixer.gated(answers_THV, gate_TX, squares_T)
        return torch.cat([
            mixer.gated(answers_THV[row, None], gate_TX[row, None], None if squares_T is None else squares_T[row, None])
            for row in range(len(row_TX))
        ])  # fmt: skip

    def _answer(self, mixer: Mixer, layer: int, inputs: Tensor, group: Group, answers_THV: Tensor) -> None:
        """Of the group's rows, into their places; their states go on."""
        held, C = self.store.of(layer), group.num_chained
        rows = (mixer.rows_alone if self.whole else mixer.rows)(inputs[group.sights_BRK], group.absent_BR)
        state = held.states[group.slots_B].masked_fill_(group.fresh_B[:, None, None, None], 0)
        chain, tree = rows.part(0, C), rows.part(C, rows.k.shape[2])
        if self.whole:
            state, chained = _in_turn(state, chain, sums=mixer.sums)
            looked = one_by_one(state, tree, group.parents_BN, sums=mixer.sums)[1]
        else:
            state, chained = taken_in(state, chain, sums=mixer.sums)
            looked = looked_at(state, tree, group.paths_BNN, sums=mixer.sums)
        held.states[group.slots_B] = state
        held.left[group.slots_B, : group.kept_BL.shape[1]] = inputs[group.kept_BL]
        told = mixer.answered(torch.cat([chained, looked], 2), rows).transpose(1, 2).flatten(0, 1)
        answers_THV[group.told_to] = told[group.told_from].to(answers_THV.dtype)


def _in_turn(state: Tensor, rows: Rows, *, sums: bool) -> tuple[Tensor, Tensor]:
    """`taken_in`, row by row."""
    answers = [rows.v[:, :, :0]]
    for start in range(rows.k.shape[2]):
        parents = state.new_full((len(state), 1), -1).long()
        states, answered = one_by_one(state, rows.part(start, start + 1), parents, sums=sums)
        state = states[:, :, 0]
        answers.append(answered)
    return state, torch.cat(answers, 2)


@dataclass(frozen=True, slots=True)
class Group:
    """Spans that are computed together. Of the inputs, sights [B, C + N, kernel]: what each row's convolution sees;
    kept [B, num_before + N]: what is left in the slots now. absent: [B, C + N], no row. told: of those B (C + N) rows,
    and of the round's, those that are answered. parents: [B, N], paths: [B, N, N], of the trees.
    """

    num_chained: int
    slots_B: Tensor
    fresh_B: Tensor
    sights_BRK: Tensor
    kept_BL: Tensor
    absent_BR: Tensor
    told_from: Tensor
    told_to: Tensor
    parents_BN: Tensor
    paths_BNN: Tensor

    @classmethod
    def of(cls, some: Sequence[Course], places: dict[int, int], device: torch.device) -> Group:
        """places: among the inputs, of what courses name and is not of the round."""
        C, N = max(one.num_kept + one.num_chained for one in some), max(len(one.tree) for one in some)

        def line(chain: Sequence[T], tree: Sequence[T], filler: T) -> list[T]:
            return [*chain, *[filler] * (C - len(chain)), *tree, *[filler] * (N - len(tree))]

        def place(names: Sequence[int]) -> list[int]:
            return [name if name >= 0 else places[name] for name in names]

        sights, kept, rows = [], [], []
        for one in some:
            seen, num_chained = [place(sight) for sight in one.sights], one.num_kept + one.num_chained
            none = [places[NOTHING]] * len(seen[0])
            sights.append(line(seen[:num_chained], seen[num_chained:], none))
            kept.append([*place(one.before), *one.tree, *none[:1] * (N - len(one.tree))])
            rows.append(line([*[LEFT] * one.num_kept, *one.rows[: one.num_chained]], one.tree, ABSENT))
        rows_X = torch.tensor(rows).flatten()
        parents, paths = _trees([one.parents for one in some], N)
        return cls(
            num_chained=C,
            slots_B=sent([one.slot for one in some], device),
            fresh_B=sent(torch.tensor([one.is_fresh for one in some]), device),
            sights_BRK=sent(torch.tensor(sights), device),
            kept_BL=sent(torch.tensor(kept), device),
            absent_BR=sent(torch.tensor(rows) == ABSENT, device),
            told_from=sent((rows_X >= 0).nonzero().squeeze(1), device),
            told_to=sent(rows_X[rows_X >= 0], device),
            parents_BN=sent(parents, device),
            paths_BNN=sent(paths, device),
        )


def _trees(parents: Sequence[Sequence[int]], num_rows: int) -> tuple[Tensor, Tensor]:
    """Parents [B, N] and paths [B, N, N], filled up by rows that see themselves."""
    filled = torch.full((len(parents), num_rows), -1)
    paths = torch.eye(num_rows, dtype=torch.bool).repeat(len(parents), 1, 1)
    for text, tree in enumerate(parents):
        filled[text, : len(tree)] = torch.tensor(tree)
        paths[text, : len(tree), : len(tree)] = on_paths(tree)
    return filled, paths
