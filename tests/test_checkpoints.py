"""The tiny checkpoints themselves: whole, repeatable, and sensitive to what the parity tests are meant to catch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.checkpoints import AKIN, KINDS, loaded, tiny

PROMPT = torch.randint(3, 263, (1, 64), generator=torch.Generator().manual_seed(1))


def logits(folder: Path, **config: Any) -> torch.Tensor:
    model = loaded(folder, **config)
    with torch.no_grad():
        output: torch.Tensor = model(PROMPT).logits[0]
    return output


@pytest.mark.parametrize("kind", KINDS | AKIN)
def test_every_kind_loads_whole_and_its_argmax_is_neither_constant_nor_an_echo(kind: str, tmp_path: Path) -> None:
    """In transformers. Against checkpoints on which a broken model agrees with a right one: every prompt gets the same
    answer."""
    model, report = loaded(tiny(kind, tmp_path), output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        rows = model(PROMPT).logits[0]
    picks = rows.argmax(-1)
    assert 1 < rows.std(-1).mean() < 3
    assert len(set(picks.tolist())) > 16
    assert (picks == PROMPT[0]).float().mean() < 0.25


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("cohere2_moe", {"expert_selection_fn": "softmax"}),
        ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 2}),
        ("cohere2_moe", {"rms_norm_eps": None}),
        ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}),
        ("falcon_h1", {"attention_in_multiplier": 0.3}),
        ("falcon_h1", {"key_multiplier": 0.1}),
        ("falcon_h1", {"mlp_multipliers": [1.0, 1.0]}),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 5}),
        ("falcon_h1", {"ssm_out_multiplier": 1.5}),
        ("gpt_oss", {"swiglu_limit": 100.0}),
        ("granite", {"attention_multiplier": 0.25}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite_hybrid", {"attention_multiplier": 0.25}),
        ("granite_hybrid", {"position_embedding_type": "rope"}),
        ("granite_hybrid", {"residual_multiplier": 1.0}),
        ("granite_windows", {"layer_rope_theta": [10000] * 3}),
        ("kolibri1", {"norm_topk_prob": True}),
        ("hunyuan", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("hyperclovax", {"logits_scaling": 8.0, "residual_multiplier": 1.0}),
        ("llama4", {"attention_chunk_size": 8}),
        ("llama4", {"attn_temperature_tuning": False}),
        ("llama4", {"no_rope_layers": [1, 1, 1, 1]}),
        ("llama4", {"use_qk_norm": False}),
        ("llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("ministral3", {"rope_parameters": KINDS["ministral3"]["rope_parameters"] | {"llama_4_scaling_beta": 0.0}}),
        ("mistral", {"sliding_window": None}),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
        ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("phimoe", {"router_jitter_noise": 0.01}),
        ("starcoder2", {"sliding_window": None}),
        ("smollm3", {"no_rope_layers": [1, 1, 1]}),
    ],
)
def test_ignoring_what_is_peculiar_to_a_kind_changes_its_argmax(
    kind: str, without: dict[str, Any], tmp_path: Path
) -> None:
    """Against parity tests that pass although rope scaling, the window, NoPE layers or the clamp of a gate were never
    implemented."""
    folder = tiny(kind, tmp_path)
    changed = logits(folder).argmax(-1) != logits(folder, **without).argmax(-1)
    assert changed.float().mean() > 0.1


@pytest.mark.parametrize("kind", KINDS | AKIN)
def test_no_bias_is_zero_and_no_norm_is_one(kind: str, tmp_path: Path) -> None:
    vectors = {n: w for n, w in load_file(tiny(kind, tmp_path) / "model.safetensors").items() if w.dim() == 1}
    assert all(w.std() > 0.1 for w in vectors.values() if w.numel() > 1)
    assert all(w.item() not in (0, 1) for w in vectors.values() if w.numel() == 1)
    biased = ("arcee", "cohere", "qwen2", "glm", "glm4", "glm4_moe", "gpt_oss", "internlm3", "jais2", "lfm3_plain",
              "phi", "phimoe", "seed_oss", "qwen2_moe", "solar_open", "stablelm", "starcoder2")  # fmt: skip
    assert any(n.endswith("q_proj.bias") and "vision" not in n for n in vectors) == (kind in biased)


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    whole = load_file(tiny("llama", tmp_path / "one") / "model.safetensors")
    parts = tiny("llama", tmp_path / "many", shards=3)
    where = json.loads((parts / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(where.values())) >= 3
    assert where.keys() == whole.keys()
    assert all(torch.equal(load_file(parts / file)[name], whole[name]) for name, file in where.items())


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    """Against tests that compare two runs of a checkpoint which silently differs between them."""
    first, again, other = (
        tiny("qwen2", tmp_path / str(i), seed=s) / "model.safetensors" for i, s in enumerate((0, 0, 1))
    )
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_the_tokenizer_round_trips_any_text_and_renders_a_chat(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny("llama", tmp_path))
    text = "the café 2026 \n\t☃"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 263
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_small_vocabulary_gets_no_tokenizer(tmp_path: Path) -> None:
    assert not (tiny("llama", tmp_path, vocab_size=131) / "tokenizer.json").exists()
