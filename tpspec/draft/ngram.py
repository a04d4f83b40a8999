"""Prompt lookup: what followed the last time these tokens stood here? Needs no model; knows only the text.

Saxena, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding, 2023); copying past the end of what is
known is that of LZ77 (Ziv, Lempel 1977).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.draft.prefix import common_length
from tpspec.draft.protocol import Needs
from tpspec.draft.record import Record
from tpspec.tokens import NO_DRAFT, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.draft.protocol import Ask, Taps
    from tpspec.tokens import Verdict


# How often the next token was as it was after the earlier occurrence, by tokens that agreed before it (1, 2, ... 16):
# measured on chat, code, maths, edits and translations of a small model; a sequence's own record corrects it soon.
BELIEF = (0.26, 0.58, 0.69, 0.75, 0.78, 0.82, 0.82, 0.84, 0.85, 0.85, 0.88, 0.90, 0.90, 0.91, 0.92, 0.95)
BELIEF_WEIGHT = 8.0
GRAMS = (1, 2, 4, 8)  # suffixes that are looked up; how far an occurrence agrees beyond, is counted


class Ngram:
    """Proposes what followed the most recent earlier occurrence of the longest suffix it finds, and how likely that is.

    min_match: tokens of the suffix that must agree. floor: percent; a token less likely to be accepted than that, with
    all before it, is not proposed. The odds of a token follow from how many agreed before it, 16 telling no more than
    more would; a sequence keeps a record of what came true, whether it was verified or not. On what SmolLM2 says to
    chat, code and edit prompts that verifies as many as fixed lengths of 8 do, and wins 1.88 tokens a round, not 1.75.
    """

    needs = Needs(gives_odds=True)

    def __init__(self, *, min_match: int = 1, floor: int = 10) -> None:
        self._grams = (min_match, *(size for size in GRAMS if size > min_match))
        self._floor = floor / 100
        self._texts: dict[int, _Text] = {}

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        return [self._lookup(ask) for ask in asks]

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        """The next ask holds the committed tokens; nothing to learn from their verdicts."""

    def forget(self, seq: int) -> None:
        self._texts.pop(seq, None)

    def _lookup(self, ask: Ask) -> TokenTree:
        text = self._texts.get(ask.seq)
        if text is None:
            text = self._texts[ask.seq] = _Text(self._grams)
        text.become(ask.tokens)
        match = text.longest_match()
        if match is None:
            return NO_DRAFT
        length, source = match
        odds = self._worth(text.record, length, ask.num_tokens)
        guess = copied(ask.tokens, source, len(odds))
        text.guessed(guess, length)
        return TokenTree.chain(guess, odds=odds)

    def _worth(self, record: Record, length: int, most: int) -> list[float]:
        """Odds of the tokens after a match of `length`, each given the one before, as far as the floor allows."""
        odds: list[float] = []
        path = 1.0
        for agreed in range(length, length + most):
            told = record.odds(_kind(agreed))
            path *= told
            if path < self._floor:
                break
            odds.append(told)
        return odds


def _kind(length: int) -> int:
    """Of a guess, by tokens that agreed before it."""
    return min(length, len(BELIEF)) - 1


def copied(tokens: Sequence[int], source: int, count: int) -> list[int]:
    """`count` tokens from position `source` on; those past the end are what was copied before, so a period goes on."""
    known = list(tokens[source : source + count])
    period = len(tokens) - source
    return known if count <= period else [known[i % period] for i in range(count)]


class _Text:
    """The tokens of a sequence, for each n-gram the position of the latest token after one, and the last guess.

    Of a text shorter than n all of it stands for its n-gram, and is never found: nothing of that length is looked up
    before the text has grown beyond it.
    """

    def __init__(self, grams: Sequence[int]) -> None:
        self.record = Record(BELIEF, BELIEF_WEIGHT)
        self._longest, self._suffixes = grams[-1], [slice(-size, None) for size in reversed(grams)]  # the longest first
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        self._guess: tuple[int, list[int], int] = (0, [], 0)  # after so many tokens, what, and how many agreed

    def become(self, tokens: Sequence[int]) -> None:
        """Costs as much as has come. A text only grows (see `Ask`): one that has not is read anew."""
        if common_length(self._tokens, tokens) < len(self._tokens):
            self._tokens, self._next = [], {}
        text, next_of, longest = self._tokens, self._next, self._longest
        begin = len(text)
        text += tokens[begin:]
        for end in range(begin, len(text)):
            last = tuple(text[end - longest if end > longest else 0 : end])
            for suffix in self._suffixes:
                next_of[last[suffix]] = end
        self._judge()

    def guessed(self, guess: list[int], length: int) -> None:
        self._guess = len(self._tokens), guess, length

    def longest_match(self) -> tuple[int, int] | None:
        """Tokens that agree (as far as that tells more), and the position after their latest earlier occurrence."""
        text, last = self._tokens, tuple(self._tokens[-self._longest :])
        for suffix in self._suffixes:
            if (source := self._next.get(last[suffix])) is not None:
                break
        else:
            return None
        most = min(len(BELIEF), source)
        if text[source - most : source] == text[-most:]:
            return most, source
        length = len(last[suffix])
        while text[source - length - 1] == text[-length - 1]:
            length += 1
        return length, source

    def _judge(self) -> None:
        """The last guess against what came; as far as something came, and up to the first that was wrong."""
        begin, guess, length = self._guess
        came = self._tokens[begin : begin + len(guess)]
        for agreed, (said, token) in enumerate(zip(guess, came, strict=False), length):
            self.record.add(_kind(agreed), right=said == token)
            if said != token:
                break
        self._guess = 0, [], 0
