"""Tiny EAGLE heads as people publish them, written from the documented names and shapes, and what they compute.

`Written.logits` is the published forward in float64, one row after another, without a cache. Must not know tpspec,
which is what it is compared with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, CHANNELS, DRAFT_VOCAB = 4, 2, 16, 40, 101
EPS = 1e-5


@dataclass(frozen=True)
class Target:
    """What a head must know of the model it drafts for."""

    num_layers: int
    hidden: int
    vocab: int
    embedding: Tensor
    lm_head: Tensor

    @classmethod
    def read(cls, folder: Path) -> Target:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        embedding = tensors["model.embed_tokens.weight"].double()
        lm_head = tensors.get("lm_head.weight", embedding).double()
        return cls(config["num_hidden_layers"], config["hidden_size"], config["vocab_size"], embedding, lm_head)


@dataclass(frozen=True)
class Written:
    """A head in a folder. enter: (embedding, feature) -> (residual, what attention reads), `leave`: (logits, fed back).

    feature: of the taps of one token, side by side. ids: the target's id of each logit.
    """

    tensors: dict[str, Tensor]
    embedding: Tensor
    feature: Callable[[Tensor], Tensor]
    enter: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    leave: Callable[[Tensor], tuple[Tensor, Tensor]]
    ids: list[int]
    width: int
    rope_theta: float = 10000.0
    qk_norm: bool = False
    num_heads: int = HEADS
    num_kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM

    def logits(self, text: Sequence[int], taps: Tensor, path: Sequence[int]) -> Tensor:
        """After `text` and then the drafts of `path`; taps: of all tokens of the text but the last, [n - 1, W]."""
        rows = [(token, self.feature(tap)) for token, tap in zip(text[1:], taps.double(), strict=True)]
        for token in path:
            _, fed = self.leave(self._layer(rows))
            rows.append((token, fed))
        logits, _ = self.leave(self._layer(rows))
        return logits

    def _layer(self, rows: Sequence[tuple[int, Tensor]]) -> Tensor:
        """What leaves the layer in the last row."""
        entered = [self.enter(self.embedding[token], feature) for token, feature in rows]
        residual = entered[-1][0]
        residual = residual + self._attention(torch.stack([read for _, read in entered]))
        normed = rms(residual, self._tensor("post_attention_layernorm.weight"))
        gate, up = (self._linear(f"mlp.{part}_proj", normed) for part in ("gate", "up"))
        return residual + self._linear("mlp.down_proj", F.silu(gate) * up)

    def _attention(self, read: Tensor) -> Tensor:
        """Of the last row over all."""
        q, k, v = (self._linear(f"self_attn.{part}_proj", read).unflatten(1, (-1, self.head_dim)) for part in "qkv")
        if self.qk_norm:
            q, k = rms(q, self._tensor("self_attn.q_norm.weight")), rms(k, self._tensor("self_attn.k_norm.weight"))
        q, k = (turned(x, self.rope_theta) for x in (q, k))
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
        weights = torch.einsum("he,she->hs", q[-1], k).div(math.sqrt(self.head_dim)).softmax(1)
        return self._linear("self_attn.o_proj", torch.einsum("hs,she->he", weights, v).flatten())

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[f"layers.0.{name}"].double()

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self._tensor(name + ".weight").T
        bias = f"{name}.bias"
        return y + self._tensor(bias) if f"layers.0.{bias}" in self.tensors else y


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def turned(x: Tensor, theta: float) -> Tensor:
    """Llama's rotation of [S, heads, E], row i by position i."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).double()[:, None, None] * theta ** (-torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Weights:
    """Random ones, of a scale at which everything matters."""

    def __init__(self, seed: int) -> None:
        self._noise = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=self._noise) * gain / math.sqrt(columns)

    def norm(self, size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self._noise)

    def bias(self, size: int) -> Tensor:
        return 0.3 * torch.randn(size, generator=self._noise)

    def ids(self, count: int, vocab: int) -> Tensor:
        return torch.randperm(vocab, generator=self._noise)[:count].sort().values

    def layer(
        self, hidden: int, width: int, *, biased: bool = False, num_heads: int = HEADS, num_kv_heads: int = KV_HEADS,
        head_dim: int = HEAD_DIM, channels: int = CHANNELS,
    ) -> dict[str, Tensor]:  # fmt: skip
        at, tensors = "layers.0.", {}
        for part, num in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            tensors[f"{at}self_attn.{part}_proj.weight"] = self.matrix(num * head_dim, width, 1.5)
            if biased:
                tensors[f"{at}self_attn.{part}_proj.bias"] = self.bias(num * head_dim)
        return tensors | {
            at + "self_attn.o_proj.weight": self.matrix(hidden, num_heads * head_dim),
            at + "mlp.gate_proj.weight": self.matrix(channels, hidden),
            at + "mlp.up_proj.weight": self.matrix(channels, hidden),
            at + "mlp.down_proj.weight": self.matrix(hidden, channels),
            at + "post_attention_layernorm.weight": self.norm(hidden),
        }


def layer_config(target: Target, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": target.hidden,
        "intermediate_size": CHANNELS,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "vocab_size": target.vocab,
        "tie_word_embeddings": False,
    } | more


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, pickled: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new, 1) if name.startswith(old) else name: tensor for name, tensor in tensors.items()}


