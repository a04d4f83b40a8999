"""OLMo Hybrid's checkpoints as they were published, as transformers saves them, and as it has them in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny
from tests.model.test_delta_net import IDS, loaded, logits_of
from tpspec.errors import UserError

FILE = "model.safetensors"


def written(held: dict[str, torch.Tensor], folder: Path) -> None:
    """In place of a file that may still be read."""
    save_file(held, folder / "new", {"format": "pt"})
    (folder / "new").replace(folder / FILE)


def rewritten(folder: Path, renamed: dict[str, str], sizes: list[int]) -> None:
    """Names otherwise, and the convolution's rows in tensors of so many; [] is one tensor of all."""
    held = load_file(folder / FILE)
    for layer in (0, 2):
        at = f"model.layers.{layer}.linear_attn."
        whole = torch.cat([held.pop(f"{at}{letter}_conv1d.weight") for letter in "qkv"])
        names = [f"{at}{letter}_conv1d.weight" for letter in "qkv"] if sizes else [f"{at}conv1d.weight"]
        parts = whole.split(sizes or len(whole))
        held |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    for old, new in renamed.items():
        held[new] = held.pop(old)
    written(held, folder)


@pytest.mark.parametrize(
    ("renamed", "sizes"),
    [
        ({"layers.1.feedforward_layer_norm": "layers.1.post_attention_layernorm"}, [30, 30, 84]),
        (
            {f"layers.{layer}.feedforward_layer_norm": f"layers.{layer}.post_attention_layernorm" for layer in range(3)}
            | {f"layers.{layer}.attention_layer_norm": f"layers.{layer}.input_layernorm" for layer in (0, 2)},
            [],
        ),
    ],
    ids=["published", "in memory"],
)
def test_a_checkpoint_by_other_names_is_the_same_model(
    renamed: dict[str, str], sizes: list[int], tmp_path: Path
) -> None:
    """transformers cuts the convolution into thirds when it saves, and gives the norm behind attention the name of
    another; published ones have queries, keys and values, and the usual name."""
    folder = tiny("olmo_hybrid", tmp_path)
    as_saved = logits_of(loaded(folder), IDS)
    rewritten(folder, {f"model.{old}.weight": f"model.{new}.weight" for old, new in renamed.items()}, sizes)
    assert torch.equal(logits_of(loaded(folder), IDS), as_saved)


def test_a_convolution_with_rows_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = tiny("olmo_hybrid", tmp_path)
    held = load_file(folder / FILE)
    held["model.layers.0.linear_attn.k_conv1d.weight"] = torch.zeros(50, 1, 4)
    written(held, folder)
    with pytest.raises(UserError, match=r"layers.0.linear_attn.v_conv1d have 146 rows; should have 144 together"):
        loaded(folder)
