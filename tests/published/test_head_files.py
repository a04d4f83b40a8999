"""What a head's files say it takes, before any weight is read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from tpspec.published.head_files import ASSISTANTS, head_bytes
from tpspec.published.shape import ModelShape

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}


def test_an_assistant_takes_what_its_numbers_do_in_the_dtype_it_runs_in(tmp_path: Path) -> None:
    """Against half of it being counted where files in bfloat16, as these are published, run in float32."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": ASSISTANTS[0]}))
    save_file({"model.norm.weight": torch.zeros(100, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    target = ModelShape.from_config({"model_type": "llama", **SIZES}, "config.json")
    taken = [head_bytes(tmp_path, target, dtype, is_eagle=True) for dtype in ("float32", "bfloat16")]
    assert taken == [400, 200]
