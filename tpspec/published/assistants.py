"""Assistants, small models that attend to what layers of their target keep (Gemma 4): what they have to be like.

Knows keys and sizes; must not know tensors, or how one is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpspec.errors import UserError
from tpspec.published.checkpoint import read_config
from tpspec.published.global_heads import TYPES as GEMMA4
from tpspec.published.reads import Reads
from tpspec.published.shape import ModelShape

if TYPE_CHECKING:
    from pathlib import Path


def text_fields(folder: Path) -> dict[str, Any]:
    """The config of its layers: none of them keeps anything, whatever it says; and transformers caps no logits."""
    read = Reads(read_config(folder), f"{folder}/config.json")
    if not read.config.get("text_config"):
        raise read.refusal("text_config", "the config of the assistant's layers")
    return {**read.section("text_config").config, "num_kv_shared_layers": 0, "final_logit_softcapping": None}


def check_assistant(target: ModelShape, folder: Path) -> None:
    """UserError, naming the file, where it cannot attend to what layers of the target keep."""
    where = f"{folder}/config.json"
    read = Reads(read_config(folder), where)
    if target.model_type not in GEMMA4:
        raise UserError(f"{where}: an assistant of Gemma 4; should stand beside such a target, not {target.model_type}")
    if read.size("backbone_hidden_size", 1536) != target.hidden:
        raise read.refusal("backbone_hidden_size", f"the target's hidden size, {target.hidden}")
    if not 0 < target.num_windowed < target.num_layers:
        raise UserError(
            f"{where}: an assistant; should stand beside a target that has layers with a window, and without"
        )
    own = ModelShape.from_config(text_fields(folder), where)
    if own.model_type not in GEMMA4:
        raise UserError(f"{where}: text_config.model_type is {own.model_type}; should be {' or '.join(GEMMA4)}")
    if not 0 < own.num_windowed < own.num_layers:
        raise UserError(f"{where}: its layers all see alike; should be some with a window, and some without")
    for its, wanted in zip(_kept(own), _kept(target), strict=True):
        if its != wanted:
            raise UserError(
                f"{where}: layers with kv heads, numbers of each and window {its}; should be the target's {wanted}"
            )


def _kept(shape: ModelShape) -> list[tuple[int, int, int | None]]:
    """KV heads, numbers of each and window, of layers with one and without."""
    wide = shape.global_heads
    assert wide is not None, "all of Gemma 4 say what theirs are"
    return [(shape.num_kv_heads, shape.head_dim, shape.window), (wide.num_kv, wide.dim, None)]
