"""Tiny Medusa heads as people publish them, written from the documented names and shapes, and what they compute.

`Written.logits` is the published forward in float64. Must not know tpspec, which is what it is compared with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

NUM_HEADS = 3
Block = tuple[Tensor, Tensor]  # weight, bias


@dataclass(frozen=True)
class Written:
    """blocks: by head and layer. outputs: by head. ids: the target's id of each logit."""

    blocks: list[list[Block]]
    outputs: list[Tensor]
    ids: list[int]

    def logits(self, hidden: Tensor) -> Tensor:
        """[number of heads, number of ids], of one row of the target after its final norm."""
        return torch.stack([self._head(head, hidden.double()) for head in range(len(self.blocks))])

    def _head(self, head: int, x: Tensor) -> Tensor:
        for weight, bias in self.blocks[head]:
            x = x + F.silu(weight.double() @ x + bias.double())
        return self.outputs[head].double() @ x


def config_of(target: Path) -> tuple[int, int]:
    config = json.loads((target / "config.json").read_text())
    return config["hidden_size"], config["vocab_size"]


def drawn(target: Path, num_layers: int, num_ids: int | None = None, *, shared: bool = False) -> Written:
    """Random heads. shared: the layers of a head are one module, as `[ResBlock(...)] * num_layers` makes them."""
    noise = torch.Generator().manual_seed(num_layers)
    hidden, vocab = config_of(target)
    blocks = []
    for _ in range(NUM_HEADS):
        layers = [
            (torch.randn(hidden, hidden, generator=noise) / math.sqrt(hidden), torch.randn(hidden, generator=noise))
            for _ in range(num_layers)
        ]
        blocks.append([layers[0]] * num_layers if shared else layers)
    ids = torch.randperm(vocab, generator=noise)[: num_ids or vocab]
    outputs = [torch.randn(len(ids), hidden, generator=noise) for _ in range(NUM_HEADS)]
    return Written(blocks, outputs, list(range(vocab)) if num_ids is None else ids.tolist())


def original_names(heads: Written, *, once: bool = False) -> dict[str, Tensor]:
    """once: a module that stands there several times is saved once, as safetensors has it."""
    tensors = {}
    for i, (layers, output) in enumerate(zip(heads.blocks, heads.outputs, strict=True)):
        for j, (weight, bias) in enumerate(layers[:1] if once else layers):
            tensors |= {f"{i}.{j}.linear.weight": weight, f"{i}.{j}.linear.bias": bias}
        tensors[f"{i}.{len(layers)}.weight"] = output
    return tensors


def original(folder: Path, tensors: Mapping[str, Tensor], *, pickled: bool = False, **config: Any) -> None:
    """FasterDecoding's own (pickled), or as text-generation-inference has it."""
    _begin(folder, {"base_model_name_or_path": "somewhere/else"} | config)
    if pickled:
        torch.save(dict(tensors), folder / "medusa_lm_head.pt")
    else:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "medusa_lm_head.safetensors")


def in_model(target: Path, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Medusa-2: a whole model with its heads inside."""
    whole = load_file(target / "model.safetensors") | {f"medusa_head.{name}": tensors[name] for name in tensors}
    folder.mkdir(parents=True, exist_ok=True)
    for file in target.glob("*.json"):
        (folder / file.name).write_text(file.read_text())
    save_file({name: tensor.clone() for name, tensor in whole.items()}, folder / "model.safetensors")


def vllm_names(heads: Written, *, num_outputs: int = NUM_HEADS, mapped: bool = True) -> dict[str, Tensor]:
    tensors = {}
    for i, layers in enumerate(heads.blocks):
        for j, (weight, bias) in enumerate(layers):
            tensors |= {f"blocks.{i}.layers.{j}.weight": weight, f"blocks.{i}.layers.{j}.bias": bias}
    tensors |= {f"lm_heads.{i}.weight": heads.outputs[i] for i in range(num_outputs)}
    return tensors | ({"token_map": torch.tensor(heads.ids)} if mapped else {})


def vllm(target: Path, folder: Path, tensors: Mapping[str, Tensor], prefix: str = "", **config: Any) -> None:
    hidden, vocab = config_of(target)
    known = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": hidden, "vocab_size": vocab}
    _begin(folder, known | {"num_heads": NUM_HEADS, "num_hidden_layers": 1, "medusa_fc_bias": True} | config)
    save_file({prefix + name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _begin(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def fitted(target: Path, prompts: Sequence[Sequence[int]], length: int = 24) -> Written:
    """Heads that often are right about what the target says to such prompts: least squares from its hidden states.

    They know the ids that it says there, and no others.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    told = [model.generate(torch.tensor([list(prompt)]), min_new_tokens=length, max_new_tokens=length, do_sample=False,
                           pad_token_id=0) for prompt in prompts]  # fmt: skip
    rows = [model.model(text).last_hidden_state[0].double() for text in told]
    ids = sorted({token for text in told for token in text[0].tolist()}, reverse=True)
    column = {token: i for i, token in enumerate(ids)}
    outputs = []
    for ahead in range(2, 2 + NUM_HEADS):
        known = torch.cat([row[:-ahead] for row in rows])
        came = torch.tensor([column[token] for text in told for token in text[0, ahead:].tolist()])
        wanted = F.one_hot(came, len(ids)).double()
        ridge = known.T @ known + 1e-2 * torch.eye(known.shape[1]).double()
        outputs.append((10 * torch.linalg.solve(ridge, known.T @ wanted)).T.float().contiguous())
    hidden = known.shape[1]
    nothing = [(torch.zeros(hidden, hidden), torch.zeros(hidden))]
    return Written([nothing] * NUM_HEADS, outputs, ids)
