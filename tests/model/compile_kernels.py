"""Compiles every kernel for cards that are not here, down to machine code; run by test_card_kernels.py, in a process
without Triton's interpreter. Writes a line of JSON for each: kernel, compute capability, bytes of shared memory."""

from __future__ import annotations

import json
import sys
from typing import Any

from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tpspec.comm import peer_kernel
from tpspec.model import card_products, card_rows

HEADS = {"num_heads": 32, "dim": 128, "wide": 128}
TABLE = {"table_at": "*i64"}


def variants(x: str, small: bool) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """(kernel, types of its arguments, constants), for rows of a pointer type."""
    cells, scales = ("*i8", "*fp32") if small else (x, x)
    cache = {
        "keys_at": cells,
        "values_at": cells,
        "key_scales_at": scales,
        "value_scales_at": scales,
        "num_slots": "i32",
    }
    partial = {"sums_at": "*fp32", "tops_at": "*fp32", "masses_at": "*fp32"}
    place = {"qkv_at": x, "q_weight_at": x, "k_weight_at": x, "eps": "fp32", "cos_at": x, "sin_at": x, "q_at": x}
    attend = {"q_at": x, "heads_at": "*i32", "window": "i32", "scale": "fp32"}
    return [
        (card_rows.add_norm, {"x_at": x, "delta_at": x, "weight_at": x, "out_at": x, "eps": "fp32"},
         {"dim": 4096, "wide": 4096, "adds": True}),
        (card_rows.gate, {"gate_up_at": x, "out_at": x, "width": "i32"}, {"wide": 1024}),
        (card_rows.place, place | cache | TABLE,
         HEADS | {"num_kv_heads": 8, "normed": True, "turned": True, "small": small}),
        *((card_rows.attend, attend | cache | partial | TABLE,
           HEADS | {"fold": 4, "tile_rows": rows, "splits": 32, "windowed": True, "small": small})
          for rows in (16, 64)),
        (peer_kernel.exchange, {"x_at": x, "out_at": x, "memories_at": "*i64", "epochs_at": "*i32", "lost_at": "*i32",
                                "count": "i32"},
         {"most_looks": 1 << 30, "rank": 1, "size": 4, "chunk": 1024, "sums": not small, "on_card": True}),
        (card_rows.join, partial | TABLE | {"out_at": x}, HEADS | {"splits": 32}),
        (card_products._product, {"x_at": x, "codes_at": "*i8", "scales_at": x, "y_at": x, "num_rows": "i32",
                                  "num_outputs": "i32", "num_groups": "i32"},
         {"group": 128, "tile_rows": card_products.TILE_ROWS, "tile_outputs": card_products.TILE_OUTPUTS}),
    ]  # fmt: skip


for capability in map(int, sys.argv[1:]):
    for small in (False, True):
        for kernel, types, constants in variants("*bf16" if capability >= 80 else "*fp16", small):
            signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
            at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
            made = compiled(ASTSource(kernel, signature, at), target=GPUTarget("cuda", capability, 32))
            shared = made.metadata.shared
            sys.stdout.write(json.dumps({"kernel": kernel.__name__, "capability": capability, "shared": shared}) + "\n")
