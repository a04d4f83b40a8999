"""Compiles every kernel for cards that are not here, down to machine code; run by test_card_kernels.py, in a process
without Triton's interpreter. Tells a line of JSON a kernel. argv: CAPABILITY:POINTER TYPE:HEAD DIM, as 89:*bf16:128, or
with :heads behind it, for kernels of heads alone, or with :few, for what takes half the time: products in few tiles,
but in each tile once where there is little room; without tensor cores, or in float32, what shares memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import chain, product
from tempfile import NamedTemporaryFile
from typing import Any

from triton import compile as compiled, knobs, next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tpspec.comm import peer_kernel
from tpspec.model.card import (
    attention as card_attention,
    coded as card_coded,
    conv as card_conv,
    delta as card_delta,
    experts as card_experts,
    fragments as card_fragments,
    gates as card_gates,
    groups as card_groups,
    heads as card_heads,
    joint as card_joint,
    late as card_late,
    many as card_many,
    norms as card_norms,
    products as card_products,
    router as card_router,
    rows as card_rows,
    shares as card_shares,
    states as card_states,
    steps as card_steps,
    sums as card_sums,
    tiles as card_tiles,
)
from tpspec.model.card.norms import norm_warps
from tpspec.model.card.overlap import OVERLAP_FROM
from tpspec.model.card.steps import JOINED
from tpspec.model.card.tilings import LEAST_SIDE, Tiling
from tpspec.verify import card_noise

TABLE = {"table_at": "*i64", "most_rows": "i32"}
USUAL_DIM = 128
PLACED_APART = dict.fromkeys(("placing", "turned", "grown"), False) | dict.fromkeys(("normed", "values_normed"), "")
PLACED_APART |= {"num_kv_heads": 0, "num_lines": 0}
LOOP = re.compile(r"^( *)(?:%\S+ = )?scf\.for .*?^\1}", re.MULTILINE | re.DOTALL)
ITEM_BYTES = {"*fp32": 4, "*bf16": 2, "*fp16": 2}
TILES, CODED_TILES, FRAGMENT_TILES, GATED_TILES, GATED_CODED_TILES, GATED_FRAGMENT_TILES = (
    [tile for tile in dict.fromkeys(chain.from_iterable(tiles.values())) if tile is not None]
    for tiles in (card_tiles.TILES, card_tiles.CODED_TILES, card_tiles.FRAGMENT_TILES, card_tiles.GATED_TILES,
                  card_tiles.GATED_CODED_TILES, card_tiles.GATED_FRAGMENT_TILES)
)  # fmt: skip
# Of add_norm and sum_add_norm: whether what is added has a norm, and of which kind the other is.
NORMS = [(False, "rms"), (True, "rms"), (False, "centred"), (False, "biased"), (True, "")]
# Tiles, biases and gates of products in 16 bits.
PLAIN = [*product(TILES, (False, True), ("",)), *product(GATED_TILES, (True,), ("gelu",))]
FEW_BIASED = [(max(TILES), True, ""), (max(GATED_TILES), True, "gelu")]
# Of most rows every tile: with other warps a card has other instructions for those.
FEW_TILES_OF_16_BITS = [tile for tile in TILES if tile == TILES[0] or tile.rows == max(TILES).rows]
FEW_SHARING = (card_experts._tile_product, card_groups.coded)  # beside those of heads


def in_tiles(tiling: Tiling, rows: int) -> dict[str, Any]:
    pieces = card_rows.KEYS // tiling.keys
    return {"wide": tiling.wide, "rest": tiling.rest, "tile_rows": rows, "tile_keys": tiling.keys, "pieces": pieces}


def variants(
    x: str, dim: int, capability: int, small: bool, tiling: Tiling, many: Tiling, few: bool
) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """(kernel, types of its arguments, constants), for rows of a pointer type and heads of `dim`."""
    heads, whole = {"num_heads": 32, "dim": dim}, next_power_of_2(dim)
    cells, scales = ("*i8", "*fp32") if small else (x, x)
    cache = {
        "keys_at": cells,
        "values_at": cells,
        "key_scales_at": scales,
        "value_scales_at": scales,
        "num_slots": "i32",
    }
    partial = {"sums_at": "*fp32", "tops_at": "*fp32", "masses_at": "*fp32"}
    placing = {
        "q_weight_at": "*fp32",
        "k_weight_at": "*fp32",
        "v_weight_at": "*fp32",
        "eps": "fp32",
        "cos_at": x,
        "sin_at": x,
        "gains_at": "*fp32",
    }
    placed = {"num_kv_heads": 8, "num_lines": 48, "turned": True, "grown": True}
    placed |= {"normed": "before", "values_normed": "before"}
    sinks = {"sinks_at": "*fp32"}
    attend = (
        {"rows_at": x, "heads_at": "*i32", "window": "i32", "scale": "fp32"} | placing | cache | partial | TABLE | sinks
    )
    # Who places heads: attention, where it can, but for layers that read what another keeps, as a rule in 16 bits.
    ways = [placed | {"placing": True}] if tiling.places else []
    ways += [PLACED_APART] if not (small and tiling.places) else []
    attended = {"fold": 4, "cuts": 1, "windowed": True, "sinks": True, "small": small}
    attended |= {"cap": 0.0 if dim == USUAL_DIM else 50.0}  # as Gemma 2's wide heads have it
    attended |= {"chunked": dim < USUAL_DIM}  # which Llama 4's are not, but would be no other kernel
    few_tiles = TILES if capability == LITTLE_ROOM else FEW_TILES_OF_16_BITS
    plain = [*product(few_tiles, (False,), ("",)), *FEW_BIASED] if few else PLAIN
    return [
        *((card_norms.add_norm, {"x_at": x, "delta_at": x, "delta_weight_at": "*fp32", "delta_eps": "fp32",
                                "weight_at": "*fp32", "eps": "fp32", "bias_at": "*fp32", "scale": "fp32",
                                "out_at": x},
           {"dim": 4096, "wide": 4096, "adds": True, "norms_delta": own, "scales": own, "norms": norms})
          for own, norms in NORMS),
        *((card_sums.sum_add_norm, {"partial_at": x, "x_at": x, "delta_weight_at": "*fp32", "delta_eps": "fp32",
                                    "weight_at": "*fp32", "eps": "fp32", "bias_at": "*fp32", "scale": "fp32",
                                    "out_at": x,
                                    "memories_at": "*i64", "epochs_at": "*i32", "lost_at": "*i32",
                                    "most_looks": "i32"},
           {"rank": 1, "size": 4, "leg": 2 * peer_kernel.leg_bytes(4), "dim": 4096, "wide": 4096,
            "norms_delta": own, "scales": own, "norms": norms, "on_card": True}) for own, norms in NORMS),
        *((card_joint.squares, {"made_at": x, "sums_at": "*fp32"},
           {"width": 1024, "num_queries": 768, "first_key": 768, "num_keys": 128, "adds": adds, "wide": 1024})
          for adds in (False, True)),
        *((card_gates.weighed, {"attended_at": x, "made_at": x, "out_at": x, "width": "i32"},
           {"dim": dim, "by_head": by_head, "act": act, "wide": card_steps.GATE_WIDTH})
          for act, by_head in (("softplus", True), ("sigmoid", False))),
        (card_joint.jointly_normed, {"qkv_at": x, "sums_at": "*fp32", "weight_at": "*fp32", "eps": "fp32",
                                     "all_queries": "i32", "all_keys": "i32"},
         {"width": 1024, "num_queries": 768, "num_normed": 896, "wide": card_steps.JOINTLY}),
        *((card_rows.gate, {"gate_up_at": x, "out_at": x, "width": "i32", "limit": "fp32"},
           {"wide": 1024, "kind": kind}) for kind in ("silu", "gelu", "clamped", "limited")),
        *((card_rows.act, {"up_at": x, "out_at": x, "width": "i32", "above": "fp32", "below": "fp32", "slope": "fp32"},
           {"wide": 1024, "kind": kind}) for kind in ("gelu_alone", "relu2", "xielu")),
        (card_heads.place, {"qkv_at": x, "q_at": x} | placing | cache | TABLE,
         heads | placed | {"wide": whole, "small": small}),
        *((card_attention.attend, attend,
           heads | attended | in_tiles(tiling, rows) | {"splits": 32, "recorded": True} | how)
          for how in ways
          for rows in sorted({LEAST_SIDE, tiling.rows})),
        *((card_attention.attend, attend | ({"sums_at": x} if splits == 1 else {}),
           heads | attended | in_tiles(many, many.rows) | {"splits": splits, "recorded": False} | PLACED_APART)
          for splits in ((1,) if small or dim != USUAL_DIM else (1, card_many.MOST_SPLITS))),
        *((peer_kernel.exchange, {"x_at": sent, "out_at": sent, "memories_at": "*i64", "epochs_at": "*i32",
                                  "lost_at": "*i32", "count": "i32", "most_looks": "i32"},
           {"rank": 1, "size": 4, "chunk": 1024, "sums": sent == x, "on_card": True})
          for sent in (x, "*u8")),
        (peer_kernel.sum_by_shares, {"x_at": x, "memories_at": "*i64", "epochs_at": "*i32", "lost_at": "*i32",
                                     "count": "i32", "share": "i32", "most_looks": "i32"},
         {"rank": 1, "size": 4, "chunk": 1024, "leg": peer_kernel.leg_bytes(4),
          "on_card": True}),
        *((card_attention.join, partial | TABLE | sinks | {"out_at": x},
           heads | {"wide": min(whole, JOINED), "splits": 32, "sinks": has}) for has in (False, True)),
        *([] if small else coded(x, capability, few=few) + mixture(x) + noise() + linear_attention(x)),
        *((card_products._few_rows, {"x_at": x, "weights_at": x, "biases_at": x, "y_at": x, "num_rows": "i32",
                                     "num_outputs": "i32", "num_inputs": "i32", "stride": "i32"},
           {"columns": tile.columns, "has_biases": biased, "tile_rows": tile.rows, "tile_outputs": tile.outputs,
            "gate": gate, "lines": card_products.LINES, "num_stages": tile.stages, "num_warps": tile.warps})
          for tile, biased, gate in plain if not small and x == "*bf16"),
    ]  # fmt: skip


AT_ONCE, USUAL_GROUP = (card_shares.FEW_GROUPS, card_shares.MORE_GROUPS), 128
# (bits, group, type of scales, how zeros are kept, table): as we quantize, and as others may. The last as NVFP4.
CODES = (
    (8, USUAL_GROUP, "*bf16", "", ""),
    (4, USUAL_GROUP, "*i32", "beside", ""),
    (8, 32, "*fp32", "apart", ""),
    (4, 64, "*fp32", "apart", ""),
    (4, 64, "*fp32", "", "nf4"),
    (8, 64, "*fp32", "", "e4m3"),
    (4, 64, "*i32", "", "e2m1"),
)


PLAIN_CODES = {"gate": "", "sorted_rows": 0, "has_biases": False, "splits": 1}
# Of programs that share a tile's columns: where they have most to keep, and to tell each other.
SPLIT_TILES = {*GATED_CODED_TILES, *(max(tiles) for tiles in card_tiles.CODED_TILES.values())}
# Cards with tensor cores and little room get all tiles of codes, and all heads in 8 bits; others the usual one and the
# largest, and the usual heads.
LITTLE_ROOM, FEW_TILES = 86, [CODED_TILES[0], max(GATED_CODED_TILES), max(CODED_TILES)]


def coded(x: str, capability: int, *, few: bool) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    on_tensor_cores, made = capability >= 80 and x != "*fp32", []
    sizes = {"num_rows": "i32", "num_outputs": "i32", "num_groups": "i32"}
    narrow = {"tile_rows": card_tiles.TILE_ROWS, "tile_outputs": card_tiles.TILE_OUTPUTS}
    many = {"tile_rows": card_groups.MANY_ROWS, "tile_outputs": card_groups.MANY_OUTPUTS}
    is_each_once = few and capability != LITTLE_ROOM
    for rows, (bits, group, scales, zeros, table) in product(
        {x, "*fp16"} if on_tensor_cores and not is_each_once else {x}, CODES
    ):
        types = sizes | {"x_at": rows, "scales_at": scales, "zeros_at": scales, "y_at": rows}
        types |= {"codes_at": "*i16"}
        few_types = types | {"expert_at": "*i32", "pairs_at": "*i32", "biases_at": rows, "fan": "i32", "width": "i32"}
        few_types |= {"counters_at": "*i32", "partials_at": "*fp32", "gains_at": "*fp32"}
        of = {"group": group, "bits": bits, "kept_zeros": zeros}
        looked_up = {"table": table, "has_gains": table == "e2m1", "inline_ptx": on_tensor_cores}
        tile = (many if on_tensor_cores else narrow) | {"together": card_tiles.TILE_OUTPUTS}
        many_types = types | {"gains_at": "*fp32", "width": "i32"}
        made.append((card_groups.coded, many_types, of | looked_up | tile))
        if zeros == "beside":  # of groups that words are too long for
            made.append((card_groups.coded, many_types | {"codes_at": "*u8"}, of | looked_up | tile | {"group": 32}))
        every = rows == x and group == USUAL_GROUP
        ways = (few_ways if few else ways_of)(capability, every=every, beside=zeros == "beside")
        ways += [(AT_ONCE[0], max(GATED_CODED_TILES), "silu", 1)] if looked_up["has_gains"] else []
        for at_once, tile, gate, splits in ways if on_tensor_cores else ():
            of_tile = {"tile_rows": tile.rows, "tile_outputs": tile.outputs, "together": card_tiles.TILE_OUTPUTS}
            of_tile |= {"num_stages": tile.stages, "num_warps": at_once, "at_once": at_once} | looked_up
            of_tile |= {"stages": tile.stages, "code_lines": card_coded.CODE_LINES}
            made.append(
                (card_coded.few_coded, few_types, of | of_tile | PLAIN_CODES | {"gate": gate, "splits": splits})
            )
        if on_tensor_cores and bits == card_fragments.BITS and not table:
            made += fragments(types, of, every=every, largest_only=is_each_once)
    return made + (coded_experts(x, few=few) if on_tensor_cores else [])


def ways_of(capability: int, *, every: bool, beside: bool) -> list[tuple[int, Any, str, int]]:
    """(groups at once, tile, gate, programs that share its columns) of a product by codes; every: tile, and gates and
    shares."""
    made, tiles = [], (CODED_TILES if capability == LITTLE_ROOM else FEW_TILES) if every else CODED_TILES[:1]
    for at_once, tile in product(AT_ONCE, tiles):
        kinds = ("", "silu") if every and tile in GATED_CODED_TILES else ("",)
        is_split = every and at_once == card_shares.MORE_GROUPS and tile in SPLIT_TILES
        splits = (1, card_shares.MOST_SPLITS) if is_split else (1,)
        made += [(at_once, tile, gate, split) for gate, split in product(kinds, splits)]
    return made


def few_ways(capability: int, *, every: bool, beside: bool) -> list[tuple[int, Any, str, int]]:
    """Of those the smallest and the largest, and where there is little room each tile once, of codes whose zeros are
    `beside` their scales."""
    (fewest, most), smallest, gated = AT_ONCE, CODED_TILES[0], max(GATED_CODED_TILES)
    made = [(fewest, smallest, "", 1)]
    if every:
        made += [(most, gated, gate, splits) for gate, splits in product(("", "silu"), (1, card_shares.MOST_SPLITS))]
        if capability == LITTLE_ROOM:
            made += [(fewest, smallest, "silu", 1), (most, max(CODED_TILES), "", card_shares.MOST_SPLITS)]
            made += [(most, tile, "", 1) for tile in (CODED_TILES if beside else FEW_TILES) if tile != gated]
    return made


def fragments(
    types: dict[str, str], of: dict[str, Any], *, every: bool, largest_only: bool
) -> list[tuple[Any, dict[str, str], Any]]:
    """The same by the other kernel; every: tile (or the largest), and gates and shares, where a program has most groups
    at once."""
    types = {name: kind for name, kind in types.items() if name != "codes_at"}
    types |= {"x_at": "*i32", "pairs_at": "*i32", "counters_at": "*i32", "partials_at": "*fp32", "width": "i32"}
    few, most = AT_ONCE
    tiles: list[Any] = [(few, FRAGMENT_TILES[0], "", 1), (most, FRAGMENT_TILES[0], "", card_shares.MOST_SPLITS)]
    if every:
        tiles += [
            (most, tile, gate, 1)
            for gate in ("", "silu")
            for of_kind in [GATED_FRAGMENT_TILES if gate else FRAGMENT_TILES]
            for tile in ([max(of_kind)] if largest_only else of_kind)
        ]
        tiles.append((most, max(GATED_FRAGMENT_TILES), "gelu", card_shares.MOST_SPLITS))
    side_by_side = card_fragments.side_by_side(of["group"] * of["bits"] // 16)
    of = of | {"together": card_tiles.TILE_OUTPUTS, "side_by_side": side_by_side, "inline_ptx": True}
    of |= {"fetched_groups": card_fragments.FETCHED_GROUPS}
    return [
        (card_fragments.few_fragments, types, of | {
            "tile_rows": tile.rows, "tile_outputs": tile.outputs, "ahead": tile.ahead, "at_once": at_once,
            "gate": gate, "splits": splits, "num_warps": at_once,
        })
        for at_once, tile, gate, splits in tiles
    ]  # fmt: skip


def coded_experts(x: str, *, few: bool) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """In all tiles that are taken, none of which is tried; few: the smallest and the largest."""
    types = {"x_at": x, "codes_at": "*i16", "zeros_at": x, "y_at": x, "biases_at": x, "num_rows": "i32",
             "num_outputs": "i32", "num_groups": "i32", "expert_at": "*i32", "pairs_at": "*i32", "fan": "i32",
             "width": "i32", "counters_at": x, "partials_at": x, "gains_at": x}  # fmt: skip
    of, made = {"group": USUAL_GROUP, "gate": "", "sorted_rows": card_tiles.TILE_ROWS, "inline_ptx": True}, []
    of |= {"splits": 1, "code_lines": card_coded.CODE_LINES}
    sides = (card_tiles.FEWEST_ROWS, card_tiles.TILE_ROWS), sorted(card_experts.STAGES), AT_ONCE
    for rows, outputs, at_once in zip(*sides, strict=True) if few else product(*sides):
        tile = {"tile_rows": rows, "tile_outputs": outputs, "together": card_tiles.TILE_OUTPUTS, "at_once": at_once}
        stages = card_experts.STAGES[card_experts.MORE_OUTPUTS]
        tile |= {"stages": stages, "num_stages": stages, "num_warps": at_once}
        for bits, scales, zeros in ((8, x, ""), (4, "*i32", "beside"), (4, "*i32", "")):
            table = "e2m1" if bits == 4 and not zeros else ""
            kind = {"bits": bits, "kept_zeros": zeros, "table": table, "has_biases": table != "", "has_gains": False}
            made.append((card_coded.few_coded, types | {"scales_at": scales}, of | tile | kind))
    return made


def mixture(x: str) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    tiles = {"expert_at": "*i32", "pairs_at": "*i32"}
    product = {"x_at": x, "zeros_at": x, "biases_at": x, "gains_at": x, "y_at": x, "num_outputs": "i32", "width": "i32",
               "num_scales": "i32", "fan": "i32"} | tiles  # fmt: skip
    return [
        *((card_router._choose, {"logits_at": "*fp32", "bias_at": "*fp32", "scales_at": "*fp32",
                                   "closed_at": "*fp32",
                                   "slots_at": "*i64", "chosen_at": "*i32",
                                   "weights_at": "*fp32", "count": "i32", "scale": "fp32", "added": "fp32",
                                   "margin": "fp32"},
           {"num_chosen": 8, "wide": 128, "wide_chosen": 8, "sigmoid": sigmoid, "corrected": corrected,
            "sums_to_one": not (sigmoid or alone), "divided": sigmoid, "scaled": not (sigmoid or alone),
            "one_by_one": alone, "padded": True})
          for sigmoid, corrected, alone in ((False, "", False), (True, "sigmoids", False), (True, "logits", False),
                                            (False, "", True))),
        (card_router._sort, {"chosen_at": "*i32", "ranks_at": "*i32", "num_pairs": "i32", "num_tiles": "i32"} | tiles,
         {"wide": card_router.MOST_SORTED, "wide_tiles": 256, "at_once": card_router.AT_ONCE,
          "tile_rows": card_tiles.TILE_ROWS}),
        *((card_experts._tile_product, product | {"weights_at": weights, "scales_at": scales},
           {"bits": bits, "group": group, "table": "e2m1" if scales == "*i32" else "",
            "kept_zeros": "apart" if scales == "*fp32" else "",
            "has_biases": scales == "*i32", "has_gains": False, "together": card_tiles.TILE_OUTPUTS,
            "tile_rows": card_tiles.TILE_ROWS, "tile_outputs": outputs})
          for outputs in card_experts.STAGES
          for bits, group, weights, scales in ((16, card_experts.COLUMNS, x, x), (8, 128, "*i16", "*bf16"),
                                               (4, 32, "*u8", "*fp32"), (4, 128, "*i16", "*i32"))),
        (card_experts._weigh, {"x_at": x, "weights_at": "*fp32", "y_at": x, "dim": "i32"},
         {"num_chosen": 8, "wide": card_experts.ADDED}),
        *((card_experts._add, {"made_at": x, "chosen_at": "*i32", "weights_at": "*fp32", "sums_at": x, "dim": "i32"},
           {"num_chosen": 8, "wide": card_experts.ADDED, "weighed": weighed}) for weighed in (True, False)),
    ]  # fmt: skip


def linear_attention(x: str) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Of as many heads as Qwen3.5-27B, Kimi Linear, and Nemotron 3 Nano, has on each of four cards; and what Granite
    4.0 H Small, and Falcon-H1, have of their own."""
    qwen = {"num_keys": 4, "num_values": 12, "key_dim": 128, "value_dim": 128, "sums": False, "by_channel": False}
    nemotron = qwen | {"num_keys": 2, "num_values": 16, "value_dim": 64, "sums": True}
    kimi = qwen | {"num_keys": 8, "num_values": 8, "by_channel": True}
    late = {"sums": True, "normed": True, "late": True, "by_channel": False}
    tiled = {"dim": 4096, "size": 4, "wide": card_steps.JOINTLY}
    return [
        *_convolutions(x),
        *_linear(x, qwen, 128),
        *_linear(x, kimi, 128),
        *_linear(x, nemotron, 512),
        (card_delta.gated, _gated(x), late | {"late": False, "normed": False, "dim": 64, "wide": 64}),
        (card_delta.gated, _gated(x), late | {"dim": 2048, "wide": 2048}),
        (card_late.beside, {"made_at": x, "squares_at": "*fp32", "out_at": x}, tiled | {"rank": 1}),
        (
            card_late.normed_late,
            {"total_at": x, "out_at": x, "numbers": "i32", "eps": "fp32"},
            tiled | {"wide_told": 8},
        ),
    ]


