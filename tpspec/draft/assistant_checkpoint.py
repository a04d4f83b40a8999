"""Assistants as Google publishes them, read beside their target: which layers of it they attend to, and how.

Must not know how an assistant is run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tpspec.draft.assistant import Assistant
from tpspec.errors import UserError
from tpspec.model.decoder import FINAL
from tpspec.model.loader import Loader
from tpspec.model.matrices import Matrices
from tpspec.model.spec import resolved
from tpspec.model.stored import whole_place
from tpspec.model.weights import Checkpoint
from tpspec.topology.checkpoint import read_config
from tpspec.topology.global_heads import TYPES as GEMMA4
from tpspec.topology.reads import Reads
from tpspec.topology.shape import ModelShape
from tpspec.topology.shards import split

if TYPE_CHECKING:
    from tpspec.draft.protocol import Given
    from tpspec.model.spec import LayerSpec, ModelSpec

ENTER, LEAVE = "pre_projection", "post_projection"


def load_assistant(given: Given) -> Assistant:
    """The one in `given.folder`. Raises UserError, naming the file and what would be right."""
    assert given.folder is not None, "the rules of a topology ask for it"
    where = f"{given.folder}/config.json"
    (whole,) = split(ModelShape.of(given.target), (1.0,))
    target = Loader.open(given.target, whole, given.dtype, given.device, given.quantize)
    read = Reads(read_config(given.folder), where)
    if read.size("backbone_hidden_size", 1536) != target.spec.hidden:
        raise read.refusal("backbone_hidden_size", f"the target's hidden size, {target.spec.hidden}")
    shape, spec = _of_text(read.section("text_config"), where)
    kept = _kept_by(target.spec, where)
    layers = tuple(replace(layer, kept_by=_at(spec, layer)) for layer in spec.layers)
    if {layer.window is not None for layer in layers} != {True, False}:
        raise UserError(f"{where}: its layers all see alike; should be some with a window, and some without")
    for layer in layers:
        its = target.spec.layers[kept[layer.window is not None]]
        _check(layer, its, where)
        _check_rope(spec, layer, target.spec, its, where)
    (alone,) = split(shape, (1.0,))
    own = Matrices(Checkpoint(given.folder), None, given.dtype, given.device, given.quantize, adds_biases=True)
    loader = Loader(replace(spec, layers=layers), alone, own)
    return Assistant(
        taps=(*kept.values(), FINAL),
        keepers={_at(spec, target.spec.layers[index]): target.keeper(index) for index in kept.values()},
        embedding=target.embedding(),
        enter=own.column_parallel([whole_place(ENTER, spec.hidden, 2 * target.spec.hidden)], biased=False),
        model=loader.alone(given.num_slots),
        leave=own.column_parallel([whole_place(LEAVE, target.spec.hidden, spec.hidden)], biased=False),
        max_positions=shape.max_positions,
    )


def _of_text(read: Reads, where: str) -> tuple[ModelShape, ModelSpec]:
    """Of its layers, none of which keeps anything, whatever it says; and transformers caps none of its logits."""
    fields: dict[str, Any] = {**read.config, "num_kv_shared_layers": 0, "final_logit_softcapping": None}
    return ModelShape.from_config(fields, where), resolved(fields, where)


def _kept_by(target: ModelSpec, where: str) -> dict[bool, int]:
    """By whether it has a window, the last layer of the target that keeps something."""
    last = {layer.window is not None: i for i, layer in enumerate(target.layers) if layer.kept_by is None}
    if last.keys() != {True, False} and target.model_type in GEMMA4:
        raise UserError(
            f"{where}: an assistant; should stand beside a target that has layers with a window, and without"
        )
    if target.model_type not in GEMMA4:
        raise UserError(f"{where}: an assistant of Gemma 4; should stand beside such a target, not {target.model_type}")
    return last


def _at(spec: ModelSpec, layer: LayerSpec) -> int:
    """Of its store: behind its own layers, which have none."""
    return len(spec.layers) + (layer.window is not None)


def _check(own: LayerSpec, kept: LayerSpec, where: str) -> None:
    sizes = [(one.num_kv_heads, one.head_dim, one.window) for one in (own, kept)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{where}: layers with kv heads, numbers of each and window {sizes[0]}; should be the target's {sizes[1]}"
        )


def _check_rope(spec: ModelSpec, own: LayerSpec, target: ModelSpec, kept: LayerSpec, where: str) -> None:
    """Keys that the target's rope turned are met by queries that the assistant's turns."""
    assert own.rope is not None, "all layers of Gemma 4 have one"
    assert kept.rope is not None, "all layers of Gemma 4 have one"
    if not torch.equal(spec.ropes[own.rope].inverse, target.ropes[kept.rope].inverse):
        raise UserError(f"{where}: rope_parameters turn heads otherwise than the target's do; should be the target's")
