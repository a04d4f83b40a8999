"""Numbers that a token has for each layer, beside its embedding (Gemma 4's small models): from a config.json.

Their table stays in host memory, as that of embeddings does. Knows keys and names; must not know tensors or shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.published.places import all_of

if TYPE_CHECKING:
    from tpspec.published.places import Fused
    from tpspec.published.reads import Reads

USUAL = {"gemma4_text": 256}  # without the key
KEY, IDS_KEY = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
# Of the model; and within a layer.
TABLE, CONTEXT, NORM = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
GATE, OUT, OUT_NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"


def per_layer_of(read: Reads, model_type: str, vocab: int) -> int:
    """How many, for each layer; 0: none, or a type that knows no such thing. vocab: ids that have an embedding."""
    if model_type not in USUAL or not (size := read.size(KEY, USUAL[model_type], least=0)):
        return 0
    if num_ids_of(read) < vocab:
        raise read.refusal(IDS_KEY, f"at least vocab_size ({vocab})")
    return size


def context(num_layers: int, size: int, hidden: int) -> Fused:
    """What makes, of an embedding, so many numbers for each layer: whole on every rank, as are the next two."""
    return all_of(f"model.{CONTEXT}", num_layers * size, hidden)


def inputs(layer: str, size: int, hidden: int) -> list[Fused]:
    """What a layer makes of its numbers: what they are multiplied with, and what is added to a row. layer: what the
    names of its modules begin with."""
    return [all_of(layer + GATE, size, hidden), all_of(layer + OUT, hidden, size)]


def num_ids_of(read: Reads) -> int:
    """Rows of the table."""
    return read.size(IDS_KEY, 262144)
