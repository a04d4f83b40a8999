"""Architectures as data: what differs between the decoder-only models we run, and nothing else.

To add one, add a declaration, and what its config.json leaves out (published/model_types.py says where). Must not know
shards, or tensors' values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tpspec.model.architecture import NOPE_BESIDE, NOPE_WITH_EXPERTS, ONE_THETA, THETA, THETAS, Architecture
from tpspec.published.windows import CONV, FULL

if TYPE_CHECKING:
    from tpspec.model.curves import Curve

HYBRID = Architecture(partial_rope=True, one_more=True)  # Qwen's, of linear attention and attention
COHERE = Architecture(alternate_rope=True, centred=True, eps="layer_norm_eps", logit_scale="logit_scale")
GEMMA2 = Architecture(
    one_more=True,
    gate=("hidden_activation", "gelu_pytorch_tanh"),
    scaled_embeddings=True,
    score_scale="query_pre_attn_scalar",
    capped=True,
    scores_capped=True,
)
GEMMA4 = Architecture(
    v_norm=True,
    gate=("hidden_activation", "gelu_pytorch_tanh"),
    scaled_embeddings=True,
    scaled_layers=True,
    score_scale=1.0,
    capped=True,
)
GRANITE_MOE = Architecture(multiplied=True)
HUNYUAN = Architecture(stretched=True)
LFM2 = Architecture(eps="norm_eps", gate=(None, "silu"))
ARCHITECTURES = {
    "afmoe": Architecture(nope=FULL, scaled_embeddings="mup_enabled"),
    "apertus": Architecture(gate=("hidden_act", "xielu")),
    "arcee": Architecture(gate=("hidden_act", "relu2")),
    "axk1": Architecture(alternate_rope="rope_interleave"),
    "cohere": COHERE,
    "cohere2": replace(COHERE, nope=FULL),
    "cohere2_moe": replace(COHERE, nope=NOPE_WITH_EXPERTS, rms_eps="rms_norm_eps"),
    "cwm": Architecture(),
    "deepseek_v2": Architecture(alternate_rope=True),
    "deepseek_v3": Architecture(alternate_rope="rope_interleave"),
    "deepseek_v32": Architecture(alternate_rope=True),
    "dots1": Architecture(),
    "ernie4_5": Architecture(alternate_rope=True),
    "ernie4_5_moe": Architecture(alternate_rope=True),
    "exaone": Architecture(),
    "exaone4": Architecture(nope=NOPE_BESIDE),
    "exaone_moe": Architecture(nope=NOPE_BESIDE),
    "falcon_h1": Architecture(scaled=True),
    "flex_olmo": Architecture(),
    "flint": Architecture(nope=FULL),
    "gemma": Architecture(one_more=True, gate=("hidden_act", "gelu_pytorch_tanh"), scaled_embeddings=True),
    "gemma2": GEMMA2,
    "gemma3_text": replace(GEMMA2, scores_capped=False),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "glm": Architecture(partial_rope=True, alternate_rope=True),
    "glm4": Architecture(partial_rope=True, alternate_rope=True),
    "glm4_moe": Architecture(partial_rope=True),
    "glm4_moe_lite": Architecture(alternate_rope="rope_interleave"),
    "glm4v_moe_text": Architecture(partial_rope=True),
    "glm4v_text": Architecture(partial_rope=True, alternate_rope=True),
    "glm_moe_dsa": Architecture(alternate_rope=True),
    "gpt_oss": Architecture(clamped=True),
    "granite": Architecture(multiplied=True),
    "granite_swa": Architecture(multiplied=True, nope=THETAS),
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": replace(GRANITE_MOE, nope=THETAS),
    "granitemoehybrid": replace(GRANITE_MOE, turned="position_embedding_type"),
    "granitemoeshared": GRANITE_MOE,
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN,
    "hy_v3": Architecture(),
    "hyperclovax": Architecture(multiplied="logits"),
    "internlm3": Architecture(),
    "iquestcoder": Architecture(),
    "jais2": Architecture(centred=True, eps="layer_norm_eps", gate=("hidden_act", "relu2")),
    "kimi_linear": Architecture(turned=False),
    "kolibri1": Architecture(nope=NOPE_BESIDE),
    "laguna": Architecture(partial_rope=True, ropes_by_kind=True),
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "lfm3": Architecture(ropes_by_kind=True, nope=CONV, eps="norm_eps", gate=(None, "silu")),
    "llama": Architecture(),
    "llama4_text": Architecture(plain_norm="use_qk_norm", alternate_rope=True, tuned=True, nope="no_rope_layers"),
    "mellum": Architecture(),
    "mimo_v2_flash": Architecture(partial_rope=True, ropes_by_kind=True, value_scale="attention_value_scale"),
    "minimax_m2": Architecture(partial_rope=True),
    "ministral": Architecture(),
    "ministral3": Architecture(),
    "mistral": Architecture(),
    "mistral4": Architecture(partial_rope=True, alternate_rope="rope_interleave"),
    "mixtral": Architecture(),
    "muse_glimmer_text": Architecture(
        plain_norm=True,
        nope=ONE_THETA,
        one_more="layers",
        out_eps="post_norm_eps",
        gate=("hidden_activation", "silu"),
        normed_embeddings=True,
        logit_scale="output_multiplier",
        sharpened="qk_scale_factor",
        capped=True,
    ),
    "nanochat": Architecture(
        backwards=True,
        weighed=False,
        gate=("hidden_act", "relu2"),
        normed_embeddings=True,
        capped=True,
    ),
    "nemotron": Architecture(
        partial_rope=True, one_more=True, centred=True, eps="norm_eps", gate=("hidden_act", "relu2")
    ),
    "nemotron_h": Architecture(turned=False, eps="layer_norm_epsilon", gate=("mlp_hidden_act", "relu2")),
    "olmo": Architecture(weighed=False, centred=True, eps=1e-5),
    "olmo2": Architecture(),
    "olmo3": Architecture(),
    "olmo_hybrid": Architecture(turned=THETA),
    "olmoe": Architecture(),
    "phi": Architecture(partial_rope=True, centred=True, eps="layer_norm_eps", gate=("hidden_act", "gelu_new")),
    "phi3": Architecture(partial_rope=True),
    "phimoe": Architecture(own_scales=True, centred=True),
    "qwen2": Architecture(),
    "qwen2_5_vl_text": Architecture(),
    "qwen2_moe": Architecture(),
    "qwen2_vl_text": Architecture(),
    "qwen3": Architecture(),
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_moe": Architecture(),
    "qwen3_next": HYBRID,
    "qwen3_vl_moe_text": Architecture(),
    "qwen3_vl_text": Architecture(),
    "sarvam_mla": Architecture(alternate_rope="rope_interleave"),
    "sarvam_moe": Architecture(),
    "seed_oss": Architecture(),
    "smollm3": Architecture(nope="no_rope_layers"),
    "solar_open": Architecture(partial_rope=True),
    "stablelm": Architecture(partial_rope=True, centred=True, eps="layer_norm_eps"),
    "starcoder2": Architecture(centred=True, eps="norm_epsilon", gate=("hidden_act", "gelu_pytorch_tanh")),
    "step3p5": Architecture(
        partial_rope=True,
        ropes_by_kind=True,
        one_more=True,
        limited=True,
        score_scale="query_pre_attn_scalar",
    ),
    "vaultgemma": GEMMA2,
    "youtu": Architecture(alternate_rope="rope_interleave"),
}
GATES: dict[str, Curve] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
ACTS: dict[str, Curve] = {  # of no gate
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), "gelu_alone"),
    "relu2": "relu2",
    "xielu": "xielu",
}
