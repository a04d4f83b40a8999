"""Pieces of grammars in llguidance's Lark: quoted text, marks that may be tokens, and rules in a row."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FREE = "FREE"
ANYTHING = f"{FREE}: /(.|\\n)*/"  # what is said, up to the mark that comes next


def quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def marked(word: str, added: Mapping[str, int]) -> str:
    """By its id, where it is a token that was added to the vocabulary: its letters would be other tokens."""
    return f"<[{added[word]}]>" if word in added else quoted(word)


def joined(*pieces: str) -> str:
    """Those that say something, in a row."""
    return " ".join(filter(None, pieces))
