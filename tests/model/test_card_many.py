"""Many rows on a card are what torch makes of them, however many texts they are of. Without a card the kernels run in
Triton's interpreter.

On a machine with a card: pytest -m gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from tests.checkpoints import tiny
from tests.model.test_card_steps import CAPABILITY, DEVICE, IDS, NUMBER_BYTES
from tests.recent import told, whole_and_windowed
from tests.slow import slowly
from tpspec.cache.store import Kept, KVStore
from tpspec.comm.communicator import OneRank
from tpspec.model.attention import _visible
from tpspec.model.batch import Carried, Span
from tpspec.model.decoder import Decoder
from tpspec.model.loader import Loader
from tpspec.model.sight import Heads, Shape, Sight
from tpspec.published.shape import ModelShape
from tpspec.topology.shards import split

pytest.importorskip("triton")
from tpspec.model.card import many as card_many, rows as card_rows, tables as card_tables, tilings as card_tilings

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
LONG = card_rows.MOST_ROWS + 10  # rows, and keys of more than one block
MANY = 1 << 20  # programs, which no round has
BEHIND = (-1, *range(6), 6, 6, 7, 7, 8)  # a tree behind a chain of 7


def pair(
    folder: Path, parts: tuple[float, ...] = (1.0,), wanted: int = 0, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[Decoder, Decoder]:
    """The first shard, by torch and by the kernels. wanted: programs; below them keys are split."""
    shard = split(ModelShape.of(folder), parts)[0]
    loader = Loader.open(folder, shard, dtype, DEVICE)
    torchs, cards = (loader.decoder(OneRank(), 512, compiled=False, num_states=2, **more) for _ in range(2))
    tilings = {heads: tiling(heads.dim) for heads in cards.shape.heads}
    cards._runner.many = card_many.ManySteps(cards.shape, cards.ropes, cards.store, tilings, wanted, cards.states)
    return torchs, cards


def tiling(head_dim: int) -> card_tilings.Tiling:
    made = card_tilings.Tiling.of_many(head_dim, NUMBER_BYTES, CAPABILITY)
    assert made is not None, "no card has room for such heads"
    return made


def rounds(decoder: Decoder) -> torch.Tensor:
    """A prompt in scattered slots beside a short one; then a chain goes on beside a tree behind a chain."""
    text = Span(0, 0, IDS[:LONG], ((0, 64), (128, LONG - 64)), 5, carried=Carried(0, (), LONG))
    said = decoder.forward([text, Span(1, 0, IDS[:3], ((256, 3),), 3, carried=Carried(1, (), 3))]).clone()
    more = Span(0, LONG, IDS[LONG : LONG + 20], ((0, 64), (128, LONG - 44)), 20, carried=Carried(0, (0,), 20))
    tree = Span(1, 3, IDS[90:102], ((256, 15),), 12, BEHIND, carried=Carried(1, (0,), 7))
    return torch.cat([said, decoder.forward([more, tree])])


# What rows and keys are to each other, each once: uneven folds, windows with sinks, with norms and with both, keys that
# are their own values, states. Two layers where they differ.
LINEAR = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
KINDS = {"smollm2": {"num_hidden_layers": 1}, "gpt_oss": {"num_hidden_layers": 2}, "gemma3": {"num_hidden_layers": 2},
         "gemma2": {"num_hidden_layers": 2}, "flint": TWO,
         "deepseek_v3": {"num_hidden_layers": 2}, "qwen3_5": LINEAR}  # fmt: skip
CASES = [
    ("smollm2", True),
    ("gpt_oss", True),
    ("flint", True),
    ("deepseek_v3", False),
    ("qwen3_5", False),
    *slowly(("gpt_oss", False), ("smollm2", False), ("gemma3", False), ("gemma2", False), ("flint", False)),
]


@pytest.mark.parametrize(("kind", "splits"), CASES, ids=str)
def test_rounds_are_what_torch_makes_of_them(kind: str, splits: bool, tmp_path: Path) -> None:
    """Stands against a key of another row's branch, sequence, window or block, a block that a tile leaves out and sees,
    and a sink that is left out where keys are not split. Shard 0 of two: an uneven group of heads in some kinds."""
    torchs, cards = pair(tiny(kind, tmp_path, **KINDS[kind]), (1.0, 0.7), MANY if splits else 0)
    assert (rounds(cards) - rounds(torchs)).abs().max() < 1e-4
    for mine, its in zip(cards.store.cells, torchs.store.cells, strict=True):
        assert torch.allclose(mine.numbers_GSE, its.numbers_GSE, rtol=0, atol=1e-4)


def test_a_cache_of_8_bits_is_read_and_written_as_torch_does(tmp_path: Path) -> None:
    """Stands against scales of other keys than the tile's. A code on the edge between two may fall to either side."""
    torchs, cards = pair(tiny("mistral", tmp_path, num_hidden_layers=1), small_cache=True)
    assert (rounds(cards) - rounds(torchs)).abs().max() < 0.01


def test_layers_with_a_window_find_their_keys_in_slots_of_their_own(tmp_path: Path) -> None:
    """Stands against blocks that are left out by places of the other layers' keys."""
    torchs, cards = pair(tiny("gpt_oss", tmp_path, num_hidden_layers=2), num_recent=160)
    said = [told(decoder, whole_and_windowed(160)[1], num_steps=1, chunks=(40, 3)) for decoder in (torchs, cards)]
    assert (said[0] - said[1]).abs().max() < 1e-4