def third(
    target: Target, folder: Path, *, seed: int = 3, layout: str = "safeailab", num_taps: int = 3,
    draft_vocab: int = DRAFT_VOCAB, own_embedding: bool = False, layer: dict[str, Any] | None = None, **said: Any,
) -> Written:  # fmt: skip
    """EAGLE-3. layout: "safeailab" (SpecForge and AngelSlim have the same) or "speculators". said: in the config."""
    random, hidden = Weights(seed), target.hidden
    ids = random.ids(draft_vocab, target.vocab)
    config = layer_config(target, **(layer or {}))
    tensors = random.layer(hidden, 2 * hidden, biased=bool(config.get("attention_bias"))) | {
        "fc.weight": random.matrix(hidden, num_taps * hidden),
        "layers.0.hidden_norm.weight": random.norm(hidden),
        "layers.0.input_layernorm.weight": random.norm(hidden),
        "norm.weight": random.norm(hidden),
        "lm_head.weight": random.matrix(draft_vocab, hidden, 2.0),
    }
    if config.get("attention_bias"):
        tensors["layers.0.self_attn.o_proj.bias"] = random.bias(hidden)
    if qk_norm := config["model_type"] == "qwen3":
        tensors |= {f"layers.0.self_attn.{part}_norm.weight": random.norm(HEAD_DIM) for part in "qk"}
    if draft_vocab < target.vocab:
        known = torch.zeros(target.vocab, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(draft_vocab), "t2d": known}
    if own_embedding:
        tensors["embed_tokens.weight"] = random.matrix(target.vocab, hidden, 2.0)
    if said.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.norm(num_taps * hidden)
    if said.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": random.norm(hidden) for i in range(num_taps)}
    if layout == "safeailab":
        inv_freq = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(HEAD_DIM // 2)}
        write(
            folder,
            config | {"draft_vocab_size": draft_vocab} | said,
            renamed(tensors, "layers.0.", "midlayer.") | inv_freq,
        )
    else:
        about = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": draft_vocab,
        }
        write(folder, about | {"transformer_layer_config": config} | said, tensors)
    feeds_normed = bool(said.get("norm_output")) and (layout == "speculators" or bool(said.get("fc_norm")))

    def feature(taps: Tensor) -> Tensor:
        if said.get("norm_before_fc"):
            taps = rms(taps, tensors["input_norm.weight"])
        if said.get("fc_norm"):
            parts = taps.split(hidden)
            taps = torch.cat([rms(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
        return taps @ tensors["fc.weight"].double().T

    def enter(embedding: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms(h, tensors["layers.0.hidden_norm.weight"])
        read = torch.cat([rms(embedding, tensors["layers.0.input_layernorm.weight"]), normed])
        return normed if said.get("norm_before_residual") else h, read

    def leave(h: Tensor) -> tuple[Tensor, Tensor]:
        plain = layout == "safeailab" and said.get("norm_output") is False
        normed = h if plain else rms(h, tensors["norm.weight"])
        return normed @ tensors["lm_head.weight"].double().T, normed if feeds_normed else h

    embedding = tensors["embed_tokens.weight"].double() if own_embedding else target.embedding
    theta = config.get("rope_theta", 10000.0)
    return Written(tensors, embedding, feature, enter, leave, ids.tolist(), num_taps * hidden, theta, qk_norm)


def first(
    target: Target, folder: Path, *, seed: int = 1, wrapped: bool = False, pickled: bool = False,
    qwen2: bool = False, **said: Any,
) -> Written:  # fmt: skip
    """EAGLE-1 and 2. wrapped: in the config that vLLM once wanted. A bias of fc unless `said` says there is none."""
    random, hidden = Weights(seed), target.hidden
    config = layer_config(target, **({"model_type": "qwen2"} if qwen2 else {}))
    tensors = random.layer(hidden, hidden, biased=qwen2) | {
        "embed_tokens.weight": random.matrix(target.vocab, hidden, 2.0),
        "fc.weight": random.matrix(hidden, 2 * hidden),
    }
    biased = bool(said.get("eagle_fc_bias", False) if wrapped else said.get("bias", True))
    if biased:
        tensors["fc.bias"] = random.bias(hidden)
    if wrapped:
        given = renamed(
            renamed(tensors, "layers.0.", "model.model.layers.0."), "embed_tokens.", "model.model.embed_tokens."
        )
        given["model.model.layers.0.input_layernorm.weight"] = random.norm(hidden)
        write(folder, {"model_type": "eagle", "model": config} | said, given, pickled=pickled)
    else:
        write(folder, config | said, tensors, pickled=pickled)

    def enter(embedding: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.cat([embedding, f]) @ tensors["fc.weight"].double().T
        h = h + tensors["fc.bias"].double() if biased else h
        return h, h

    def leave(h: Tensor) -> tuple[Tensor, Tensor]:
        return h @ target.lm_head.T, h

    embedding = tensors["embed_tokens.weight"].double()
    return Written(tensors, embedding, lambda f: f, enter, leave, list(range(target.vocab)), hidden)
