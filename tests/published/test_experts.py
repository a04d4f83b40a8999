"""Mixtures of experts: what their configs say, what is refused of them, and how their checkpoints are stored."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from math import comb

import pytest
from hypothesis import given, strategies as st
from transformers import AutoConfig

from tpspec.errors import UserError
from tpspec.published.experts import Experts
from tpspec.published.shape import ModelShape, shape_of
from tpspec.topology.shards import split
from tpspec.topology.sizes import expert_bytes, weight_bytes

SIZES: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "vocab_size": 1024,
}
GPTQ: dict[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def shape(model_type: str = "mixtral", **keys: object) -> ModelShape:
    return ModelShape.from_config({**SIZES, "model_type": model_type, **keys}, "here")


@st.composite
def mixtures(draw: st.DrawFn) -> Experts:
    count = draw(st.integers(1, 256))
    return Experts(count, draw(st.integers(1, count)), sums_to_one=True)


@pytest.mark.parametrize(("count", "chosen", "num_rows"), [(4, 2, 2), (5, 2, 3), (6, 1, 4), (3, 3, 2)])
def test_what_rows_read_is_the_mean_over_every_way_to_choose(count: int, chosen: int, num_rows: int) -> None:
    """Stands against rows that never share an expert, and rows that always do."""
    ways = product(combinations(range(count), chosen), repeat=num_rows)
    read = sum(len(set().union(*rows)) for rows in ways)
    share = read / count / comb(count, chosen) ** num_rows
    assert Experts(count, chosen, sums_to_one=True).share_read(num_rows) == pytest.approx(share)


@given(mixtures(), st.integers(0, 300))
def test_more_rows_read_more_and_never_more_than_there_is(experts: Experts, num_rows: int) -> None:
    """Stands against a share above 1 for a prompt's rows, and experts that are read for no row."""
    shares = [experts.share_read(rows) for rows in (0, 1, num_rows, num_rows + 1, 10**6)]
    assert shares[:2] == [0, pytest.approx(experts.chosen / experts.count)]
    assert shares[2] <= shares[3] <= shares[4] == pytest.approx(1)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_what_is_left_out_means_what_transformers_takes_it_for(model_type: str) -> None:
    """Stands against another number of experts, or of chosen ones, than the published weights were made for."""
    theirs, ours = AutoConfig.for_model(model_type), shape(model_type).experts
    count = theirs.num_local_experts if model_type == "mixtral" else theirs.num_experts
    # Mixtral has no key for it: its weights always sum to one.
    sums = getattr(theirs, "norm_topk_prob", True)
    assert ours == Experts(count, theirs.num_experts_per_tok, sums_to_one=sums)


def test_what_stands_before_and_beside_experts_is_what_transformers_takes_it_for() -> None:
    """Stands against the first layers of GLM-4.5 taken for mixtures, and MLPs of another width."""
    theirs = AutoConfig.for_model("glm4_moe")
    sizes = {key: SIZES[key] for key in ("num_hidden_layers", "hidden_size")}
    ours = ModelShape.from_config({"model_type": "glm4_moe", **sizes, "num_hidden_layers": 5}, "here")
    assert ours.experts == Experts(
        theirs.n_routed_experts,
        theirs.num_experts_per_tok,
        sums_to_one=theirs.norm_topk_prob,
        sigmoid=True,
        corrected="sigmoids",
        scale=theirs.routed_scaling_factor,
        first_layer=theirs.first_k_dense_replace,
        dense=theirs.intermediate_size,
        shared=theirs.n_shared_experts * theirs.moe_intermediate_size,
    )
    assert (ours.intermediate, ours.num_heads, ours.vocab) == (1408, theirs.num_attention_heads, theirs.vocab_size)


