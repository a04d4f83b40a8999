"""Short convolutions between their products, in torch, in C and by a card's kernel: texts go on from what is left of
them as if they had been read whole. Without a card its kernel runs in Triton's interpreter.

On a machine with a card: pytest -m gpu."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from transformers import AutoConfig

from tests.checkpoints import tiny
from tests.model.test_linear_attention import CARD, CPU, FEW, IDS, TEXTS, WAYS, Case, Text, plans
from tpspec.cache.states import StateSizes, StateStore
from tpspec.errors import UserError
from tpspec.model.batch import Carried, Span
from tpspec.model.layers import ConvLayer
from tpspec.model.norm import Norm
from tpspec.model.short_conv import GatedConv
from tpspec.model.sight import Heads, Shape, Sight
from tpspec.model.spec import read_spec, resolve
from tpspec.published.reads import Reads
from tpspec.published.shape import ModelShape
from tpspec.published.windows import windows_of
from tpspec.topology.shards import split

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


class ConvCase(Case):
    """A layer with random weights, the steps of one way, and what the product gives for each token id."""

    def __init__(self, way: str, channels: int, dtype: torch.dtype = torch.float32, kernel: int = 3) -> None:
        self.way, noise = way, torch.Generator().manual_seed(0)
        device, nowhere = CARD if way in ("card", "many") else CPU, None
        weights, biases = torch.randn(kernel, channels, generator=noise), torch.randn(channels, generator=noise)
        self.table = torch.randn(IDS, 3 * channels, generator=noise).to(device, dtype)
        norm = Norm(biases, 1e-6)  # nobody reads it
        conv = GatedConv(nowhere, nowhere, weights.to(device), biases.to(device) if kernel % 2 else None)  # type: ignore[arg-type]
        self.conv_layer = ConvLayer(index=0, attention_norm=norm, mixer=conv, mlp_norm=norm, mlp=nowhere)
        self.states = StateStore([0], StateSizes(0, 0, 0, channels, kernel - 1), TEXTS, 12, dtype, device)
        self.steps = self._steps(way, Shape(frozenset({Sight(Heads((0,), 16), None)}), dtype, device, 1.0, "silu"))

    def answers(self, spans: list[Span], padding: int = 0) -> torch.Tensor:
        tokens = [token for span in spans for token in span.tokens]
        padding = 12 - len(tokens) if self.way == "deterministic" else padding
        rows = self.table[[*tokens, *[0] * padding]]
        made = self.steps.convolved(self.conv_layer, rows, self.steps.begin(spans, len(rows)))
        assert self.way != "card" or not made[len(tokens) :].any(), "padding is anything"
        return made[: len(tokens)].float().to(CPU, copy=True)


@pytest.mark.parametrize(
    ("way", "channels", "kernel"),
    [("torch", 5, 3), ("C", 5, 3), ("C", 70, 7), ("C", 16, 1), ("card", 70, 3), ("card", 5, 2), ("many", 5, 7)],
    ids=str,
)
def test_rounds_of_any_texts_and_trees_are_those_of_whole_texts(way: str, channels: int, kernel: int) -> None:
    """Stands against a row that sees its neighbour and not its parent, what another text has left, and channels beyond
    a program's or a vector's."""

    @settings(max_examples={"card": 4, "many": 3}.get(way, 25))
    @given(plans())
    def holds(plan: list[list[tuple[int, list[int], int]]]) -> None:
        case, reference = ConvCase(way, channels, kernel=kernel), ConvCase("torch", channels, kernel=kernel)
        texts = [Text(slot) for slot in range(TEXTS)]
        for number, some in enumerate(plan):
            made = [text.span(11 * number + text.slot, *one[:2]) for text, one in zip(texts, some, strict=False)]
            answers = case.answers([span for span, _ in made], padding=number)
            wanted = torch.stack([reference.whole(end) for _, ends in made for end in ends])
            assert (answers - wanted).abs().max() < 1e-4
            for text, (_, _, leaf) in zip(texts, some, strict=False):
                text.keep(leaf)

    holds()


@pytest.mark.parametrize("way", WAYS)
def test_a_row_sees_its_own_gates_and_the_rows_before_it(way: str) -> None:
    """Against B in the place of C, a gate of another row, and taps the other way round: as it is defined."""
    case, text = ConvCase(way, 5), [7, 8, 9, 10]
    before, behind, x = case.table[text].float().cpu().chunk(3, 1)
    seen = torch.cat([torch.zeros(2, 5), before * x])
    conv = case.conv_layer.mixer
    assert conv.biases_M is not None
    sums = torch.stack([(seen[row : row + 3] * conv.kernel.cpu()).sum(0) for row in range(4)]) + conv.biases_M.cpu()
    made = case.answers([Span(0, 0, tuple(text), ((0, 4),), 1, carried=Carried(0, (), 4))])
    assert (made - behind * sums).abs().max() < 1e-5


def test_more_rows_than_a_program_takes_at_a_time_are_all_made() -> None:
    """Of one text and padding behind it, in chunks. Stands against the rows behind the first eight."""
    case, reference, text = ConvCase("many", 5), ConvCase("torch", 5), list(range(30, 61))
    first = case.answers([Span(0, 0, tuple(text[:19]), ((0, 19),), 1, carried=Carried(0, (), 19))], padding=11)
    then = case.answers([Span(0, 19, tuple(text[19:]), ((0, 31),), 1, carried=Carried(0, (0,), 12))])
    whole = reference.answers([Span(9, 0, tuple(text), ((0, 31),), 1)])
    assert (torch.cat([first, then]) - whole).abs().max() < 1e-5


@pytest.mark.parametrize(("way", "dtype"), FEW, ids=str)
def test_channels_of_a_usual_number_are_what_torch_makes_of_them(way: str, dtype: torch.dtype) -> None:
    """In 16 bits, in which three things are rounded, the same but for the order of a sum."""
    told = []
    for by in ("torch", way):
        case, text = ConvCase(by, 683, dtype), Text(1)
        case.answers([text.span(5, 6, [])[0]])
        text.keep(-1)
        told.append(case.answers([text.span(9, 1, [-1, 0])[0]]))
    assert (told[0] - told[1]).abs().max() < (1e-5 if dtype == torch.float32 else 0.01) * told[0].abs().max()


@pytest.mark.parametrize(("way", "dtype"), [*FEW, ("torch", torch.float32), ("deterministic", torch.bfloat16)], ids=str)
def test_a_row_has_the_same_bits_however_it_came_about(way: str, dtype: torch.dtype) -> None:
    """Alone, behind drafts that were kept, in a chain or on a path of a tree."""
    case, ids = ConvCase(way, 21, dtype), tuple(range(40, 50))

    def said(start: int, count: int, kept: tuple[int, ...] = (0,), certain: int = 1) -> torch.Tensor:
        runs = ((0, start + count),)
        return case.answers([Span(0, start, ids[start:][:count], runs, 1, carried=Carried(0, kept, certain))])

    said(0, 6, (), 6)
    alone = torch.cat([said(6 + row, 1) for row in range(4)])
    said(0, 6, (), 6)
    assert torch.equal(said(6, 3), alone[:3])
    assert torch.equal(said(9, 1, (0, 1, 2)), alone[3:])
    said(0, 6, (), 6)
    beside, parents = (*ids[6:8], 99, *ids[8:10]), (-1, 0, 0, 1, 3)
    tree = Span(0, 6, beside, ((0, 11),), 1, parents, carried=Carried(0, (0,), 1))
    assert torch.equal(case.answers([tree])[[0, 1, 3, 4]], alone)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_number_stays_in_its_text(way: str) -> None:
    """And in its branch, and is forgotten with it."""
    case, clean = ConvCase(way, 5), ConvCase("torch", 5)
    case.table[99] = torch.nan
    case.answers([Span(0, 0, (5, 6, 7), ((0, 3),), 1, carried=Carried(0, (), 3))])
    tree = Span(0, 3, (8, 99, 9), ((0, 6),), 1, (-1, 0, 0), carried=Carried(0, (0,), 1))
    answers = case.answers([tree, Span(1, 0, (5, 6), ((8, 2),), 1, carried=Carried(1, (), 2))])
    assert answers[1].isnan().all()
    wanted = torch.stack([clean.whole(text) for text in ([5, 6, 7, 8], [5, 6, 7, 8, 9], [5], [5, 6])])
    assert (answers[[0, 2, 3, 4]] - wanted).abs().max() < 1e-4
    on = case.answers([Span(0, 5, (10,), ((0, 6),), 1, carried=Carried(0, (0, 2), 1))])
    assert (on[0] - clean.whole([5, 6, 7, 8, 9, 10])).abs().max() < 1e-4


def changed(folder: Path, said: dict[str, Any]) -> ModelShape:
    config = json.loads((folder / "config.json").read_text()) | said
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return ModelShape.of(folder)


def test_channels_go_to_ranks_at_any_index(tmp_path: Path) -> None:
    shards = split(ModelShape.of(tiny("lfm2", tmp_path)), (3, 1, 2))
    assert [shard.conv_channels for shard in shards] == [range(48), range(48, 64), range(64, 96)]


def test_layers_are_those_of_transformers_where_a_config_does_not_say() -> None:
    """Of LFM3, whose others have a window or none."""
    config = {"model_type": "lfm3", "num_hidden_layers": 11}
    shape, spec = ModelShape.from_config(config, "here"), resolve(AutoConfig.for_model(**config), "there")
    assert shape.short_conv == spec.shape.short_conv
    windows = [layer.window for layer in spec.layers]
    assert windows_of(Reads(config, "here"), "lfm3", 11) == (*windows,)
    assert [layer for layer, window in enumerate(windows) if window] == [4, 8]
    assert shape.stateful == {0, 1, 3, 5, 7, 9}


def test_lfm2s_config_as_it_was_published_is_the_same_model(tmp_path: Path) -> None:
    """Whose MLPs, layers and head have older names."""
    folder = tiny("lfm2", tmp_path)
    shape = ModelShape.of(folder)
    assert (shape.intermediate, shape.tied) == (96, True)  # 100 * 2 / 3 = 66, * 1.3 = 85, in steps of 24
    old = {"block_ff_dim": 100, "intermediate_size": ..., "tie_embedding": True, "tie_word_embeddings": ...}
    assert changed(folder, old | {"full_attn_idxs": [1], "layer_types": ...}) == shape
    assert read_spec(folder).shape == shape
    assert changed(folder, {"block_auto_adjust_ff_dim": False}).intermediate == 100
    assert read_spec(folder).shape.intermediate == 100


def test_lfm3s_rope_as_it_was_published_turns_a_part_of_each_head(tmp_path: Path) -> None:
    """Which it calls default; stands against all of a head that is turned, as transformers does by that name."""
    folder = tiny("lfm3", tmp_path)
    due, ropes = read_spec(folder).ropes, json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert [int((rope.inverse > 0).sum()) for rope in due] == [4, 8]
    ropes["full_attention"]["rope_type"] = "default"
    changed(folder, {"rope_parameters": ropes})
    assert all(torch.equal(ours.inverse, rope.inverse) for ours, rope in zip(read_spec(folder).ropes, due, strict=True))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"conv_L_cache": 0}, "conv_L_cache is 0; should be a whole number above 0"),
        ({"layer_types": ["conv"] * 3}, "layer_types is .*; should be full_attention for one layer"),
        ({"layer_types": ["conv", "full_attention"]}, "should be conv or full_attention for each of 3 layers"),
        ({"layer_types": None, "full_attn_idxs": [3]}, r"full_attn_idxs is \[3\]; should be numbers of layers, from 0"),
        ({"block_use_swiglu": False}, "block_use_swiglu is False; should be True"),
        ({"use_pos_enc": False}, "use_pos_enc is False; should be True"),
        ({"block_multiple_of": 0}, "block_multiple_of is 0"),
    ],
)
def test_what_lfm2s_layers_are_not_is_refused(said: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = tiny("lfm2", tmp_path)
    with pytest.raises(UserError, match=why):
        changed(folder, said)
