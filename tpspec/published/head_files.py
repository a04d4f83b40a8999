"""The files of a head: which they are, what they take, and what its layer is like. Must not open a weight."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from tpspec.errors import UserError
from tpspec.published.checkpoint import read_config, tensors
from tpspec.published.defaults import Defaults
from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.published.multimodal import STORAGE
from tpspec.published.norm_names import USUAL as USUAL_NORMS
from tpspec.published.shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

MOST_LAYERS = 4  # of a head's own
MOST_HEADS = 5  # that Medusa has
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # as config.json calls small models that are heads
# What a head's layer is where its config does not say.
LAYER: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 1}
# Of transformers' Llama; and what does not matter to what a layer keeps.
USUAL: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 1, "vocab_size": 1}
IN_MODEL = "medusa_head."  # prefix of the tensors of heads in a whole model's files
IN_VLLM = "medusa_heads."  # prefix of a head's tensors
MEDUSA = re.compile(rf"{re.escape(IN_MODEL)}|({re.escape(IN_VLLM)})?blocks\.|\d+\.\d+\.")  # tensors of its heads
OUTPUT = re.compile(r"\blm_heads?\.|^(medusa_head\.)?\d+\.\d+\.weight$")  # of EAGLE's heads and Medusa's
HEAD_FILES = ("*.safetensors", "pytorch_model*.bin", "*.pt")  # the first that finds any


def head_bytes(folder: Path, target: ModelShape, dtype: str, *, is_eagle: bool) -> int:
    """Of a head's weights where it runs: its table of embeddings stays on the host, and a head without an output of its
    own brings the target's once more, whole."""
    found, output = tensors(folder), target.vocab * target.hidden
    if is_assistant(folder):
        return DTYPE_BYTES[dtype] * sum(prod(tensor.shape) for tensor in found.values())
    if not found:
        return _pickled_bytes(folder, output, target.hidden, DTYPE_BYTES[dtype], is_eagle=is_eagle)
    own = {name: tensor for name, tensor in found.items() if name.startswith(IN_MODEL)} or found
    held = sum(prod(tensor.shape) for name, tensor in own.items() if not name.endswith("embed_tokens.weight"))
    return DTYPE_BYTES[dtype] * (held + output * (not any(map(OUTPUT.search, own))))


def _pickled_bytes(folder: Path, output: int, hidden: int, number: int, *, is_eagle: bool) -> int:
    """The same where weights are in torch's files, which nobody looks into here but for how large their parts are."""
    num_layers = read_config(folder).get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > MOST_LAYERS:  # heads inside a whole model's
        return MOST_HEADS * (output + hidden**2) * number
    parts = [size for path in head_files(folder) for size in _part_sizes(path)]
    if not is_eagle:
        return sum(parts)
    num_outputs = sum(size in (2 * output, 4 * output) for size in parts)  # or tables, which are as large
    return sum(parts) + (1 - num_outputs) * output * number


def _part_sizes(path: Path) -> list[int]:
    """What torch.save writes is an archive of the numbers of tensors."""
    try:
        with ZipFile(path) as file:
            return [part.file_size for part in file.infolist()]
    except BadZipFile:
        return [path.stat().st_size]


def is_assistant(folder: Path) -> bool:
    """Whether a head is a small model that attends to what layers of its target keep."""
    return read_config(folder).get("model_type") in ASSISTANTS


def head_files(folder: Path) -> list[Path]:
    """Those with the weights of a head; empty where there are none."""
    found = (sorted(folder.glob(pattern)) for pattern in HEAD_FILES)
    return next(filter(None, found), [])


