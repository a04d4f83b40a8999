"""Linear attention between its products, in torch, in C and by a card's kernels: texts go on from states as if they had
been read whole. Without a card its kernels run in Triton's interpreter.

On a machine with a card: pytest -m gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.slow import slowly
from tpspec.cache.states import StateSizes, StateStore
from tpspec.cache.store import Kept, KVStore
from tpspec.model.batch import Carried, Span
from tpspec.model.compiled import CompiledSteps, compiled_rows
from tpspec.model.delta_net import Made, Mixer
from tpspec.model.layers import LinearLayer
from tpspec.model.norm import Norm
from tpspec.model.sight import Heads, Shape, Sight
from tpspec.model.steps import Steps
from tpspec.model.torch_steps import TorchSteps

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
CPU, CARD = torch.device("cpu"), torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEXTS, IDS = 3, 250
WAYS = ["torch", "C", "card"]
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter rounds to the former otherwise
FEW = [("C", torch.float32), ("C", torch.bfloat16), ("card", torch.float32), ("card", HALF)]
SMALL = {"num_keys": 2, "key_of": (0, 0, 1), "key_dim": 5, "value_dim": 7}
UNEVEN = {
    "num_keys": 2,
    "key_of": (0, 1, 1, 1),
    "key_dim": 20,
    "value_dim": 70,
}  # values beyond four vectors of any CPU
MANY = {"num_keys": 4, "key_of": tuple(head // 3 for head in range(12)), "key_dim": 5, "value_dim": 7}
TWICE = SMALL | {"most_written": 2}
PUBLISHED = {"num_keys": 1, "key_of": (0, 0), "key_dim": 128, "value_dim": 128}
LATE = {"num_keys": 1, "key_of": (0, 0, 0), "key_dim": 5, "value_dim": 7, "sums": True, "late": True}
BARE = {"num_keys": 2, "key_of": (0, 0, 1), "key_dim": 5, "value_dim": 7, "sums": True, "bare": True}
SUMS = {"num_keys": 2, "key_of": (0, 0, 1, 1), "key_dim": 5, "value_dim": 7, "sums": True}
GRANITE = {"num_keys": 1, "key_of": (0,) * 12, "key_dim": 128, "value_dim": 64, "sums": True, "late": True}
OLMO = {"num_keys": 2, "key_of": (0, 1), "key_dim": 96, "value_dim": 192, "most_written": 2}
CHANNELS = SMALL | {"by_channel": True}
KIMI = {"num_keys": 2, "key_of": (0, 1), "key_dim": 128, "value_dim": 128, "by_channel": True}
FALCON = {"num_keys": 1, "key_of": (0,) * 5, "key_dim": 256, "value_dim": 64, "sums": True, "bare": True}
NEMOTRON = {"num_keys": 2, "key_of": (0, 0, 1, 1), "key_dim": 128, "value_dim": 64, "sums": True}


class Case:
    """A layer with random weights, the steps of one way, and what the products give for each token id."""

    def __init__(self, way: str, sizes: dict[str, Any], dtype: torch.dtype = torch.float32, kernel: int = 4) -> None:
        self.way, noise = way, torch.Generator().manual_seed(0)
        keys, key_of, K, V = sizes["num_keys"], sizes["key_of"], sizes["key_dim"], sizes["value_dim"]
        H, M = len(key_of), 2 * keys * K + len(key_of) * V
        F = H * K if sizes.get("by_channel") else H

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=noise)

        nowhere: Any = None  # products are given
        device = CARD if way in ("card", "many") else CPU
        sums, self.late = sizes.get("sums", False), sizes.get("late", False)
        norm = Norm((1 + 0.3 * random(H * V if sums else V)).to(device), 1e-6)
        is_bare = sizes.get("bare", False)
        mixer = Mixer(
            mixed=nowhere, rates=nowhere, gate=nowhere, out=nowhere, kernel=random(kernel, M).to(device) / 2,
            key_of=torch.tensor(key_of).to(device), num_keys=keys, key_dim=K,
            decays_H=(random(H) - 3).exp().to(device), biases_F=random(F).to(device),
            norm=None if is_bare else norm,
            skips_H=random(H).to(device) if sums else None, conv_biases_M=random(M).to(device) if sums else None,
            most_written=sizes.get("most_written", 1),
        )  # fmt: skip
        self.layer = LinearLayer(index=0, attention_norm=norm, mixer=mixer, mlp_norm=norm, mlp=nowhere)
        self.products = [random(IDS, width).to(device, dtype) for width in (M, H + F, H * V)]
        if sums:  # whose rates are one
            self.products[1][:, H:] = self.products[1][:, :H]
        self.states = StateStore([0], StateSizes(H, K, V, M + H + F, kernel - 1), TEXTS, 12, dtype, device)
        self.steps = self._steps(way, Shape(frozenset({Sight(Heads((0,), 16), None)}), dtype, device, 1.0, "silu"))

    def _steps(self, way: str, shape: Shape) -> Steps:
        store = KVStore({0: Kept(1, 16)}, 512, shape.dtype, shape.device)
        if way in ("torch", "deterministic"):
            return TorchSteps(shape, [], store, 12 if way == "deterministic" else None, states=self.states)
        if way == "C":
            if (rows := compiled_rows()) is None:
                pytest.skip("no compiled library here")
            return CompiledSteps(rows, shape, [], store, self.states)
        card = pytest.importorskip("tpspec.model.card.many", reason="no Triton")
        tilings = dict.fromkeys(shape.heads, card.Tiling(32, 16, 0, 64))
        if way == "card":
            return card.CardSteps(shape, [], store, tilings, self.states)  # type: ignore[no-any-return]
        return card.ManySteps(shape, [], store, tilings, 1, self.states)  # type: ignore[no-any-return]

    def answers(self, spans: list[Span], padding: int = 0) -> torch.Tensor:
        """Of each row, what the product behind reads."""
        tokens = [token for span in spans for token in span.tokens]
        padding = 12 - len(tokens) if self.way == "deterministic" else padding
        rows = [table[[*tokens, *[0] * padding]] for table in self.products]
        squares_T = torch.zeros(len(rows[0]), device=rows[0].device) if self.late else None
        round = self.steps.begin(spans, len(tokens) + padding)
        made = self.steps.linear_attention(self.layer, Made(*rows, squares_T), round)[: len(tokens)].float()
        if squares_T is not None:  # the norm of what is here alone
            made = made * torch.rsqrt(squares_T[: len(tokens), None] / made.shape[1] + 1e-6)
        return made.to(CPU, copy=True)

    def whole(self, text: list[int]) -> torch.Tensor:
        """Of the last token of a text that is read at once, of which nothing is kept."""
        return self.answers([Span(9, 0, tuple(text), ((0, len(text)),), 1)])[-1]


class Text:
    """What a text has said, and what its last forward has left."""

    def __init__(self, slot: int) -> None:
        self.slot, self.said, self.kept = slot, list[int](), list[int]()
        self.rows, self.above, self.chain = list[int](), list[int](), 0

    def span(self, first: int, chain: int, parents: list[int]) -> tuple[Span, list[list[int]]]:
        """Goes on with `chain` tokens more, the last of them the root of a tree; and the text that each row ends."""
        start, self.chain = len(self.said), chain
        self.rows = [(first + 7 * row + 31 * start) % IDS for row in range(chain + len(parents))]
        self.above = [*range(-1, chain - 1), *(chain + parent for parent in parents)]
        texts: list[list[int]] = []
        for token, above in zip(self.rows, self.above, strict=True):
            texts.append([*(self.said if above < 0 else texts[above]), token])
        size, carried = start + len(self.rows), Carried(self.slot, tuple(self.kept), chain)
        span = Span(self.slot, start, tuple(self.rows), ((0, size),), len(self.rows), tuple(self.above), None, carried)
        return span, texts

    def keep(self, leaf: int) -> None:
        """What was certain, and of the tree what leads to row `leaf` of it; -1: the root alone."""
        path, row = list[int](), self.chain + leaf
        while row >= self.chain:
            path.append(row)
            row = self.above[row]
        self.said += [*self.rows[: self.chain], *(self.rows[row] for row in reversed(path))]
        self.kept = [0, *(row - self.chain + 1 for row in reversed(path))]


@st.composite
def plans(draw: st.DrawFn) -> list[list[tuple[int, list[int], int]]]:
    """Of each round, of some texts: certain rows, parents of the drafts (-1: the root), and the draft that is kept."""
    plan = []
    for _ in range(draw(st.integers(1, 4))):
        some = []
        for _ in range(draw(st.integers(1, TEXTS))):
            size = draw(st.integers(0, 5))
            parents = [draw(st.integers(-1, row - 1)) for row in range(size)]
            some.append((draw(st.integers(1, 4)), parents, draw(st.integers(-1, size - 1))))
        plan.append(some)
    return plan


def test_what_a_card_is_told_of_a_round_is_the_same_behind_a_larger_one() -> None:
    """Stands against rows and states of a round that was, in the numbers that are kept from round to round."""
    used, fresh = (Case("card", SMALL).steps for _ in range(2))
    large = [Text(slot).span(5, 4, [-1, 0])[0] for slot in range(TEXTS)]
    small = [Text(0).span(9, 1, [])[0]]
    for steps, rounds in ((used, [large, small]), (fresh, [small])):
        for spans in rounds:
            steps.begin(spans, sum(len(span.tokens) for span in spans))
    assert (used._states._numbers == fresh._states._numbers).all()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("way", "sizes", "kernel"),
    [
        ("torch", SMALL, 4),
        ("C", SMALL, 4),
        ("C", UNEVEN, 2),
        ("card", SMALL, 4),
        ("many", SMALL, 4),
        ("torch", CHANNELS, 4),
        ("C", CHANNELS, 4),
        ("C", UNEVEN | {"by_channel": True}, 2),
        ("card", CHANNELS, 4),
        ("C", TWICE, 4),
        ("card", TWICE, 4),
        ("torch", SUMS, 4),
        ("C", SUMS, 4),
        ("card", SUMS, 4),
        ("torch", BARE, 4),
        ("C", BARE, 4),
        ("card", BARE, 4),
        ("torch", LATE, 4),
        ("C", LATE, 4),
        ("card", LATE, 4),
        *slowly(("card", SMALL, 1), ("many", CHANNELS, 4)),
    ],
    ids=str,
)
def test_rounds_of_any_texts_and_trees_are_those_of_whole_texts(way: str, sizes: dict[str, Any], kernel: int) -> None:
    """Stands against a row that takes another span's place, state, head or path, a convolution that sees a row's
    neighbour and not its parent, and what is left in another's slot; and, of a norm that is made later, squares of
    another row, or of what has a weight already."""

    @settings(max_examples={"card": 4, "many": 3}.get(way, 25))
    @given(plans())
    def holds(plan: list[list[tuple[int, list[int], int]]]) -> None:
        case, reference = Case(way, sizes, kernel=kernel), Case("torch", sizes | {"late": False}, kernel=kernel)
        texts = [Text(slot) for slot in range(TEXTS)]
        for number, some in enumerate(plan):
            made = [text.span(11 * number + text.slot, *one[:2]) for text, one in zip(texts, some, strict=False)]
            answers = case.answers([span for span, _ in made], padding=number)
            wanted = torch.stack([reference.whole(end) for _, ends in made for end in ends])
            assert (answers - wanted).abs().max() < 1e-4
            for text, (_, _, leaf) in zip(texts, some, strict=False):
                text.keep(leaf)

    holds()


@pytest.mark.parametrize(
    "sizes",
    [PUBLISHED, NEMOTRON, GRANITE, OLMO, KIMI, FALCON],
    ids=["qwen", "nemotron", "granite", "olmo", "kimi", "falcon"],
)
@pytest.mark.parametrize(("way", "dtype"), FEW, ids=str)
def test_heads_of_a_usual_size_are_what_torch_makes_of_them(
    way: str, dtype: torch.dtype, sizes: dict[str, Any]
) -> None:
    """In 16 bits, in which five things are rounded, nearly. Stands against columns beyond a program's or a vector's."""
    told = []
    for by in ("torch", way):
        case, text = Case(by, sizes, dtype), Text(1)
        case.answers([text.span(5, 6, [])[0]])
        text.keep(-1)
        told.append(case.answers([text.span(9, 1, [-1, 0])[0]]))
    assert (told[0] - told[1]).abs().max() < (1e-4 if dtype == torch.float32 else 0.01) * told[0].abs().max()


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("C", torch.float32),
        ("C", torch.bfloat16),
        ("card", HALF),
        ("deterministic", torch.float32),
        ("deterministic", torch.bfloat16),
        *slowly(("card", torch.float32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [SMALL, SUMS, LATE, CHANNELS], ids=["delta", "sums", "late", "channels"])
def test_a_row_has_the_same_bits_however_it_came_about(way: str, dtype: torch.dtype, kind: dict[str, Any]) -> None:
    """Alone, behind drafts that were kept, in a chain or on a path of a tree, between other texts. Stands against sums
    in another order, which turn near ties: a text with drafts would be another."""
    sizes = kind
    if way == "deterministic" and kind is not LATE:
        sizes = MANY | {"sums": kind is SUMS, "by_channel": kind is CHANNELS}
    case, ids = Case(way, sizes, dtype), tuple(range(40, 50))

    def said(start: int, count: int, kept: tuple[int, ...] = (0,), certain: int = 1) -> torch.Tensor:
        runs = ((0, start + count),)
        return case.answers([Span(0, start, ids[start:][:count], runs, 1, carried=Carried(0, kept, certain))])

    said(0, 6, (), 6)
    alone = torch.cat([said(6 + row, 1) for row in range(4)])
    said(0, 6, (), 6)
    assert torch.equal(said(6, 3), alone[:3])
    assert torch.equal(said(9, 1, (0, 1, 2)), alone[3:])
    said(0, 6, (), 6)
    assert torch.equal(said(6, 4, certain=3), alone)
    said(0, 6, (), 6)
    beside, parents = (*ids[6:8], 99, *ids[8:10]), (-1, 0, 0, 1, 3)
    tree = Span(0, 6, beside, ((0, 11),), 1, parents, carried=Carried(0, (0,), 1))
    assert torch.equal(case.answers([tree])[[0, 1, 3, 4]], alone)
    said(0, 6, (), 6)
    others = [Span(i, 0, ids[i : 2 * i + 1], ((20 * i, i + 1),), 1, carried=Carried(i, (), i + 1)) for i in (1, 2)]
    chain = Span(0, 6, ids[6:10], ((0, 10),), 1, carried=Carried(0, (0,), 1))
    assert torch.equal(case.answers([others[0], chain, others[1]])[2:6], alone)


@pytest.mark.parametrize("sizes", [SMALL, SUMS, CHANNELS], ids=["delta", "sums", "channels"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_number_stays_in_its_text(way: str, sizes: dict[str, Any]) -> None:
    """And in its branch: a draft whose row is broken leaves the others, and is forgotten. Stands against a state that
    has taken it in, and zeros times NaN."""
    case, clean = Case(way, sizes), Case("torch", sizes)
    for table in case.products[:2]:
        table[99] = torch.nan
    case.answers([Span(0, 0, (5, 6, 7), ((0, 3),), 1, carried=Carried(0, (), 3))])
    tree = Span(0, 3, (8, 99, 9), ((0, 6),), 1, (-1, 0, 0), carried=Carried(0, (0,), 1))
    other = Span(1, 0, (5, 6), ((8, 2),), 1, carried=Carried(1, (), 2))
    answers = case.answers([tree, other])
    assert answers[1].isnan().all()
    wanted = torch.stack([clean.whole(text) for text in ([5, 6, 7, 8], [5, 6, 7, 8, 9], [5], [5, 6])])
    assert (answers[[0, 2, 3, 4]] - wanted).abs().max() < 1e-4
    on = case.answers([Span(0, 5, (10,), ((0, 6),), 1, carried=Carried(0, (0, 2), 1))])
    assert (on[0] - clean.whole([5, 6, 7, 8, 9, 10])).abs().max() < 1e-4


def test_more_rows_than_a_table_has_place_for_take_other_steps() -> None:
    """Eight texts that have each kept eight rows of their last forward fit; nine do not. Stands against what is written
    beyond the place of such rows."""
    case = Case("card", SMALL)
    spans = [Span(i, 9, (5,), ((16 * i, 10),), 1, carried=Carried(0, tuple(range(8)), 1)) for i in range(9)]
    assert [case.steps.fits(some, len(some)) for some in (spans[:8], spans)] == [True, False]  # type: ignore[attr-defined]