def test_experts_of_gpt_oss_are_what_transformers_takes_them_for() -> None:
    """Stands against biases that nobody counts, and sizes of the smaller of its two."""
    theirs, ours = AutoConfig.for_model("gpt_oss"), ModelShape.from_config({"model_type": "gpt_oss"}, "here")
    counts = theirs.num_local_experts, theirs.num_experts_per_tok
    assert ours.experts == Experts(*counts, sums_to_one=True, biased=True)
    sizes = (ours.num_layers, ours.hidden, ours.num_heads, ours.num_kv_heads, ours.head_dim, ours.vocab)
    assert sizes == (theirs.num_hidden_layers, theirs.hidden_size, theirs.num_attention_heads,
                     theirs.num_key_value_heads, theirs.head_dim, theirs.vocab_size)  # fmt: skip


@pytest.mark.parametrize("strategy", ["average", "sum"])
@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_experts_of_command_a_plus_are_weighed_as_its_config_says(function: str, shared: int, strategy: str) -> None:
    """Stands against a mean that is taken of nothing beside, and parts of a softmax over all experts."""
    said = {"num_shared_experts": shared, "shared_expert_combination_strategy": strategy, "norm_topk_prob": False}
    half = 0.5 if shared and strategy == "average" else 1.0
    made = shape("cohere2_moe", **said, expert_selection_fn=function, first_k_dense_replace=1).experts
    due = Experts(8, 2, function == "softmax", sigmoid=function == "sigmoid", first_layer=1, dense=512)
    assert made == replace(due, scale=half, shared=shared * 512, shared_scale=half)


@pytest.mark.parametrize(("said", "first"), [({}, 2), ({"mlp_only_layers": []}, 0), ({"mlp_only_layers": [0]}, 1)])
def test_dense_layers_of_flint_are_those_that_its_config_lists(said: dict[str, list[int]], first: int) -> None:
    """Stands against tensors of experts that would be called missing, where a config leaves the list out."""
    experts = shape("flint", **said, shared_expert_intermediate_size=96).experts
    due = Experts(256, 6, sums_to_one=True, sigmoid=True, first_layer=first, dense=512 if first else 0, shared=96)
    assert experts == due


def test_a_model_of_another_type_has_no_experts() -> None:
    """Stands against a dense model sized by a key that its config has for another reason."""
    assert shape("llama", num_local_experts=8, num_experts_per_tok=2).experts is None


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_names_of_their_number_are_read(key: str) -> None:
    """Stands against 128 experts for a config that says 16 under the other name."""
    assert shape("qwen3_moe", **{key: 16}).experts == Experts(16, 8, sums_to_one=False)


@pytest.mark.parametrize(("local", "due"), [(8, "8"), (None, "None"), ("x" * 999, "'x{198}.*[.]{3}")])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_two_numbers_of_experts_are_refused(model_type: str, local: object, due: str) -> None:
    """Stands against a plan for one of them and weights for the other: which of the two transformers reads depends on
    the type."""
    with pytest.raises(UserError, match=f"here: num_local_experts is {due} and num_experts is 16; should be the same"):
        shape(model_type, num_experts=16, num_local_experts=local)
    assert shape(model_type, num_experts=16, num_local_experts=16).experts is not None


