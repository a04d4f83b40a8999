"""Kimi Linear's config.json as it was published: what transformers says by other keys in other ways (keys.py
has the rest), and what else it says, which is always so.

Knows keys. What those mean is read where those of other models are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.published.delta_net import FULL, LINEAR
from tpspec.published.model_types import MODEL_TYPES

if TYPE_CHECKING:
    from tpspec.published.reads import Reads

TYPE = "kimi_linear"
SECTION, FIRST, KINDS, MLP_KINDS = "linear_attn_config", "first_k_dense_replace", "layer_types", "mlp_layer_types"
SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # in the section, which is believed before what stands beside it; as transformers does
LISTS = {"full_attn_layers": FULL, "kda_layers": LINEAR}  # in it, too; their first layer is 1
NUM_LAYERS = MODEL_TYPES[TYPE].num_layers
NEVER = ("attn_res_block_size", "mla_use_output_gate", "mla_use_rope", "routed_expert_hidden_size")  # Kimi K3's


def as_now(config: dict[str, object]) -> dict[str, object]:
    """A config of any type, one of Kimi Linear by those keys. What cannot be said by them stays, for `check`."""
    if config.get("model_type") != TYPE:
        return config
    made = {key: value for key, value in config.items() if value is not None}
    num_layers, section = made.get("num_hidden_layers", NUM_LAYERS), made.get(SECTION)
    if type(num_layers) is not int:
        return made
    if isinstance(section, dict):
        made |= {key: section[name] for name, key in SIZES.items() if section.get(name) is not None}
        if KINDS not in made and (kinds := _kinds(section, num_layers)) is not None:
            made[KINDS] = kinds
    first = made.get(FIRST, 1)
    if MLP_KINDS not in made and type(first) is int and first >= 0:
        made[MLP_KINDS] = ["dense" if layer < first else "sparse" for layer in range(num_layers)]
    if MLP_KINDS in made:
        made.pop(FIRST, None)
    return made


def _kinds(section: dict[str, object], num_layers: int) -> list[str] | None:
    """Of each layer, where the section's lists say it of all."""
    said: dict[object, str] = {}
    for key, kind in LISTS.items():
        listed = section.get(key)
        if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
            return None
        said |= dict.fromkeys(listed, kind)
    every = range(1, num_layers + 1)
    return [said[layer] for layer in every] if said.keys() == {*every} else None


def check(read: Reads, model_type: str) -> None:
    """UserError for what is said otherwise than such models are; nothing for other types."""
    if model_type != TYPE:
        return
    read.one_of("moe_router_activation_func", ("sigmoid",), "sigmoid")
    read.one_of("mla_use_nope", (True,), True)
    read.refuse(*NEVER)
    section = read.section(SECTION)
    section.refuse(*(key for key in section.config if key not in {*SIZES, *LISTS}))
    if KINDS not in read.config and any(key in section.config for key in LISTS):
        raise section.refusal("kda_layers", "numbers of layers from 1 on, and all those that full_attn_layers has not")
