"""Step 3.5 and 3.7: configs with keys of their own, experts stacked in three tensors, and MLPs kept within limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import BASE, KINDS, LLAMA3_ROPE, as_step, loaded, tiny
from tests.model.test_gemma4 import tensors
from tests.model.test_multimodal import IDS, logits
from tests.worlds import serve, topology
from tpspec.comm.communicator import OneRank
from tpspec.comm.messages import Submit
from tpspec.errors import UserError
from tpspec.model.limits import Limits
from tpspec.model.loader import Loader
from tpspec.model.spec import read_spec
from tpspec.model.weights import SINGLE
from tpspec.published.checkpoint import read_config
from tpspec.published.gating import Gating
from tpspec.published.global_heads import GlobalHeads
from tpspec.published.multimodal import text_config
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.topology.shards import split
from tpspec.topology.sizes import weight_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from tpspec.comm.messages import ToLead

CPU = torch.device("cpu")
NOW = BASE | KINDS["step3p5"]  # by transformers' keys
LIMITS = ("swiglu_limits", "swiglu_limits_shared")


def published(**said: Any) -> dict[str, Any]:
    """As that of Step 3.5 Flash."""
    made: dict[str, Any] = as_step({"text_config": dict(NOW)})["text_config"] | said
    return made


def say(folder: Path, **said: Any) -> None:
    """Of the text model."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"text_config": config["text_config"] | said}))


def expected(folder: Path) -> torch.Tensor:
    model = loaded(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        made: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return made


def test_published_keys_mean_what_transformers_own_do() -> None:
    """Stands against a list that goes on with layers for multi-token prediction, and a number of heads left out."""
    shape = ModelShape.from_config(text_config(published()), "here")
    assert shape == ModelShape.from_config(NOW, "here")
    assert (shape.num_heads, shape.global_heads) == (8, GlobalHeads(frozenset({1}), 6, 2, 16))
    assert (shape.num_windowed, shape.gating) == (2, Gating("g_proj", by_head=True))
    assert shape.experts is not None
    assert (shape.experts.count, shape.experts.chosen, shape.experts.shared) == (7, 3, 48)
    assert (shape.experts.first_layer, shape.experts.scale) == (1, 2.5)
    listed = text_config(published(moe_layers_enum=[1, 2]))
    assert ModelShape.from_config(listed, "here") == shape


def test_a_config_that_transformers_wrote_is_read_as_the_published_one(tmp_path: Path) -> None:
    """Which has per_layer_config. Stands against a checkpoint that was saved anew and is refused."""
    tiny("step3p5", tmp_path)
    shape, spec = ModelShape.of(tmp_path), read_spec(tmp_path)
    loaded(tmp_path).config.save_pretrained(tmp_path)
    assert "per_layer_config" in read_config(tmp_path)
    assert (ModelShape.of(tmp_path), read_spec(tmp_path).layers) == (shape, spec.layers)


def test_a_text_model_alone_is_the_one_that_sees(tmp_path: Path) -> None:
    """As Step 3.5 Flash is: with layers for multi-token prediction behind the last, which are not read."""
    tiny("step3p5", tmp_path)
    due, path = expected(tmp_path), tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text())["text_config"]))
    held = {name: x for name, x in load_file(tmp_path / SINGLE).items() if name.startswith(("model.", "lm_head."))}
    held |= {name.replace(".0.", ".3."): x.clone() for name, x in held.items() if ".layers.0." in name}
    save_file(held, tmp_path / SINGLE)
    assert (logits(tmp_path, (3.0, 1.0, 2.0)) - due).abs().max() < 1e-4


@pytest.mark.parametrize("parts", [(1.0,), (3.0, 1.0, 2.0)], ids=str)
def test_what_is_held_is_what_was_planned(parts: tuple[float, ...], tmp_path: Path) -> None:
    """Stands against gates of the other kind of heads, and layers whose MLP is counted by the name of a mixture."""
    shape = ModelShape.of(tiny("step3p5", tmp_path))
    for shard in split(shape, parts):
        decoder = Loader.open(tmp_path, shard, torch.float32, CPU).decoder(OneRank(), 64)
        held = sum(x.nbytes for x in tensors([decoder.layers, decoder.norm, decoder.head]))
        assert held == weight_bytes(shape, shard, "float32")