def _convolutions(x: str) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Of as many channels as LFM2 1.2B has on one card, and LFM3 on each of three."""
    types = {"made_at": x, "left_at": x, "kernel_at": "*fp32", "biases_at": "*fp32", "out_at": x, "num_rows": "i32",
             "num_left": "i32", "length": "i32"} | TABLE  # fmt: skip
    tile = {"tile": card_states.CONV_ROWS, "wide": card_states.CONV_CHANNELS}
    return [
        (card_conv.convolved, types, tile | {"num_channels": channels, "sight": sight, "biased": biased})
        for channels, sight, biased in ((2048, 3, False), (683, 7, True))
    ]


def _linear(x: str, linear: dict[str, Any], dim: int) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """dim: of a norm."""
    before = 3
    sums = {"sums": linear["sums"], "normed": True, "late": False, "by_channel": linear["by_channel"]}
    tile = {"before": before, "wide_key": 128, "piece": card_states.TILE // 128}
    types = {"mixed_at": x, "rates_at": x, "left_at": x, "kernel_at": "*fp32", "decays_at": "*fp32",
             "biases_at": "*fp32", "conv_biases_at": "*fp32", "skips_at": "*fp32", "rows_at": "*fp32",
             "key_of_at": "*i64", "states_at": "*fp32", "answers_at": x, "num_left": "i32", "length": "i32",
             "scale": "fp32"} | TABLE  # fmt: skip
    constants = [
        (card_delta.convolve, linear | {"sight": before + 1, "wide": 128, "biased": linear["sums"], "most_written": 1}),
        (card_delta.take_in, linear | tile | {"wide_left": 64}),
        (card_delta.look_at, linear | tile),
    ]
    return [
        *((kernel, {name: types[name] for name in kernel.arg_names if name in types}, of) for kernel, of in constants),
        (card_delta.gated, _gated(x), sums | {"dim": dim, "wide": dim}),
    ]


def _gated(x: str) -> dict[str, str]:
    return {"answers_at": x, "weight_at": "*fp32", "eps": "fp32", "gate_at": x, "out_at": x, "squares_at": "*fp32"}


def noise() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    of_programs = {"values_at": "*fp32", "ids_at": "*i64"}
    return [
        *((card_noise._best_of_blocks, of_programs | {"scores_at": scores, "keys_at": "*i64", "num_ids": "i32",
                                                      "start": "i32", "first": "i32"},
           {"blocks": card_noise.BLOCKS, "noisy": noisy})
          for noisy in (False, True) for scores in ("*fp32", "*bf16", "*fp16")),
        (card_noise._best_of_programs, of_programs | {"value_at": "*fp32", "id_at": "*i32", "num_programs": "i32"},
         {"wide": card_noise.USUAL_PROGRAMS}),
    ]  # fmt: skip


def stack(cubin: bytes) -> int:
    """Bytes of a thread that found no place in registers."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", told)))


