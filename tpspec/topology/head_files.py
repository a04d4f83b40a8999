"""The files of a head: which they are, and what they take. Must not open a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.topology.checkpoint import read_config

if TYPE_CHECKING:
    from pathlib import Path

MOST_LAYERS = 4  # of a head's own
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # as config.json calls small models that are heads
HEAD_FILES = ("*.safetensors", "pytorch_model*.bin", "*.pt")  # the first that finds any


def head_bytes(folder: Path) -> int:
    """Of the files of a head; heads inside a whole model's files are too few of these to count."""
    num_layers = read_config(folder).get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > MOST_LAYERS:
        return 0
    return sum(path.stat().st_size for path in head_files(folder))


def is_assistant(folder: Path) -> bool:
    """Whether a head is a small model that attends to what layers of its target keep."""
    return read_config(folder).get("model_type") in ASSISTANTS


def head_files(folder: Path) -> list[Path]:
    """Those with the weights of a head; empty where there are none."""
    found = (sorted(folder.glob(pattern)) for pattern in HEAD_FILES)
    return next(filter(None, found), [])
