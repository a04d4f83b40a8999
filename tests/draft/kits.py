"""What each source needs beside a tiny target: files made for it, and the keys of a topology that name them.

Every source has a kit, or the test that every source must pass does not know it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoints import tiny

Kit = Callable[[Path, Path], dict[str, Any]]  # the target's folder, an empty one -> the section `draft`


def nothing(target: Path, folder: Path) -> dict[str, Any]:
    return {}


def small_model(target: Path, folder: Path) -> dict[str, Any]:
    tiny("smollm2", folder, num_hidden_layers=1)
    shutil.copy(target / "tokenizer.json", folder)
    return {"model": str(folder)}


KITS: dict[str, Kit] = {
    "none": nothing,
    "ngram": nothing,
    "model": small_model,
}


def draft_section(name: str, target: Path, folder: Path) -> dict[str, Any]:
    """The section `draft` of a topology that drafts with source `name`. folder: where files may be made."""
    folder.mkdir(parents=True, exist_ok=True)
    return {"source": name} | KITS[name](target, folder)
