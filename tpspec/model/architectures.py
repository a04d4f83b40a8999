"""Architectures as data: what differs between the decoder-only models we run, and nothing else.

To add one, add a declaration. Options of a checkpoint that its declaration does not cover are refused by name, which
spec.py does. Must not know shards, ranks or tensors' values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.model.architecture import NOPE_BESIDE, NOPE_WITH_EXPERTS, ONE_THETA, THETA, THETAS, Architecture, NormNames
from tpspec.published.windows import CONV, FULL

if TYPE_CHECKING:
    from tpspec.model.layers import Gate

HYBRID = Architecture(  # Qwen's, of linear attention and attention
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    partial_rope=True,
    one_more=True,
)
GEMMA_NORMS = NormNames(
    attention_out="post_attention_layernorm", mlp="pre_feedforward_layernorm", mlp_out="post_feedforward_layernorm"
)
COHERE = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    alternate_rope=True,
    norms=NormNames(mlp=None),
    centred=True,
    eps="layer_norm_eps",
    logit_scale="logit_scale",
    apart={"use_qk_norm": ()},
)
OLMO2 = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    norms=NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    apart={"clip_qkv": ()},
)
GEMMA2 = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    norms=GEMMA_NORMS,
    one_more=True,
    gate=("hidden_activation", "gelu_pytorch_tanh"),
    scaled_embeddings=True,
    score_scale="query_pre_attn_scalar",
    capped=True,
    scores_capped=True,
    apart={"use_bidirectional_attention": ()},
)
GEMMA4 = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    v_norm=True,
    norms=GEMMA_NORMS,
    gate=("hidden_activation", "gelu_pytorch_tanh"),
    scaled_embeddings=True,
    scaled_layers=True,
    score_scale=1.0,
    capped=True,
    apart={"use_bidirectional_attention": ("vision",)},  # text looks back all the same
)
LLAMA = Architecture(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
GRANITE_MOE = Architecture(qkv_bias="attention_bias", o_bias="attention_bias", multiplied=True)
HUNYUAN = Architecture(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    stretched=True,
    norms=NormNames(queries="query_layernorm", keys="key_layernorm"),
)
LFM2 = Architecture(
    qk_norm=True,
    norms=NormNames("operator_norm", mlp="ffn_norm", queries="q_layernorm", keys="k_layernorm"),
    eps="norm_eps",
    gate=(None, "silu"),
)
ERNIE = Architecture(alternate_rope=True, apart={"use_bias": ()})
ARCHITECTURES = {
    "afmoe": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        nope=FULL,
        norms=NormNames(
            attention_out="post_attention_layernorm", mlp="pre_mlp_layernorm", mlp_out="post_mlp_layernorm"
        ),
        scaled_embeddings="mup_enabled",
    ),
    "apertus": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        norms=NormNames("attention_layernorm", mlp="feedforward_layernorm"),
        gate=("hidden_act", "xielu"),
    ),
    "arcee": replace(LLAMA, gate=("hidden_act", "relu2")),
    "axk1": Architecture(alternate_rope="rope_interleave", norms=NormNames(mixture_out="post_mlp_layernorm")),
    "cohere": COHERE,
    "cohere2": replace(COHERE, nope=FULL),
    "cohere2_moe": replace(COHERE, nope=NOPE_WITH_EXPERTS, rms_eps="rms_norm_eps"),
    "cwm": Architecture(),
    "deepseek_v2": Architecture(alternate_rope=True),
    "deepseek_v3": Architecture(alternate_rope="rope_interleave"),
    "dots1": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
    "ernie4_5": ERNIE,
    "ernie4_5_moe": ERNIE,
    "exaone": replace(LLAMA, norms=NormNames("ln_1", mlp="ln_2")),
    "exaone4": Architecture(qk_norm=True, nope=NOPE_BESIDE, norms=OLMO2.norms),
    "exaone_moe": Architecture(qk_norm=True, nope=NOPE_BESIDE),
    "falcon_h1": Architecture(norms=NormNames(mlp="pre_ff_layernorm"), scaled=True),
    "flex_olmo": OLMO2,
    "flint": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, nope=FULL),
    "gemma": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        one_more=True,
        gate=("hidden_act", "gelu_pytorch_tanh"),
        scaled_embeddings=True,
        apart={"use_bidirectional_attention": ()},
    ),
    "gemma2": GEMMA2,
    "gemma3_text": replace(
        GEMMA2,
        qk_norm=True,
        scores_capped=False,
        apart={**GEMMA2.apart, "attn_logit_softcapping": ()},
    ),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "glm": Architecture(qkv_bias="attention_bias", partial_rope=True, alternate_rope=True),
    "glm4": Architecture(
        qkv_bias="attention_bias",
        partial_rope=True,
        alternate_rope=True,
        norms=NormNames(attention_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"),
    ),
    "glm4_moe": Architecture(qkv_bias="attention_bias", qk_norm="use_qk_norm", partial_rope=True),
    "glm4_moe_lite": Architecture(alternate_rope="rope_interleave"),
    "glm4v_moe_text": Architecture(qkv_bias="attention_bias", partial_rope=True),
    "glm4v_text": Architecture(
        qkv_bias=True,
        partial_rope=True,
        alternate_rope=True,
        norms=NormNames(attention_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"),
    ),
    "gpt_oss": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", clamped=True),
    "granite": replace(LLAMA, multiplied=True),
    "granite_swa": replace(LLAMA, multiplied=True, nope=THETAS),
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": replace(GRANITE_MOE, nope=THETAS),
    "granitemoehybrid": replace(GRANITE_MOE, turned="position_embedding_type"),
    "granitemoeshared": GRANITE_MOE,
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN,
    "hy_v3": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
    "hyperclovax": replace(
        LLAMA,
        norms=NormNames(attention_out="post_norm1", mlp_out="post_norm2"),
        out_norms="use_post_norm",
        multiplied="logits",
    ),
    "internlm3": LLAMA,
    "iquestcoder": LLAMA,
    "jais2": replace(LLAMA, centred=True, eps="layer_norm_eps", gate=("hidden_act", "relu2")),
    "kimi_linear": Architecture(turned=False),
    "kolibri1": Architecture(
        qk_norm=True,
        nope=NOPE_BESIDE,
        norms=NormNames(attention_out="post_attn_norm", mlp_out="post_ffn_norm"),
    ),
    "laguna": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        partial_rope=True,
        ropes_by_kind=True,
        apart={"moe_apply_router_weight_on_input": (), "swa_attention_sink_enabled": (), "swa_rope_parameters": ()},
    ),
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "lfm3": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        ropes_by_kind=True,
        nope=CONV,
        norms=NormNames("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
        out_norms="use_sandwich_norm",
        eps="norm_eps",
        gate=(None, "silu"),
    ),
    "llama": LLAMA,
    "llama4_text": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        plain_norm="use_qk_norm",
        alternate_rope=True,
        tuned=True,
        nope="no_rope_layers",
    ),
    "mellum": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
    "mimo_v2_flash": Architecture(partial_rope=True, ropes_by_kind=True, value_scale="attention_value_scale"),
    "minimax_m2": Architecture(qk_norm=True, partial_rope=True, apart={"qk_norm_type": ("per_layer",)}),
    "ministral": Architecture(),
    "ministral3": Architecture(),
    "mistral": Architecture(),
    "mistral4": Architecture(partial_rope=True, alternate_rope="rope_interleave"),
    "mixtral": Architecture(),
    "muse_glimmer_text": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        plain_norm=True,
        nope=ONE_THETA,
        norms=GEMMA_NORMS,
        one_more="layers",
        out_eps="post_norm_eps",
        gate=("hidden_activation", "silu"),
        normed_embeddings=True,
        logit_scale="output_multiplier",
        sharpened="qk_scale_factor",
        capped=True,
    ),
    "nanochat": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        backwards=True,
        weighed=False,
        gate=("hidden_act", "relu2"),
        normed_embeddings=True,
        capped=True,
    ),
    "nemotron": replace(
        LLAMA, partial_rope=True, one_more=True, centred=True, eps="norm_eps", gate=("hidden_act", "relu2")
    ),
    "nemotron_h": Architecture(
        turned=False, norms=NormNames("norm", mlp="norm"), eps="layer_norm_epsilon", gate=("mlp_hidden_act", "relu2")
    ),
    "olmo": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", weighed=False, centred=True, eps=1e-5),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2),
    "olmo_hybrid": replace(OLMO2, turned=THETA, linear_norms=NormNames()),
    "olmoe": replace(OLMO2, norms=NormNames()),
    "phi": Architecture(
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        partial_rope=True,
        norms=NormNames(mlp=None),
        centred=True,
        eps="layer_norm_eps",
        gate=("hidden_act", "gelu_new"),
    ),
    "phi3": Architecture(partial_rope=True),
    "phimoe": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", own_scales=True, centred=True),
    "qwen2": Architecture(qkv_bias=True),
    "qwen2_5_vl_text": Architecture(qkv_bias=True),
    "qwen2_moe": Architecture(qkv_bias="qkv_bias"),
    "qwen2_vl_text": Architecture(qkv_bias=True),
    "qwen3": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_moe": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
    "qwen3_next": HYBRID,
    "qwen3_vl_moe_text": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
    "qwen3_vl_text": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
    "sarvam_mla": Architecture(alternate_rope="rope_interleave"),
    "sarvam_moe": Architecture(
        qkv_bias="attention_bias", qk_norm=True, norms=NormNames(queries="query_layernorm", keys="key_layernorm")
    ),
    "seed_oss": Architecture(qkv_bias="attention_bias", o_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "smollm3": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        nope="no_rope_layers",
    ),
    "solar_open": Architecture(qkv_bias="attention_bias", partial_rope=True),
    "stablelm": Architecture(qkv_bias="use_qkv_bias", partial_rope=True, centred=True, eps="layer_norm_eps"),
    "starcoder2": Architecture(
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        centred=True,
        eps="norm_epsilon",
        gate=("hidden_act", "gelu_pytorch_tanh"),
    ),
    "step3p5": Architecture(
        qk_norm=True,
        partial_rope=True,
        ropes_by_kind=True,
        one_more=True,
        limited=True,
        score_scale="query_pre_attn_scalar",
    ),
    "vaultgemma": replace(GEMMA2, norms=NormNames(mlp="pre_feedforward_layernorm")),
    "youtu": Architecture(alternate_rope="rope_interleave"),
}
GATES: dict[str, Gate] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
ACTS: dict[str, Gate] = {  # of no gate
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), "gelu_alone"),
    "relu2": "relu2",
    "xielu": "xielu",
}


def declared(model_type: object, where: str) -> Architecture:
    """The declaration of an architecture. Raises UserError with the choices."""
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UserError(f"{where}: architecture {model_type!r} is not supported; supported are {known}")
    return ARCHITECTURES[model_type]
