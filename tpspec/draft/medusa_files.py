"""Reads published Medusa heads: the original's files, whole models that hold heads, and vLLM's format.

How many heads there are, and how many layers each has, is what the file holds: config.json of published heads may say
otherwise. Must not know what the heads are used for.

Shapes: H heads, L layers of a head, D hidden, V draft ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.model.architectures import read_spec
from tpspec.model.weights import INDEX, SINGLE, Checkpoint
from tpspec.topology.checkpoint import read_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import Tensor

    from tpspec.model.architectures import ModelSpec

TENSORS, PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
IN_MODEL, IN_VLLM = "medusa_head.", "medusa_heads."  # prefixes of a head's tensors


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """weights_LHDD, biases_LHD: of the residual blocks, as nn.Linear has them.

    outputs_VD: one for each head, or one that all share. ids_V: the target's id of each row of those; None where they
    are 0, 1, 2 and so on.
    """

    weights_LHDD: Tensor
    biases_LHD: Tensor
    outputs_VD: tuple[Tensor, ...]
    ids_V: Tensor | None = None


def read_heads(folder: Path, target: Path) -> MedusaWeights:
    """The heads in `folder`, made for the model in `target`. Refuses by name what is missing, misshapen or unknown."""
    tensors, spec = _open(folder), read_spec(target)
    if any(name.startswith("blocks.") for name in tensors.unread):
        weights = _vllm(tensors, read_config(folder), spec, target)
    else:
        weights = _original(tensors, spec)
    tensors.check_all_read()
    return weights


class _Tensors:
    """Tensors by name, each of which must be asked for. where: for messages. names: of all that are there.

    In a whole model the heads' names have a prefix, and the others are no matter of ours; vLLM's may have another.
    """

    def __init__(self, where: Path, names: Iterable[str], load: Callable[[str], Tensor]) -> None:
        names = list(names)
        in_model = any(name.startswith(IN_MODEL) for name in names)
        self.where, self._load, self._prefix = where, load, IN_MODEL if in_model else ""
        self.unread = {
            name.removeprefix(IN_MODEL).removeprefix(IN_VLLM): name for name in names if name.startswith(self._prefix)
        }

    def read(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """shapes: one of these it must have."""
        if name not in self.unread:
            raise UserError(f"{self.where}: tensor {self._prefix}{name} is missing; the checkpoint is incomplete")
        tensor = self._load(self.unread[name])
        if tuple(tensor.shape) not in shapes:
            right = " or ".join(str(list(shape)) for shape in shapes)
            found = f"{self.where}: tensor {self.unread[name]} has shape {list(tensor.shape)}"
            raise UserError(f"{found}; heads for this target have {right}")
        del self.unread[name]
        return tensor

    def highest(self, pattern: str) -> int:
        """The highest number where `pattern` has its group, over all names; -1 where it matches none."""
        found = (re.fullmatch(pattern, name) for name in self.unread)
        return max((int(match[1]) for match in found if match), default=-1)

    def check_all_read(self) -> None:
        if self.unread:
            names = ", ".join(sorted(self.unread.values())[:3])
            raise UserError(f"{self.where}: no tensor of Medusa heads is called {names}; should hold no others")


def _open(folder: Path) -> _Tensors:
    if (folder / TENSORS).exists():
        checkpoint = Checkpoint(folder, TENSORS)
        return _Tensors(folder / TENSORS, checkpoint.names, checkpoint.whole)
    if (folder / PICKLE).exists():
        tensors = _unpickled(folder / PICKLE)
        return _Tensors(folder / PICKLE, tensors, tensors.__getitem__)
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        raise UserError(f"{folder} holds no Medusa heads; should hold {TENSORS}, {PICKLE} or {SINGLE}")
    checkpoint = Checkpoint(folder)
    return _Tensors(folder, checkpoint.names, checkpoint.whole)


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}; should hold named tensors and nothing else") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise UserError(f"{path}: should hold named tensors and nothing else")
    return tensors


def _original(tensors: _Tensors, spec: ModelSpec) -> MedusaWeights:
    """FasterDecoding's: of head i block j is `i.j.linear`, and behind the last block stands the output."""
    num_heads = 1 + tensors.highest(r"(\d+)\..*")
    if num_heads == 0:
        raise UserError(f"{tensors.where} holds no Medusa heads; their tensors are called 0.0.linear.weight and so on")
    num_layers = max(tensors.highest(r"\d+\.(\d+)\.weight"), 1 + tensors.highest(r"\d+\.(\d+)\.linear\.\w+"))
    names = [_block_names(tensors, head, num_layers) for head in range(num_heads)]
    weights, biases = _blocks(tensors, names, spec.hidden, biased=True)
    shape = (spec.vocab, spec.hidden)
    outputs = [tensors.read(f"{head}.{num_layers}.weight", shape) for head in range(num_heads)]
    return MedusaWeights(weights, biases, tuple(outputs))


