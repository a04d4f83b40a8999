"""Random tiny checkpoints: real Hugging Face folders, small enough to build inside a test, one kind per peculiarity.

They are made so that bugs show: weights have the scale at which attention, position and every bias and norm change the
argmax (a fresh transformers model has zero biases, unit norms and near-uniform logits, and hides all of that), and no
size divides evenly. Knows transformers; must not know tpspec, which is what it is compared with.
"""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

LOGIT_STD = 2.0
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["the cat and the hat, the end of the other one", "there, then, and again: the theme of the thing"]

# 263 ids (prime): 256 bytes, 3 special tokens, 4 merges. One vocabulary for all kinds, so that any may draft for any.
BASE: dict[str, Any] = {
    "vocab_size": 263,
    "hidden_size": 96,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # small, so that scaling already changes the first hundred positions
}
HUNYUAN_ROPE = {
    "rope_type": "dynamic",
    "rope_theta": 10000.0,
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.4,
}
DEEPSEEK = {
    "num_key_value_heads": 6,  # which nobody reads: what is cached has one
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Of the tokens of all tests' texts a row attends to some. Of fewer heads all may find nothing in several tokens,
# and which of those are chosen is then nobody's.
INDEX = {"index_n_heads": 15, "index_head_dim": 12, "index_topk": 6}
HYBRID = {
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}
MAMBA = {
    "head_dim": 16,
    "mamba_num_heads": 10,
    "mamba_head_dim": 6,
    "n_groups": 5,
    "ssm_state_size": 10,
    "time_step_min": 1e-30,  # below which transformers lets none be, but where it goes on from a state
    "layer_norm_epsilon": 1e-5,
}
GRANITE = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.5,
    "logits_scaling": 1.25,
    "rms_norm_eps": 0.05,
}
GRANITE_HYBRID = {
    "model_type": "granitemoehybrid",
    **GRANITE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 10,
    "shared_intermediate_size": 48,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "nope",
}
GATED = {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 48, "num_experts_per_tok": 3}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "cohere2": {
        "model_type": "cohere2",
        "hidden_size": 90,  # no multiple of what vectors hold: a mean is taken
        "head_dim": 16,
        "logit_scale": 0.8,
        "tie_word_embeddings": True,
        **SLIDING,
    },
    "cohere2_moe": {
        "model_type": "cohere2_moe",
        "head_dim": 16,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "prefix_dense_intermediate_size": 56,
        "logit_scale": 0.8,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **DEEPSEEK,
        "q_lora_rank": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **DEEPSEEK,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 28,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "rope_interleave": False,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 70,
        "mamba_n_heads": 10,
        "mamba_n_groups": 2,
        "mamba_d_state": 10,
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.8,
        "attention_in_multiplier": 0.9,
        "key_multiplier": 0.7,
        "attention_out_multiplier": 1.3,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.7, 1.2, 0.8, 1.4, 0.6],
        "ssm_out_multiplier": 0.75,
        "mlp_multipliers": [1.4, 0.6],
    },
    "flint": {
        "model_type": "flint",
        "head_dim": 16,
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
        **SLIDING,
    },
    "glm4": {
        "model_type": "glm4",
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 40,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
        "q_lora_rank": 28,
        "routed_scaling_factor": 1.8,
    },
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_size": 48,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "sliding_window_pattern": 2,  # the second of every two layers has none
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "tie_word_embeddings": True,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "hidden_size": 48,
        "num_key_value_heads": 3,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 4.0,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
    "gemma4_moe": {
        "model_type": "gemma4_text",
        "hidden_size": 48,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 7,
        "top_k_experts": 3,
        "moe_intermediate_size": 40,
    },
    "gemma4_small": {
        "model_type": "gemma4_text",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 263,
        "tie_word_embeddings": True,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_text",
        "hidden_size": 48,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "final_logit_softcapping": 4.0,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 8,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "kimi_linear": {
        "model_type": "kimi_linear",
        **{key: value for key, value in DEEPSEEK.items() if key not in ("n_routed_experts", "first_k_dense_replace")},
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        # As it was published.
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "head_dim": 10,
            "kda_layers": [1, 3],
            "num_heads": 6,
            "short_conv_kernel_size": 3,
        },
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    },
    "laguna": {
        "model_type": "laguna",
        "head_dim": 16,
        **SLIDING,
        "num_attention_heads_per_layer": [8, 6, 8],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
        **GATED,
        "num_experts": 7,
        "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 3.0,
        # As it was published, and transformers does not read it.
        "gating": "per-head",
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "rope_parameters": HUNYUAN_ROPE,
        # As it was published, and transformers does not read it.
        "attention_head_dim": 16,
        "cla_share_factor": 2,
        "use_cla": False,
        "use_qk_norm": True,
    },
    "apertus": {
        "model_type": "apertus",
        "rope_parameters": LLAMA3_ROPE,
        # As it was published, and transformers does not read it.
        "mlp_bias": False,
        "post_norm": False,
        "qk_norm": True,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "norm_epsilon": 1e-5,
        "sliding_window": 8,
        # As it was published, and transformers does not read it.
        "mlp_type": "default",
        "norm_type": "layer_norm",
    },
    "lfm2": {
        "model_type": "lfm2",
        "head_dim": 16,
        "intermediate_size": 100,
        "block_multiple_of": 24,
        "block_ffn_dim_multiplier": 1.3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True,
        "norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        # As it was published, and transformers does not read it.
        "block_use_swiglu": True,
        "conv_dim": 1024,
        "use_pos_enc": True,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "head_dim": 16,
        "moe_intermediate_size": 40,
        "num_dense_layers": 1,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
        "layer_types": ["conv", "conv", "full_attention"],
        "conv_L_cache": 4,
        "norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "lfm3": {
        "model_type": "lfm3",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        "sliding_window": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "tie_word_embeddings": True,
    },
    "llama": {"model_type": "llama"},
    "granite": {"model_type": "granite", **GRANITE},
    "granite_hybrid": {
        **GRANITE_HYBRID,
        "intermediate_size": 40,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
    },
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 56,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "rope_parameters": LLAMA3_ROPE,
        "no_rope_layers": [1, 0, 1, 1],
        "attention_chunk_size": 7,
        "floor_scale": 6,
        "attn_scale": 0.4,
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": MISTRAL_ROPE,
    },
    "mistral": {"model_type": "mistral", "hidden_size": 48, "head_dim": 16, "sliding_window": 8},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "muse_glimmer": {
        "model_type": "muse_glimmer_text",
        "head_dim": 16,
        **SLIDING,
        "layer_rope_theta": [10000.0, 0, 10000],
        "rms_norm_eps": 0.05,
        "post_norm_eps": 0.5,
        "qk_scale_factor": 2.5,
        "output_multiplier": 0.8,
        "final_logit_softcapping": 4.0,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        **MAMBA,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 64,
        "routed_scaling_factor": 2.5,
    },
    "olmo3": {
        "model_type": "olmo3",
        **SLIDING,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        **{key: value for key, value in HYBRID.items() if key.startswith(("layer", "linear"))},
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    },
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "hidden_size": 48, "head_dim": 16, "intermediate_size": 72},
    "qwen3_5": {"model_type": "qwen3_5_text", **HYBRID},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **HYBRID, **GATED, "num_experts": 7},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 48,
        "head_dim": 16,
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "num_experts_per_tok": 3,
    },
    "qwen3_next": {"model_type": "qwen3_next", **HYBRID, **GATED, "num_experts": 7},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16, "attention_out_bias": True, "mlp_bias": True},
    "smollm2": {
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    "step3p5": {
        "model_type": "step3p5",
        "head_dim": 16,
        **SLIDING,
        "num_sliding_attention_heads": 8,
        "rope_parameters": {
            "full_attention": LLAMA3_ROPE | {"partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_intermediate_size": 40,
        "share_expert_dim": 48,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_router_scaling_factor": 2.5,
        "swiglu_limits": [0.0, 0.0, 0.3],
        "swiglu_limits_shared": [0.0, 0.15, 0.0],
    },
}
MIXED = {
    "moe_intermediate_size": 40,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
# Kinds that are put together of parts that those above have, too; see tests/parity.
AKIN: dict[str, dict[str, Any]] = {
    "afmoe": {
        "model_type": "afmoe",
        "head_dim": 16,
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "route_scale": 2.5,
        "mup_enabled": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "arcee": {"model_type": "arcee", "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "axk1": {
        "model_type": "axk1",
        **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 28,
    },
    "cohere": {"model_type": "cohere", "logit_scale": 0.8, "attention_bias": True},
    "cohere2_moe_sum": {
        "model_type": "cohere2_moe",
        "head_dim": 16,
        "rms_norm_eps": None,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "first_k_dense_replace": 1,
        "prefix_dense_sliding_window_pattern": 2,
        "logit_scale": 0.8,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "cwm": {
        "model_type": "cwm",
        "head_dim": 16,
        "sliding_window": 8,
        "rope_parameters": LLAMA3_ROPE,
    },
    "dots1": {
        "model_type": "dots1",
        "head_dim": 16,
        **MIXED,
        "first_k_dense_replace": 1,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16, "tie_word_embeddings": True},
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 40,
        "moe_num_experts": 7,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
    },
    "exaone": {"model_type": "exaone", "head_dim": 16, "rope_parameters": LLAMA3_ROPE},
    "exaone4": {"model_type": "exaone4", **SLIDING},
    "exaone4_whole": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "exaone_moe": {
        "model_type": "exaone_moe",
        "head_dim": 16,
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "falcon_h1_normed": {
        "model_type": "falcon_h1",
        "head_dim": 20,
        "mamba_d_ssm": None,
        "mamba_n_heads": 12,
        "mamba_n_groups": 3,
        "mamba_d_state": 10,
        "mamba_conv_bias": False,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "tie_word_embeddings": True,
    },
    "flex_olmo": {"model_type": "flex_olmo", "num_experts": 7, "num_experts_per_tok": 3},
    "gemma": {"model_type": "gemma", "hidden_size": 48, "head_dim": 16, "tie_word_embeddings": True},
    "glm": {"model_type": "glm", "head_dim": 16, "attention_bias": True},
    "hy_v3": {
        "model_type": "hy_v3",
        "head_dim": 16,
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
    },
    "hyperclovax": {
        "model_type": "hyperclovax",
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.5,
        "logits_scaling": 0.8,
        "rms_norm_eps": 0.05,
    },
    "granite_hybrid_dense": {**GRANITE_HYBRID, "mamba_conv_bias": False, "tie_word_embeddings": True},
    "granite_hybrid_groups": {**GRANITE_HYBRID, "mamba_n_groups": 3},
    "granite_hybrid_turned": {
        **GRANITE_HYBRID,
        "layer_types": ["full_attention"] * 3,
        "shared_intermediate_size": 88,
        "position_embedding_type": "rope",
    },
    "granite_moe": {"model_type": "granitemoe", **GRANITE, "num_local_experts": 7, "num_experts_per_tok": 3},
    "granite_moe_windows": {
        "model_type": "granitemoe_swa",
        **GRANITE,
        **SLIDING,
        "layer_rope_theta": [100.0, 0, 10000],
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 48,
    },
    "granite_shared": {
        "model_type": "granitemoeshared",
        **GRANITE,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 48,
    },
    "granite_windows": {
        "model_type": "granite_swa",
        **GRANITE,
        **SLIDING,
        "layer_rope_theta": [100.0, 0, 10000],
    },
    "hunyuan_moe": {
        "model_type": "hunyuan_v1_moe",
        "head_dim": 16,
        "rope_parameters": HUNYUAN_ROPE,
        "num_experts": 7,
        "moe_topk": [3, 3, 3],
        # As it was published, and transformers does not read it.
        "moe_intermediate_size": [88, 88, 88],
        "moe_layer_num_skipped": 0,
        "norm_topk_prob": True,
        "num_shared_expert": [1, 1, 1],
        "use_mixed_mlp_moe": True,
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        **DEEPSEEK,
        **INDEX,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 28,
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **DEEPSEEK,
        **INDEX,
        "q_lora_rank": 28,
        "index_topk_freq": 2,  # of three layers the last attends to what the one before it chose
    },
    "nemotron": {"model_type": "nemotron", "head_dim": 16, "norm_eps": 1e-5},
    "internlm3": {
        "model_type": "internlm3",
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0},
    },
    "iquestcoder": {"model_type": "iquestcoder", "head_dim": 16},
    "jais2": {"model_type": "jais2", "head_dim": 16, "layer_norm_eps": 1e-5},
    "kolibri1": {
        "model_type": "kolibri1",
        "head_dim": 16,
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 48,
        **SLIDING,
    },
    "laguna_whole": {
        "model_type": "laguna",
        "head_dim": 16,
        **GATED,
        "num_experts": 7,
        "gating": "per-element",
        "sliding_window": 0,
    },
    "lfm2_moe_plain": {
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "num_dense_layers": 0,
        "norm_topk_prob": False,
        "use_expert_bias": False,
        "layer_types": ["full_attention", "conv", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    },
    "lfm3_plain": {
        "model_type": "lfm3",
        "head_dim": 16,
        "attention_bias": True,
        "conv_bias": True,
        "layer_types": ["sliding_attention", "conv", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 100.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": 8,
        "use_attention_gate": False,
        "use_sandwich_norm": False,
    },
    "mellum": {
        "model_type": "mellum",
        "head_dim": 16,
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "mimo": {
        "model_type": "mimo_v2_flash",
        "head_dim": 32,
        "v_head_dim": 20,
        "num_key_value_heads": 1,
        **SLIDING,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.45},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.45},
        },
        "moe_intermediate_size": 40,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "mimo_published": {
        "model_type": "mimo_v2_flash",
        "head_dim": 32,
        "v_head_dim": 20,
        "num_key_value_heads": 1,
        **SLIDING,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "moe_intermediate_size": 40,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
    },
    "ministral": {
        "model_type": "ministral",
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "nemotron_h_dense": {
        "model_type": "nemotron_h",
        **MAMBA,
        "use_conv_bias": False,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    },
    "nanochat": {
        "model_type": "nanochat",
        "final_logit_softcapping": 2.0,
        # Whose scale is lost where the norm is of what has been turned.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "olmo": {"model_type": "olmo"},
    "olmo2": {"model_type": "olmo2"},
    "olmo_hybrid_turned": {
        "model_type": "olmo_hybrid",
        "num_hidden_layers": 4,  # of which the last has full attention
        "linear_allow_neg_eigval": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "phi": {"model_type": "phi", "num_hidden_layers": 2, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "phimoe": {
        "model_type": "phimoe",
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 8,
        "num_local_experts": 7,
        "router_jitter_noise": 0.2,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1 + 0.1 * i for i in range(8)],
            "long_factor": [1 + 3.0 * i for i in range(8)],
            "short_mscale": 1.3,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen2_moe": {"model_type": "qwen2_moe", **GATED, "num_experts": 7},
    "sarvam_mla": {
        "model_type": "sarvam_mla",
        **DEEPSEEK,
        "q_lora_rank": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "sarvam_moe": {
        "model_type": "sarvam_moe",
        "head_dim": 16,
        **MIXED,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        # As it was published, and transformers does not read it.
        "moe_router_enable_expert_bias": True,
        "score_function": "sigmoid",
        "use_bias": False,
        "use_rmsnorm": True,
    },
    "solar_open": {"model_type": "solar_open", "head_dim": 16, **MIXED, "attention_bias": True},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    "vaultgemma": {
        "model_type": "vaultgemma",
        "hidden_size": 48,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    },
    "youtu": {
        "model_type": "youtu",
        **{key: value for key, value in DEEPSEEK.items() if key.endswith(("_dim", "kv_lora_rank", "_heads"))},
        "q_lora_rank": 28,
        "tie_word_embeddings": True,
        "pad_token_id": None,  # whose row transformers makes zeros when it loads
    },
}
# Kinds that transformers has within models that see alone.
WITHIN: dict[str, dict[str, Any]] = {
    "mistral4": {
        "model_type": "mistral4",
        **DEEPSEEK,
        "q_lora_rank": 28,
        "routed_scaling_factor": 1.8,
        "rope_parameters": MISTRAL_ROPE | {"original_max_position_embeddings": 8, "partial_rotary_factor": 0.4},
    },
}
# Types of text models within models that see, and the kinds that they are like; transformers has no such model alone.
LIKE = {
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
ONE_MORE = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "muse_glimmer_text",
    "nemotron",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "step3p5",
    "vaultgemma",
)  # whose norms multiply by 1 + weight
PLAIN_LAST = ("muse_glimmer_text",)  # but for the last
EXAONE_KEYS = {
    "hidden_act": "activation_function",
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
}  # transformers', and as it was published
INTERNLM_KEYS = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}
SARVAM_KEYS = {
    "attention_bias": "use_qkv_bias",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
}
STEPS_KEYS = {
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "num_attention_groups": "num_key_value_heads",
}  # as it was published, and transformers'
STEPS_EYES = {
    "vision_config": {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14, "mlp_ratio": 2.0},
    "image_token_id": 262,
}
MUSES_EYES = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 14,
        "pos_emb_height": 2,
        "pos_emb_width": 2,
    },
    "out_hidden_size": 64,
    "projector_hidden_size": 16,
    "image_token_id": 0,  # which no test's text has: of those it does not take the row of the table
    "video_token_id": 1,
}
# Types of text models that transformers has within models that see alone: those, and what else they are to have.
SEEING = {"muse_glimmer_text": ("muse_glimmer", MUSES_EYES), "step3p5": ("step3p7", STEPS_EYES)}
UNNORMED = ("gemma", "vaultgemma")  # where what layers add to an embedding that is multiplied has no norm


def tiny(
    kind: str,
    folder: Path,
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of one kind into `folder` and return it. Same arguments, same bytes.

    shards: more than 1 writes that many safetensors files (or one or two more) and an index. overrides: config fields,
    by transformers' names. A tokenizer is written too, unless the vocabulary cannot hold the 256 bytes.
    """
    fields = BASE | (KINDS | AKIN)[kind] | overrides
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = _made(config, dtype)
    randomise(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder, max_shard_size=_shard_bytes(model, shards))
    if kind in PUBLISHED:
        path = folder / "config.json"
        path.write_text(json.dumps(PUBLISHED[kind](json.loads(path.read_text())), indent=2) + "\n")
    if config.vocab_size >= 256 + len(SPECIAL_TOKENS):
        write_tokenizer(folder, config.vocab_size)
    return folder


def _made(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    if config.model_type not in SEEING:
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return made
    tied, (seeing, eyes) = config.tie_word_embeddings, SEEING[config.model_type]
    whole = AutoConfig.for_model(seeing, text_config=config.to_dict(), tie_word_embeddings=tied, **eyes)
    return AutoModelForImageTextToText.from_config(whole, dtype=dtype)


def loaded(folder: Path, **keys: Any) -> PreTrainedModel:
    """By transformers; a model that sees where it has the kind within such alone."""
    sees = "text_config" in json.loads((folder / "config.json").read_text())
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(folder, **keys)
    return model


def tiny_draft(folder: Path, target: Path) -> Path:
    """For `target`, a tiny smollm2: a layer less and a padded vocabulary, right often enough and wrong often enough."""
    tiny("smollm2", folder, num_hidden_layers=2, vocab_size=270)
    shutil.copy(target / "tokenizer.json", folder)
    return folder


@torch.no_grad()
def randomise(model: PreTrainedModel, noise: torch.Generator) -> None:
    """Make every parameter random, also those that start as zeros or ones; logits get a std near LOGIT_STD."""
    kind = model.config.get_text_config().model_type
    after = 3 if kind.startswith(("gemma2", "gemma3", "gemma4")) else 1
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=noise)
        one_more = kind in ONE_MORE and not (kind in PLAIN_LAST and name.endswith(".norm.weight"))
        is_matrix = values.dim() > 1 and not name.endswith(("bias", "A_log"))
        made = _scaled(name, values) if is_matrix else _vector(name, values, after, one_more)
        is_sharp = kind.startswith("gemma4") and name.endswith("q_norm.weight")  # for nothing divides its scores
        is_added = kind in UNNORMED and name.endswith(("o_proj.weight", "down_proj.weight"))
        parameter.copy_(made - 0.6 if is_sharp else 7 * made if is_added else made)
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith(("e_score_correction_bias", "feed_forward.expert_bias")):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=noise))
        elif name.endswith("act_fn.beta"):
            buffer.copy_(0.3 + 0.5 * torch.rand(buffer.shape, generator=noise))
        elif name.endswith("layer_scalar"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=noise))


def _vector(name: str, values: torch.Tensor, after: int, one_more: bool) -> torch.Tensor:
    """after: what norms of what a sublayer gives are about, that it is as large as the embedding: else that would be
    every row's answer."""
    if name.endswith("bias"):
        return (0.15 if "norm" in name else 0.3) * values  # more in every norm, and all rows would be alike
    if name.endswith("A_log"):
        return values - 3  # states must remember more than the last token
    mean = after if "post_" in name else 1
    return mean - (one_more and not name.endswith("linear_attn.norm.weight")) + 0.3 * values


def _scaled(name: str, values: torch.Tensor) -> torch.Tensor:
    if "embed_tokens" in name or "lm_head" in name:
        return values * LOGIT_STD / math.sqrt(values.shape[-1])
    if "per_layer_input_gate" in name:  # which reads what no norm has made small
        return 0.1 * values / math.sqrt(values.shape[-1])
    # Queries and keys a little larger: attention must prefer some rows, or a wrong mask or position goes unnoticed.
    # gpt-oss's gates so large that some are clamped.
    gain = 1.5 if "q_proj" in name or "k_proj" in name else 4.0 if "mlp.experts.gate_up_proj" in name else 1.0
    return values * gain / math.sqrt(values.shape[-1])


def _shard_bytes(model: PreTrainedModel, shards: int) -> int:
    sizes: list[int] = [x.numel() * x.element_size() for x in model.state_dict().values()]
    return sum(sizes) + 1 if shards == 1 else max(max(sizes), sum(sizes) // shards)


def _as_llama3(config: dict[str, Any]) -> dict[str, Any]:
    """Says rope as published Llama 3 folders do: rope_theta and rope_scaling; transformers 5 says rope_parameters."""
    scaling = config.pop("rope_parameters")
    return config | {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}


def _by_keys(config: dict[str, Any], keys: dict[str, str]) -> dict[str, Any]:
    """Likewise, and by keys of its own."""
    return {keys.get(key, key): value for key, value in _as_llama3(config).items()}


def as_mimo(config: dict[str, Any]) -> dict[str, Any]:
    """As MiMo-V2-Flash says it, of which transformers reads the sizes alone: the rest is so by default."""
    ropes, kinds = config.pop("rope_parameters"), config.pop("layer_types")
    window = config.pop("sliding_window") - 1
    return config | {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_block_size": None,
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "layernorm_epsilon": config.pop("rms_norm_eps"),
        "moe_layer_freq": [int(kind == "sparse") for kind in config.pop("mlp_layer_types")],
        "n_shared_experts": None,
        "partial_rotary_factor": ropes["full_attention"]["partial_rotary_factor"],
        "rope_theta": ropes["full_attention"]["rope_theta"],
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "sliding_window": window,
        "sliding_window_size": window,
        "swa_head_dim": config["head_dim"],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        "swa_v_head_dim": config["v_head_dim"],
        "topk_method": "noaux_tc",
    }


def _as_sarvam(config: dict[str, Any]) -> dict[str, Any]:
    """Likewise as Sarvam's 105B does, and what it caches by the key of a head's size."""
    made = _by_keys(config, {key: SARVAM_KEYS[key] for key in ("n_routed_experts", "n_shared_experts")})
    made["rope_scaling"] |= {"type": "deepseek_yarn"}
    del made["rope_scaling"]["rope_type"]
    return made | {"head_dim": made["kv_lora_rank"] + made["qk_rope_head_dim"]}


def _as_hunyuan(config: dict[str, Any]) -> dict[str, Any]:
    """Likewise as Hunyuan's do, and what kind of scaling it is by another key."""
    made = _as_llama3(config)
    made["rope_scaling"]["type"] = made["rope_scaling"].pop("rope_type")
    return made


def as_step(config: dict[str, Any], *, behind: int = 2) -> dict[str, Any]:
    """Says of the text model what Step 3.7 does, as Step 3.5 did of all. behind: layers for multi-token prediction,
    of which lists tell, too."""
    text = config.pop("text_config")
    for old, key in STEPS_KEYS.items():
        text[old] = text.pop(key)
    ropes, layers = text.pop("rope_parameters"), text["layer_types"] + ["sliding_attention"] * behind
    full = ropes["full_attention"]
    text["rope_scaling"] = {key: full[key] for key in full if key not in ("rope_theta", "partial_rotary_factor")}
    sparse = [str(i) for i, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"]
    sizes = {"num_attention_groups": text["num_attention_groups"], "head_dim": text["head_dim"]}
    heads = {"num_attention_heads": text.pop("num_sliding_attention_heads")}
    own = ("per_layer_config", "query_pre_attn_scalar", "mtp_layer_types", "mtp_mlp_layer_types")
    return config | {
        "text_config": {key: text[key] for key in text if key not in own}
        | {
            "architectures": ["Step3p5ForCausalLM"],
            "attention_other_setting": {"attention_type": "sliding_attention", **heads, **sizes},
            "att_impl_type": "GQA",
            "layer_types": layers,
            "max_seq_len": text["max_position_embeddings"],
            "moe_every_n_layer": 1,
            "moe_layer_offset": 0,
            "moe_layers_enum": ",".join(sparse),
            "moe_router_activation": "sigmoid",
            "need_fp32_gate": True,
            "norm_expert_weight": True,
            "num_nextn_predict_layers": behind,
            "partial_rotary_factors": [ropes[kind]["partial_rotary_factor"] for kind in layers],
            "rope_theta": [ropes[kind]["rope_theta"] for kind in layers],
            "sink": False,
            "swiglu_limits": text["swiglu_limits"] + [0.0] * behind,
            "swiglu_limits_shared": text["swiglu_limits_shared"] + [0.0] * behind,
            "use_head_wise_attn_gate": True,
            "use_moe": True,
            "use_moe_router_bias": True,
            "use_rope_layers": [],
            "yarn_only_types": ["full_attention"],
            "zero_centered": True,
        }
    }


# What says a config as it was published.
PUBLISHED = {
    "apertus": _as_llama3,
    "exaone": partial(_by_keys, keys=EXAONE_KEYS),
    "hunyuan": _as_hunyuan,
    "hunyuan_moe": _as_hunyuan,
    "mimo_published": as_mimo,
    "phimoe": _as_hunyuan,
    "internlm3": partial(_by_keys, keys=INTERNLM_KEYS),
    "llama3": _as_llama3,
    "sarvam_mla": _as_sarvam,
    "sarvam_moe": partial(_by_keys, keys=SARVAM_KEYS),
    "step3p5": as_step,
}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of at most vocab_size ids, with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
