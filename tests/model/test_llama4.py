"""Llama 4 as it was published in FP8: experts of a layer in one tensor, by FBGEMM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny
from tests.model.test_quantized import held, parts_of
from tests.model.test_stored import logits
from tpspec.comm.communicator import OneRank
from tpspec.errors import UserError
from tpspec.model.loader import Loader
from tpspec.model.weights import SINGLE
from tpspec.published.shape import ModelShape
from tpspec.topology.shards import split
from tpspec.topology.sizes import weight_bytes

MOST = 448.0  # of E4M3
DOWN = "model.layers.3.feed_forward.experts.down_proj"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """With a scale for each output of an expert, of which those of down_proj stand; and what is meant."""
    meant, coded = load_file(tiny("llama4", tmp_path / "meant") / SINGLE), {}
    for name, x_NIO in meant.items():
        if ".experts." in name:
            scales = x_NIO.abs().amax(1, keepdim=True) / MOST
            coded |= {name: (x_NIO / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales}
            meant[name] = coded[name].float() * scales
        if name.endswith(".experts.down_proj"):
            coded[f"{name}_scale"] = coded[f"{name}_scale"].transpose(1, 2).contiguous()
    quantized = tiny("llama4", tmp_path / "coded")
    save_file(meant, tmp_path / "meant" / SINGLE)
    save_file(meant | coded, quantized / SINGLE)
    plain = [name.removesuffix(".weight") for name in meant if ".experts." not in name]
    said = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": plain}
    path = quantized / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    return quantized, tmp_path / "meant"


@pytest.mark.parametrize("weights", [(1,), (3, 1, 2)], ids=str)
def test_experts_have_a_scale_for_each_output(folders: tuple[Path, Path], weights: tuple[int, ...]) -> None:
    """Stands against a slice that has its neighbour's scales, or those of inputs, and a plan of plain experts."""
    quantized, meant = folders
    assert (logits(quantized, weights) - logits(meant, (1,))).abs().max() < 1e-4
    shape = ModelShape.of(quantized)
    for shard in split(shape, weights):
        decoder = Loader.open(quantized, shard, torch.bfloat16, torch.device("cpu")).decoder(OneRank(), 8)
        assert sum(map(held, parts_of(decoder))) == weight_bytes(shape, shard, "bfloat16")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (None, "down_proj_scale_inv is missing"),
        (torch.ones(5, 95, 1), r"has shape \[5, 95, 1\]; should be \[5, 1, 96\]"),
    ],
    ids=["missing", "of another shape"],
)
def test_scales_that_are_not_those_of_outputs_are_refused(
    folders: tuple[Path, Path], wrong: torch.Tensor | None, why: str
) -> None:
    tensors = load_file(folders[0] / SINGLE)
    del tensors[f"{DOWN}_scale"]
    save_file(tensors if wrong is None else tensors | {f"{DOWN}_scale": wrong}, folders[0] / SINGLE)
    with pytest.raises(UserError, match=why):
        logits(folders[0], (1,))