def _block_names(tensors: _Tensors, head: int, num_layers: int) -> list[str]:
    """All blocks of a head are one module that stands there several times, and may be saved only once."""
    names = [f"{head}.{layer}.linear" for layer in range(num_layers)]
    there = [name for name in names if f"{name}.weight" in tensors.unread]
    return there * num_layers if len(there) == 1 else names


def _vllm(tensors: _Tensors, config: dict[str, object], spec: ModelSpec, target: Path) -> MedusaWeights:
    num_heads = 1 + tensors.highest(r"blocks\.(\d+)\..*")
    num_layers = 1 + tensors.highest(r"blocks\.\d+\.layers\.(\d+)\..*")
    names = [[f"blocks.{head}.layers.{layer}" for layer in range(num_layers)] for head in range(num_heads)]
    biased = bool(config.get("medusa_fc_bias")) or any(name.endswith(".bias") for name in tensors.unread)
    weights, biases = _blocks(tensors, names, spec.hidden, biased=biased)
    ids = _token_map(tensors, config, spec.vocab)
    outputs = _outputs(tensors, config, spec, target, num_heads, spec.vocab if ids is None else len(ids))
    if ids is not None:
        outputs = [output if len(output) == len(ids) else output[ids] for output in outputs]
    return MedusaWeights(weights, biases, tuple(outputs), ids)


def _blocks(tensors: _Tensors, names: list[list[str]], hidden: int, *, biased: bool) -> tuple[Tensor, Tensor]:
    """names: by head, of its layers, of which several may be the same."""
    weights = {name: tensors.read(f"{name}.weight", (hidden, hidden)) for head in names for name in dict.fromkeys(head)}
    biases = {name: tensors.read(f"{name}.bias", (hidden,)) if biased else torch.zeros(hidden) for name in weights}
    if not weights:
        return torch.empty(0, len(names), hidden, hidden), torch.empty(0, len(names), hidden)
    by_layer = list(zip(*names, strict=True))
    return (
        torch.stack([torch.stack([weights[name] for name in layer]) for layer in by_layer]),
        torch.stack([torch.stack([biases[name] for name in layer]) for layer in by_layer]),
    )


def _token_map(tensors: _Tensors, config: dict[str, object], vocab: int) -> Tensor | None:
    size = config.get("truncated_vocab_size")
    size = size if isinstance(size, int) else vocab
    if size == vocab and "token_map" not in tensors.unread:
        return None
    ids = tensors.read("token_map", (size,)).long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) < len(ids):
        raise UserError(f"{tensors.where}: token_map should hold distinct ids from 0 to {vocab - 1}, of the target")
    return ids


def _outputs(
    tensors: _Tensors, config: dict[str, object], spec: ModelSpec, target: Path, num_heads: int, num_ids: int
) -> list[Tensor]:
    """With `original_lm_head` all heads share one: the file's, or where it has none the target's own."""
    shapes = (num_ids, spec.hidden), (spec.vocab, spec.hidden)
    if not config.get("original_lm_head"):
        return [tensors.read(f"lm_heads.{head}.weight", *dict.fromkeys(shapes)) for head in range(num_heads)]
    for name in ("lm_heads.0.weight", "lm_head.weight"):
        if name in tensors.unread:
            return [tensors.read(name, *dict.fromkeys(shapes))]
    name = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    return [Checkpoint(target).read(name, shapes[1])]
