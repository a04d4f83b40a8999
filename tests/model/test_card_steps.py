"""The kernels of few rows on a card compute what torch does. Without a card they run in Triton's interpreter.

On a machine with a card: pytest -m gpu."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.checkpoints import KINDS, tiny
from tests.recent import told, whole_and_windowed
from tests.slow import slowly
from tpspec.comm.communicator import OneRank
from tpspec.model import compiled, torch_steps
from tpspec.model.batch import Carried, Span
from tpspec.model.decoder import Decoder
from tpspec.model.gates import HeadGate
from tpspec.model.loader import Loader
from tpspec.model.sight import Heads, Sight
from tpspec.published.gating import Gating
from tpspec.published.shape import ModelShape
from tpspec.topology.shards import split

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime import interpreter

from tpspec.model.card import (
    attention as card_attention,
    rows as card_rows,
    steps as card_steps,
    tables as card_tables,
    tilings as card_tilings,
)

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IDS = tuple(torch.randint(3, 263, (200,), generator=torch.Generator().manual_seed(0)).tolist())
HEADS = st.just(Heads((0,), 16))
SIGHTS = st.builds(Sight, HEADS, st.none() | st.integers(1, 300)) | st.builds(
    Sight, HEADS, st.integers(1, 300), st.just(True)
)
LONG = card_rows.MOST_ROWS + 10  # rows that are too many for the kernels, and keys of more than one block
TREE = (-1, 0, 0, 1, 1, 2)
NUMBER_BYTES, CAPABILITY = 2, (8, 6)  # that tiles are cut for


def pair(
    folder: Path,
    parts: tuple[float, ...] = (1.0,),
    most: int | None = None,
    *,
    replicates: bool = False,
    **more: Any,
) -> tuple[Decoder, Decoder]:
    """The first shard, by torch and by the kernels. most: folded rows of a tile. replicates: see Loader."""
    shard = split(ModelShape.of(folder), parts)[0]
    loader = Loader.open(folder, shard, torch.float32, DEVICE, replicates=replicates)
    torchs, cards = (loader.decoder(OneRank(), 512, compiled=False, num_states=2, **more) for _ in range(2))
    tilings = {heads: tiling(heads.dim, most) for heads in cards.shape.heads}
    cards._runner.few = card_steps.CardSteps(cards.shape, cards.ropes, cards.store, tilings, cards.states)
    return torchs, cards


def tiling(head_dim: int, most: int | None) -> Any:
    tiling = card_tilings.Tiling.of(head_dim, NUMBER_BYTES, CAPABILITY)
    assert tiling is not None, "no card has room for such heads"
    return replace(tiling, rows=most or tiling.rows, splits=4)


class Alone:
    """In place of attention that places heads, in Triton's interpreter: each program finds nothing of what the others
    wrote, as the last of a card's programs may. Of what each wrote all stays."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(rows: torch.Tensor, *tensors: torch.Tensor, **named: Any) -> None:
            if not named["placing"] or named["small"]:
                self._kernel[grid](rows, *tensors, **named)
                return
            slots = tensors[4][card_rows.ROW_SLOT * named["most_rows"] :][: grid[0]]
            slots = slots[slots >= 0]
            cells = tensors[:2]
            kept = [torch.full_like(cell[:, slots], torch.nan) for cell in cells]
            for cell in cells:
                cell[:, slots] = torch.nan
            begin = type(interpreter.interpreter_builder).set_grid_idx

            def take() -> None:
                for cell, written in zip(cells, kept, strict=True):
                    own = cell[:, slots]
                    written.copy_(torch.where(own.isnan(), written, own))
                    cell[:, slots] = torch.nan

            def begin_alone(*at: Any) -> None:
                take()
                begin(*at)

            with patch.object(type(interpreter.interpreter_builder), "set_grid_idx", begin_alone):
                self._kernel[grid](rows, *tensors, **named)
            take()
            for cell, written in zip(cells, kept, strict=True):
                cell[:, slots] = written

        return launch


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no card."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(card_steps, "attend", Alone(card_steps.attend))


