"""Random weights in the shape of a known model (tpspec/topology/models.yaml): for what is timed, not read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

SURE = 1000  # times the usual size of an embedding: the layers do not outweigh it


def write(model: str, place: Path, *, repeats: bool, **keys: Any) -> None:
    """A random checkpoint of the shape, unless it is there: transformers' own initial weights. keys: of the config, in
    place of the shape's.

    repeats: a model that says after every token that token again, surely, so that another of the kind drafts what it
    says. No weight is nothing: products with zeros take a card less power, and less time.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.checkpoints import write_tokenizer
    from tpspec.topology.shape import known_models

    if place.exists():
        return
    print(f"writing random weights of {model} ...", file=sys.stderr, flush=True)
    fields = known_models()[model] | keys
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
    write_tokenizer(unfinished, config.vocab_size)
    unfinished.rename(place)


def at(model: str, folder: Path) -> Path:
    return folder / model.replace("/", "--")


def anything(model: str, folder: Path) -> Path:
    return folder / f"{at(model, folder).name}--anything"
