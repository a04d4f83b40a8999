"""Which kernel Triton's own launcher would take for the products of some row counts, for a card that is not here. Run
by test_card_kernels.py, in a process without Triton's interpreter. argv: row counts. Tells a line a row count."""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.runtime import driver

from tests.compiling_card import Absent
from tpspec.model.card import (
    coded as card_coded,
    fragments as card_fragments,
    groups as card_groups,
    products as card_products,
    shares as card_shares,
    tiles as card_tiles,
)

SIZE, SHARES, tile = 4096, card_shares.Shares(4, 4), card_tiles.USUAL

driver.set_active(Absent((9, 0)))
weight, codes = (torch.zeros(SIZE, SIZE, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
for num_rows in map(int, sys.argv[1:]):
    x = torch.zeros(num_rows, SIZE, dtype=torch.bfloat16)
    of_few = card_products._few_rows.warmup(
        x, weight, x, x, num_rows, SIZE, SIZE, SIZE, columns=tile.columns, has_biases=False, tile_rows=tile.rows,
        tile_outputs=tile.outputs, gate="", lines=card_products.LINES, overlaps=True, launch_pdl=True, grid=(1, 1),
        num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    of_codes: Any = {"group": 128, "bits": 8, "kept_zeros": "", "overlaps": True, "launch_pdl": True, "grid": (1, 1)}
    given = x, codes, weight, weight, x, num_rows, SIZE, SIZE // 128
    counters, partials = SHARES.counters(SIZE, x.device), SHARES.partials(x, SIZE)
    of_few_codes = card_coded.few_coded.warmup(
        *given, x, x, x, x, counters, partials, 1, SIZE, gate="", sorted_rows=0, table="", has_biases=False,
        has_gains=False,
        **card_coded.in_tile(card_tiles.USUAL_CODED, SHARES), **of_codes,
    )  # fmt: skip
    of_fragments = card_fragments.few_fragments.warmup(
        x.view(torch.int32), codes.view(torch.int32), *given[2:], counters, partials, SIZE,
        **card_fragments.in_tile(card_tiles.FRAGMENT_TILES[8][0], SHARES, 32), gate="", **of_codes | {"bits": 4},
    )  # fmt: skip
    of_many = card_groups.coded.warmup(
        *given, x, SIZE, has_gains=False, tile_rows=card_groups.MANY_ROWS, tile_outputs=card_groups.MANY_OUTPUTS,
        together=card_tiles.TILE_OUTPUTS, num_warps=8, table="", inline_ptx=True, **of_codes,
    )  # fmt: skip
    sys.stdout.write(f"{of_few.hash} {of_few_codes.hash} {of_fragments.hash} {of_many.hash}\n")