def sums(ttgir: str) -> list[str]:
    """How threads share the numbers of each sum, and with that the order in which a row's are added."""
    layouts = dict(re.findall(r"(#\w+) = (#ttg\.\w+<.*>)\n", ttgir))
    reduced = re.findall(r'"tt\.reduce"(?:.*\n)*?.*\}\) : \(tensor<\w+, (#\w+)>', ttgir)
    return sorted(layouts[name] for name in reduced)


def loads(ttgir: str) -> int:
    """In loops: what is not copied in the background, and waited for in the turn that asks for it."""
    return sum(len(re.findall(r"= tt\.load ", loop)) for loop in loops(ttgir))


def loops(ttgir: str) -> list[str]:
    return [loop.group() for loop in LOOP.finditer(ttgir)]


def read_before(ttir: str) -> list[str] | None:
    """Arguments that a kernel reads at before it waits for the kernels in front of it; None where it does not wait.
    What is written then is told as a read at "?"."""
    before, waits, _ = ttir.partition("griddepcontrol.wait")
    if not waits:
        return None
    origins, read = dict[str, set[str]](), set[str]()
    for made, operation, rest in re.findall(r"^ *(?:(%\w+) = )?([\w.]+) (.*)", before, re.MULTILINE):
        operands = re.findall(r"%\w+", rest)
        if operation == "tt.func":
            origins |= {name: {name[1:]} for name in re.findall(r"(%\w+): !tt.ptr", rest)}
        elif operation in ("tt.load", "tt.store") or "atomic" in operation:
            read |= origins[operands[0]] if operation == "tt.load" else {"?"}
        elif made and "!tt.ptr" in rest:
            pointers = operands[:1] if operation == "tt.addptr" else operands
            origins[made] = set().union(*(origins.get(operand, set()) for operand in pointers))
    return sorted(read)


