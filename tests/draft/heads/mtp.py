"""Layers for multi-token prediction inside tiny targets' checkpoints, by the documented names, and what they compute.

Must not know tpspec, which is what it is compared with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints import tiny
from tests.draft.heads.eagle import Target, Weights, Written, rms

QWEN = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
        "norm": "mtp.norm", "layers.0": "mtp.layers.0"}  # fmt: skip


def deepseek(folder: Path, seed: int = 5, *, own_tables: bool = False) -> Written:
    """DeepSeek-V3 and GLM-4.5: the layer after the last. own_tables: with copies of the tables that they share."""
    target, names = Target.read(folder), _deepseek_names(folder)
    at = names["layers.0"]
    shared = {f"{at}.embed_tokens.weight": target.embedding, f"{at}.shared_head.head.weight": target.lm_head}
    return _written(folder, target, seed, names, shared if own_tables else {}, feeds_normed=False)


def qwen(folder: Path, seed: int = 5) -> Written:
    """Qwen3-Next, of one dense layer."""
    return _written(folder, Target.read(folder), seed, QWEN, {}, feeds_normed=True)


@dataclass(frozen=True)
class Mixed(Written):
    """Its layer by transformers: of a model that has no other."""

    model: Any = None

    @torch.inference_mode()
    def _layer(self, rows: Sequence[tuple[int, Tensor]]) -> Tensor:
        entered = torch.stack([self.enter(self.embedding[token], feature)[0] for token, feature in rows])
        left: list[Tensor] = []
        hook = self.model.model.layers[0].register_forward_hook(
            lambda _, given, made: left.append(made)
        )  # glm_moe_dsa's tells what is chosen, too
        self.model(inputs_embeds=entered[None])
        hook.remove()
        (made,) = left
        return (made[0] if isinstance(made, tuple) else made)[0, -1]


def glm(folder: Path, alone: Path, kind: str = "glm4_moe", seed: int = 5) -> Written:
    """GLM-4.5 and others whose layer has experts. alone: for a model that has no other."""
    listed = kind in ("glm4_moe_lite", "glm_moe_dsa")
    tiny(kind, alone, seed=seed, num_hidden_layers=1, **{
        "mlp_layer_types" if listed else "first_k_dense_replace": ["sparse"] if listed else 0
    })  # fmt: skip
    target, names = Target.read(folder), _deepseek_names(folder)
    return _mixed(_written(folder, target, seed, names, {}, _layer_of(alone), feeds_normed=False), alone)


def hybrid(folder: Path, alone: Path, kind: str, seed: int = 5) -> Written:
    """Qwen3-Next and Qwen3.5: a layer with attention, whichever the target's are."""
    tiny(kind, alone, seed=seed, num_hidden_layers=1, layer_types=["full_attention"])
    target, layer = Target.read(folder), _layer_of(alone)
    return _mixed(_written(folder, target, seed, QWEN, {}, layer, feeds_normed=True, one_more=True), alone)


def _layer_of(alone: Path) -> dict[str, Tensor]:
    tensors = load_file(alone / "model.safetensors").items()
    return {name.removeprefix("model."): tensor for name, tensor in tensors if ".layers." in name}


def _mixed(written: Written, alone: Path) -> Mixed:
    plainly = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(alone, dtype=torch.float64, **plainly).eval()
    return Mixed(**{one.name: getattr(written, one.name) for one in fields(written)}, model=model)


def _deepseek_names(folder: Path) -> dict[str, str]:
    at = f"model.layers.{Target.read(folder).num_layers}"
    names = {part: f"{at}.{part}" for part in ("enorm", "hnorm", "eh_proj")} | {"norm": f"{at}.shared_head.norm"}
    return names | {"layers.0": at}


def _written(
    folder: Path,
    target: Target,
    seed: int,
    names: dict[str, str],
    shared: dict[str, Tensor],
    layer: dict[str, Tensor] | None = None,
    *,
    feeds_normed: bool,
    one_more: bool = False,
) -> Written:
    """one_more: norms multiply by 1 + weight."""
    config, random, hidden = json.loads((folder / "config.json").read_text()), Weights(seed), target.hidden
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    dense = random.layer(hidden, hidden, channels=config["intermediate_size"], **sizes)
    tensors = (layer or dense | {"layers.0.input_layernorm.weight": random.norm(hidden)}) | {
        "enorm.weight": random.norm(hidden),
        "hnorm.weight": random.norm(hidden),
        "eh_proj.weight": random.matrix(hidden, 2 * hidden),
        "norm.weight": random.norm(hidden),
    }
    if qk_norm := config["model_type"] == "qwen3":
        tensors |= {f"layers.0.self_attn.{part}_norm.weight": random.norm(dim) for part in "qk"}
    added = {_named(name, names): tensor for name, tensor in tensors.items()} | shared
    add(folder, {name: tensor.float() for name, tensor in added.items()})

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, tensors[f"{name}.weight"] + one_more)

    def enter(embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.cat([norm(embedding, "enorm"), norm(feature, "hnorm")]) @ tensors["eh_proj.weight"].double().T
        return h, norm(h, "layers.0.input_layernorm")

    def leave(h: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(h, "norm")
        return normed @ target.lm_head.T, normed if feeds_normed else h

    theta = config["rope_parameters"]["rope_theta"]
    ids = list(range(target.vocab))
    return Written(tensors, target.embedding, lambda tap: tap, enter, leave, ids, hidden, theta, qk_norm, **sizes)


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    """To a checkpoint that somebody may have open: a new file takes the old one's place."""
    path = folder / "model.safetensors"
    kept = {name: tensor.clone() for name, tensor in load_file(path).items()}
    whole = kept | {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path.with_suffix(".new"), {"format": "pt"})
    path.with_suffix(".new").replace(path)


def _named(name: str, names: dict[str, str]) -> str:
    stem = next(stem for stem in names if name.startswith(stem + "."))
    return names[stem] + name.removeprefix(stem)
