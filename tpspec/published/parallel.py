"""Parallel drafters, models that say several tokens at once (PARD): which token stands for a place to fill.

Knows a key of config.json; must not know how such a model drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.published.checkpoint import read_config

if TYPE_CHECKING:
    from pathlib import Path

KEY = "pard_token"


def mask_of(folder: Path) -> int:
    """The id of that token. UserError for a model that has none."""
    config = read_config(folder)
    mask, vocab = config.get(KEY), config.get("vocab_size")
    if type(mask) is not int or not isinstance(vocab, int) or not 0 <= mask < vocab:
        raise UserError(
            f"{folder}: config.json has {KEY} {mask!r}; source pard needs a model that was trained as a parallel "
            "drafter, whose config names an id of its vocabulary there"
        )
    return mask
