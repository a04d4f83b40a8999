"""Layers of linear attention, Gated DeltaNet (Yang et al., arXiv 2412.06464): which of a model's those are, and their
sizes, from a config.json.

In place of keys and values of every token such a layer keeps one matrix for each of its value heads, however long a
text is. Knows keys; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpspec.topology.reads import Reads

LINEAR, FULL = "linear_attention", "full_attention"  # as layer_types calls layers
MODULE = "linear_attn"  # within a layer, as checkpoints call it
OUT = "out_proj"
EVERY = 4  # layers: the last of so many has full attention, where the config does not say


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """key_heads: of queries and of keys, of key_dim numbers; value_heads: of value_dim, which share them evenly.
    kernel: tokens that the convolution before them sees. layers: where a model has this in place of attention.

    mixed, gate, writes, decays: what checkpoints call the matrices of what the convolution sees, of the gate, and of
    the two rates. The first two may be one, and so may the last two: their rows are then those of one key head after
    another, each with what its value heads have.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    layers: frozenset[int] = frozenset()
    mixed: str = "in_proj_qkv"
    gate: str = "in_proj_z"
    writes: str = "in_proj_b"
    decays: str = "in_proj_a"

    @property
    def is_in_groups(self) -> bool:
        """Whether rows are those of one key head after another."""
        return self.mixed == self.gate

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def num_mixed(self) -> int:
        """Numbers of a token that the convolution sees."""
        return self.mixed_of(self.key_heads, self.value_heads)

    def mixed_of(self, num_keys: int, num_values: int) -> int:
        """The same of some heads: queries, keys and values."""
        return 2 * num_keys * self.key_dim + num_values * self.value_dim


# What types mean by keys that their config.json leaves out, as transformers does.
USUAL = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
DELTA_NETS = {
    "qwen3_5_moe_text": USUAL,
    "qwen3_5_text": USUAL,
    "qwen3_next": replace(USUAL, mixed="in_proj_qkvz", gate="in_proj_qkvz", writes="in_proj_ba", decays="in_proj_ba"),
}


def delta_net_of(read: Reads, model_type: str, num_layers: int) -> DeltaNet | None:
    """None for a model without such layers. UserError for what is no size, or not supported."""
    usual = DELTA_NETS.get(model_type)
    if usual is None:
        return None
    kinds = read.texts("layer_types")
    if not kinds:
        every = read.size("full_attention_interval", EVERY)
        kinds = tuple(LINEAR if (layer + 1) % every else FULL for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
        raise read.refusal("layer_types", f"{LINEAR} or {FULL} for each of {num_layers} layers")
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    if not layers:
        return None
    key_heads = read.size("linear_num_key_heads", usual.key_heads)
    value_heads = read.size("linear_num_value_heads", usual.value_heads)
    if value_heads % key_heads:
        raise read.refusal("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    return replace(
        usual,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=read.size("linear_key_head_dim", usual.key_dim),
        value_dim=read.size("linear_value_head_dim", usual.value_dim),
        kernel=read.size("linear_conv_kernel_dim", usual.kernel),
        layers=layers,
    )
