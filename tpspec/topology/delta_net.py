"""Layers of linear attention, Gated DeltaNet (Yang et al., arXiv 2412.06464) or Mamba-2 (Dao, Gu, arXiv 2405.21060):
which of a model's those are, and their sizes, from a config.json.

In place of keys and values of every token such a layer keeps one matrix for each of its value heads, however long a
text is. Knows keys; must not know tensors or shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpspec.topology.reads import Reads

LINEAR, FULL = "linear_attention", "full_attention"  # as layer_types calls layers
OUT = "out_proj"
UNLIMITED = [0.0, math.inf]  # steps of Mamba-2's time
EVERY = 4  # layers: the last of so many has full attention, where the config does not say


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """key_heads: of queries and of keys, of key_dim numbers; value_heads: of value_dim, which share them evenly.
    kernel: tokens that the convolution before them sees. layers: where a model has this in place of attention.

    module: what checkpoints call it within a layer; mixed, gate, writes, decays: the matrices of what the convolution
    sees, of the gate, and of the two rates. The first two may be one, and so may the last two: their rows are then
    those of one key head after another, each with what its value heads have.

    sums: a state takes values as they are, and not what it does not say of their keys already: Mamba-2, whose C, B and
    x are queries, keys and values, its groups key heads, and both rates one. All are rows of one matrix, and value
    heads that share a key head have one norm, so that one rank holds them. biased: the convolution.
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
    module: str = "linear_attn"
    sums: bool = False
    biased: bool = False

    @property
    def is_in_groups(self) -> bool:
        """Whether rows are those of one key head after another."""
        return self.mixed == self.gate and not self.sums

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def num_normed(self) -> int:
        """Numbers of a norm's weight."""
        return self.value_dim * (self.value_heads if self.sums else 1)

    @property
    def num_mixed(self) -> int:
        """Numbers of a token that the convolution sees."""
        return self.mixed_of(self.key_heads, self.value_heads)

    def mixed_of(self, num_keys: int, num_values: int) -> int:
        """The same of some heads: queries, keys and values."""
        return 2 * num_keys * self.key_dim + num_values * self.value_dim


# What types mean by keys that their config.json leaves out, as transformers does.
USUAL = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
MAMBA = DeltaNet(
    key_heads=8,
    value_heads=128,
    key_dim=128,
    value_dim=64,
    kernel=4,
    mixed="in_proj",
    gate="in_proj",
    writes="in_proj",
    decays="in_proj",
    module="mixer",
    sums=True,
)
DELTA_NETS = {
    "nemotron_h": MAMBA,
    "qwen3_5_moe_text": USUAL,
    "qwen3_5_text": USUAL,
    "qwen3_next": replace(USUAL, mixed="in_proj_qkvz", gate="in_proj_qkvz", writes="in_proj_ba", decays="in_proj_ba"),
}


def delta_net_of(read: Reads, model_type: str, num_layers: int, blocks: tuple[str, ...] = ()) -> DeltaNet | None:
    """None for a model without such layers. blocks: see blocks.py. UserError for what is no size, or not supported."""
    usual = DELTA_NETS.get(model_type)
    if usual is None:
        return None
    if usual.sums:
        return _mamba_of(read, usual, frozenset(layer for layer, kind in enumerate(blocks) if kind == LINEAR))
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


def _mamba_of(read: Reads, usual: DeltaNet, layers: frozenset[int]) -> DeltaNet | None:
    if not layers:
        return None
    groups = read.size("n_groups", read.size("mamba_n_groups", usual.key_heads))
    heads = read.size("mamba_num_heads", usual.value_heads)
    if heads % groups:
        raise read.refusal("mamba_num_heads", f"a multiple of n_groups ({groups})")
    read.one_of("mamba_hidden_act", ("silu",), "silu")
    read.refuse("use_bias", "mamba_proj_bias")
    for key in ("time_step_limit", "mamba_dt_limit"):
        if list(read.config.get(key) or UNLIMITED) != UNLIMITED:  # type: ignore[call-overload]
            raise read.refusal(key, f"{UNLIMITED}: others are not supported")
    return replace(
        usual,
        key_heads=groups,
        value_heads=heads,
        key_dim=read.size("ssm_state_size", usual.key_dim),
        value_dim=read.size("mamba_head_dim", usual.value_dim),
        kernel=read.size("conv_kernel", read.size("mamba_d_conv", usual.kernel)),
        layers=layers,
        biased=read.flag("use_conv_bias", read.flag("mamba_conv_bias", True)),
    )
