"""Assistants as Google publishes them, read beside their target: which layers of it they attend to, and how.

Must not know how an assistant is run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tpspec.draft.assistant import Assistant
from tpspec.errors import UserError
from tpspec.model.decoder import FINAL
from tpspec.model.loader import Loader
from tpspec.model.matrices import Matrices
from tpspec.model.spec import resolved
from tpspec.model.weights import Checkpoint
from tpspec.published.assistants import check_assistant, text_fields
from tpspec.published.places import all_of
from tpspec.published.shape import ModelShape
from tpspec.topology.shards import whole_shard

if TYPE_CHECKING:
    from tpspec.draft.protocol import Given
    from tpspec.model.layer_spec import LayerSpec
    from tpspec.model.spec import ModelSpec

ENTER, LEAVE = "pre_projection", "post_projection"


def load_assistant(given: Given) -> Assistant:
    """The one in `given.folder`. Raises UserError, naming the file and what would be right."""
    assert given.folder is not None, "the rules of a topology ask for it"
    where, target_shape = f"{given.folder}/config.json", ModelShape.of(given.target)
    check_assistant(target_shape, given.folder)
    target = Loader.open(given.target, whole_shard(target_shape), given.dtype, given.device, given.quantize)
    fields = text_fields(given.folder)
    shape, spec = ModelShape.from_config(fields, where), resolved(fields, where)
    # By whether it has a window, the last layer of the target that keeps something.
    kept = {layer.window is not None: i for i, layer in enumerate(target.spec.layers) if layer.kept_by is None}
    layers = tuple(replace(layer, kept_by=_at(spec, layer)) for layer in spec.layers)
    for layer in layers:
        _check_rope(spec, layer, target.spec, target.spec.layers[kept[layer.window is not None]], where)
    own = Matrices(Checkpoint(given.folder), None, given.dtype, given.device, given.quantize, adds_biases=True)
    loader = Loader(replace(spec, layers=layers), whole_shard(shape), own)
    return Assistant(
        taps=(*kept.values(), FINAL),
        keepers={_at(spec, target.spec.layers[index]): target.attentions.keeper(index) for index in kept.values()},
        embedding=target.embedding(),
        enter=own.product(all_of(ENTER, spec.shape.hidden, 2 * target.spec.shape.hidden)),
        model=loader.alone(given.num_slots, num_positions=given.num_positions),
        leave=own.product(all_of(LEAVE, target.spec.shape.hidden, spec.shape.hidden)),
        max_positions=shape.max_positions,
    )


def _at(spec: ModelSpec, layer: LayerSpec) -> int:
    """Of its store: behind its own layers, which have none."""
    return len(spec.layers) + (layer.window is not None)


def _check_rope(spec: ModelSpec, own: LayerSpec, target: ModelSpec, kept: LayerSpec, where: str) -> None:
    """Keys that the target's rope turned are met by queries that the assistant's turns."""
    assert own.rope is not None, "all layers of Gemma 4 have one"
    assert kept.rope is not None, "all layers of Gemma 4 have one"
    if not torch.equal(spec.ropes[own.rope].inverse, target.ropes[kept.rope].inverse):
        raise UserError(f"{where}: rope_parameters turn heads otherwise than the target's do; should be the target's")
