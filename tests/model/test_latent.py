"""Latent attention on latents as they are cached is the attention whose keys and values are made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.checkpoints import tiny
from tpspec.comm.communicator import OneRank
from tpspec.model.attention import fused
from tpspec.model.batch import Span
from tpspec.model.compiled import CompiledSteps, compiled_rows
from tpspec.model.decoder import Decoder
from tpspec.model.latent import EPS, Reduced, around, turned_last
from tpspec.model.linear import PlainLinear
from tpspec.model.loader import Loader
from tpspec.model.norm import Norm
from tpspec.published.latent import Latent
from tpspec.published.shape import ModelShape
from tpspec.topology.caches import kv_bytes
from tpspec.topology.shards import split

CPU = torch.device("cpu")
IDS = tuple(torch.randint(3, 263, (90,), generator=torch.Generator().manual_seed(0)).tolist())
HIDDEN = 24


@st.composite
def latents(draw: st.DrawFn) -> Latent:
    size, even = st.integers(1, 9), st.integers(1, 9).map(lambda number: 2 * number)
    return Latent(draw(even), draw(size), draw(even), draw(size), draw(st.none() | st.integers(1, 12)))


@settings(deadline=None)
@given(latent=latents(), num_heads=st.integers(1, 5), num_rows=st.integers(1, 7), seed=st.integers(0, 99))
def test_what_stands_around_attention_is_the_formula(latent: Latent, num_heads: int, num_rows: int, seed: int) -> None:
    """Without rope, over any sizes. Stands against heads, halves or rows that change places, numbers that rope turned
    taken for a latent's, and a norm over more than the latent."""
    noise = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=noise, dtype=torch.float64) / inputs**0.5

    def norm(size: int) -> Norm:
        return Norm(1 + 0.3 * torch.randn(size, generator=noise), 1.0)  # of another eps than these have

    first = latent.queries or num_heads * latent.head_dim
    down, made = matrix(first + latent.cached, HIDDEN), matrix(num_heads * latent.made, latent.rank)
    reduced = None if latent.queries is None else (norm(first), matrix(num_heads * latent.head_dim, first))
    key_norm, out, x_TD = norm(latent.rank), matrix(HIDDEN, num_heads * latent.values), matrix(num_rows, HIDDEN)
    qkv, o = around(
        latent,
        down=PlainLinear(down),
        reduced=None if reduced is None else Reduced(reduced[0], PlainLinear(reduced[1])),
        norm=key_norm,
        made_XL=made,
        out=PlainLinear(out),
    )
    heads_THE = qkv(x_TD).view(num_rows, num_heads + 1, latent.cached)
    q_GRE, k_GSE = heads_THE[:, :-1].reshape(1, -1, latent.cached), heads_THE[:, -1][None]
    ours = o(fused(q_GRE, k_GSE, k_GSE, None, 0.3).view(num_rows, -1))

    def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return (x / (x.pow(2).mean(1, keepdim=True) + EPS).sqrt() * norm.weight).double()

    read = x_TD @ down.T
    queries, latent_TL, turned_TR = read[:, :first], read[:, first : -latent.turned], read[:, -latent.turned :]
    if reduced is not None:
        queries = normed(queries, reduced[0]) @ reduced[1].T
    made_THX = (normed(latent_TL, key_norm) @ made.T).view(num_rows, num_heads, -1)
    keys_THE, values_THV = made_THX[..., : latent.plain], made_THX[..., latent.plain :]
    keys_THE = torch.cat([keys_THE, turned_TR[:, None].expand(-1, num_heads, -1)], 2)
    scores_HTS = torch.einsum("the,she->hts", queries.view(num_rows, num_heads, -1), keys_THE) * 0.3
    theirs = torch.einsum("hts,shv->thv", scores_HTS.softmax(2), values_THV).flatten(1) @ out.T
    assert (ours - theirs).abs().max() < 1e-5


def test_numbers_that_rope_turns_are_put_in_two_halves() -> None:
    """Stands against a number turned with the wrong one."""
    assert turned_last(3, 6, alternate=True) == (0, 1, 2, 3, 5, 7, 4, 6, 8)
    assert turned_last(3, 6, alternate=False) == tuple(range(9))


def decoder(folder: Path, num_ranks: int = 1, *, compiled: bool = True, small: bool = False) -> Decoder:
    shard = split(ModelShape.of(folder), (1.0,) * num_ranks)[0]
    loader = Loader.open(folder, shard, torch.float32, CPU)
    return loader.decoder(OneRank(), 128, compiled=compiled, small_cache=small)


@pytest.mark.parametrize("small", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_token_is_cached_once_and_whole_on_every_rank(num_ranks: int, small: bool, tmp_path: Path) -> None:
    """Stands against values beside keys, which would double the cache, and a plan that divides it by ranks."""
    folder = tiny("glm4_moe_lite", tmp_path)
    store, shape = decoder(folder, num_ranks, small=small).store, ModelShape.of(folder)
    cells = {id(cells): cells for cells in (*store.keys.values(), *store.values.values())}
    tensors = [one for each in cells.values() for one in (each.numbers_GSE, each.scales_GS) if one is not None]
    taken, shard = sum(one.numel() * one.element_size() for one in tensors), split(shape, (1.0,) * num_ranks)[0]
    assert taken == kv_bytes(shape, shard, "int8" if small else "float32", 128)
    assert taken == 3 * 128 * ((40 + 8) * (1 if small else 4) + 4 * small)


@pytest.mark.skipif(compiled_rows() is None, reason="the compiled steps were not built here")
@pytest.mark.parametrize("small", [False, True], ids=["plain", "int8"])
def test_latents_as_wide_as_published_ones_have_compiled_steps(small: bool, tmp_path: Path) -> None:
    """512 and 64 numbers. Stands against a head of more numbers than the C code has room for. Without experts, of which
    a code on the edge between two could choose others."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    folder, told = tiny("deepseek_v2", tmp_path, **sizes), []
    for compiled in (True, False):
        model = decoder(folder, compiled=compiled, small=small)
        assert isinstance(model._runner.few, CompiledSteps) == compiled
        model.forward([Span(0, 0, IDS[:70], ((0, 70),), 0)])
        told.append(model.forward([Span(0, 70, IDS[70:76], ((0, 76),), 6, (-1, 0, 0, 1, 1, 2))]))
    assert (told[0] - told[1]).abs().max() < (0.01 if small else 1e-4)
