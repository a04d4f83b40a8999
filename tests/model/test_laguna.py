"""Laguna: layers that see everything have other numbers of query heads, and gates are of heads or of their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig

from tests.checkpoints import AKIN, BASE, KINDS, tiny
from tests.worlds import topology
from tpspec.errors import UserError
from tpspec.model.gates import HeadGate
from tpspec.model.spec import resolve
from tpspec.published.gating import Gating
from tpspec.published.global_heads import GlobalHeads
from tpspec.published.shape import ModelShape
from tpspec.topology.caches import num_attended
from tpspec.topology.cards import parse_gpus
from tpspec.topology.layout import Wish
from tpspec.topology.plan import plan
from tpspec.topology.report import describe
from tpspec.topology.shards import by_heads, split

if TYPE_CHECKING:
    from pathlib import Path

ALL_FULL = ["full_attention"] * 3


def config(kind: str = "laguna", **said: Any) -> dict[str, Any]:
    return BASE | (KINDS | AKIN)[kind] | said


def test_heads_are_counted_by_kinds_of_layers() -> None:
    """Stands against heads of one kind in a cache or a shard of the other."""
    shape = ModelShape.from_config(config(), "here")
    assert (shape.num_heads, shape.global_heads) == (8, GlobalHeads(frozenset({1}), 6, 2, 16))
    shards = split(shape, (1, 2))
    assert [(len(one.heads), len(one.global_heads)) for one in shards] == [(3, 2), (5, 4)]
    assert [(one.kv_heads, one.global_kv_heads) for one in shards] == [(range(1), range(1)), (range(2), range(2))]
    sliding, full = by_heads(shape, shards[1])
    assert (sliding.which, sliding.shard.heads, sliding.shape.num_windowed) == ((0, 2), range(3, 8), 2)
    assert (full.which, full.shard.heads, full.shape.num_windowed) == ((1,), range(2, 6), 0)


@pytest.mark.parametrize(
    ("said", "num_heads"),
    [
        ({"num_attention_heads_per_layer": None}, 6),
        ({"num_attention_heads_per_layer": [4, 4, 4]}, 4),
        ({"layer_types": ALL_FULL, "num_attention_heads_per_layer": [4, 4, 4]}, 4),
        ({"layer_types": ["sliding_attention"] * 3, "num_attention_heads_per_layer": [4, 4, 4]}, 4),
    ],
)
def test_where_all_layers_have_as_many_heads_none_have_others(said: dict[str, Any], num_heads: int) -> None:
    """Stands against num_attention_heads, which counts only where no list does."""
    shape = ModelShape.from_config(config(**said), "here")
    assert (shape.num_heads, shape.global_heads) == (num_heads, None)
    spec = resolve(AutoConfig.for_model(**config(**said)), "there")
    assert (spec.shape.num_heads, any(layer.is_global for layer in spec.layers)) == (num_heads, False)


def test_there_are_as_many_shards_as_the_fewest_heads() -> None:
    """Stands against a rank without a head in some layers."""
    shape = ModelShape.from_config(config(), "here")
    assert all(one.global_heads for one in split(shape, (1,) * 6))
    with pytest.raises(UserError, match="7 shards for 6 query heads; should be at most 6 target ranks"):
        split(shape, (1,) * 7)


def test_a_plan_has_as_many_shards_as_the_fewest_heads(tmp_path: Path) -> None:
    """Stands against a plan that asks for a rank without a head, and is refused whole."""
    wish = Wish(parse_gpus(["8x3090"]), "pcie4", str(tiny("laguna", tmp_path)), "ngram")
    assert max(len(one.layout.shards) for one in plan(wish).plans) == 6


def test_a_row_is_multiplied_with_the_keys_of_each_kind_of_heads() -> None:
    """Stands against a cost of the usual number of heads in all layers."""
    shape = ModelShape.from_config(config(), "here")
    assert num_attended(shape, split(shape, (1,))[0], 100) == 2 * 16 * (2 * 8 * 8 + 1 * 6 * 100)


def test_a_part_of_a_head_is_turned_where_its_kind_of_layers_says_so() -> None:
    """Stands against the order of one kind's heads in layers of the other."""
    layers = resolve(AutoConfig.for_model(**config()), "there").layers
    assert [layer.head_order for layer in layers] == [
        None,
        (*range(4), *range(8, 12), *range(4, 8), *range(12, 16)),
        None,
    ]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"num_attention_heads_per_layer": [8, 6, 6]}, "for each of 3 layers, the same for all of a kind"),
        ({"num_attention_heads_per_layer": [8, 6]}, "a whole number above 0 for each of 3 layers"),
        ({"num_attention_heads_per_layer": [8, True, 8]}, "a whole number above 0 for each of 3 layers"),
        ({"num_attention_heads_per_layer": [[8], 6, 8]}, "a whole number above 0 for each of 3 layers"),
        ({"num_attention_heads_per_layer": 8}, "a whole number above 0 for each of 3 layers"),
        ({"num_attention_heads_per_layer": [8, 7, 8]}, r"should be multiples of num_key_value_heads \(2\)"),
        ({"num_attention_heads_per_layer": [7, 6, 7]}, "num_key_value_heads is 2; should be a divisor"),
        ({"gating": "per-dim"}, "gating is 'per-dim'; should be True or per-head or per-element"),
        ({"gating": False}, "gating is False; should be True or per-head or per-element"),
        ({"mlp_only_layers": [0, 1]}, r"mlp_only_layers is \[0, 1\]; should be \[0\], as mlp_layer_types is, or null"),
        ({"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid is False; should be True"),
        ({"moe_router_score_func": "sqrtsoftplus"}, "moe_router_score_func is 'sqrtsoftplus'; should be sigmoid"),
        ({"moe_router_logit_softcapping": -1.0}, "moe_router_logit_softcapping is -1.0; should be a number above 0"),
    ],
)
def test_what_it_does_not_know_is_refused(said: dict[str, Any], why: str) -> None:
    """Stands against a traceback while loading, and layers that compute something else without a word."""
    with pytest.raises(UserError, match=why):
        ModelShape.from_config(config(**said), "here")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled is True; should be null"),
        ({"swa_rope_parameters": {"rope_theta": 1e4}}, "swa_rope_parameters is .*; should be null"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has nothing for full_attention, sliding_attention"),
    ],
)
def test_what_other_code_than_transformers_reads_is_refused(said: dict[str, Any], why: str) -> None:
    """Stands against sinks that are left out, and layers with the rope of the other kind."""
    with pytest.raises(UserError, match=why):
        resolve(AutoConfig.for_model(**config(**said)), "there")


def test_check_says_the_heads_of_both_kinds(tmp_path: Path) -> None:
    """Stands against a table that seems to hold of all layers."""
    lines = describe(topology(tiny("laguna", tmp_path), 2))
    assert "query and kv heads of layers that see everything: 0-2 (3) and 0-0 (1), 3-5 (3) and 1-1 (1)" in lines


@pytest.mark.parametrize(("kind", "by_head"), [("laguna", True), ("laguna_whole", False)])
def test_a_gate_is_for_a_head_or_for_each_of_its_numbers(kind: str, by_head: bool) -> None:
    """Stands against one that is read as the other, which has other rows."""
    shape = ModelShape.from_config(config(kind), "here")
    assert shape.gating == Gating("g_proj", "softplus", by_head)
    assert shape.gating.num_rows(6, 16) == (6 if by_head else 96)


def test_a_number_for_a_head_gates_all_that_it_gives() -> None:
    made_TH = torch.tensor([[0.0, 100.0], [-3.0, 1.0]])
    wide = HeadGate(lambda _: made_TH, Gating("g_proj", "softplus", by_head=True), 3)(torch.zeros(2, 4))
    assert torch.allclose(wide, torch.nn.functional.softplus(made_TH).repeat_interleave(3, 1))