# To the steps, what others are too: they differ in matrices and how those are stored; and nearly so.
ALIKE = {"glm4", "granite", "llama3", "mixtral", "phi3", "qwen2", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "seed_oss"}
NEARLY_ALIKE = {
    "apertus", "cohere2_moe", "deepseek_v2", "gemma3", "gemma4_unified", "glm4_moe", "glm4_moe_lite", "hunyuan", "lfm2",
    "lfm2_moe", "llama", "ministral3", "mistral", "nemotron_h", "olmo_hybrid", "qwen3", "smollm3", "starcoder2",
}  # fmt: skip


def rounds(decoder: Decoder) -> torch.Tensor:
    """Two prompts by torch, in scattered slots; then a tree beside a chain, and a short text alone."""
    text = Span(0, 0, IDS[:LONG], ((0, 64), (128, LONG - 64)), 0, carried=Carried(0, (), LONG))
    decoder.forward([text, Span(1, 0, IDS[:3], ((256, 3),), 0, carried=Carried(1, (), 3))])
    tree = Span(0, LONG, IDS[LONG : LONG + 6], ((0, 64), (128, LONG - 58)), 6, TREE, carried=Carried(0, (0,), 1))
    chain = Span(1, 3, IDS[90:93], ((256, 6),), 3, carried=Carried(1, (0,), 1))
    return torch.cat([decoder.forward([tree, chain]), decoder.forward([Span(2, 0, IDS[50:55], ((300, 5),), 5)])])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [*sorted(KINDS.keys() - ALIKE - NEARLY_ALIKE), *slowly(*sorted(NEARLY_ALIKE))])