def barriers(ptx: str) -> int | None:
    """Between the last of its own keys that a program writes and the first copy of what it then reads; None where
    nothing is copied in the background."""
    before, copies, _ = ptx.partition("cp.async")
    return before.rpartition("st.global")[2].count("bar.sync") if copies else None


def compile_for(capability: int, x: str, dim: int, part: str) -> None:
    """part: "heads", "few" or "", for all."""
    has_tensor_cores = capability >= 80 and x != "*fp32"
    tiling = Tiling.of(dim, ITEM_BYTES[x], (capability // 10, capability % 10))
    many = Tiling.of_many(dim, ITEM_BYTES[x], (capability // 10, capability % 10))
    assert tiling is not None, f"heads of {dim} {x} are too wide for {capability}"
    assert many is not None, "which few rows have a tile for"
    only_wide = (part == "heads" and capability != LITTLE_ROOM) or (part == "few" and not has_tensor_cores)
    for small in (False,) if only_wide else (False, True):
        for kernel, types, constants in variants(x, dim, capability, small, tiling, many, part == "few"):
            is_of_heads = "num_heads" in constants
            if part == "heads" and not is_of_heads:
                continue
            if part == "few" and not has_tensor_cores and not is_of_heads and kernel not in FEW_SHARING:
                continue
            names = kernel.arg_names
            if "overlaps" in names:
                constants |= {"overlaps": (capability // 10, capability % 10) >= OVERLAP_FROM}
            # As tensors are laid out: without it loads are not pipelined, and less is shared than on a card.
            whole = [name for name, kind in types.items() if kind != "fp32"]
            aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
            is_norm = "norms_delta" in constants or kernel is card_delta.gated
            options = {"num_warps": norm_warps(constants["wide"])} if is_norm else {}
            if kernel is card_experts._tile_product:
                options = {"num_stages": card_experts.STAGES[constants["tile_outputs"]]}
            if kernel in (card_products._few_rows, card_coded.few_coded):
                options = {name: constants.pop(name) for name in ("num_stages", "num_warps")}
            if kernel is card_fragments.few_fragments:
                options = {"num_warps": constants.pop("num_warps")}
            if kernel is card_groups.coded:
                options = {"num_warps": 8 if constants["tile_rows"] == card_groups.MANY_ROWS else 4}
            if kernel is card_attention.attend:
                cut = tiling if constants["recorded"] else many
                options = {"num_stages": cut.stages, "num_warps": cut.warps}
            signature = {name: "constexpr" if name in constants else types[name] for name in names}
            at = {(names.index(name),): value for name, value in constants.items()}
            source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, at, aligned)
            made = compiled(source, target=GPUTarget("cuda", capability, 32), options=options)
            told = {"kernel": kernel.__name__, "capability": capability, "shared": made.metadata.shared}
            told |= {"outputs": constants.get("tile_outputs"), "stack": stack(made.asm["cubin"])}
            told |= {"products": sorted(set(re.findall(r"w?g?mma\.\S*\.(m\d+)n", made.asm["ptx"])))}
            told |= {"whole_copies": len(re.findall(r"cp\.async\.cg\.\S+ \[.*\], 0x10,", made.asm["ptx"]))}
            told |= {"sums": sums(made.asm["ttgir"]), "tile_rows": constants.get("tile_rows")}
            told |= {"places": [*map(int, re.findall(r"memdesc<(\d+)x\d+x\d+x", made.asm["ttgir"]))]}
            told |= {
                "adds": len(re.findall(r"\badd\.(?:rn\.)?f32", made.asm["ptx"])),
                "at_once": constants.get("at_once"),
            }
            told |= {"biased": constants.get("has_biases", False), "gate": constants.get("gate", "")}
            told |= {"stages": options.get("num_stages"), "state": constants.get("sums")}
            told |= {
                "recorded": constants.get("recorded", True),
                "placing": constants.get("placing", False),
                "splits": constants.get("splits"),
            }
            told |= {"loads": loads(made.asm["ttgir"]), "scales": types.get("scales_at")}
            told |= {"barriers": barriers(made.asm["ptx"]) if constants.get("placing") else None}
            told |= {
                "waits": constants.get("overlaps"),
                "read_before": read_before(made.asm.get("ttir") or made.asm["ttgir"]),
            }
            told |= {"whole_loads": len(re.findall(r"ld\.global\.cg\.v4\.b32", made.asm["ptx"]))}
            sys.stdout.write(json.dumps(told | {"rows": x, "dim": dim}) + "\n")


for word in sys.argv[1:]:
    capability, x, dim, *part = word.split(":")
    compile_for(int(capability), x, int(dim), "".join(part))