def test_limits_are_of_their_layers(tmp_path: Path) -> None:
    """Stands against limits of the MLP beside the experts taken for those of experts, and parity without either."""
    due = expected(tiny("step3p5", tmp_path))
    assert read_spec(tmp_path).limits == (Limits(), Limits(shared=(0.15,)), Limits(experts=(0.3,)))
    for key in LIMITS:
        said = json.loads((tmp_path / "config.json").read_text())["text_config"][key]
        for other in (None, [0.0] * len(said)):
            say(tmp_path, **{key: other})
            assert (logits(tmp_path) - due).abs().max() > 0.1
        say(tmp_path, **{key: said})
    assert (logits(tmp_path) - due).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"swiglu_limits": [0, 0, -1.0, 0, 0]}, "swiglu_limits is .*; should be a number above 0, or 0 or null"),
        ({"swiglu_limits": 7}, "not a configuration transformers can read: .*swiglu_limits"),
        ({"swiglu_limits_shared": [0, 7]}, r"swiglu_limits_shared is \[0, 7\]; should be .* for each of 3 layers"),
        ({"swiglu_limits_shared": [2, 0, 0]}, "should be 0 or null for the first 1 layers, which have no experts"),
        ({"attention_bias": True}, "attention_bias is True; should be null"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; should be a number above 0"),
        (
            {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}},
            "rope_type is 'mrope'; should be default or dynamic or",
        ),
    ],
)
def test_what_is_no_limit_or_option_is_refused_when_it_is_read(said: dict[str, Any], why: str, tmp_path: Path) -> None:
    """Stands against a traceback while loading, and a limit that nobody minds."""
    (tmp_path / "config.json").write_text(json.dumps(published(**said)))
    with pytest.raises(UserError, match=why):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"att_impl_type": "MFA"}, "att_impl_type is 'MFA'; should be GQA"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation is 'softmax'; should be sigmoid"),
        ({"norm_expert_weight": False}, "norm_expert_weight is False; should be True"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate is False; should be True"),
        ({"use_moe_router_bias": False}, "use_moe_router_bias is False; should be True"),
        ({"zero_centered": False}, "zero_centered is False; should be True"),
        ({"moe_every_n_layer": 2}, "moe_every_n_layer is 2; should be 1"),
        ({"sink": True}, "sink is True; should be null: it is not supported"),
        ({"use_rope_layers": [1, 0, 1]}, "use_rope_layers is .*; should be null: it is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_groups is 2; should be 3, as num_key_value_heads is"),
        ({"moe_layers_enum": "1,two"}, "moe_layers_enum is '1,two'; should be numbers of layers"),
        ({"mlp_layer_types": ["dense"] * 3}, "moe_layers_enum is '1,2'; should be numbers of layers, .* if it does"),
        ({"num_sliding_attention_heads": 6}, "attention_other_setting .*, as num_sliding_attention_heads if that is"),
        ({"moe_layers_enum": "0,2"}, "mlp_layer_types is .*; should be dense for the first layers"),
        ({"mlp_layer_types": ["dense"], "moe_layers_enum": None}, "mlp_layer_types .* one for each of 3 layers"),
        ({"layer_types": ["full_attention"]}, "layer_types .* for each of 3 layers, not for 1"),
        ({"sliding_window": None}, "sliding_window is missing; should be a whole number above 0"),
        ({"rope_theta": [1e4, 1e4, 1e3, 1e4, 1e4]}, "rope_theta is .*; should be one for each of 3 layers, the same"),
        ({"rope_theta": [1e4]}, "rope_theta is .*; should be one for each of 3 layers"),
        ({"partial_rotary_factors": [[1], 1, 1, 1, 1]}, "partial_rotary_factors is .*; should be one for each"),
        ({"rope_scaling": {"type": "llama3"}}, r"rope_scaling.rope_type is missing; should be a text"),
        ({"yarn_only_types": None}, r"yarn_only_types is missing; should be \['full_attention'\]"),
        ({"attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4}},
         "attention_other_setting is .*; should be what sliding_attention has: num_attention_heads of its own"),
        ({"attention_other_setting": {"attention_type": "full_attention", "num_attention_heads": 8}},
         "attention_other_setting is .*; should be what sliding_attention has"),
        ({"attention_other_setting": {"num_attention_heads": "8"}}, "num_sliding_attention_heads is '8'; should be a"),
        ({"attention_other_setting": {"num_attention_heads": 7}}, "num_key_value_heads is 2; should be a divisor"),
        ({"num_attention_heads": 7}, r"num_attention_heads is 7; should be multiples of num_key_value_heads \(2\)"),
        ({"per_layer_config": {"0": {"num_attention_heads": 8}}}, "per_layer_config .* should be num_attention_heads"),
        ({"rope_parameters": LLAMA3_ROPE}, r"rope_parameters.full_attention is missing; should be a section"),
        ({"rope_parameters": NOW["rope_parameters"]}, "rope_theta is .*; should be null: it is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; should be silu"),
        ({"gating": "per-element"}, "gating is 'per-element'; should be True or per-head"),
    ],
)  # fmt: skip
def test_what_a_config_may_not_say_is_refused(said: dict[str, Any], why: str) -> None:
    """Stands against layers that compute something else without a word: transformers reads the first layer of a type
    only, and most of these not at all."""
    with pytest.raises(UserError, match=why):
        ModelShape.from_config(text_config(published(**said)), "here")