def layer_of(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The section of a head's config that says what its one layer is like, whichever the layout. Raises UserError."""
    own = config.get("eagle_config") or {}
    if not isinstance(own, dict):
        raise UserError(f"{where}: eagle_config is {own!r}; should be a section, or left out")
    layer: dict[str, Any] = {**config, **own}
    if (kind := config.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise UserError(f"{where}: speculators_model_type {kind!r} is not supported; source eagle reads 'eagle3'")
        layer = config.get("transformer_layer_config", {})
        if not isinstance(layer, dict) or not layer:
            raise UserError(f"{where}: transformer_layer_config is missing; should be the config of the head's layer")
    elif config.get("model_type") == "eagle" and isinstance(config.get("model"), dict):
        layer = config["model"]
    num_layers = layer.get("num_hidden_layers")
    if num_layers not in (None, 1):
        is_whole = isinstance(num_layers, int) and num_layers > MOST_LAYERS
        other = "; a whole model drafts by source model" if is_whole else ""
        raise UserError(f"{where}: num_hidden_layers is {num_layers}; heads of 1 layer are supported{other}")
    return layer


def is_third(config: Mapping[str, Any], layer: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a head is EAGLE-3's, by its config, the layer's section of that, and its tensors' names; else it is that
    of EAGLE-1 or 2, which are alike."""
    if layer is config.get("model"):  # as vLLM once wanted EAGLE-1
        return False
    says_so = "draft_vocab_size" in layer or "Eagle3" in str(layer.get("architectures"))
    is_of_speculators = config.get("speculators_model_type") is not None
    return is_of_speculators or says_so or any(name.endswith("hidden_norm.weight") for name in names)


def check_eagle(folder: Path, hidden: int) -> None:
    """UserError where a head is no layer that EAGLE knows, or as wide as its target, of that hidden size, where it has
    to be; of weights in torch's files, where nobody looks, loading tells."""
    config, names = read_config(folder), tensors(folder)
    layer, own = layer_of(config, f"{folder}/config.json"), layer_shape(folder).hidden
    if names and own != hidden and not is_third(config, layer, names):
        raise other_width(folder, own, hidden)


def check_medusa(folder: Path) -> None:
    """UserError where no tensor is of Medusa's heads. As of EAGLE's, in torch's files nobody looks."""
    if (names := tensors(folder)) and not any(map(MEDUSA.match, names)):
        raise no_heads(folder)


def no_heads(folder: Path) -> UserError:
    """What there is to say where a folder holds none of Medusa's."""
    return UserError(f"{folder} holds no Medusa heads; their tensors are called 0.0.linear.weight and so on")


def other_width(folder: Path, own: int, hidden: int) -> UserError:
    """What there is to say where a head is not as wide as its target."""
    return UserError(f"{folder}: hidden_size is {own}; should be the target's {hidden}")


def layer_fields(layer: Mapping[str, Any]) -> dict[str, Any]:
    """As the config of a model of that layer."""
    said = {key: value for key, value in layer.items() if value is not None}
    if isinstance(kinds := said.get("layer_types"), list):
        said["layer_types"] = kinds[:1]  # often its target's
    return LAYER | said


def layer_shape(folder: Path) -> ModelShape:
    """Of the one layer of a head, as far as it keeps anything of a text. UserError for what is no such config."""
    where = f"{folder}/config.json"
    fields = USUAL | layer_fields(layer_of(read_config(folder), where))
    shape = ModelShape.from_config({key: fields[key] for key in fields if key not in STORAGE}, where)
    usual = shape.usual
    attends_so = (
        (usual.attention, usual.out) != (Defaults().attention, Defaults().out)
        or shape.norms.attention is None
        or usual.turns_first
        or usual.joint_norm
        or shape.parallel
        or shape.blocks
    )
    acts_so = shape.experts or shape.stateful or shape.mlp_names.bends or usual.norms_biased
    if attends_so or acts_so or shape.layer_norms != USUAL_NORMS.num:
        raise UserError(f"{where}: model_type is {shape.model_type}; heads of such layers are not supported")
    return shape


def behind_last(num_layers: int) -> tuple[str, str]:
    """With which names of tensors begin that are of a target's layer for multi-token prediction."""
    return "mtp.", f"model.layers.{num_layers}."


def no_layer(model: object, num_layers: int) -> UserError:
    """What there is to say where its files have none."""
    held = " or ".join(f"{begin}*" for begin in behind_last(num_layers))
    return UserError(f"{model} has no layer for multi-token prediction; should hold tensors {held}")


def check_layer(folder: Path, num_layers: int) -> None:
    """UserError where the model in a folder has none."""
    names = tensors(folder)
    if names and not any(name.startswith(behind_last(num_layers)) for name in names):
        raise no_layer(folder, num_layers)
