"""Layers that mix a text by a short convolution behind one gate and before another (LFM2, arXiv 2511.23404): which of a
model's those are, and their sizes, from a config.json; and what else of such a config has names of its own.

In place of keys and values of every token such a layer keeps what its convolution sees before the next one, however
long a text is. Knows keys; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.topology.windows import FULL

if TYPE_CHECKING:
    from tpspec.topology.reads import Reads

CONV = "conv"  # as layer_types calls such a layer, and checkpoints its module
IN, OUT = "in_proj", "out_proj"
PARTS = 3  # what in_proj makes of each channel: B, by which x is multiplied before the convolution, C behind it, and x


@dataclass(frozen=True, slots=True)
class ShortConv:
    """channels: numbers of a row, of which the convolution sees each alone. kernel: tokens that it sees. layers: where
    a model has this in place of attention. biased: the convolution, and the matrices before and behind it."""

    channels: int
    kernel: int
    layers: frozenset[int]
    biased: bool = False


KERNELS = {"lfm2": 3, "lfm2_moe": 3}  # of types that have some: how many tokens are seen where a config does not say
SIZES = ("block_dim", "conv_dim", "conv_dim_out")  # as LFM2 was published; those of a row, all of them


def short_conv_of(read: Reads, model_type: str, num_layers: int, hidden: int) -> ShortConv | None:
    """None for a model without such layers. hidden: numbers of a row. UserError for what is not supported."""
    if model_type not in KERNELS:
        return None
    layers = frozenset(layer for layer, kind in enumerate(_kinds(read, num_layers)) if kind == CONV)
    if not layers:
        return None
    for key in SIZES:
        read.one_of(key, (hidden,), hidden)
    return ShortConv(hidden, read.size("conv_L_cache", KERNELS[model_type]), layers, read.flag("conv_bias", False))


def _kinds(read: Reads, num_layers: int) -> tuple[str, ...]:
    kinds = read.texts("layer_types")
    if not kinds:
        full = read.config.get("full_attn_idxs")
        full = list(range(num_layers)) if full is None else full
        if not isinstance(full, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in full):
            raise read.refusal("full_attn_idxs", f"numbers of layers, from 0 to {num_layers - 1}")
        kinds = tuple(FULL if layer in full else CONV for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {CONV, FULL}:
        raise read.refusal("layer_types", f"{CONV} or {FULL} for each of {num_layers} layers")
    if FULL not in kinds:
        raise read.refusal("layer_types", f"{FULL} for one layer")
    return kinds


def adjusted(read: Reads, model_type: str, channels: int) -> int:
    """Channels of an MLP of which a config says so many: in LFM2 two thirds of those, and more up to a multiple."""
    if model_type != "lfm2" or not read.flag("block_auto_adjust_ff_dim", True):
        return channels
    wanted, multiple = read.number("block_ffn_dim_multiplier", 1.0), read.size("block_multiple_of", 256)
    return -(-int(wanted * int(2 * channels / 3)) // multiple) * multiple
