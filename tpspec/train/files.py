"""What a training run leaves: a checkpoint to go on from, the head as others load it, and the record of its making.

Must not know how a head is trained.
"""

from __future__ import annotations

import json
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from tpspec.errors import UserError
from tpspec.written import whole, write

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CHECKPOINT = "checkpoint.pt"
KEYS = {"head", "optimizer", "made_of", "step", "seconds", "history"}


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    path = folder / CHECKPOINT
    try:
        with whole(path) as part, part.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch's own, of an archive with no end, over the reason
        raise UserError(f"{path}: cannot be written: {error.__context__ or _first(error)}") from error


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, UnpicklingError) as error:
        raise UserError(
            f"{path}: not a whole checkpoint; delete it, and training begins anew ({_first(error)})"
        ) from error
    if not isinstance(state, dict) or not state.keys() >= KEYS:
        raise UserError(f"{path}: not a checkpoint of a head; delete it, and training begins anew")
    return state


def _first(error: Exception) -> str:
    """Its first line; torch says a paragraph."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def make_folder(option: str, folder: Path) -> None:
    """UserError where it is not there and cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {folder}: should be a folder, and cannot be made one: {error.strerror}") from error


def publish(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], record: dict[str, Any]) -> None:
    """model.safetensors (floats in bfloat16) and config.json as loaders expect them; training.json for people."""
    half = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    with whole(folder / "model.safetensors") as part:
        part.write_bytes(save(half, metadata={"format": "pt"}))
    write_json(folder / "config.json", config)
    write_json(folder / "training.json", record)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=1) + "\n")
