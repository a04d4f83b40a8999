"""Reads published Medusa heads: the original's files, whole models that hold heads, and vLLM's format.

How many heads there are, and how many layers each has, is what the file holds: config.json of published heads may say
otherwise. Must not know what the heads are used for.

Shapes: H heads, L layers of a head, D hidden, V draft ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.draft.head_files import HeadFiles
from tpspec.errors import UserError
from tpspec.model.head import head_numbers
from tpspec.published.checkpoint import read_config
from tpspec.published.head_files import IN_MODEL, IN_VLLM, no_heads
from tpspec.published.shape import ModelShape

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """weights_LHDD, biases_LHD: of the residual blocks, as nn.Linear has them.

    outputs_VD: one for each head, or one that all share; bias_V: of that one, where it is the target's own and has one.
    ids_V: the target's id of each row of those; None where they are 0, 1, 2 and so on.
    """

    weights_LHDD: Tensor
    biases_LHD: Tensor
    outputs_VD: tuple[Tensor, ...]
    ids_V: Tensor | None = None
    bias_V: Tensor | None = None


def read_heads(folder: Path, target: Path) -> MedusaWeights:
    """The heads in `folder`, made for the model in `target`. Refuses by name what is missing, misshapen or unknown."""
    # In a whole model the names of the heads have a prefix, and all others are no matter of ours.
    in_model = HeadFiles(folder, lambda name: name.removeprefix(IN_MODEL) if name.startswith(IN_MODEL) else None)
    files, shape = in_model or HeadFiles(folder, lambda name: name.removeprefix(IN_VLLM)), ModelShape.of(target)
    if any(name.startswith("blocks.") for name in files.names):
        weights = _vllm(files, read_config(folder), shape, target)
    else:
        weights = _original(files, shape)
    files.check_all_taken(())
    return weights


def _original(files: HeadFiles, shape: ModelShape) -> MedusaWeights:
    """FasterDecoding's: of head i block j is `i.j.linear`, and behind the last block stands the output."""
    num_heads = 1 + _highest(files, r"(\d+)\..*")
    if num_heads == 0:
        raise no_heads(files.folder)
    num_layers = max(_highest(files, r"\d+\.(\d+)\.weight"), 1 + _highest(files, r"\d+\.(\d+)\.linear\.\w+"))
    names = [_block_names(files, head, num_layers) for head in range(num_heads)]
    weights, biases = _blocks(files, names, shape.hidden, biased=True)
    outputs = [files.take(f"{head}.{num_layers}.weight", shape.vocab, shape.hidden) for head in range(num_heads)]
    return MedusaWeights(weights, biases, tuple(outputs))


def _block_names(files: HeadFiles, head: int, num_layers: int) -> list[str]:
    """All blocks of a head are one module that stands there several times, and may be saved only once."""
    names = [f"{head}.{layer}.linear" for layer in range(num_layers)]
    there = [name for name in names if f"{name}.weight" in files]
    return there * num_layers if len(there) == 1 else names


def _vllm(files: HeadFiles, config: dict[str, object], shape: ModelShape, target: Path) -> MedusaWeights:
    num_heads = 1 + _highest(files, r"blocks\.(\d+)\..*")
    num_layers = 1 + _highest(files, r"blocks\.\d+\.layers\.(\d+)\..*")
    names = [[f"blocks.{head}.layers.{layer}" for layer in range(num_layers)] for head in range(num_heads)]
    biased = bool(config.get("medusa_fc_bias")) or any(name.endswith(".bias") for name in files.names)
    weights, biases = _blocks(files, names, shape.hidden, biased=biased)
    ids = _token_map(files, config, shape.vocab)
    outputs, bias = _outputs(files, config, shape, target, num_heads, shape.vocab if ids is None else len(ids))
    if ids is not None:
        outputs = [output if len(output) == len(ids) else output[ids] for output in outputs]
        bias = None if bias is None else bias[ids]
    return MedusaWeights(weights, biases, tuple(outputs), ids, bias)


def _blocks(files: HeadFiles, names: list[list[str]], hidden: int, *, biased: bool) -> tuple[Tensor, Tensor]:
    """names: by head, of its layers, of which several may be the same."""
    weights = {name: files.take(f"{name}.weight", hidden, hidden) for head in names for name in dict.fromkeys(head)}
    biases = {name: files.take(f"{name}.bias", hidden) if biased else torch.zeros(hidden) for name in weights}
    if not weights:
        return torch.empty(0, len(names), hidden, hidden), torch.empty(0, len(names), hidden)
    by_layer = list(zip(*names, strict=True))
    return (
        torch.stack([torch.stack([weights[name] for name in layer]) for layer in by_layer]),
        torch.stack([torch.stack([biases[name] for name in layer]) for layer in by_layer]),
    )


def _token_map(files: HeadFiles, config: dict[str, object], vocab: int) -> Tensor | None:
    size = config.get("truncated_vocab_size")
    size = size if isinstance(size, int) else vocab
    if size == vocab and "token_map" not in files:
        return None
    ids = files.take("token_map", size).long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) < len(ids):
        raise UserError(f"{files.folder}: token_map should hold distinct ids from 0 to {vocab - 1}, of the target")
    return ids


def _outputs(
    files: HeadFiles, config: dict[str, object], shape: ModelShape, target: Path, num_heads: int, num_ids: int
) -> tuple[list[Tensor], Tensor | None]:
    """With `original_lm_head` all heads share one: the file's, or where it has none the target's own, and its bias."""
    names = [f"lm_heads.{head}.weight" for head in range(num_heads)]
    if config.get("original_lm_head"):
        names = [name for name in (names[0], "lm_head.weight") if name in files][:1]
    if not names:
        output, bias = head_numbers(target, shape)
        return [output], bias
    # Rows that no id leads to may have been left where they were.
    sizes = [shape.vocab if name in files and files.shape(name)[0] == shape.vocab else num_ids for name in names]
    return [files.take(name, size, shape.hidden) for name, size in zip(names, sizes, strict=True)], None


def _highest(files: HeadFiles, pattern: str) -> int:
    """The highest number where `pattern` has its group, over all names; -1 where it matches none."""
    found = (re.fullmatch(pattern, name) for name in files.names)
    return max((int(match[1]) for match in found if match), default=-1)