def test_a_round_larger_than_any_before_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against rows beyond a table's last column."""
    monkeypatch.setattr(card_many.ManySteps, "usual_rows", 4)
    torchs, cards = pair(tiny("smollm2", tmp_path, num_hidden_layers=1))
    spans = [Span(0, 0, IDS[:9], ((32, 9),), 9), Span(1, 0, IDS[:3], ((64, 3),), 3)]
    assert (cards.forward(spans) - torchs.forward(spans)).abs().max() < 1e-4


def test_rows_of_padding_take_every_kernel_and_leave_the_cache_alone(tmp_path: Path) -> None:
    """Stands against a first prompt that waits for a compiler."""
    _, cards = pair(tiny("qwen3_5", tmp_path), wanted=MANY)
    many, taken = cards._runner.many, []
    for num_rows in many.rehearsed:
        x_TD = torch.zeros(num_rows, cards.embedding.width, device=DEVICE)
        cards._whole(x_TD, many, many.begin((), num_rows), ())
        taken += [many._shares(table, many._folds[heads], num_rows)[1] for (heads, _), table in many._tables.items()]
    assert sorted(taken) == [1, 2, 4, card_many.MOST_SPLITS]
    assert all(not cell.numbers_GSE.any() for cell in cards.store.cells)


def test_a_tree_of_more_rows_than_a_word_has_bits_is_torchs() -> None:
    """Stands against a row that sees what its 65th stands for."""
    fork = Span(0, 0, (5,) * 70, ((0, 70),), 70, (-1, *([0] * 69)))
    line = Span(0, 0, (5,) * 70, ((0, 70),), 70, (*range(-1, 67), 66, 66))
    assert [fork.num_chained(), line.num_chained()] == [1, 67]
    shape = Shape(frozenset({Sight(Heads((0,), 16), None)}), torch.float32, torch.device("cpu"), 1.0, "silu")
    store = KVStore({0: Kept(1, 16)}, 128, torch.float32, torch.device("cpu"))
    many = card_many.ManySteps(shape, [], store, dict.fromkeys(shape.heads, tiling(16)), 0)
    assert [many.fits([fork], 70), many.fits([line], 70)] == [False, True]


HEADS = st.just(Heads((0,), 16))
SIGHTS = st.builds(Sight, HEADS, st.none() | st.integers(1, 200)) | st.builds(
    Sight, HEADS, st.integers(1, 200), st.just(True)
)


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    """Of some texts in slots of their own: chains, trees, and trees behind chains, behind cached tokens or none."""
    made, first = [], 0
    for seq in range(draw(st.integers(1, 3))):
        start, chain, size = draw(st.integers(0, 150)), draw(st.integers(0, 90)), draw(st.integers(1, 8))
        parents = [
            *range(-1, chain - 1),
            *(draw(st.integers(max(-1, chain - 3), chain + row - 1)) for row in range(size)),
        ]
        parents = [max(0, parent) if row else -1 for row, parent in enumerate(parents)]
        cut = draw(st.integers(1, start + len(parents) - 1)) if start + len(parents) > 1 else 0
        runs = (
            ((first + 7, cut), (first + 400, start + len(parents) - cut)) if cut else ((first, start + len(parents)),)
        )
        is_chain = draw(st.booleans())
        made.append(Span(seq, start, (5,) * len(parents), runs, 1, None if is_chain else tuple(parents)))
        first += 1000
    return made


@given(spans(), SIGHTS, st.integers(1, 40))
def test_a_table_says_what_every_row_sees(some: list[Span], sight: Sight, tile_rows: int) -> None:
    """Of the slots, as torch's masks do. Stands against a tile that leaves out a block of its last row or its first,
    and a row of a tree that sees all of the chain, or none."""
    num_rows = sum(len(span.tokens) for span in some)
    table = card_tables.Table(4000, sight, 4000, torch.device("cpu"), 512)
    table.write(some, [card_tables.Seen.by(span) for span in some], tile_rows)
    table.put()
    table.copy()
    numbers = table.there.tolist()
    columns = [numbers[column * 512 :][:num_rows] for column in range(4)]
    tiles_at, blocks_at = 4 * 512, (4 + card_rows.TILE_SIZE) * 512
    begins = {(span.start, sum(len(other.tokens) for other in some[:at])) for at, span in enumerate(some)}
    expected, said = [], [set[int]() for _ in range(num_rows)]
    for span in some:
        slots = [first + at for first, count in span.runs for at in range(count)]
        expected += [{slots[at] for at, sees in enumerate(row) if sees} for row in _visible(span, 0, sight).tolist()]
    for tile in range(table.num_tiles):
        first, before, rows, tree_at, chained, begin, end = numbers[tiles_at + card_rows.TILE_SIZE * tile :][:7]
        assert (tree_at - chained, first - chained) in begins
        for row in range(first + before, first + before + rows):
            assert columns[3][row] == end - begin
            for block in range(begin, end):
                slot, count, place = numbers[blocks_at + 3 * block :][:3]
                for key in range(count):
                    own = place + key - tree_at
                    sees = columns[2][row] >> own & 1 if own >= 0 else place + key <= tree_at + row - first
                    stands = columns[0][first + own] if own >= 0 else place + key
                    if sees and stands >= sight.first_seen(columns[0][row]):
                        said[row].add(slot + key)
    assert said == expected
    assert columns[1] == [slot for span in some for slot in span.own_slots()]
