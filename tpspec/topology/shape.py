"""The sizes of a model, without its weights: from a config.json, or from the table of well-known models shipped here.

Knows numbers. Which layers an architecture has is `model/`'s matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import yaml

from tpspec.errors import UserError
from tpspec.topology import checkpoint
from tpspec.topology.experts import Experts, MlpNames, experts_of, mlp_names
from tpspec.topology.formats import Stored, stored_as
from tpspec.topology.reads import Reads

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a type of model means by a key that its config.json leaves out, as transformers does; None: see from_config.

    biased: queries, keys and values always have biases, whatever the config says. normed: queries and keys have norms.
    intermediate: the key for an MLP's, or an expert's, channels, and how many there are without it.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    biased: bool = False
    normed: bool = False
    intermediate: tuple[str, int | None] = ("intermediate_size", None)


# The types that model/architectures.py declares.
MODEL_TYPES = {
    "llama": Defaults(),
    "mistral": Defaults(num_kv_heads=8),
    "mixtral": Defaults(num_kv_heads=8),
    "qwen2": Defaults(num_kv_heads=32, biased=True),
    "qwen3": Defaults(num_kv_heads=32, head_dim=128, normed=True),
    "qwen3_moe": Defaults(num_kv_heads=4, normed=True, intermediate=("moe_intermediate_size", 768)),
    "smollm3": Defaults(num_kv_heads=4, tied=True),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """num_heads query heads share num_kv_heads KV heads evenly. vocab: rows of the head and of the embedding table.

    tied: the head is the embedding table. qk_norm: a norm of head_dim on queries and on keys in every layer.
    intermediate: channels of an MLP, or of each expert where a layer has a mixture in its place.
    max_positions: the longest text it was made for, however its rope is scaled; None where the config does not say.
    stored: how a published quantized checkpoint holds its matrices; None where they are plain.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    model_type: str
    qk_norm: bool = False
    max_positions: int | None = None
    stored: Stored | None = None
    experts: Experts | None = None

    @classmethod
    def from_config(cls, config: dict[str, object], where: str) -> ModelShape:
        """From the keys of a Hugging Face config; UserError names `where` and the key that is missing or wrong.

        By default each query head has a KV head of its own, and all together are as wide as the hidden state.
        """
        read = Reads(config, where)
        model_type = read.text("model_type")  # first, for the configs of others have other keys
        if model_type not in MODEL_TYPES:
            known = ", ".join(sorted(MODEL_TYPES))
            raise UserError(f"{where}: architecture {model_type!r} is not supported; supported are {known}")
        usual, hidden, heads = MODEL_TYPES[model_type], read.size("hidden_size"), read.size("num_attention_heads")
        return cls(
            num_layers=read.size("num_hidden_layers"),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=read.divisor("num_key_value_heads", heads, usual.num_kv_heads),
            head_dim=read.size("head_dim", usual.head_dim or hidden // heads),
            intermediate=read.size(*usual.intermediate),
            vocab=read.size("vocab_size"),
            tied=read.flag("tie_word_embeddings", usual.tied),
            qkv_bias=read.flag("attention_bias", usual.biased) or usual.biased,
            model_type=model_type,
            qk_norm=usual.normed,
            max_positions=read.size_if_given("max_position_embeddings"),
            stored=stored_as(config, where),
            experts=experts_of(read, model_type),
        )

    @classmethod
    def of(cls, folder: Path) -> ModelShape:
        """Of the model in a folder."""
        return cls.from_config(checkpoint.read_config(folder), str(folder))

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def mlp_names(self) -> MlpNames:
        return mlp_names(self.model_type)


def shape_of(model: str) -> ModelShape:
    """The shape of a model in a topology; touches the network only when the model is neither here nor well known."""
    folder = checkpoint.local(model)
    if folder is None and model in known_models():
        return ModelShape.from_config(known_models()[model], f"tpspec/topology/models.yaml: {model}")
    folder = folder or checkpoint.find(model)
    return ModelShape.from_config(checkpoint.read_config(folder), str(folder / "config.json"))


@cache
def known_models() -> dict[str, dict[str, object]]:
    """Config keys of well-known models, by name."""
    text = files("tpspec.topology").joinpath("models.yaml").read_text(encoding="utf-8")
    models: dict[str, dict[str, object]] = yaml.safe_load(text)
    return models
