"""Random weights in the shape of a known model (tpspec/published/models.yaml): for what is timed, not read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SURE = 1000  # times the usual size of an embedding: the layers do not outweigh it
EXPONENT = 120  # of codes of 4 bits, which are of about 3: the usual size of a weight


def write(model: str, place: Path, *, repeats: bool, **keys: Any) -> None:
    """A random checkpoint of the shape, unless it is there: transformers' own initial weights, and random codes where
    it is stored in MXFP4. keys: of the config, in place of the shape's.

    repeats: a model that says after every token that token again, surely, so that another of the kind drafts what it
    says. No weight is nothing: products with zeros take a card less power, and less time.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.checkpoints import write_tokenizer
    from tpspec.published.shape import known_models

    if place.exists():
        return
    print(f"writing random weights of {model} ...", file=sys.stderr, flush=True)
    fields = known_models()[model] | keys
    stored = fields.pop("quantization_config", None)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        random = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if repeats:
        embedding, head = random.get_input_embeddings().weight, random.get_output_embeddings().weight
        with torch.no_grad():
            embedding *= SURE
            head.copy_(embedding)
    unfinished = place.with_name(place.name + ".unfinished")
    random.save_pretrained(unfinished)
    if stored is not None:
        _put_codes(unfinished, stored)
    write_tokenizer(unfinished, config.vocab_size)
    unfinished.rename(place)


def _put_codes(folder: Path, stored: object) -> None:
    """In place of the experts' matrices, [experts, inputs, outputs], which gpt-oss has in one tensor for a layer."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            count, num_inputs, num_outputs = tensors.pop(name).shape
            groups = (count, num_outputs, num_inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full(groups, EXPONENT, dtype=torch.uint8)
        save_file(tensors, file, metadata={"format": "pt"})


def at(model: str, folder: Path) -> Path:
    return folder / model.replace("/", "--")


def anything(model: str, folder: Path) -> Path:
    return folder / f"{at(model, folder).name}--anything"
