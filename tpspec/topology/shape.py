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

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelShape:
    """num_heads query heads share num_kv_heads KV heads evenly. vocab: rows of the head and of the embedding table.

    tied: the head is the embedding table. qk_norm: a norm of head_dim on queries and on keys in every layer.
    max_positions: the longest text it was made for, however its rope is scaled; None where the config does not say.
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

    @classmethod
    def from_config(cls, config: dict[str, object], where: str) -> ModelShape:
        """From the keys of a Hugging Face config; UserError names `where` and the key that is missing or wrong."""
        read = _Reads(config, where)
        hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
        model_type = read.text("model_type")
        return cls(
            num_layers=read.size("num_hidden_layers"),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=read.divisor("num_key_value_heads", of=heads),
            head_dim=read.size("head_dim", hidden // heads),
            intermediate=read.size("intermediate_size"),
            vocab=read.size("vocab_size"),
            tied=read.flag("tie_word_embeddings", False),
            # Qwen2 always has these biases and no key that says so; its successor dropped them for norms.
            qkv_bias=read.flag("attention_bias", model_type == "qwen2"),
            model_type=model_type,
            qk_norm=model_type == "qwen3",
            max_positions=read.size_if_given("max_position_embeddings"),
        )

    @classmethod
    def of(cls, folder: Path) -> ModelShape:
        """Of the model in a folder."""
        return cls.from_config(checkpoint.read_config(folder), str(folder))

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class _Reads:
    """Typed reads that refuse what is missing or odd by name. A null counts as missing, as in the hub's own files."""

    config: dict[str, object]
    where: str

    def size(self, key: str, default: int | None = None) -> int:
        value = default if self.config.get(key) is None else self.config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._refusal(key, "a whole number above 0")
        return value

    def size_if_given(self, key: str) -> int | None:
        return None if self.config.get(key) is None else self.size(key)

    def divisor(self, key: str, of: int) -> int:
        value = self.size(key, of)
        if of % value:
            raise self._refusal(key, f"a divisor of num_attention_heads ({of})")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = default if self.config.get(key) is None else self.config[key]
        if not isinstance(value, bool):
            raise self._refusal(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self.config.get(key)
        if not isinstance(value, str):
            raise self._refusal(key, "a text")
        return value

    def _refusal(self, key: str, right: str) -> UserError:
        value = self.config.get(key)
        what = "is missing" if value is None else f"is {value!r}"
        return UserError(f"{self.where}: {key} {what}; should be {right}")


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
