"""MiMo-V2-Flash: values shorter than keys, layers with a window that have sinks and twice as many kv heads, and its
config as it was published. Parity with transformers is tests/parity's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig

from tests.checkpoints import AKIN, BASE, as_mimo, tiny
from tests.model.test_delta_net import tensors
from tpspec.comm.communicator import OneRank
from tpspec.errors import UserError
from tpspec.model.linear import PlainLinear
from tpspec.model.loader import Loader
from tpspec.model.short_values import Cut, Filled
from tpspec.published.global_heads import GlobalHeads
from tpspec.published.multimodal import text_config
from tpspec.published.shape import ModelShape
from tpspec.topology.shards import by_heads, split
from tpspec.topology.sizes import weight_bytes

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
NO_ROPE = dict.fromkeys(("partial_rotary_factor", "rope_theta", "swa_rope_theta"))
BASE_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def published(**said: Any) -> dict[str, Any]:
    now = AutoConfig.for_model(**(BASE | AKIN["mimo_published"])).to_dict()
    return text_config(as_mimo(now) | said)


def test_values_are_filled_up_and_cut_again() -> None:
    """Stands against a value's numbers beside another's, keys that are scaled, and zeros that go through o."""
    noise = torch.Generator().manual_seed(0)
    rows, x_TD = torch.randn(2 * 4 + 4 + 2 * 3, 5, generator=noise), torch.randn(7, 5, generator=noise)  # H = 2, G = 2
    rows[8:12] = torch.randn(4, 5, generator=noise)
    made_TX = x_TD @ rows.T
    filled_TX = Filled(PlainLinear(rows), 2, 3, 4, 0.5)(x_TD)
    assert torch.equal(filled_TX[:, :12], made_TX[:, :12])
    values_TGE = filled_TX[:, 12:].view(7, 2, 4)
    assert torch.allclose(values_TGE[..., :3].flatten(1), made_TX[:, 12:] * 0.5)
    assert not values_TGE[..., 3].any()
    assert torch.equal(Cut(PlainLinear(torch.eye(6)), 3, 4)(filled_TX[:, 12:]), values_TGE[..., :3].flatten(1))


@pytest.mark.parametrize("parts", [(1.0,), (3.0, 1.0, 2.0)], ids=str)
@pytest.mark.parametrize("kind", ["mimo", "mimo_published"])
def test_what_is_held_is_what_was_planned(kind: str, parts: tuple[float, ...], tmp_path: Path) -> None:
    """Stands against values counted as long as keys are, and sinks of layers that have none."""
    shape = ModelShape.of(tiny(kind, tmp_path))
    for shard in split(shape, parts):
        decoder = Loader.open(tmp_path, shard, torch.float32, CPU).decoder(OneRank(), 64)
        held = sum(x.nbytes for x in tensors([decoder.layers, decoder.norm, decoder.head]))
        assert held == weight_bytes(shape, shard, "float32")


def test_layers_with_a_window_have_twice_as_many_heads_of_keys() -> None:
    """Stands against a cache of the other kind's."""
    shape = ModelShape.from_config(published(), "here")
    assert (shape.num_kv_heads, shape.window, shape.num_windowed) == (2, 8, 2)
    assert shape.global_heads == GlobalHeads(frozenset({0}), 6, 1, 32)
    kept = [(one.which, one.shape.num_kv_heads) for one in by_heads(shape, split(shape, (1,))[0])]
    assert kept == [((0,), 1), ((1, 2), 2)]
    for pattern, count in (([0, 0, 0], 1), ([1, 1, 1], 2)):
        alike = ModelShape.from_config(published(hybrid_layer_pattern=pattern), "here")
        assert (alike.num_kv_heads, alike.global_heads) == (count, None)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"hybrid_layer_pattern": [0, 1, 2]}, r"hybrid_layer_pattern is \[0, 1, 2\]; should be 0 or 1 for each layer"),
        ({"layer_types": ["full_attention"] * 3}, "hybrid_layer_pattern is .*, and as layer_types says, if it does"),
        ({"moe_layer_freq": [1, 0, 1]}, "mlp_layer_types is .*; should be dense for the first layers"),
        ({"swa_num_attention_heads": 8}, "swa_num_attention_heads is 8; should be 6"),
        ({"swa_num_key_value_heads": 3}, "swa_num_key_value_heads is 3; should be 2"),
        ({"swa_v_head_dim": 32}, "swa_v_head_dim is 32; should be 20"),
        ({"v_head_dim": 40, "swa_v_head_dim": 40}, r"v_head_dim is 40; should be at most head_dim \(32\)"),
        (
            {"num_key_value_heads": 2, "swa_num_key_value_heads": 4},
            "num_key_value_heads is 2; should be half a divisor",
        ),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is True; should be null"),
        ({"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias is False; should be True"),
        ({"sliding_window_size": "8"}, "sliding_window_size is '8'; should be null"),
        ({"swa_rope_theta": None}, "partial_rotary_factor is 0.334; should be beside the rest of"),
        ({"rope_parameters": BASE_ROPES}, "partial_rotary_factor is 0.334; should be .*, and as rope_parameters says"),
        ({"rope_parameters": BASE_ROPES, **NO_ROPE}, "rope_parameters.sliding_attention.partial_rotary_factor is miss"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is .*; should be null"),
        ({"attention_bias": True}, "attention_bias is True; should be null"),
        ({"n_shared_experts": -1}, "n_shared_experts is -1; should be a whole number"),
    ],
)
def test_what_a_config_may_not_say_is_refused(said: dict[str, Any], why: str) -> None:
    """Stands against layers that compute something else without a word: transformers does not read most of these."""
    with pytest.raises(UserError, match=why):
        ModelShape.from_config(published(**said), "here")
