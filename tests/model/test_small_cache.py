"""Keys and values in 8 bits: what is kept, what attention makes of it, and that texts still do not depend on drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.checkpoints import tiny
from tests.worlds import serve, topology
from tpspec.cache.store import Cells, Kept, KVStore
from tpspec.comm.communicator import OneRank
from tpspec.model.batch import Span
from tpspec.model.compiled import MOST_ROWS, compiled_rows
from tpspec.model.loader import Loader
from tpspec.model.target import ShardedTarget
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.roles.build import build_engine
from tpspec.topology.caches import kv_bytes
from tpspec.topology.config import load
from tpspec.topology.report import describe
from tpspec.topology.shards import split

CPU = torch.device("cpu")
LONG = MOST_ROWS + 8  # rows that are too many for the compiled steps
IDS = tuple(torch.randint(3, 263, (60,), generator=torch.Generator().manual_seed(0)).tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("qwen3", tmp_path_factory.mktemp("tiny"))  # with norms of heads, and a head dimension that compiles


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from([8, 16, 80])),
    power=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_number_is_off_by_at_most_half_a_step_of_its_own_head(
    sizes: tuple[int, int, int], power: int, dtype: torch.dtype
) -> None:
    """Stands against a scale that heads or tokens share, a token written over its neighbour, and a head of nothings."""
    num_heads, num_tokens, dim = sizes
    cells = Cells((num_heads, 12, dim), dtype, CPU, small=True)
    noise = torch.randn(num_tokens, num_heads, dim, generator=torch.Generator().manual_seed(0))
    x_TGE = (noise * 2.0**power * torch.arange(num_tokens)[:, None, None]).to(dtype)  # the first token: nothings
    slots = torch.randperm(12, generator=torch.Generator().manual_seed(1))[:num_tokens]
    cells.write(slots, x_TGE)
    off = (cells.read(slots).transpose(0, 1).float() - x_TGE.float()).abs()
    most = x_TGE.float().abs().amax(2, keepdim=True)
    assert (off <= most * (0.501 / 127 + (2**-8 if dtype == torch.bfloat16 else 0))).all()


@pytest.mark.parametrize("keys_alone", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_a_moved_slot_reads_as_it_did(small: bool, keys_alone: bool) -> None:
    """Stands against codes that are moved without their scales, and a path that is overwritten while it moves, or moved
    twice where keys are their own values."""
    store = KVStore(dict.fromkeys(range(2), Kept(3, 16)), 10, torch.float32, CPU, small=small, keys_alone=keys_alone)
    for layer in range(2):
        store.write(layer, slice(0, 10), *(torch.randn(10, 3, 16) * torch.arange(1, 11)[:, None, None] for _ in "kv"))
    parts = store.cells
    before = [cells.read(torch.tensor([4, 5, 7])).clone() for cells in parts]
    store.move([4, 5, 7], [3, 4, 5])
    for cells, expected in zip(parts, before, strict=True):
        assert torch.equal(cells.read(slice(3, 6)), expected)


def decoder(folder: Path, dtype: torch.dtype, *, small: bool = True, **more: Any) -> Any:
    (whole,) = split(ModelShape.of(folder), (1.0,))
    return Loader.open(folder, whole, dtype, CPU).decoder(OneRank(), 128, small_cache=small, **more)


@pytest.mark.skipif(compiled_rows() is None, reason="the compiled steps were not built here")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)], ids=str)
def test_the_compiled_steps_read_and_write_what_torch_does(folder: Path, dtype: torch.dtype, near: float) -> None:
    """Stands against a scale of another slot or head in C, and codes cut off instead of rounded."""
    text = Span(0, 0, IDS[:LONG], ((0, LONG),), 1)
    tree = Span(0, LONG, IDS[LONG : LONG + 6], ((0, LONG + 6),), 6, (-1, 0, 0, 1, 1, 2))
    ours, torchs = (decoder(folder, dtype, compiled=compiled) for compiled in (True, False))
    for model in (ours, torchs):
        model.forward([text])
    assert (ours.forward([tree]).float() - torchs.forward([tree]).float()).abs().max() < near
    for mine, its in zip(ours.store.cells, torchs.store.cells, strict=True):
        kept = slice(LONG, LONG + 6)
        assert (mine.read(kept) - its.read(kept)).abs().max() < 3 * near


def test_logits_are_near_those_of_a_plain_cache(folder: Path) -> None:
    """Stands against a cache that is kept plain, and one that is off by more than its rounding."""
    span = Span(0, 0, IDS, ((0, 60),), 60)
    small, plain = (
        decoder(folder, torch.float32, compiled=True, small=small).forward([span]) for small in (True, False)
    )
    off = (small - plain).abs()
    assert 1e-4 < off.max() < 0.2
    assert off.mean() < 0.02


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_a_row_has_the_same_bits_in_a_chunk_as_alone(folder: Path, compiled: bool) -> None:
    """Where texts are to be bitwise the same. Stands against a scale that is taken over the rows of a round."""
    logits = []
    for size in (1, 5):
        model, rows = decoder(folder, torch.bfloat16, compiled=compiled, fixed_rows=6), []
        for start in range(0, 60, size):
            rows.append(model.forward([Span(0, start, IDS[start : start + size], ((0, start + size),), size)]))
        logits.append(torch.cat(rows))
    assert torch.equal(*logits)


CACHE = {"tokens": 1024, "page": 16, "dtype": "int8"}
ASKS = [
    Request(i, (*IDS[:40], *(5, 6, 7, 8) * 3, i), 24, Sampling(temperature=0.8 * (i % 2), seed=i)) for i in range(3)
]
DRAFTS: dict[str, dict[str, Any]] = {
    "a chain": {"source": "ngram", "tokens": 4},
    "a tree": {"source": "model", "tokens": 6, "tree": "dynamic"},
}


def test_a_topology_asks_for_it(folder: Path) -> None:
    """Stands against a key that is read and forgotten: every law below would hold."""
    engine = build_engine(topology(folder, cache=CACHE), OneRank(), CPU).engine
    assert isinstance(engine.target, ShardedTarget)
    assert engine.target.decoder.store.keys[0].numbers_GSE.dtype == torch.int8


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", list(DRAFTS))
def test_texts_depend_on_neither_drafts_nor_ranks(folder: Path, kind: str, num_ranks: int) -> None:
    """The law, over rounded keys: a row that sees its own key as it was before rounding would break it, and so would
    a path of a tree whose scales stay behind."""
    plain = serve(topology(folder, cache=CACHE), ASKS).texts()
    draft = DRAFTS[kind] | ({"model": str(folder)} if kind == "a tree" else {})
    told = serve(topology(folder, num_ranks, cache=CACHE, draft=draft), ASKS)
    assert told.texts() == plain
    assert told.stats[-1].accepted > 0


def test_texts_do_not_depend_on_what_was_cached_before(folder: Path) -> None:
    """Stands against pages of a prefix that come back with the scales of their next owner."""
    texts = [serve(topology(folder, cache=CACHE | {"prefix": prefix}, serve={"max_running": 1}), ASKS) for prefix in
             (True, False)]  # fmt: skip
    assert texts[0].texts() == texts[1].texts()
    assert texts[0].texts()[:1] == serve(topology(folder, cache=CACHE), ASKS[:1]).texts()


def test_it_takes_what_the_plan_says(folder: Path, tmp_path: Path) -> None:
    """Stands against a plan that forgets the scales, or counts a cache of 16 bits."""
    shape = ModelShape.of(folder)
    (whole,) = split(shape, (1.0,))
    store = decoder(folder, torch.bfloat16, compiled=True).store
    tensors = [one for cells in store.cells for one in (cells.numbers_GSE, cells.scales_GS)]
    assert sum(one.numel() * one.element_size() for one in tensors) == kv_bytes(shape, whole, "int8", 128)
    file = tmp_path / "topology.yaml"
    file.write_text(f"name: a\ntarget: {{model: {folder}, ranks: [0]}}\ncache: {{tokens: 65536}}\n")
    plain, small = (
        float(next(line for line in describe(load(file, more)) if line.startswith("0 ")).split("MiB")[1].split()[-1])
        for more in ([], ["cache.dtype=int8"])
    )
    assert small / plain == pytest.approx((16 + 4) / 32, abs=0.01)
