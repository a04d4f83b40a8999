"""Layers for multi-token prediction: both layouts against their formulas in float64, and what is no such layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny
from tests.draft.heads import mtp
from tests.draft.heads.checked import Told, exercise, given
from tests.draft.heads.eagle import Written
from tests.model import published
from tests.model.published import publish
from tests.model.test_delta_net import tensors
from tests.worlds import topology
from tpspec.draft.mtp import load_mtp
from tpspec.errors import UserError
from tpspec.topology.cards import card
from tpspec.topology.layout import Wish
from tpspec.topology.plan import plan
from tpspec.topology.report import describe

LAYOUTS: dict[str, Callable[[Path], Written]] = {
    "deepseek": mtp.deepseek,
    "deepseek, own tables": lambda folder: mtp.deepseek(folder, own_tables=True),
    "qwen": mtp.qwen,
}


@pytest.mark.parametrize("branches", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["smollm2", "qwen3", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_layer_says_is_what_its_formulas_say(layout: str, kind: str, branches: int, tmp_path: Path) -> None:
    """The one feeds back what it has before the last norm, the other what it has after; rope is the target's."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    tiny(kind, tmp_path, num_hidden_layers=2, rope_parameters=rope)
    exercise(Told(LAYOUTS[layout](tmp_path), load_mtp(given(tmp_path, tmp_path)), branches), branches)


@pytest.mark.parametrize("branches", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "glm_moe_dsa"])
def test_a_layer_with_experts_is_what_transformers_makes_of_it(kind: str, branches: int, tmp_path: Path) -> None:
    """GLM-4.5's, and with latents, GLM-4.7-Flash's. Stands against a router without its bias, heads put in another
    order than their rope's, and an index that is not looked at. (No DeepSeek-V2 has such a layer; here its queries are
    of the hidden state.)"""
    folder = tiny(kind, tmp_path / "target", num_hidden_layers=2)
    written = mtp.glm(folder, tmp_path / "alone", kind)
    exercise(Told(written, load_mtp(given(folder, folder)), branches), branches)


@pytest.mark.parametrize("branches", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_layer_behind_linear_attention_is_what_transformers_makes_of_it(
    kind: str, branches: int, tmp_path: Path
) -> None:
    """Stands against norms of 1 + weight that multiply by the weight, and a gate taken for a query."""
    folder = tiny(kind, tmp_path / "target", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    written = mtp.hybrid(folder, tmp_path / "alone", kind)
    exercise(Told(written, load_mtp(given(folder, folder)), branches), branches)


@pytest.mark.parametrize("block", [None, (16, 24)], ids=["a scale for a matrix", "in blocks"])
@pytest.mark.parametrize("kind", ["qwen3_5", "deepseek_v3"])
def test_a_layer_may_be_stored_in_floats_of_8_bits(kind: str, block: tuple[int, int] | None, tmp_path: Path) -> None:
    """As those of DeepSeek-V3, GLM and Qwen are, with the rest of the model. Stands against a gate that is taken apart
    before its scales are known."""
    is_hybrid = kind == "qwen3_5"
    layers = {"layer_types": ["linear_attention", "full_attention"]} if is_hybrid else {}
    folder = tiny(kind, tmp_path / "target", num_hidden_layers=2, **layers)
    (mtp.hybrid if is_hybrid else mtp.glm)(folder, tmp_path / "alone", kind)
    quantized, meant = publish(folder, tmp_path, published.fp8(block))
    read, expected = (tensors([load_mtp(given(one, one)).layer]) for one in (quantized, meant))
    assert len(read) == len(expected) > 4
    assert all(torch.allclose(*both, rtol=1e-5, atol=1e-7) for both in zip(read, expected, strict=True))


PLAIN, CODES = torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        (None, PLAIN, r"should hold tensors mtp\.\* or model\.layers\.2\.\*"),
        (
            "mtp.layers.0.mlp.experts.0.up_proj.weight",
            PLAIN,
            r"has experts \(layers.0.mlp.experts.0.up_proj.weight\)",
        ),
        ("mtp.layers.1.input_layernorm.weight", PLAIN, "does not have: mtp.layers.1.input_layernorm.weight"),
        ("mtp.fc.weight", PLAIN, r"tensor mtp.fc.weight has shape \[8, 8\]; by the configs it should be \[72, 144\]"),
        ("mtp.layers.0.mlp.up_proj.weight", CODES, "is float8_e4m3fn, and what drafts is not read in codes"),
    ],
)
def test_what_is_no_such_layer_is_refused_by_name(
    name: str | None, dtype: torch.dtype, message: str, tmp_path: Path
) -> None:
    """Most published ones have experts: said at the start, not by drafts that are never right."""
    tiny("smollm2", tmp_path, num_hidden_layers=2)
    if name is not None:
        mtp.qwen(tmp_path)
        mtp.add(tmp_path, {name: torch.ones(8, 8).to(dtype)})
    with pytest.raises(UserError, match=message):
        load_mtp(given(tmp_path, tmp_path))


def test_a_layer_that_may_have_a_window_or_none_is_refused(tmp_path: Path) -> None:
    """Mellum's has one where its last layer has none. Stands against drafts that are hardly ever right, without a
    word."""
    target = tiny("mellum", tmp_path)
    with pytest.raises(UserError, match="some layers of mellum have a window, and whether its layer for multi-token"):
        load_mtp(given(target, target))
    with pytest.raises(UserError, match="should be another source, such as ngram"):
        describe(topology(target, draft={"source": "mtp"}))
    with pytest.raises(UserError, match="some layers of mellum have a window"):
        plan(Wish((card("3090"),), None, str(target), "mtp"))
