"""Mixtures of experts, type by type: what matrices are called (mlp_names.py says how), and what is meant by keys that a
config.json leaves out.

Data. What is read with it is experts.py's matter.
"""

from __future__ import annotations

from dataclasses import replace

from tpspec.published.mixture import Beside, ByLogits, Mixing
from tpspec.published.mlp_names import DENSE, GRANITE, MLPS, TOGETHER, MlpNames
from tpspec.published.model_types import MODEL_TYPES

MIXTURES = {
    "afmoe": Mixing(
        MlpNames("mlp", router="router.gate", correction="mlp.expert_bias"),
        count=64,
        chosen=6,
        sums_to_one=True,
        beside=Beside(
            dense=6144,
            shared=2,
            groups=None,
            keys=("num_dense_layers", "num_shared_experts", "route_scale"),
        ),
    ),
    "axk1": Mixing(
        MlpNames("mlp", may_lack_correction=True),
        count=192,
        chosen=8,
        norms=True,
        beside=Beside(dense=18432, shared=1, groups=(8, 4), scale=2.5, listed=True),
    ),
    "cohere2_moe": Mixing(
        DENSE,
        count=8,
        chosen=2,
        norms=True,
        by_logits=ByLogits(
            shared=("num_shared_experts", 0),
            each=("intermediate_size", 22528),
            listed="mlp_layer_types",
            dense="prefix_dense_intermediate_size",
            varied=True,
        ),
    ),
    "deepseek_v2": Mixing(
        DENSE,
        count=64,
        chosen=None,
        sums_to_one=False,
        beside=Beside(dense=11008, shared=2, first_layer=0, sigmoid=False),
    ),
    "deepseek_v3": Mixing(
        DENSE,
        count=256,
        chosen=8,
        norms=True,
        beside=Beside(dense=18432, shared=1, first_layer=3, groups=(8, 4), scale=2.5),
    ),
    "deepseek_v32": Mixing(
        DENSE,
        count=256,
        chosen=8,
        norms=True,
        beside=Beside(dense=18432, shared=1, first_layer=3, groups=(8, 4), scale=2.5, listed="or counted"),
    ),
    "dots1": Mixing(DENSE, count=None, chosen=None, beside=Beside(dense=10944, shared=None, first_layer=0)),
    "ernie4_5_moe": Mixing(
        MlpNames("mlp", correction="mlp.moe_statics.e_score_correction_bias"),
        count=64,
        chosen=6,
        chosen_key="moe_k",
        sums_to_one=True,
        beside=Beside(
            dense=12288,
            shared=2,
            groups=None,
            of_parts=True,
            keys=("moe_layer_start_index", "moe_num_shared_experts", "routed_scaling_factor"),
        ),
    ),
    "exaone_moe": Mixing(
        MlpNames("mlp", correction="mlp.e_score_correction_bias"),
        count=64,
        chosen=8,
        norms=True,
        beside=Beside(
            dense=16384,
            shared=1,
            scale=2.5,
            listed=True,
            keys=("first_k_dense_replace", "num_shared_experts", "routed_scaling_factor"),
        ),
    ),
    "flex_olmo": Mixing(DENSE, count=7, chosen=5),
    "flint": Mixing(
        MlpNames("mlp", shared="mlp.shared_expert"),
        count=256,
        chosen=6,
        norms=True,
        by_logits=ByLogits(
            shared=("shared_expert_intermediate_size", 1024), listed="mlp_only_layers", usual_dense=6144
        ),
    ),
    "gemma4_text": Mixing(
        MlpNames("", router="router.proj", shared="mlp", together=TOGETHER, upright=True),
        count=None,
        chosen=None,
        chosen_key="top_k_experts",
        sums_to_one=True,
        apart=9216,
        alone=DENSE,
        channels=("moe_intermediate_size", None),
    ),
    "glm4_moe": Mixing(DENSE, count=128, chosen=8, norms=True, beside=Beside(dense=10944, shared=1)),
    "glm4_moe_lite": Mixing(
        DENSE,
        count=64,
        chosen=4,
        norms=True,
        beside=Beside(dense=10240, shared=1, scale=1.8, listed=True),
    ),
    "glm4v_moe_text": Mixing(DENSE, count=128, chosen=8, norms=True, beside=Beside(dense=10944, shared=1)),
    "glm_moe_dsa": Mixing(
        DENSE,
        count=256,
        chosen=8,
        norms=True,
        beside=Beside(dense=12288, shared=1, first_layer=3, scale=2.5, listed="or counted"),
    ),
    "gpt_oss": Mixing(
        MlpNames("mlp", router="router", together=TOGETHER, alternate=True),
        count=128,
        chosen=4,
        sums_to_one=True,
        biased=True,
    ),
    "granitemoe": Mixing(GRANITE, count=8, chosen=2, sums_to_one=True),
    "granitemoe_swa": Mixing(
        replace(GRANITE, router="router", together=TOGETHER),
        count=8,
        chosen=2,
        sums_to_one=True,
        shared=("shared_intermediate_size", 0),
    ),
    "granitemoehybrid": Mixing(
        GRANITE,
        count=8,
        chosen=2,
        sums_to_one=True,
        shared=("shared_intermediate_size", 1024),
        alone=replace(GRANITE, module="shared_mlp", together=None),
        channels=("intermediate_size", 11008),
    ),
    "granitemoeshared": Mixing(GRANITE, count=8, chosen=2, sums_to_one=True, shared=("shared_intermediate_size", 0)),
    "hunyuan_v1_moe": Mixing(
        MlpNames("mlp", router="gate.wg", shared="mlp.shared_mlp"),
        count=1,
        chosen=1,
        chosen_key="moe_topk",
        sums_to_one=True,
        shared=("intermediate_size", 11008),
        by_layer=("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"),
    ),
    "hy_v3": Mixing(
        MlpNames("mlp", router="router.gate", shared="mlp.shared_mlp", correction="mlp.expert_bias"),
        count=192,
        chosen=8,
        sums_to_one=True,
        beside=Beside(
            dense=13312,
            shared=1,
            groups=None,
            scale=2.826,
            listed=True,
            keys=("first_k_dense_replace", "num_shared_experts", "router_scaling_factor"),
        ),
    ),
    "kimi_linear": Mixing(
        MlpNames(
            "block_sparse_moe",
            "w1",
            "w3",
            "w2",
            shared="block_sparse_moe.shared_experts",
            dense="mlp",
            apart=("gate_proj", "up_proj", "down_proj"),
            correction="block_sparse_moe.gate.e_score_correction_bias",
        ),
        count=256,
        chosen=8,
        norms=True,
        beside=Beside(dense=9216, shared=1, scale=2.446, listed=True),
    ),
    "kolibri1": Mixing(
        MlpNames("mlp", correction="moe.router.expert_bias"),
        count=384,
        chosen=6,
        by_logits=ByLogits(shared=("shared_expert_intermediate_size", 512), corrected=True),
    ),
    "laguna": Mixing(
        MlpNames("mlp", shared="mlp.shared_expert", correction="mlp.experts.e_score_correction_bias"),
        count=256,
        chosen=8,
        sums_to_one=True,
        beside=Beside(
            dense=8192,
            shared=1,
            groups=None,
            listed=True,
            own="shared_expert_intermediate_size",
            keys=("first_k_dense_replace", "n_shared_experts", "moe_routed_scaling_factor"),
        ),
    ),
    "lfm2_moe": Mixing(
        replace(MLPS["lfm2"], correction="feed_forward.expert_bias"),
        count=32,
        chosen=4,
        norms=True,
        beside=Beside(
            dense=7168,
            shared=0,
            first_layer=2,
            groups=None,
            switch="use_expert_bias",
            added=1e-6,
            keys=("num_dense_layers", "num_shared_experts", "routed_scaling_factor"),
        ),
    ),
    "llama4_text": Mixing(
        MlpNames("feed_forward", router="router", shared="feed_forward.shared_expert", together=TOGETHER),
        count=16,
        chosen=1,
        by_logits=ByLogits(
            shared=("intermediate_size", 8192),
            dense="intermediate_size_mlp",
            usual_dense=16384,
            spaced=True,
            on_inputs=True,
        ),
    ),
    "mellum": Mixing(DENSE, count=64, chosen=8, norms=True),
    "mimo_v2_flash": Mixing(DENSE, count=256, chosen=8, norms=True, beside=Beside(dense=16384, shared=0, listed=True)),
    "minimax_m2": Mixing(
        MlpNames("block_sparse_moe", "w1", "w3", "w2", correction="block_sparse_moe.e_score_correction_bias"),
        count=256,
        chosen=8,
        sums_to_one=True,
        sigmoid=True,
    ),
    "mistral4": Mixing(
        MlpNames("mlp", together=TOGETHER, upright=True),
        count=128,
        chosen=4,
        norms=True,
        beside=Beside(dense=12288, shared=1, first_layer=0, groups=None, sigmoid=False),
    ),
    "mixtral": Mixing(MlpNames("block_sparse_moe", "w1", "w3", "w2"), count=8, chosen=2, sums_to_one=True),
    "nemotron_h": Mixing(
        MlpNames("mixer", gate=None, shared="mixer.shared_experts", correction="mixer.gate.e_score_correction_bias"),
        count=8,
        chosen=2,
        norms=True,
        beside=Beside(dense=21504, shared=1, first_layer=0, own="moe_shared_expert_intermediate_size"),
        channels=("moe_intermediate_size", 7688),
    ),
    "olmoe": Mixing(DENSE, count=64, chosen=8),
    "phimoe": Mixing(
        MlpNames("block_sparse_moe", "w1", "w3", "w2"),
        count=16,
        chosen=2,
        sums_to_one=False,
        margin=("router_jitter_noise", 0.01),
    ),
    "qwen2_moe": Mixing(MlpNames("mlp", shared="mlp.shared_expert"), count=60, chosen=4, gated=5632),
    "qwen3_5_moe_text": Mixing(
        MlpNames("mlp", shared="mlp.shared_expert", together=TOGETHER, upright=True),
        count=256,
        chosen=8,
        sums_to_one=True,
        gated=512,
    ),
    "qwen3_moe": Mixing(DENSE, count=128, chosen=8),
    "qwen3_vl_moe_text": Mixing(MlpNames("mlp", together=TOGETHER), count=60, chosen=4, sums_to_one=True),
    "qwen3_next": Mixing(MlpNames("mlp", shared="mlp.shared_expert"), count=512, chosen=10, norms=True, gated=512),
    "sarvam_mla": Mixing(DENSE, count=128, chosen=8, norms=True, beside=Beside(dense=16384, shared=1, scale=2.5)),
    "sarvam_moe": Mixing(
        MlpNames("mlp", correction="mlp.gate.expert_bias"),
        count=128,
        chosen=6,
        norms=True,
        beside=Beside(dense=8192, shared=1, scale=2.5),
    ),
    "solar_open": Mixing(
        DENSE,
        count=128,
        chosen=8,
        norms=True,
        beside=Beside(dense=10944, shared=1, first_layer=0),
    ),
    "step3p5": Mixing(
        MlpNames(
            "moe",
            shared="share_expert",
            dense="mlp",
            together=("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
            upright=True,
            correction="moe.router_bias",
        ),
        count=288,
        chosen=8,
        sums_to_one=True,
        beside=Beside(
            dense=11264,
            shared=1,
            first_layer=3,
            groups=None,
            listed=True,
            own="share_expert_dim",
            keys=("first_k_dense_replace", "n_shared_experts", "moe_router_scaling_factor"),
        ),
    ),
}
NAMES = {mixing.names for mixing in MIXTURES.values()}
TOGETHER_DOWN = tuple(f".{names.within('')}{names.together[-1]}" for names in NAMES if names.together)


def channels_key(model_type: str) -> tuple[str, int | None]:
    """The key for an expert's channels, and how many there are without it."""
    return MIXTURES[model_type].channels or MODEL_TYPES[model_type].intermediate


def has_narrow_columns(name: str) -> bool:
    """Whether the columns of the matrix of that name are the channels of one expert."""
    return name.endswith(TOGETHER_DOWN) or ("experts." in name and name.endswith(tuple(names.down for names in NAMES)))


def mlp_names(model_type: str, *, mixed: bool = True) -> MlpNames:
    """mixed: whether a model has experts, of a type that may have some or none."""
    if (mixing := MIXTURES.get(model_type)) is None:
        return MLPS.get(model_type, DENSE)
    return mixing.names if mixed or mixing.alone is None else mixing.alone
