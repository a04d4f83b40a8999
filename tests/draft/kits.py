"""What each source needs beside a tiny target: files made for it, and the keys of a topology that name them.

Every source has a kit, or the test that every source must pass does not know it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoints import tiny
from tests.draft.heads import eagle, medusa, mtp

Kit = Callable[[Path, Path], dict[str, Any]]  # the target's folder, an empty one -> the section `draft`


def nothing(target: Path, folder: Path) -> dict[str, Any]:
    return {}


def small_model(target: Path, folder: Path) -> dict[str, Any]:
    tiny("smollm2", folder, num_hidden_layers=1)
    shutil.copy(target / "tokenizer.json", folder)
    return {"model": str(folder)}


def a_skip_file(target: Path, folder: Path) -> dict[str, Any]:
    """Of a target of two layers or more."""
    (folder / "skip.json").write_text('{"attention": [1], "mlp": [0]}')
    return {"options": {"skip": str(folder / "skip.json")}}


def eagle_head(target: Path, folder: Path) -> dict[str, Any]:
    eagle.third(eagle.Target.read(target), folder, eagle_aux_hidden_state_layer_ids=[2, 1, 0])
    return {"model": str(folder)}


def mtp_layer(target: Path, folder: Path) -> dict[str, Any]:
    mtp.deepseek(target)
    return {}


def medusa_heads(target: Path, folder: Path) -> dict[str, Any]:
    """Heads that are right about the prompts of the law test often enough for their trees to be walked."""
    heads = medusa.fitted(target, [[random.Random(length).randrange(3, 20)] * length for length in (4, 9, 18, 31)])
    medusa.vllm(target, folder, medusa.vllm_names(heads), truncated_vocab_size=len(heads.ids))
    return {"model": str(folder)}


def parallel_model(target: Path, folder: Path) -> dict[str, Any]:
    tiny("smollm2", folder, num_hidden_layers=1, pard_token=262)
    shutil.copy(target / "tokenizer.json", folder)
    return {"model": str(folder)}


KITS: dict[str, Kit] = {
    "none": nothing,
    "ngram": nothing,
    "model": small_model,
    "eagle": eagle_head,
    "mtp": mtp_layer,
    "medusa": medusa_heads,
    "layer_skip": a_skip_file,
    "early_exit": nothing,
    "pard": parallel_model,
    "lookahead": nothing,
    "suffix": nothing,
}


def draft_section(name: str, target: Path, folder: Path) -> dict[str, Any]:
    """The section `draft` of a topology that drafts with source `name`. folder: where files may be made."""
    folder.mkdir(parents=True, exist_ok=True)
    return {"source": name} | KITS[name](target, folder)
