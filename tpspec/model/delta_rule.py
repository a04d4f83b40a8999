"""The gated delta rule (Yang et al., Gated DeltaNet, arXiv 2412.06464, equation 10), over rows that follow each other
and over trees. In torch.

A head's state S [K, V] takes a token in by S <- a S + k u^T, of u = b (v - (a S)^T k), and answers q with S^T q; a is
one number, or one for each of a key's, as in Kimi Delta Attention (arXiv 2510.26692, equation 1). Rows of a chunk are
taken in at once: their u depend on those of the rows before them, which is one triangular system (ibid., 3.3). Nothing
in it asks for rows in a line: where a row's own path stands in place of all rows before it, the same system answers
every row of a tree, and the state is only read. Where u = b v, which needs no system, that is Mamba-2 (Dao, Gu, arXiv
2405.21060, 5): `sums`. Knows numbers; must not know slots, ranks or layers.

Shapes: B texts, R rows of each (filled up by rows that change nothing: k, u and log a are 0), H heads, K and V of a key
and a value, X of a: 1 or K. All float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 64  # rows of one triangular system: with more, the products of rows with rows outweigh those with the state
FADING = 16  # where each number of a key fades in its own way, so that such a product is one for each pair of rows


class Rows(NamedTuple):
    """q, k: [B, H, R, K], their lengths being 1 but where a state sums, or 0 of k where a row is no row. v:
    [B, H, R, V]. decays: [B, H, R, X], log a of each row. writes: [B, H, R], b."""

    q: Tensor
    k: Tensor
    v: Tensor
    decays: Tensor
    writes: Tensor

    def part(self, start: int, stop: int) -> Rows:
        return Rows(*(x[:, :, start:stop] for x in self))


def taken_in(state_BHKV: Tensor, rows: Rows, *, sums: bool = False) -> tuple[Tensor, Tensor]:
    """Rows that follow each other: the state behind the last, and what each was answered, [B, H, R, V]."""
    answers, size = [], CHUNK if rows.decays.shape[3] == 1 else FADING
    for start in range(0, rows.k.shape[2], size):
        part = rows.part(start, start + size)
        above_RR = torch.ones(part.k.shape[2], part.k.shape[2], dtype=torch.bool, device=part.k.device).tril()
        sums_BHRX = part.decays.cumsum(2)
        u_BHRV, answered = _solved(state_BHKV, part, above_RR, sums_BHRX, sums=sums)
        answers.append(answered)
        left_BHRX = (sums_BHRX[:, :, -1:] - sums_BHRX).exp()
        state_BHKV = state_BHKV * sums_BHRX[:, :, -1, :, None].exp() + (part.k * left_BHRX).mT @ u_BHRV
    return state_BHKV, torch.cat(answers, 2) if answers else rows.v


def looked_at(state_BHKV: Tensor, rows: Rows, paths_BRR: Tensor, *, sums: bool = False) -> Tensor:
    """Rows of trees: what each is answered, [B, H, R, V]. paths: which rows lie on a row's path from the root, itself
    among them; a row stands behind those. What is no number in a row stays in its branch."""
    *wide, writes_BHR = rows
    finite_BR = torch.stack([x.isfinite().all(3).all(1) for x in wide]).all(0) & writes_BHR.isfinite().all(1)
    rows = Rows(*(x.masked_fill(~_beside(finite_BR, x), 0) for x in rows))
    sums_BHRX = paths_BRR[:, None].float() @ rows.decays
    answers_BHRV = _solved(state_BHKV, rows, paths_BRR[:, None], sums_BHRX, sums=sums)[1]
    broken_BR = (paths_BRR & ~finite_BR[:, None]).any(2)
    return answers_BHRV.masked_fill(_beside(broken_BR, answers_BHRV), torch.nan)


def _beside(rows_BR: Tensor, x: Tensor) -> Tensor:
    """As [B, 1, R], or [B, 1, R, 1]: beside what rows have."""
    return rows_BR[:, None, :, None] if x.dim() == 4 else rows_BR[:, None]


def _solved(
    state_BHKV: Tensor, rows: Rows, paths_RR: Tensor, sums_BHRX: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor]:
    """u, and the answers. sums_BHRX: of log a, from the state to each row."""
    q, k, v, _, writes_BHR = rows
    between = sums_BHRX[..., :, None, :] - sums_BHRX[..., None, :, :]
    between = between.masked_fill(~paths_RR[..., None], -torch.inf).exp()
    since_BHRX = sums_BHRX.exp()
    u = v * writes_BHR[..., None]
    if not sums:
        wanted = (v - (k * since_BHRX) @ state_BHKV) * writes_BHR[..., None]
        above = (writes_BHR[..., None] * _met(k, k, between)).tril(-1)
        u = torch.linalg.solve_triangular(above, wanted, upper=False, unitriangular=True)
    return u, (q * since_BHRX) @ state_BHKV + _met(q, k, between) @ u


def _met(q_BHRK: Tensor, k_BHRK: Tensor, between_BHRRX: Tensor) -> Tensor:
    """Products of each row with each, [B, H, R, R], of keys that have faded since."""
    if between_BHRRX.shape[-1] == 1:
        return between_BHRRX.squeeze(-1) * (q_BHRK @ k_BHRK.mT)
    return torch.einsum("bhik,bhijk->bhij", q_BHRK, between_BHRRX * k_BHRK[..., None, :, :])


def one_by_one(state_BHKV: Tensor, rows: Rows, parents_BR: Tensor, *, sums: bool = False) -> tuple[Tensor, Tensor]:
    """The states behind every row, [B, H, R, K, V], and the answers: the same bits, whichever rows stand beside a row,
    and however those before it were taken in. parents: of each row, before it; -1: the state."""
    B, H, R, K, V = *rows.k.shape, rows.v.shape[3]
    states = torch.cat([state_BHKV[:, :, None], state_BHKV.new_empty(B, H, R, K, V)], 2)
    texts, answers = torch.arange(B, device=state_BHKV.device), []
    for row in range(R):
        decays_BHX = rows.decays[:, :, row].contiguous().exp()  # or its bits would depend on how many rows there are
        before = states[texts, :, parents_BR[:, row] + 1] * decays_BHX[..., None]
        k_BHK1 = rows.k[:, :, row, :, None]
        said_BHV = 0 if sums else (before * k_BHK1).sum(2)
        u_BHV = (rows.v[:, :, row] - said_BHV) * rows.writes[:, :, row, None]
        states[:, :, row + 1] = now = before + k_BHK1 * u_BHV[:, :, None]
        answers.append((now * rows.q[:, :, row, :, None]).sum(2))
    return states[:, :, 1:], torch.stack(answers, 2) if answers else rows.v
