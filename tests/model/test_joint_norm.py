"""Norms of the queries of all heads together, and of the keys, over ranks that hold some heads each, or the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoints import tiny
from tests.model.test_delta_net import tensors
from tpspec.comm.communicator import OneRank, Purpose
from tpspec.comm.threads import ThreadWorld
from tpspec.model.joint_norm import JointNorm
from tpspec.model.loader import Loader
from tpspec.topology.shape import ModelShape
from tpspec.topology.shards import Shard, split
from tpspec.topology.sizes import weight_bytes

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, ROWS = 6, 2, 16, 5  # of olmo3


def norm_of(folder: Path, shard: Shard) -> JointNorm:
    loader = Loader.open(folder, shard, torch.float32, CPU)
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
        counted += [shard.kv_heads.start * DIM + key for key in norm.own_keys]
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
        return norm.normed(qkv_TX, comm.all_reduce(norm.squares(qkv_TX), Purpose.norm))

    for shard, told in zip(shards, ThreadWorld(len(weights)).run(rank), strict=True):
        assert torch.allclose(told, made([wanted_q, wanted_k, v], shard), atol=1e-5)


@pytest.mark.parametrize("weights", [(1,), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", ["olmo3", "minimax_m2", "cohere2", "exaone4"])
def test_what_is_held_is_what_was_planned(kind: str, weights: tuple[int, ...], tmp_path: Path) -> None:
    """Stands against plans with norms that there are not, or with those of whole heads on every rank."""
    folder = tiny(kind, tmp_path)
    shape = ModelShape.of(folder)
    for shard in split(shape, weights):
        decoder = Loader.open(folder, shard, torch.float32, CPU).decoder(OneRank(), 64, compiled=False)
        held = sum(x.nbytes for x in tensors([decoder.layers, decoder.norm, decoder.head]))
        assert held == weight_bytes(shape, shard, "float32")
