"""Norms of the queries of all heads together, and of the keys, over ranks that hold some heads each, or the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from tests.checkpoints import tiny
from tests.model.test_delta_net import tensors
from tests.model.test_thinned import Counting
from tests.worlds import serve, topology
from tpspec.comm.communicator import OneRank, Purpose
from tpspec.comm.ledger import Ledger, counted
from tpspec.comm.messages import Tally
from tpspec.comm.threads import ThreadWorld
from tpspec.errors import UserError
from tpspec.model.batch import Span
from tpspec.model.joint_norm import JointNorm
from tpspec.model.loader import Loader
from tpspec.model.torch_steps import WithoutKernels
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.topology.config import Quantize
from tpspec.topology.rounds import FEW_ROWS
from tpspec.topology.shards import Shard, split
from tpspec.topology.sizes import weight_bytes
from tpspec.topology.target_shape import target_shape

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, ROWS = 6, 2, 16, 5  # of olmo3


def norm_of(folder: Path, shard: Shard, *, replicates: bool = False) -> JointNorm:
    loader = Loader.open(folder, shard, torch.float32, CPU, replicates=replicates)
    norm = loader.attentions.joint_norm("model.layers.0.self_attn.", loader.spec.layers[0])
    assert norm is not None
    return norm


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("olmo3", tmp_path_factory.mktemp("olmo3"))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=HEADS))
def test_each_number_is_counted_by_one_rank(olmo: Path, weights: list[int]) -> None:
    """Stands against a key head that two ranks hold, whose squares both add."""
    counted: list[int] = []
    for shard in split(ModelShape.of(olmo), weights):
        norm = norm_of(olmo, shard)
        counted += [shard.kv_heads.start * DIM + column - norm.num_queries for column in norm.own.keys]
        assert norm.num_queries == len(shard.heads) * DIM
    assert counted == list(range(KV_HEADS * DIM))


@pytest.mark.parametrize("weights", [(1,), (1, 2), (1, 1, 1, 1, 1)], ids=str)
def test_shards_have_the_norm_of_all(olmo: Path, weights: tuple[int, ...]) -> None:
    shape, random = ModelShape.of(olmo), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(ROWS, heads, DIM, generator=random) for heads in (HEADS, KV_HEADS, KV_HEADS))
    whole = norm_of(olmo, split(shape, (1,))[0]).weight_N
    wanted_q = F.rms_norm(q.flatten(1), [HEADS * DIM], whole[: HEADS * DIM], 1e-5).view_as(q)
    wanted_k = F.rms_norm(k.flatten(1), [KV_HEADS * DIM], whole[HEADS * DIM :], 1e-5).view_as(k)
    shards = split(shape, weights)

    def made(parts: list[torch.Tensor], shard: Shard) -> torch.Tensor:
        heads = (shard.heads, shard.kv_heads, shard.kv_heads)
        return torch.cat([x[:, own.start : own.stop].flatten(1) for x, own in zip(parts, heads, strict=True)], 1)

    def rank(comm: OneRank) -> torch.Tensor:
        norm, qkv_TX = norm_of(olmo, shards[comm.rank]), made([q, k, v], shards[comm.rank])
        return norm.normed(qkv_TX, comm.all_reduce(norm.own.squares(qkv_TX), Purpose.norm))

    for shard, told in zip(shards, ThreadWorld(len(weights)).run(rank), strict=True):
        assert torch.allclose(told, made([wanted_q, wanted_k, v], shard), atol=1e-5)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=HEADS), st.integers(1, FEW_ROWS))
def test_who_makes_the_queries_and_keys_of_all_heads_asks_nobody(olmo: Path, weights: list[int], num_rows: int) -> None:
    """Stands against a head that counts twice, as a key head that several hold, or not at all."""
    shape = ModelShape.of(olmo)
    shards = split(shape, weights)
    x_TD = torch.randn(num_rows, shape.hidden, generator=torch.Generator().manual_seed(0))

    def told(shard: Shard, replicates: bool, comm: OneRank) -> torch.Tensor:
        loader = Loader.open(olmo, shard, torch.float32, CPU, replicates=replicates)
        layer, at = loader.spec.layers[0], "model.layers.0.self_attn."
        qkv, norm = loader.attentions.products(at, layer)[0], loader.attentions.joint_norm(at, layer)
        assert norm is not None
        return norm(x_TD, qkv(x_TD), WithoutKernels(), comm)

    wanted = ThreadWorld(len(weights)).run(lambda comm: told(shards[comm.rank], False, comm))
    for shard, expected in zip(shards, wanted, strict=True):
        asked = Counting()
        assert torch.allclose(told(shard, True, asked), expected, atol=1e-5)
        assert asked.purposes == [Purpose.norm] * (len(weights) == 1)


def test_a_prompt_makes_no_queries_of_others(olmo: Path) -> None:
    """Which would be most of what attention computes, to save one small message for all its rows."""
    shards = split(ModelShape.of(olmo), (1, 2))
    assert norm_of(olmo, shards[0], replicates=True).others is not None
    counts: dict[int, int] = {}

    def rank(comm: OneRank) -> None:
        loader = Loader.open(olmo, shards[comm.rank], torch.float32, CPU, replicates=True)
        ledger = Ledger()
        decoder = loader.decoder(counted(comm, ledger), 128)
        for size in (FEW_ROWS, FEW_ROWS + 1):
            decoder.forward([Span(0, 0, (5,) * size, ((0, size),), 1)])
            counts[size] = ledger.totals().get(Purpose.norm, Tally()).count

    ThreadWorld(2).run(rank)
    assert counts == {FEW_ROWS: 0, FEW_ROWS + 1: ModelShape.of(olmo).num_layers}


def test_rounds_that_never_have_so_few_rows_are_refused(olmo: Path) -> None:
    """They would pay for the heads of others and for their collectives."""
    keys = {"target": {"qk_norm": "replicate"}, "deterministic": True}
    assert target_shape(topology(olmo, 2, **keys)).replicates_norm
    with pytest.raises(UserError, match=r"fixed_rows 33 no round has so few rows; should be reduce, or .* at most 32"):
        target_shape(topology(olmo, 2, **keys, engine={"fixed_rows": FEW_ROWS + 1}))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0, 2.0)], ids=str)
def test_texts_do_not_depend_on_who_makes_them(olmo: Path, weights: tuple[float, ...]) -> None:
    """Drafts are verified beside a prompt that is longer than the few rows of which all queries are made."""
    asks = [Request(0, (5, 6, 7, 8) * 3, 12), Request(1, (9, 5, 6, 4) * 10, 12, Sampling(temperature=0.9, seed=2))]
    texts = [
        serve(topology(olmo, len(weights), target={"weights": weights, "qk_norm": way},
                       draft={"source": "ngram", "tokens": 3}), asks).texts()
        for way in ("reduce", "replicate")
    ]  # fmt: skip
    assert texts[0] == texts[1]


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("weights", [(1,), (3, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("kind", "replicates"),
    [("olmo3", False), ("olmo3", True), ("minimax_m2", False), ("minimax_m2", True), ("cohere2", False),
     ("cohere2_moe", False), ("exaone4", False)],
)  # fmt: skip
def test_what_is_held_is_what_was_planned(
    kind: str, replicates: bool, weights: tuple[int, ...], quantize: Quantize | None, tmp_path: Path
) -> None:
    """Stands against plans with norms that there are not, or with those of whole heads on every rank."""
    folder = tiny(kind, tmp_path)
    shape = replace(ModelShape.of(folder), replicates_norm=replicates)
    for shard in split(shape, weights):
        loader = Loader.open(folder, shard, torch.float32, CPU, quantize, replicates=replicates)
        decoder = loader.decoder(OneRank(), 64, compiled=False)
        held = sum(x.nbytes for x in tensors([decoder.layers, decoder.norm, decoder.head]))
        assert held == weight_bytes(shape, shard, "float32", quantize)