def test_a_round_is_what_torch_makes_of_it(kind: str, tmp_path: Path) -> None:
    """Stands against a key of another row's branch, sequence, window or block, a head folded elsewhere, and a query
    turned to another place. Shard 0 of two: an uneven group of heads in some kinds."""
    torchs, cards = pair(tiny(kind, tmp_path), (1.0, 0.7))
    assert (rounds(cards) - rounds(torchs)).abs().max() < 1e-4
    for mine, its in zip(cards.store.cells, torchs.store.cells, strict=True):
        assert torch.allclose(mine.numbers_GSE, its.numbers_GSE, rtol=0, atol=1e-4)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_gates_and_is_gated_stays_within_a_limit(dtype: torch.dtype, limit: float | None, tmp_path: Path) -> None:
    """Of 35 channels, by kernels and in C. Stands against a limit of what goes into silu, of one side alone, and
    numbers that are none and become the limit."""
    both = 2 * torch.randn(5, 70, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    both[1, 3], both[2, 36], both[3, 40], both[3, 41] = torch.nan, torch.nan, torch.inf, -torch.inf
    gate, up = both.float().chunk(2, 1)
    due = gate * gate.sigmoid()
    if limit is not None:
        due, up = due.minimum(torch.tensor(limit)), up.minimum(torch.tensor(limit)).maximum(torch.tensor(-limit))
    due *= up
    assert (due.isnan().sum(), bool(due.isinf().any())) == (2, limit is None)
    for one in all_steps(tiny("smollm2", tmp_path, num_hidden_layers=1, head_dim=16), dtype):
        assert torch.allclose(
            one.gate(both, () if limit is None else (limit,)).float(), due, rtol=2**-7, atol=1e-6, equal_nan=True
        ), one


@pytest.mark.parametrize("kind", ["apertus", "arcee", "starcoder2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_comes_up_without_a_gate_goes_through_its_act(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    """Of 35 channels, by torch, by kernels and in C. Stands against e^x - 1 - x in float32, which is off by a tenth of
    itself where x is a thousandth; and numbers that are none and become 0."""
    x = 2 * torch.randn(5, 35, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x[0, :4] = torch.tensor([-1e-3, -0.4999, -0.5, -9.0])
    x[1, 3], x[1, 4] = torch.nan, torch.inf
    numbers = (0.7, 1.3, 0.4) if kind == "apertus" else ()
    wide = x.double()
    if kind == "arcee":
        due = wide.clamp(min=0).square()
    elif kind == "starcoder2":
        due = torch.nn.functional.gelu(wide, approximate="tanh")
    else:
        due = torch.where(wide > 0, 0.7 * wide.square(), 1.3 * (wide.expm1() - wide)) + 0.4 * wide
    for one in all_steps(tiny(kind, tmp_path, num_hidden_layers=1), dtype):
        assert torch.allclose(one.gate(x, numbers).double(), due, rtol=2**-7 if dtype is torch.bfloat16 else 1e-5,
                              atol=1e-6, equal_nan=True), one  # fmt: skip


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("act", ["sigmoid", "softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_heads_give_is_gated_as_torch_gates_it(
    dtype: torch.dtype, act: Any, by_head: bool, tmp_path: Path
) -> None:
    """Of 3 heads of 16. Stands against the gate of a neighbour, a softplus that is nothing where it is small, or is
    infinite where its power of e is, and a number that is none and gates nothing."""
    noise = torch.Generator().manual_seed(0)
    attended = torch.randn(5, 48, generator=noise).to(DEVICE, dtype)
    made = 4 * torch.randn(5, 3 if by_head else 48, generator=noise).to(DEVICE, dtype)
    made[0, 0], made[1, 1], made[2, 2], made[3, 0] = -12.0, 100.0, torch.nan, 20.5
    gate = HeadGate(lambda _: made, Gating("g_proj", act, by_head), 16)
    torchs, kernels, *_ = all_steps(tiny("smollm2", tmp_path, num_hidden_layers=1, head_dim=16), dtype)
    due, found = (one.weighed(attended, gate, attended) for one in (torchs, kernels))
    assert due.isnan().sum() == (16 if by_head else 1)
    assert found.dtype == dtype
    # Two numbers are rounded, which the interpreter does towards zero.
    assert torch.allclose(found, due, rtol=1e-5 if dtype == torch.float32 else 2**-6, atol=0, equal_nan=True)


def all_steps(folder: Path, dtype: torch.dtype) -> list[Any]:
    """Steps of a checkpoint: by torch, by kernels, and in C where there is no card."""
    loader = Loader.open(folder, split(ModelShape.of(folder), (1.0,))[0], dtype, DEVICE)
    made = loader.decoder(OneRank(), 64)
    tilings = {heads: tiling(heads.dim, None) for heads in made.shape.heads}
    torchs = torch_steps.TorchSteps(made.shape, made.ropes, made.store, None)
    kernels = card_steps.CardSteps(made.shape, made.ropes, made.store, tilings, None)
    compiled_ones = compiled.compiled_steps(made.shape, made.ropes, made.store)
    return [torchs, kernels] if compiled_ones is None else [torchs, kernels, compiled_ones]


def test_squares_of_heads_that_are_elsewhere_are_added_to_those_that_are_here(tmp_path: Path) -> None:
    """Of key heads none may be elsewhere, and of a rank's columns more are normed than it has queries."""
    for kind, parts in (("olmo3", (1.0, 0.7)), ("olmo3", (1.0, 5.0)), ("minimax_m2", (0.5, 2.0))):
        torchs, cards = pair(tiny(kind, tmp_path / f"{kind}{parts}"), parts, replicates=True)
        assert (rounds(cards) - rounds(torchs)).abs().max() < 1e-4


def test_heads_that_are_read_in_pieces_are_what_torch_makes_of_them(tmp_path: Path) -> None:
    """A latent's, of 256 and 40 numbers. Stands against columns of the one piece taken for the other's, and keys of a
    block that come later."""
    torchs, cards = pair(tiny("deepseek_v3", tmp_path, kv_lora_rank=288, num_hidden_layers=2))
    tiling = card_tilings.Tiling.of(296, NUMBER_BYTES, CAPABILITY)
    assert tiling is not None
    assert (tiling.wide, tiling.rest, tiling.keys) == (256, 64, card_rows.KEYS // 2)
    assert (rounds(cards) - rounds(torchs)).abs().max() < 1e-4


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("kind", "most"), [("smollm2", 2), ("deepseek_v3", 3), ("gpt_oss", 1)])
def test_more_heads_than_a_tile_has_rows_are_cut_into_folds(kind: str, most: int, tmp_path: Path) -> None:
    """128 heads of DeepSeek-V3 read one latent: until now such models ran without kernels. Shard 0 of two: folds of
    unlike sizes."""
    torchs, cards = pair(tiny(kind, tmp_path), (1.0, 0.7), most)
    assert all(folds.cuts > 1 for folds in cards._runner.few._folds.values())
    assert (rounds(cards) - rounds(torchs)).abs().max() < 1e-4


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "hunyuan", "deepseek_v3"])
def test_a_cache_of_8_bits_is_read_and_written_as_torch_does(kind: str, tmp_path: Path) -> None:
    """Stands against codes cut off instead of rounded, and a scale of another slot or head. A code on the edge between
    two may fall to either side."""
    torchs, cards = pair(tiny(kind, tmp_path), small_cache=True)
    assert (rounds(cards) - rounds(torchs)).abs().max() < 0.01
    for mine, its in zip(cards.store.cells, torchs.store.cells, strict=True):
        off = (mine.numbers_GSE.int() - its.numbers_GSE.int()).abs()
        assert off.max() <= 1
        assert off.float().mean() < 1e-3
        assert torch.allclose(mine.scales_GS, its.scales_GS, rtol=1e-4)


@pytest.mark.usefixtures("alone")
def test_layers_with_a_window_find_their_keys_in_slots_of_their_own(tmp_path: Path) -> None:
    """Stands against a key that is written or looked for where the other layers have it, and blocks of keys that begin
    where the window does not."""
    torchs, cards = pair(tiny("gpt_oss", tmp_path, num_hidden_layers=2), num_recent=160)
    said = [told(decoder, whole_and_windowed(160)[1], num_steps=2, chunks=(70, 3)) for decoder in (torchs, cards)]
    assert (said[0] - said[1]).abs().max() < 1e-4


@pytest.mark.usefixtures("alone")
def test_a_row_sees_as_many_rows_as_a_round_has(tmp_path: Path) -> None:
    """Stands against the bit of the 64th row, which is the sign of a word, and tiles that are not full."""
    folder, size = tiny("smollm2", tmp_path, num_hidden_layers=1), card_rows.MOST_ROWS
    span = Span(0, 0, IDS[:size], ((32, size),), size)
    torchs, cards = pair(folder)
    assert (cards.forward([span]) - torchs.forward([span])).abs().max() < 1e-4


@pytest.mark.parametrize(("first", "then"), [(20, 4), (5, 1), (5, 16)])
def test_a_launch_writes_no_more_rows_than_it_has(first: int, then: int, tmp_path: Path) -> None:
    """By the table of another round, as when a recording is timed, or rehearsed by padding. Stands against keys of rows
    that there are not, in slots of other texts."""
    _, cards = pair(tiny("smollm2", tmp_path, num_hidden_layers=1))
    few, few_rows = cards._runner.few, min(3, first - 1)
    text = Span(0, 0, IDS[: first - few_rows], ((40, first - few_rows),), 1)
    cards.forward([Span(1, 0, IDS[:9], ((200, 9),), 0)])
    cards.forward([text, Span(1, 9, IDS[9 : 9 + few_rows], ((200, 9), (300, few_rows)), 1)])
    (table,) = few._tables.values()
    slots = table.there[card_rows.ROW_SLOT * table.most_rows :][:then]
    others = torch.ones(cards.store.num_slots, dtype=torch.bool, device=DEVICE)
    others[slots[slots >= 0]] = False

    def run() -> list[torch.Tensor]:
        cards._whole(torch.ones(then, cards.embedding.width, device=DEVICE), few, None, ())
        return [cell.numbers_GSE.clone() for cell in cards.store.cells]

    before = [cell.numbers_GSE.clone() for cell in cards.store.cells]
    after = run()
    assert all(torch.equal(one[:, others], other[:, others]) for one, other in zip(before, after, strict=True))
    few.begin((), then)
    assert all(torch.equal(one, other) for one, other in zip(after, run(), strict=True))


@triton.jit  # type: ignore[untyped-decorator]
def who_ends(said_at: tl.tensor, placing: tl.constexpr) -> None:
    at = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(said_at + at, tl.where(card_attention._waits_no_more(placing), 1, 0))


@pytest.mark.parametrize("grid", [(1, 1, 1), (6, 2, 1), (1, 8, 32), (8, 3, 4)])
def test_of_programs_that_have_nothing_to_do_one_waits_for_what_is_in_front(grid: tuple[int, int, int]) -> None:
    """Stands against a launch of padding that waits for nobody: whoever waits for it would not wait for what it stands
    behind. A kernel that has waited before it asks lets all go."""
    said = torch.full(grid, -1, dtype=torch.int32, device=DEVICE)
    who_ends[grid](said, placing=True)
    assert said.flatten().tolist() == [0, *[1] * (said.numel() - 1)]
    who_ends[grid](said, placing=False)
    assert said.all()


def test_tables_that_are_longer_than_usual_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against blocks that a recording, which copies as much every time, leaves on the host."""
    monkeypatch.setattr(card_tables, "USUAL_BLOCKS", 1)
    torchs, cards = pair(tiny("smollm2", tmp_path, num_hidden_layers=1))
    assert (rounds(cards) - rounds(torchs)).abs().max() < 1e-4


@pytest.mark.usefixtures("alone")
def test_keys_in_single_slots_are_still_read(tmp_path: Path) -> None:
    """Of a round of one row, and of one whose rows have keys in more than one block of a program. Stands against a
    table with room for whole pages only, and a program that reads keys before they are written."""
    folder, size = tiny("smollm2", tmp_path, num_hidden_layers=1), 20
    torchs, cards = pair(folder)
    scattered = tuple((3 * at, 1) for at in range(size))
    told = []
    for decoder in (torchs, cards):
        decoder.forward([Span(0, 0, IDS[:5], scattered[:5], 0)])
        said = decoder.forward([Span(0, 5, IDS[5 : size - 1], scattered[:-1], 2)]).clone()
        told.append(torch.cat([said, decoder.forward([Span(0, size - 1, IDS[size - 1 : size], scattered, 1)])]))
    assert (told[0] - told[1]).abs().max() < 1e-4


@given(
    counts=st.lists(st.integers(1, 200), min_size=1, max_size=2 * card_tables.FEW_RUNS),
    num_rows=st.integers(1, 8),
    sight=SIGHTS,
    most_shifts=st.sampled_from([1, card_tables.MOST_SHIFTS]),
)
def test_every_key_that_is_seen_is_in_one_block(
    counts: list[int], num_rows: int, sight: Sight, most_shifts: int
) -> None:
    """Stands against keys that are read twice, never or at another place, and blocks that end elsewhere in another
    round: rows would sum other keys together. Also where there are more runs than are remembered."""
    counts[-1] += num_rows
    start = sum(counts) - num_rows
    runs = tuple((1000 * run, count) for run, count in enumerate(counts))
    slots = [first + at for first, count in runs for at in range(count)]
    span = Span(0, start, (5,) * num_rows, runs, num_rows)
    table = card_tables.Table(len(slots), sight, len(slots), torch.device("cpu"))
    room = np.zeros(3 * len(slots), np.int64)
    with patch.object(card_tables, "MOST_SHIFTS", most_shifts):
        blocks = room[: 3 * table._put_blocks(span, card_tables.words_of(room))].reshape(-1, 3).tolist()
    read = [(first + key, place + key) for first, count, place in blocks for key in range(count)]
    assert read == [(slots[place], place) for place in range(sight.first_seen(start), len(slots))]
    assert all(place // card_rows.KEYS == (place + count - 1) // card_rows.KEYS for _, count, place in blocks)
    ends = {place + count for _, count, place in blocks[:-1]}
    run_ends = {sum(counts[: run + 1]) for run in range(len(counts))}
    assert all(end % card_rows.KEYS == 0 or end in run_ends for end in ends)


@given(
    starts=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    rounds=st.lists(st.sampled_from(["row", "row", "rows", "rows", "tree", "run", "fewer"]), min_size=1, max_size=12),
    kept=st.integers(1, 3),
    sight=SIGHTS,
)
def test_a_table_that_goes_on_is_what_a_new_one_would_be(
    starts: list[int], rounds: list[str], kept: int, sight: Sight
) -> None:
    """Rounds of one row a text, and of several of which some are kept, texts that go on in another run of slots, and
    texts that end. Stands against a table that says where a row stood in the round before, or that a block has no more
    keys."""
    device, texts = torch.device("cpu"), [[[1000 * text, start]] for text, start in enumerate(starts)]
    table, went_on = card_tables.Table(4000, sight, 4000, device), []
    for kind in rounds:
        if kind == "fewer" and len(texts) > 1:
            texts.pop()
        if kind == "run":
            texts[0].append([3000 + 10 * len(texts[0]), 0])
        num_rows, parents = {"rows": (3, None), "tree": (3, (-1, 0, 0))}.get(kind, (1, None))
        spans = []
        for seq, runs in enumerate(texts):
            runs[-1][1] += num_rows
            start = sum(count for _, count in runs) - num_rows
            spans.append(Span(seq, start, (5,) * num_rows, tuple(map(tuple, runs)), num_rows, parents))
            runs[-1][1] -= max(0, num_rows - kept)
        fresh, seen = card_tables.Table(4000, sight, 4000, device), [card_tables.Seen.by(span) for span in spans]
        fresh.write(spans, seen, 4)
        went_on.append(table.goes_on(spans))
        if not went_on[-1]:
            table.write(spans, seen, 4)
        ends = fresh._words[fresh._tiles_at + card_rows.TILE_SIZE - 1 : fresh._blocks_at : card_rows.TILE_SIZE]
        size = fresh._size(max(ends))
        assert table._words[:size] == fresh._words[:size]
    if not sight.is_windowed and rounds[:2] in (["row", "row"], ["rows", "rows"], ["tree", "tree"]):
        last, on = (0, 1) if rounds[0] == "row" else (2, kept)
        assert went_on[1] is all((at + last) // card_rows.KEYS == (at + last + on) // card_rows.KEYS for at in starts)


def test_what_is_written_of_a_round_leaves_the_one_before_it_where_a_copy_takes_it_from() -> None:
    """Whether it goes on or is another: it is written while the card may not have fetched that one's. Stands against a
    round that runs by the next one's integers."""
    first, then, other = (Span(0, start, (5,), ((1000, start + 1),), 1) for start in (70, 71, 200))
    table = card_tables.Table(4000, Sight(Heads((0,), 16), None), 4000, torch.device("cpu"))
    table.write([first], [card_tables.Seen.by(first)], 4)
    table.put()
    table.copy()
    there = table.there.tolist()
    assert table.goes_on([then])
    table.copy()
    assert table.there.tolist() == there
    table.write([other], [card_tables.Seen.by(other)], 4)
    table.copy()
    assert table.there.tolist() == there
    table.put()
    table.copy()
    assert table.there[card_rows.ROW_POSITION * table.most_rows] == 200
