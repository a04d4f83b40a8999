"""Rows attend to what an index chooses, and to nothing else, whatever runs beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

from tests.checkpoints import loaded, tiny
from tests.model import published
from tests.model.test_quantized import held, parts_of
from tests.worlds import serve, topology
from tpspec.comm.communicator import OneRank
from tpspec.comm.threads import ThreadWorld
from tpspec.errors import UserError
from tpspec.model.batch import Span
from tpspec.model.decoder import Decoder
from tpspec.model.indexer import best
from tpspec.model.loader import Loader
from tpspec.model.spec import read_spec
from tpspec.model.weights import Checkpoint
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.topology.caches import kv_bytes
from tpspec.topology.report import describe
from tpspec.topology.shards import split, whole_shard
from tpspec.topology.sizes import weight_bytes

CPU = torch.device("cpu")
CHOSEN = 12
IDS = tuple(torch.randint(3, 263, (60,), generator=torch.Generator().manual_seed(0)).tolist())
KINDS = ("deepseek_v32", "glm_moe_dsa")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("indexed")
    return {kind: tiny(kind, root / kind, index_topk=CHOSEN) for kind in KINDS}


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path]) -> dict[str, PreTrainedModel]:
    return {kind: loaded(folder, dtype=torch.float32).eval() for kind, folder in folders.items()}


def expected(model: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def decoder(folder: Path, comm: Any = None, num_ranks: int = 1, **options: Any) -> Decoder:
    comm = comm or OneRank()
    shard = split(ModelShape.of(folder), (3.0, 1.0, 2.0)[:num_ranks])[comm.rank]
    return Loader.open(folder, shard, torch.float32, CPU).decoder(comm, 160, **options)


@settings(deadline=None)
@given(row=st.lists(st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, torch.inf, torch.nan]), min_size=1), data=st.data())
def test_of_the_same_scores_the_first_are_chosen(row: list[float], data: st.DataObject) -> None:
    """Stands against a choice among equals that another rank makes differently, a token too many where several are the
    last, and one too few where a score is no number, which would end the world."""
    count = data.draw(st.integers(1, len(row)))
    by_score = sorted(range(len(row)), key=lambda place: -row[place] if row[place] == row[place] else -torch.inf)
    assert best(torch.tensor(row), count).tolist() == sorted(by_score[:count])


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_rank_and_any_round_attend_to_what_is_chosen(
    kind: str, num_ranks: int, folders: dict[str, Path], theirs: dict[str, PreTrainedModel]
) -> None:
    """A prompt in pieces, then token by token. Stands against keys of an index that are not those of the text's slots,
    or that other ranks hold, and a row that chooses among more than it sees."""

    def run(comm: Any) -> torch.Tensor:
        model = decoder(folders[kind], comm, num_ranks)
        made = [model.forward([Span(0, 0, IDS[:9], ((32, 9),), 9)])]
        made += [model.forward([Span(0, 9, IDS[9:40], ((32, 20), (96, 20)), 31)])]
        for at in range(40, 60):
            runs = ((32, 20), (96, at + 1 - 20))
            made.append(model.forward([Span(0, at, IDS[at : at + 1], runs, 1)]).clone())
        return torch.cat(made)

    logits = torch.cat(ThreadWorld(num_ranks).run(run), -1)
    assert (logits - expected(theirs[kind], IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("fixed_rows", [None, 8], ids=["as it comes", "deterministic"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_tree_chooses_among_its_ancestors(
    kind: str, fixed_rows: int | None, folders: dict[str, Path], theirs: dict[str, PreTrainedModel]
) -> None:
    """Beside another text's rows, few enough to attend to all. Stands against a sibling that takes a chosen token's
    place, and one text's choice that is the other's."""
    model, rows, parents = decoder(folders[kind], fixed_rows=fixed_rows), IDS[40:46], (-1, 0, 0, 1, 2, 3)
    for start in range(0, 40, 8):
        model.forward([Span(0, start, IDS[start : start + 8], ((32, start + 8),), 0)])
    spans = [Span(1, 0, IDS[50:52], ((100, 2),), 2), Span(0, 40, rows, ((32, 46),), 6, parents)]
    others, *paths = torch.split(model.forward(spans), [2, 1, 1, 1, 1, 1, 1])
    assert (others - expected(theirs[kind], IDS[50:52])).abs().max() < 1e-4
    for row, made in enumerate(paths):
        path, at = list[int](), row
        while at >= 0:
            path, at = [rows[at], *path], parents[at]
        assert (made[0] - expected(theirs[kind], (*IDS[:40], *path))[-1]).abs().max() < 1e-4


def test_keys_of_an_index_move_with_those_of_attention(
    folders: dict[str, Path], theirs: dict[str, PreTrainedModel]
) -> None:
    """A tree of which the second path was accepted. Stands against a key of a rejected draft, which might be chosen."""
    model = decoder(folders["glm_moe_dsa"])
    model.forward([Span(0, 0, IDS[:30], ((0, 30),), 0)])
    model.forward([Span(0, 30, (IDS[30], 5, IDS[31], 6, IDS[32]), ((0, 35),), 5, (-1, 0, 0, 1, 2))])
    model.store.move([32, 34], [31, 32])
    made = model.forward([Span(0, 33, IDS[33:60], ((0, 60),), 27)])
    assert (made - expected(theirs["glm_moe_dsa"], IDS)[33:]).abs().max() < 1e-4


def test_rows_in_the_deterministic_mode_choose_the_same_whichever_are_beside_them(folders: dict[str, Path]) -> None:
    """Bit for bit. Stands against scores whose last bits, and so a choice, depend on how many rows are scored."""
    alone, beside = (decoder(folders["deepseek_v32"], fixed_rows=8) for _ in range(2))
    for model in (alone, beside):
        for start in range(0, 40, 8):
            model.forward([Span(0, start, IDS[start : start + 8], ((0, start + 8),), 0)])
    one_by_one = [alone.forward([Span(0, at, IDS[at : at + 1], ((0, at + 1),), 1)]).clone() for at in range(40, 45)]
    others = Span(1, 0, IDS[50:53], ((100, 3),), 3)
    together = beside.forward([others, Span(0, 40, IDS[40:45], ((0, 45),), 5)])[3:]
    assert torch.equal(torch.cat(one_by_one), together)


@pytest.mark.parametrize("small", [False, True], ids=["plain", "int8"])
def test_what_is_planned_for_keys_of_indexes_is_what_they_take(small: bool, folders: dict[str, Path]) -> None:
    """Of layers that choose alone. Stands against a plan that has none, or one for each layer."""
    shape = ModelShape.of(folders["glm_moe_dsa"])
    store = decoder(folders["glm_moe_dsa"], small_cache=small).store
    tensors = [one for cells in store.cells for one in (cells.numbers_GSE, cells.scales_GS) if one is not None]
    taken = sum(one.numel() * one.element_size() for one in tensors)
    assert sorted(store.indexes) == [0, 1]
    assert taken == kv_bytes(shape, whole_shard(shape), "int8" if small else "float32", 160)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_what_is_planned_for_an_index_is_what_it_takes(quantize: Any, folders: dict[str, Path]) -> None:
    """On each of three ranks. Stands against a plan that has none, or divides it, or counts it for all layers."""
    shape = ModelShape.of(folders["glm_moe_dsa"])
    for shard in split(shape, (3, 1, 2)):
        loader = Loader.open(folders["glm_moe_dsa"], shard, torch.bfloat16, CPU, quantize)
        parts = parts_of(loader.decoder(OneRank(), 8))
        assert sum(map(held, parts)) == weight_bytes(shape, shard, "bfloat16", quantize)


@pytest.mark.parametrize("weights", [(), ("indexer.weights_proj",)], ids=["plain weights", "all"])
@pytest.mark.parametrize("block", [(16, 24), (24, 32)], ids=str)
def test_an_index_is_read_out_of_floats_of_8_bits(
    block: tuple[int, int], weights: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    """In blocks, as both models are published. Stands against codes that are taken for weights, and rows put in another
    order than the scales of their blocks."""
    folder = folders["deepseek_v32"]
    quantized, meant = published.publish(folder, tmp_path, replace(published.fp8(block), also=weights))
    assert all(
        f"model.layers.0.self_attn.indexer.{name}.weight_scale_inv" in Checkpoint(quantized)
        for name in ("wq_b", "wk", *("weights_proj" for _ in weights))
    )
    read, due = (decoder(one).forward([Span(0, 0, IDS, ((0, 60),), 60)]) for one in (quantized, meant))
    assert (read - due).abs().max() < 1e-4


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_same_with_drafts_and_without(kind: str, num_ranks: int, folders: dict[str, Path]) -> None:
    """Trees of its own drafts over small pages, texts that begin alike. Stands against what a rejected draft has left
    in an index, and pages that are shared without it."""
    asks = [Request(i, (*IDS[:18], i + 5), 20, Sampling(temperature=0.7 * i, seed=i)) for i in range(3)]
    plain = serve(topology(folders[kind], cache={"page": 4}), asks).texts()
    draft = {"source": "model", "model": str(folders[kind]), "tokens": 4, "tree": "dynamic"}
    told = serve(topology(folders[kind], num_ranks, draft=draft, cache={"page": 4}), asks)
    assert told.texts() == plain
    assert told.stats[-1].accepted > 0


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        ("deepseek_v32", {"index_topk": 0}, "index_topk is 0; should be a whole number above 0"),
        ("deepseek_v32", {"index_head_dim": 6}, r"index_head_dim is 6; should be at least qk_rope_head_dim \(8\)"),
        (
            "deepseek_v32",
            {"q_lora_rank": None},
            "q_lora_rank is missing; should be a whole number above 0: the indexer",
        ),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave is True; should be False"),
        (
            "glm_moe_dsa",
            {"indexer_types": None, "index_skip_topk_offset": 0},
            "index_skip_topk_offset is 0; should be a",
        ),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "indexer_types is .*, and full for the first"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FS"}, "index_topk_pattern is 'FS'; .* for 2"),
    ],
)
def test_an_index_that_is_not_supported_is_refused_by_its_key(
    kind: str, said: dict[str, object], why: str, folders: dict[str, Path]
) -> None:
    """Stands against an index that chooses other tokens than its model's, without a word."""
    config = json.loads((folders[kind] / "config.json").read_text())
    with pytest.raises(UserError, match=f"here: {why}"):
        ModelShape.from_config(config | said, "here")


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({}, {0, 1}),
        ({"index_topk_freq": 1}, {0, 1, 2}),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, {0, 2}),
        ({"index_topk_pattern": "FSF"}, {0, 2}),
        ({"index_topk_pattern": "FSSF", "num_nextn_predict_layers": 1}, {0}),
        ({"index_topk_pattern": ["full", "shared", "shared"]}, {0}),
        ({"indexer_types": ["full", "shared", "full"], "index_topk_freq": 9}, {0, 2}),
    ],
)
def test_layers_that_choose_are_those_of_transformers(
    said: dict[str, Any], layers: set[int], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Stands against a layer that goes by the choice of another than it was trained with."""
    config = json.loads((folders["glm_moe_dsa"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"indexer_types": None} | said))
    indexer = read_spec(tmp_path).shape.indexer
    assert indexer is not None
    assert indexer.layers == layers


def test_a_layer_whose_tokens_another_chooses_is_not_left_without_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """Stands against a draft by some layers that ends in an assertion."""
    folder = tiny("glm_moe_dsa", tmp_path, index_topk=CHOSEN)
    (folder / "layer_skip.json").write_text(json.dumps({"attention": [1], "mlp": []}))
    with pytest.raises(UserError, match="attention of layer 1 is left out, and layer 2 reads what that keeps or choo"):
        serve(topology(folder, draft={"source": "layer_skip", "tokens": 2}), [Request(0, IDS[:20], 3)])
    (folder / "layer_skip.json").write_text(json.dumps({"attention": [1, 2], "mlp": [0]}))
    asks = [Request(0, IDS[:20], 12)]
    told = serve(topology(folder, 2, draft={"source": "layer_skip", "tokens": 2}), asks)
    assert told.texts() == serve(topology(folder), asks).texts()


def test_a_card_is_refused_by_name(folders: dict[str, Path]) -> None:
    """Stands against a model that runs out of a card's memory for masks, or takes minutes for a prompt, and a `check`
    that finds nothing wrong with it."""
    folder = folders["glm_moe_dsa"]
    with pytest.raises(UserError, match="no kernels for cards yet; should run with device: cpu"):
        Loader.open(folder, whole_shard(ModelShape.of(folder)), torch.bfloat16, torch.device("cuda"))
    with pytest.raises(UserError, match="no kernels for cards yet; should run with device: cpu"):
        describe(topology(folder, device="cuda"))
    assert describe(topology(folder, device="cpu"))