@pytest.mark.parametrize("columns", [24, 32])
@pytest.mark.parametrize("parts", [(1.0,), (1.0, 2.0)], ids=str)
def test_stacked_experts_may_be_floats_of_8_bits(parts: tuple[float, ...], columns: int, tmp_path: Path) -> None:
    """As FP8 was published, but for smaller blocks, of which codes are computed with or not. Stands against scales of
    other experts or tensors."""
    tiny("step3p5", tmp_path)
    meant, coded, rows = load_file(tmp_path / SINGLE), {}, 16
    for name, x_NOI in meant.items():
        if ".moe." not in name or x_NOI.dim() < 3:
            continue
        count, outputs, inputs = x_NOI.shape
        size = count, -(-outputs // rows), -(-inputs // columns)
        scales = 0.01 + torch.rand(size, generator=torch.Generator().manual_seed(len(coded)))
        spread = scales.repeat_interleave(rows, 1)[:, :outputs].repeat_interleave(columns, 2)[..., :inputs]
        coded |= {name: (x_NOI / spread).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
        meant[name] = coded[name].float() * spread
    assert len(coded) == 12
    save_file(meant, tmp_path / SINGLE)
    due = logits(tmp_path)
    save_file(meant | coded, tmp_path / SINGLE)
    path = tmp_path / "config.json"
    said = {"quant_method": "fp8", "weight_block_size": [rows, columns], "modules_to_not_convert": ["self_attn"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    assert (logits(tmp_path, parts) - due).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("scales", "why"),
    [
        (torch.ones(7, 1, 2), r"has shape \[7, 1, 2\]; should be \[7, 1, 1\]"),
        (torch.full((7, 1, 1), 127, dtype=torch.uint8), "is of uint8, not float16 or bfloat16 or"),
    ],
)
def test_scales_that_nobody_tells_of_are_refused(scales: torch.Tensor, why: str, tmp_path: Path) -> None:
    """Stands against the first of some blocks of inputs taken for all, and bytes that may be exponents for numbers."""
    tiny("step3p5", tmp_path)
    path, name, held = tmp_path / "config.json", "model.layers.1.moe.up_proj.weight", load_file(tmp_path / SINGLE)
    for stack in [stack for stack in held if ".moe." in stack and held[stack].dim() == 3]:
        held[stack] = held[stack].to(torch.float8_e4m3fn)
        held[f"{stack}_scale_inv"] = scales if stack.endswith(name) else torch.ones(7, 1, 1)
    save_file(held, tmp_path / SINGLE)
    said = {"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    with pytest.raises(UserError, match=f"{name}_scale_inv {why}"):
        logits(tmp_path)


def test_stacked_experts_in_other_codes_are_refused(tmp_path: Path) -> None:
    tiny("step3p5", tmp_path)
    path, said = tmp_path / "config.json", {"quant_method": "gptq", "bits": 4, "group_size": 32}
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.1.moe.up_proj.weight"] = tensors["model.layers.1.moe.up_proj.weight"].int()
    save_file(tensors, tmp_path / SINGLE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    with pytest.raises(
        UserError, match=r"layers.1.moe.up_proj.weight holds all experts of a layer, which config.json says are"
    ):
        logits(tmp_path)


DRAFTS = [
    {"source": "ngram", "tokens": 3},
    {"source": "early_exit", "tokens": 3},
    {"source": "layer_skip", "tokens": 3},
    {"source": "model", "tokens": 4, "tree": "dynamic"},
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft["source"])
def test_texts_depend_on_neither_drafts_nor_ranks(draft: dict[str, Any], num_ranks: int, tmp_path: Path) -> None:
    """The law, with prompts that are longer than the window and begin as others did. Stands against a layer that is
    left out and has limits, and heads of one kind where the other's keys are kept."""
    tiny("step3p5", tmp_path)
    (tmp_path / "layer_skip.json").write_text(json.dumps({"attention": [1], "mlp": [0, 1]}))
    asks = [Request(i, IDS[: 30 - i] * 2, 16, Sampling(temperature=0.8 * i, seed=i)) for i in range(4)]
    messages: dict[int, list[ToLead]] = {1: [*map(Submit, asks[:2])], 14: [*map(Submit, asks[2:])]}
    section = draft | ({"model": str(tmp_path)} if draft["source"] == "model" else {})
    told = serve(topology(tmp_path, num_ranks, draft=section), messages=messages)
    assert told.texts() == serve(topology(tmp_path), asks).texts()
    assert told.stats[-1].drafted > 0
    assert told.stats[-1].prefix_found > 0


def test_its_layers_for_multi_token_prediction_are_refused_by_name(tmp_path: Path) -> None:
    """There are three, each of its own; none runs here."""
    with pytest.raises(UserError, match="some layers of step3p5 have a window, and whether its layer for multi-token"):
        serve(topology(tiny("step3p5", tmp_path), draft={"source": "mtp", "tokens": 2}), [Request(0, IDS, 4)])
