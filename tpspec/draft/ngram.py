"""Prompt lookup: what followed the last time these tokens stood here? Needs no model; knows only the text.

Saxena, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding, 2023); copying past the end of what is
known is that of LZ77 (Ziv, Lempel 1977).
"""

from __future__ import annotations

from itertools import accumulate, takewhile
from operator import mul
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
        if not 1 <= min_match <= GRAMS[-1] or not 0 <= floor <= 100:
            raise ValueError(f"need 1 <= min_match <= {GRAMS[-1]} and floor from 0 to 100, got {min_match}, {floor}")
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
        odds = [record.odds(_kind(length + i)) for i in range(most)]
        paths = accumulate(odds, mul)
        return odds[: sum(1 for _ in takewhile(lambda path: path >= self._floor, paths))]


def _kind(length: int) -> int:
    """Of a guess, by tokens that agreed before it."""
    return min(length, len(BELIEF)) - 1


def copied(tokens: Sequence[int], source: int, count: int) -> list[int]:
    """`count` tokens from position `source` on; those past the end are what was copied before, so a period goes on."""
    period = len(tokens) - source
    known = list(tokens[source : source + count])
    return [known[i % period] for i in range(count)]


class _Text:
    """The tokens of a sequence, for each n-gram the position of the latest token after one, and the last guess.

    To take tokens back, every push keeps what it replaced.
    """

    def __init__(self, grams: Sequence[int]) -> None:
        self.record = Record(BELIEF, BELIEF_WEIGHT)
        self._grams = grams
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        self._replaced: list[list[int | None]] = []
        self._guess: tuple[int, list[int], int] = (0, [], 0)  # after so many tokens, what, and how many agreed

    def become(self, tokens: Sequence[int]) -> None:
        kept = common_length(self._tokens, tokens)
        while len(self._tokens) > kept:
            self._pop()
        for token in tokens[kept:]:
            self._push(token)
        self._judge()

    def guessed(self, guess: list[int], length: int) -> None:
        self._guess = len(self._tokens), guess, length

    def longest_match(self) -> tuple[int, int] | None:
        """Tokens that agree (as far as that tells more), and the position after their latest earlier occurrence."""
        known = (gram for gram in reversed(self._suffixes()) if gram in self._next)
        found = next(((len(gram), self._next[gram]) for gram in known), None)
        if found is None:
            return None
        length, source = found
        end = len(self._tokens)
        while length < min(len(BELIEF), source) and self._tokens[source - length - 1] == self._tokens[end - length - 1]:
            length += 1
        return length, source

    def _judge(self) -> None:
        """The last guess against what came; as far as something came, and up to the first that was wrong."""
        begin, guess, length = self._guess
        for i, (said, token) in enumerate(zip(guess, self._tokens[begin:], strict=False)):
            self.record.add(_kind(length + i), right=said == token)
            if said != token:
                break
        self._guess = 0, [], 0

    def _suffixes(self) -> list[tuple[int, ...]]:
        last = tuple(self._tokens[-self._grams[-1] :])
        return [last[-length:] for length in self._grams if length <= len(last)]

    def _push(self, token: int) -> None:
        grams, end = self._suffixes(), len(self._tokens)
        self._replaced.append([self._next.get(gram) for gram in grams])
        for gram in grams:
            self._next[gram] = end
        self._tokens.append(token)

    def _pop(self) -> None:
        self._tokens.pop()
        for gram, before in zip(self._suffixes(), self._replaced.pop(), strict=True):
            if before is None:
                del self._next[gram]
            else:
                self._next[gram] = before
