"""Keys by which configs of some types of models were published, and what transformers calls them.

Knows keys; must not know what they mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpspec.published.reads import Reads

KEYS = {
    "exaone": {
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
        "num_layers": "num_hidden_layers",
    },
    "internlm3": {"bias": "mlp_bias", "qkv_bias": "attention_bias"},
    "kimi_linear": {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    "lfm2": {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings"},
    "mimo_v2_flash": {"layernorm_epsilon": "rms_norm_eps"},
    "sarvam_mla": {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    "sarvam_moe": {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    },
    "step3p5": {
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "num_attention_groups": "num_key_value_heads",
        "share_expert_dims": "share_expert_dim",
    },
}


def as_now(config: dict[str, object]) -> dict[str, object]:
    """A config by transformers' keys. What two say differently stays, for `check`."""
    kind = config.get("model_type")
    renamed = KEYS.get(kind, {}) if isinstance(kind, str) else {}
    made = {key: value for key, value in config.items() if key not in renamed or value is not None}
    for old, key in renamed.items():
        say(made, old, key, made.get(old))
    return made


def say(made: dict[str, object], old: str, key: str, value: object) -> None:
    """By another key, which may say it already; what it then says differently stays."""
    if value is None:
        return
    if made.get(key) is None:
        made[key] = value
    if made[key] == value:
        del made[old]


def check(read: Reads, model_type: str) -> None:
    """UserError for what is said twice, and differently."""
    for old, key in KEYS.get(model_type, {}).items():
        if read.config.get(old) is not None:
            raise read.refusal(old, f"{read.config.get(key)}, as {key} is")