@pytest.mark.parametrize(
    ("model_type", "key", "value", "why"),
    [
        ("qwen3_moe", "mlp_only_layers", [0, 1], "null: it is not supported"),
        ("qwen3_moe", "decoder_sparse_step", 2, "1"),
        ("qwen3_moe", "decoder_sparse_step", True, "1"),
        ("qwen3_moe", "num_experts_per_tok", 129, r"at most num_experts \(128\)"),
        ("mixtral", "num_experts_per_tok", 9, r"at most num_local_experts \(8\)"),
        ("mixtral", "num_experts_per_tok", 0, "a whole number above 0"),
        ("mixtral", "num_local_experts", "8", "a whole number above 0"),
        ("qwen3_moe", "num_experts", 8.0, "a whole number above 0"),
        ("qwen3_moe", "norm_topk_prob", 1, "true or false"),
        ("qwen3_moe", "moe_intermediate_size", "768", "a whole number above 0"),
        ("glm4_moe", "n_group", 3, r"a divisor of the number of experts \(128\)"),
        ("glm4_moe", "n_group", 128, "a divisor .* and at most half of it"),
        ("glm4_moe", "topk_group", 2, r"at most n_group \(1\)"),
        (
            "deepseek_v3",
            "topk_group",
            1,
            r"at most n_group \(8\), and so many that num_experts_per_tok \(33\) are in them",
        ),
        ("deepseek_v2", "norm_topk_prob", True, "null: it is not supported"),
        ("glm4_moe", "first_k_dense_replace", -1, "a whole number above -1"),
        ("glm4_moe", "routed_scaling_factor", 0, "a number above 0"),
        ("glm4_moe", "use_qk_norm", 1, "true or false"),
        ("ernie4_5_moe", "moe_layer_interval", 2, "1"),
        ("ernie4_5_moe", "moe_layer_end_index", 0, "-1 or 1"),
        ("ernie4_5_moe", "moe_norm_min", 0.5, "1e-12"),
        ("mistral4", "n_group", 2, "1"),
        ("afmoe", "num_dense_layers", -1, "a whole number above -1"),
        ("exaone_moe", "num_shared_experts", "1", "a whole number above -1"),
        ("hunyuan_v1_moe", "moe_topk", [2, 3], "the same for every layer"),
        ("hunyuan_v1_moe", "moe_topk", [True, 1], "the same for every layer"),
        ("hunyuan_v1_moe", "moe_intermediate_size", [96, 96], "512"),
        ("hunyuan_v1_moe", "num_shared_expert", [2, 2], "1"),
        ("hunyuan_v1_moe", "norm_topk_prob", False, "True"),
        ("hunyuan_v1_moe", "use_mixed_mlp_moe", False, "True"),
        ("hunyuan_v1_moe", "moe_layer_num_skipped", 1, "null: it is not supported"),
        ("hy_v3", "router_scaling_factor", 0, "a number above 0"),
        ("llama4_text", "moe_layers", [0, 1, 3], "the layers with experts, each as far behind the one before it"),
        ("llama4_text", "moe_layers", [], "the layers with experts"),
        ("llama4_text", "moe_layers", [True], "the layers with experts"),
        ("llama4_text", "interleave_moe_layer_step", 0, "a whole number above 0"),
        ("mellum", "mlp_layer_types", ["dense", "sparse"], "sparse for all layers"),
        ("cohere2_moe", "mlp_layer_types", ["sparse", "dense"], "dense for the first layers, and sparse for all after"),
        ("cohere2_moe", "mlp_only_layers", [0], "null: it is not supported"),
        ("flint", "mlp_only_layers", [0, 2], r"the first layers in their order, as \[0, 1\]"),
        ("flint", "mlp_only_layers", 1, "the first layers in their order"),
        ("flint", "mlp_layer_types", ["dense", "sparse"], "sparse for all layers"),
        ("flint", "decoder_sparse_step", 2, "1"),
        ("kolibri1", "mlp_layer_types", ["dense", "sparse"], "sparse for all layers"),
        ("kolibri1", "norm_topk_prob", 1, "true or false"),
        ("cohere2_moe", "first_k_dense_replace", -1, "a whole number above -1"),
        ("cohere2_moe", "num_shared_experts", "1", "a whole number above -1"),
        ("cohere2_moe", "expert_selection_fn", "tanh", "sigmoid or softmax"),
        ("cohere2_moe", "shared_expert_combination_strategy", "max", "average or sum"),
    ],
)
def test_a_mixture_that_is_not_supported_is_refused_by_its_key(
    model_type: str, key: str, value: object, why: str
) -> None:
    """Stands against sizes of a model whose other layers are dense, which would be wrong without a word."""
    keys: dict[str, object] = {"num_local_experts": 8} if model_type == "mixtral" else {"num_experts": 128}
    keys |= {"num_experts": 256, "num_experts_per_tok": 33} if model_type.startswith("deepseek") else {}
    with pytest.raises(UserError, match=f"here: {key} is .*; should be {why}"):
        shape(model_type, **(keys | {key: value}))


