"""Shapes of models: the shipped table against published sizes, and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpspec.errors import UserError
from tpspec.topology import checkpoint
from tpspec.topology.shape import ModelShape, known_models, shape_of
from tpspec.topology.shards import split, weight_bytes

# Parameters as published on each model's page, in units of 1e9.
PUBLISHED = {
    "smollm2-135m": 0.1345,
    "meta-llama/Llama-3.3-70B-Instruct": 70.55,
    "meta-llama/Llama-3.1-8B-Instruct": 8.030,
    "meta-llama/Llama-3.2-3B-Instruct": 3.213,
    "meta-llama/Llama-3.2-1B-Instruct": 1.236,
    "Qwen/Qwen2.5-7B-Instruct": 7.616,
    "Qwen/Qwen2.5-14B-Instruct": 14.77,
    "Qwen/Qwen2.5-32B-Instruct": 32.76,
    "Qwen/Qwen2.5-72B-Instruct": 72.71,
    "Qwen/Qwen3-0.6B": 0.5960,
    "Qwen/Qwen3-8B": 8.191,
    "Qwen/Qwen3-14B": 14.77,
    "Qwen/Qwen3-32B": 32.76,
}
CONFIG: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}


@pytest.fixture(autouse=True)
def _nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSPEC_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("model", sorted(known_models()))
def test_known_shapes_weigh_what_their_publishers_say(model: str) -> None:
    """Against a typing error in the table, and a matrix that weight_bytes forgets: both are off by more than 0.1%."""
    shape = ModelShape.from_config(known_models()[model], model)
    (whole,) = split(shape, (1,))
    table = 0 if shape.tied else shape.vocab * shape.hidden  # stays in host memory, so weight_bytes leaves it out
    params = weight_bytes(shape, whole, "bfloat16") / 2 + table
    assert params / 1e9 == pytest.approx(PUBLISHED[model], rel=1e-3)


def test_a_known_shape_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a `check` that downloads 140 GB to print a table."""

    def refuse(model: str) -> Path:
        raise AssertionError(f"looked for {model}")

    monkeypatch.setattr(checkpoint, "find", refuse)
    assert shape_of("meta-llama/Llama-3.3-70B-Instruct").num_layers == 80


def test_a_folder_is_believed_before_the_table(tmp_path: Path) -> None:
    """Against a demo model that was rebuilt smaller, checked with the sizes of the one shipped."""
    folder = checkpoint.cache_root() / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert shape_of("smollm2-135m").num_layers == 2


def test_defaults_are_those_of_the_hub() -> None:
    """Against configs older than grouped queries, and qwen2, which has biases and no key that says so."""
    shape = ModelShape.from_config({**CONFIG, "head_dim": None}, "here")
    assert (shape.num_kv_heads, shape.head_dim, shape.tied, shape.qkv_bias) == (4, 16, False, False)
    assert ModelShape.from_config({**CONFIG, "model_type": "qwen2"}, "here").qkv_bias


def test_positions_are_those_of_the_config_whatever_the_rope() -> None:
    """Against multiplying them by a scaling's factor: llama3 and yarn configs give what they were made for already."""
    assert ModelShape.from_config(CONFIG, "here").max_positions is None
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = {**CONFIG, "max_position_embeddings": 128, "rope_scaling": rope}
    assert ModelShape.from_config(config, "here").max_positions == 128


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("hidden_size", None, "is missing; should be a whole number"),
        ("vocab_size", "256", "is '256'"),
        ("num_hidden_layers", True, "is True"),
        ("intermediate_size", 0, "is 0"),
        ("num_key_value_heads", 3, "a divisor of num_attention_heads"),
        ("max_position_embeddings", "8k", "is '8k'; should be a whole number"),
        ("tie_word_embeddings", 1, "should be true or false"),
        ("model_type", None, "is missing; should be a text"),
    ],
)
def test_what_a_config_lacks_is_named(key: str, value: object, why: str) -> None:
    """Against a KeyError, or a default that hides another kind of model."""
    with pytest.raises(UserError, match=f"here: {key} .*{why}"):
        ModelShape.from_config({**CONFIG, key: value}, "here")
