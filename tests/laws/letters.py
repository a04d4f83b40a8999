"""Grammars over a vocabulary of three ids: two letters and an end. For enumeration, where every text is written out."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tpspec.verify.allowed import Constraint

if TYPE_CHECKING:
    from collections.abc import Iterable

LETTERS = "ab"
END = 2


class Alphabet:
    eos_token_id, bos_token_id = END, None
    tokens = (*(letter.encode() for letter in LETTERS), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return [LETTERS.find(chr(byte)) % len(self.tokens) for byte in text]  # it is tried with other letters, too


@cache
def _matcher(pattern: str) -> LLMatcher:
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Alphabet())), LLMatcher.grammar_from_regex(pattern), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def constraint(pattern: str, kind: type[Constraint] = Constraint, stop_ids: Iterable[int] = (END,)) -> Constraint:
    """Of a text that has not begun."""
    return kind(_matcher(pattern).deep_copy, [END], frozenset(stop_ids), 1 + END, 1 + END)