@pytest.mark.parametrize(
    ("model_type", "stored"),
    [
        ("mixtral", GPTQ),
        ("qwen3_moe", GPTQ),
        ("mixtral", {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["gate"]}),
    ],
)
def test_stored_experts_take_what_their_codes_take(model_type: str, stored: dict[str, object]) -> None:
    """Stands against experts called w1, w2 and w3 sized as plain weights, four times what a card holds of them."""
    plain, small = shape(model_type), shape(model_type, quantization_config=stored)
    (whole,) = split(plain, (1,))
    assert plain.experts is not None
    weights = 2 * plain.experts.count * 3 * 256 * 512
    codes = expert_bytes(small, whole, "bfloat16")
    assert expert_bytes(plain, whole, "bfloat16") == 2 * weights
    assert 4 / 8 < codes / weights <= 4.7 / 8  # a scale, and a zero point at most, for 128 weights, of down 64


def test_what_else_than_experts_is_stored_does_not_shrink_them() -> None:
    """Stands against a checkpoint of coded attention alone that seems to fit, and one expert that stands for all."""
    attention = shape(quantization_config={**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"]]})
    first = shape(quantization_config={**GPTQ, "modules_in_block_to_quantize": [["block_sparse_moe.experts.0.w1"]]})
    (whole,) = split(attention, (1,))
    plain = 2 * 8 * 3 * 256 * 512 * 2
    assert expert_bytes(attention, whole, "bfloat16") == plain
    saved = plain - expert_bytes(first, whole, "bfloat16")
    assert saved == pytest.approx(2 * 256 * 512 * (16 - 4.125) / 8, rel=0.02)  # of w1 of one expert in both layers


def test_experts_of_float8_are_held_as_they_are_and_routers_in_float32() -> None:
    """Stands against a plan that counts scales of blocks as the files have them, where each row has its own, and one
    that counts 16 bits; or 8 of routers."""
    router = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", *router]}
    plain, small = shape("qwen3_moe"), shape("qwen3_moe", quantization_config=stored)
    (whole,) = split(plain, (1,))
    of_experts, of_all = (
        [count(of, whole, "bfloat16") for of in (plain, small)] for count in (expert_bytes, weight_bytes)
    )
    scales = (2 * 32 / 128 + 32 / 64) / 3  # bits of a weight: groups of down are cut, so that eight shards are whole
    assert of_experts[1] / of_experts[0] == pytest.approx((8 + scales) / 16)
    num_weights = 2 * 256 * (4 + 2 + 2 + 4) * 64
    apart = [all_of - own for all_of, own in zip(of_all, of_experts, strict=True)]
    assert apart[0] - apart[1] == num_weights * (16 - 8.25) / 8
    wide = 2 * (128 * 256 + 2 * 256 + 2 * 64) + 256  # routers and norms
    halves = weight_bytes(plain, whole, "float32") / 2 + 2 * wide
    assert weight_bytes(plain, whole, "bfloat16") == halves


def test_quantizing_a_mixture_leaves_its_routers() -> None:
    """Stands against experts that stay in 16 bits, and against routers of 4."""
    mixtral = shape_of("mistralai/Mixtral-8x7B-Instruct-v0.1")
    (whole,) = split(mixtral, (1,))
    plain, small = (expert_bytes(mixtral, whole, "bfloat16", quantize) for quantize in (None, "int4"))
    assert small / plain == pytest.approx(4.25 / 16, rel=1e-3)
    with pytest.raises(UserError, match="is a GPTQ checkpoint with weights of 4 bits already"):
        expert_bytes(shape(quantization_config=GPTQ), whole, "bfloat16", "int4")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"])
def test_shards_hold_hardly_more_than_their_part_in_small_weights(model: str, quantize: str) -> None:
    """Stands against groups of 128 beside the 96 channels that each of eight shards has of an expert: half as much
    again on the fullest."""
    known = shape_of(model)
    (whole,) = split(known, (1,))
    for num_shards in (2, 4, 8):
        held = [weight_bytes(known, shard, "bfloat16", quantize) for shard in split(known, (1,) * num_shards)]
        assert max(held) <= 1.03 * weight_bytes(known, whole, "bfloat16", quantize) / num_shards
