"""Layers that mix a text by a short convolution behind one gate and before another (LFM2, arXiv 2511.23404): which of a
model's those are, and their sizes, from a config.json; and what else of such a config has names of its own.

In place of keys and values of every token such a layer keeps what its convolution sees before the next one, however
long a text is. Knows keys; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.published.windows import CONV, FULL, SLIDING

if TYPE_CHECKING:
    from tpspec.published.reads import Reads

MODULE, IN, OUT = CONV, "in_proj", "out_proj"  # as checkpoints call it within a layer, and matrices within it
PARTS = 3  # what in_proj makes of each channel: B, by which x is multiplied before the convolution, C behind it, and x


@dataclass(frozen=True, slots=True)
class ShortConv:
    """channels: numbers of a row, of which the convolution sees each alone. kernel: tokens that it sees. layers: where
    a model has this in place of attention. biased: the convolution, and the matrices before and behind it."""

    channels: int
    kernel: int
    layers: frozenset[int]
    biased: bool = False


KERNELS = {"lfm2": 3, "lfm2_moe": 3, "lfm3": 7}  # of types that have some: without conv_L_cache
WINDOWED = ("lfm3",)  # of those, types whose other layers may have a window


def as_now(config: dict[str, object]) -> dict[str, object]:
    """A config of any type, one of LFM3 with its ropes by the names that transformers has for them."""
    ropes = config.get("rope_parameters")
    if config.get("model_type") not in WINDOWED or not isinstance(ropes, dict):
        return config
    return config | {"rope_parameters": {kind: _rope_as_now(rope) for kind, rope in ropes.items()}}


def _rope_as_now(rope: object) -> object:
    """Of one type of layers: as LFM3 was published, what turns a part of a head is called default, by which name
    transformers turns all of it."""
    is_part = isinstance(rope, dict) and rope.get("partial_rotary_factor") not in (None, 1)
    if not isinstance(rope, dict) or not is_part or rope.get("rope_type", "default") != "default":
        return rope
    return rope | {"rope_type": "proportional"}


def short_conv_of(read: Reads, model_type: str, num_layers: int, hidden: int) -> ShortConv | None:
    """None for a model without such layers. hidden: numbers of a row. UserError for what is not supported."""
    if model_type not in KERNELS:
        return None
    layers = frozenset(layer for layer, kind in enumerate(_kinds(read, model_type, num_layers)) if kind == CONV)
    if not layers:
        return None
    return ShortConv(hidden, read.size("conv_L_cache", KERNELS[model_type]), layers, read.flag("conv_bias", False))


def _kinds(read: Reads, model_type: str, num_layers: int) -> tuple[str, ...]:
    attention = (FULL, SLIDING) if model_type in WINDOWED else (FULL,)
    kinds = read.texts("layer_types") or _usual(read, model_type, num_layers)
    if len(kinds) != num_layers or set(kinds) - {CONV, *attention}:
        raise read.refusal("layer_types", f"{' or '.join((CONV, *attention))} for each of {num_layers} layers")
    if set(kinds) == {CONV}:
        raise read.refusal("layer_types", f"{' or '.join(attention)} for one layer")
    return kinds


def _usual(read: Reads, model_type: str, num_layers: int) -> tuple[str, ...]:
    """Where no layer_types say."""
    if model_type in WINDOWED:
        return tuple(CONV if layer % 2 or layer == 0 else FULL if layer % 4 else SLIDING for layer in range(num_layers))
    full = read.config.get("full_attn_idxs")
    if full is None:
        return (FULL,) * num_layers
    if not isinstance(full, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in full):
        raise read.refusal("full_attn_idxs", f"numbers of layers, from 0 to {num_layers - 1}")
    return tuple(FULL if layer in full else CONV for layer in range(num_layers))


def adjusted(read: Reads, model_type: str, channels: int) -> int:
    """Channels of an MLP of which a config says so many: in LFM2 two thirds of those, and more up to a multiple."""
    if model_type != "lfm2" or not read.flag("block_auto_adjust_ff_dim", True):
        return channels
    wanted, multiple = read.number("block_ffn_dim_multiplier", 1.0), read.size("block_multiple_of", 256)
    return -(-int(wanted * int(2 * channels / 3)) // multiple) * multiple
