"""Layers that are one sublayer each, as Nemotron-H's are (arXiv 2504.03624): what each is, from a config.json.

Such a layer has one norm and one all-reduce. Knows keys; must not know what a sublayer is made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.published.delta_net import FULL, LINEAR, OLDER

if TYPE_CHECKING:
    from tpspec.published.reads import Reads

MLP, MIXTURE = "mlp", "moe"
PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": MIXTURE}  # letters of hybrid_override_pattern, as it was published
TYPES = ("nemotron_h",)
USUAL = (LINEAR, MIXTURE, FULL, MLP)  # where a config says nothing, as transformers
KEYS = ("layers_block_type", "layer_types")


def blocks_of(read: Reads, model_type: str) -> tuple[str, ...]:
    """What each layer is; empty for types whose layers are attention and an MLP."""
    if model_type not in TYPES:
        return ()
    pattern = read.config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and not any(read.config.get(key) for key in KEYS):
        if set(pattern) - PATTERN.keys() or "*" not in pattern:
            raise read.refusal("hybrid_override_pattern", f"letters of {''.join(PATTERN)}, and a * among them")
        return tuple(PATTERN[letter] for letter in pattern)
    key = next((key for key in KEYS if read.config.get(key)), KEYS[0])
    kinds = tuple(OLDER.get(kind, kind) for kind in read.texts(key)) or USUAL
    if set(kinds) - {*PATTERN.values()} or FULL not in kinds:
        raise read.refusal(key, f"one of {', '.join(PATTERN.values())} for each layer, and {FULL} for one")
    return kinds
