"""Pieces of grammars in llguidance's Lark: quoted text, marks that may be tokens, and rules in a row."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FREE = "FREE"
NOT_PLAIN = re.compile(r"\W", re.ASCII)  # a letter that may be none in a pattern
BLANK = r"[\s\x1c-\x1f]"  # as Python strips them
ANYTHING = f"{FREE}: /(.|\\n)*/"  # what is said, up to the mark that comes next


def quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def marked(word: str, added: Mapping[str, int]) -> str:
    """By its id, where it is a token that was added to the vocabulary: its letters would be other tokens."""
    return f"<[{added[word]}]>" if word in added else quoted(word)


def joined(*pieces: str) -> str:
    """Those that say something, in a row."""
    return " ".join(filter(None, pieces))


def up_to(rule: str, text: str, mark: str, added: Mapping[str, int]) -> dict[str, str]:
    """Rules by name, of which `rule` is a text with the mark that ends it. text: what it may be.

    Marks that are tokens may be spelled all the same, and are read then, too.
    """
    by_token = f"{text} {marked(mark, added)} | " if mark in added else ""
    return {rule: f"{by_token}{rule}_spelled", f"{rule}_spelled[lazy]": f"{text} {quoted(mark)}"}


def other_than(names: Iterable[str], pattern: str) -> str:
    """What a pattern matches, but for these, with blanks around them or none."""
    listed = [NOT_PLAIN.sub(lambda found: rf"\x{{{ord(found[0]):x}}}", name) for name in names]
    return f"{pattern} & ~/{BLANK}*({'|'.join(listed)}){BLANK}*/" if listed else pattern
