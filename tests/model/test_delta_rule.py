"""The gated delta rule, taken in at once or one by one, over lines and trees, against its recurrence in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tpspec.model.delta_rule import CHUNK, Rows, looked_at, one_by_one, taken_in

B, H, K, V = 2, 3, 5, 4


def drawn(seed: int, num_rows: int, num_decays: int = 1) -> tuple[Tensor, Rows]:
    """num_decays: of a row, or each number of its key."""
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(B, H, *shape, generator=random)

    q, k = F.normalize(numbers(num_rows, K), dim=3), F.normalize(numbers(num_rows, K), dim=3)
    decays = -numbers(num_rows, num_decays).exp()
    return numbers(K, V), Rows(q, k, numbers(num_rows, V), decays, numbers(num_rows).sigmoid())


def recurrent(state: Tensor, rows: Rows, path: list[int]) -> tuple[Tensor, Tensor]:
    """The state behind a path, and what its last row is answered; of every text and head."""
    state, answer = state.double(), torch.zeros(B, H, V, dtype=torch.float64)
    q, k, v, decays, writes = (x.double() for x in rows)
    for row in path:
        state = state * decays[:, :, row, :, None].exp()
        u = (v[:, :, row] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, row])) * writes[:, :, row, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, row], u)
        answer = torch.einsum("bhkv,bhk->bhv", state, q[:, :, row])
    return state, answer


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**16), num_rows=st.integers(0, 2 * CHUNK + 9), num_decays=st.sampled_from([1, K]))
def test_rows_that_follow_each_other_are_taken_in_as_one_after_the_other(
    seed: int, num_rows: int, num_decays: int
) -> None:
    """Stands against a chunk that forgets the one before it, or fades it once too often, or another number of it."""
    state, rows = drawn(seed, num_rows, num_decays)
    taken, answers = taken_in(state, rows)
    assert answers.shape == (B, H, num_rows, V)
    expected, last = recurrent(state, rows, list(range(num_rows)))
    assert (taken - expected).abs().max() < 1e-4
    assert not num_rows or (answers[:, :, -1] - last).abs().max() < 1e-4


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**16), tree=st.lists(st.integers(0, 99), max_size=20), num_decays=st.sampled_from([1, K]))
def test_a_row_of_a_tree_sees_its_path_and_no_other_row(seed: int, tree: list[int], num_decays: int) -> None:
    """By either way; each text has a tree of its own. Stands against a sibling's write, and its fading."""
    parents = [[-1, *(each % (row + 1) for row, each in enumerate(tree))], [*range(-1, len(tree))]]
    state, rows = drawn(seed, len(tree) + 1, num_decays)
    paths = torch.zeros(B, len(tree) + 1, len(tree) + 1, dtype=torch.bool)
    for text in range(B):
        for row, parent in enumerate(parents[text]):
            paths[text, row] |= paths[text, parent] if parent >= 0 else paths[text, row]
            paths[text, row, row] = True
    looked, (_, turned) = looked_at(state, rows, paths), one_by_one(state, rows, torch.tensor(parents))
    for text in range(B):
        for row in range(len(tree) + 1):
            path = paths[text, row].nonzero().flatten().tolist()
            expected = recurrent(state, rows, path)[1][text]
            assert (looked[text, :, row] - expected).abs().max() < 1e-4
            assert (turned[text, :, row] - expected).abs().max() < 1e-4


def test_rows_one_by_one_have_the_same_bits_however_they_are_cut() -> None:
    """Stands against `deterministic` that holds for keys and values alone."""
    state, rows = drawn(3, 12)
    line = torch.arange(-1, 11).expand(B, 12)
    states, answers = one_by_one(state, rows, line)
    before = one_by_one(state, rows.part(0, 7), line[:, :7])[0][:, :, -1]
    after, told = one_by_one(before, rows.part(7, 12), line[:, :5])
    assert torch.equal(after[:, :, -1], states[:, :, -1])
    assert torch.equal(told, answers[:, :, 7:])


def test_rows_that_are_none_change_nothing() -> None:
    """As texts are filled up with. Stands against a state that fades while another text goes on."""
    state, rows = drawn(5, 4)
    nothing = Rows(*(torch.zeros_like(x) for x in rows))
    whole = Rows(*(torch.cat([x, none], 2) for x, none in zip(rows, nothing, strict=True)))
    assert (taken_in(state, whole)[0] - taken_in(state, rows)[0]).abs().max() < 1e-6
