"""Assistants of Gemma 4 as transformers writes them, small and random."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from tests.checkpoints import randomise


def assistant(target: Path, folder: Path) -> Path:
    """For `target`, of three layers, none of which keeps anything."""
    kind = json.loads((target / "config.json").read_text())
    text = {key: kind[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window",
                                       "attention_k_eq_v", "rope_parameters", "vocab_size")}  # fmt: skip
    overrides = next(iter(kind["per_layer_config"].values()))
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    text |= {"model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
             "layer_types": layers, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
             "num_kv_shared_layers": 3, "per_layer_config": {"2": overrides}, "final_logit_softcapping": 4.0,
             "max_position_embeddings": 512}  # fmt: skip
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=kind["hidden_size"])
    model = Gemma4AssistantForCausalLM(config)
    randomise(model, torch.Generator().manual_seed(3))
    model.save_pretrained(folder)
    return folder
