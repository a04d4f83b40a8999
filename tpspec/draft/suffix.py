"""What followed wherever these tokens stood, in this text or in earlier answers, and how often. Knows only texts.

Oliaro et al., "SuffixDecoding" (arXiv 2411.04975; github.com/snowflakedb/ArcticInference). A node of the suffix tree is
the set of places where its tokens stand, so the tree need not be built: the latest places of a suffix are looked up,
and parted by the token that comes next, for as deep as a draft goes. That takes a few dictionary entries a token where
a tree of depth D takes D nodes.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from tpspec.draft.protocol import Needs
from tpspec.draft.record import Record
from tpspec.tokens import ROOT, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.draft.protocol import Ask, Taps
    from tpspec.tokens import Verdict

GRAMS = (1, 2, 4, 8)  # suffixes that are looked up; how far a place agrees beyond, is counted
MOST_PLACES = 32  # of a suffix, the latest
END = -1  # of an earlier answer: no token

# A guess is of a kind: whether the text itself makes it or only earlier answers do, tokens that agreed before it, and
# its share of the places, or that there is but one. BELIEF: how often such guesses were right about what two small
# models said to chat, code, maths, edits and translations; a sequence's own record corrects it soon.
AGREED = (2, 4, 8)
SHARES = (0.2, 0.5, 0.9)
ALONE = len(SHARES) + 1
BELIEF_WEIGHT = 8.0
BELIEF = (
    *(0.11, 0.24, 0.29, 0.63, 0.41),
    *(0.30, 0.42, 0.49, 0.84, 0.66),
    *(0.23, 0.43, 0.54, 0.90, 0.79),
    *(0.23, 0.43, 0.58, 0.95, 0.91),
    *(0.04, 0.11, 0.25, 0.46, 0.21),
    *(0.04, 0.14, 0.36, 0.81, 0.33),
    *(0.08, 0.18, 0.36, 0.85, 0.62),
    *(0.08, 0.22, 0.40, 0.85, 0.69),
)


class Suffix:
    """Proposes the likeliest of what followed the latest places where the end of the text stood before.

    branches: guesses after each token; 1 makes chains. max_depth: tokens that may agree; more tell no more. min_odds:
    percent; a token less likely to be accepted than that, with all before it, is not proposed. kept_tokens: of the
    answers of other sequences that have ended, half to all of which are looked through; with 0 no user can learn, from
    how fast an answer comes, what another was told. coupled: whether the rule emits what noise draws, whatever is
    proposed. Else nothing is proposed that an earlier answer drew by the noise that is to judge it, of the same seed at
    the same position: when all is asked for a third time, likely tokens would come too often.

    A place counts twice as much for each further token that agrees there. A sequence keeps a record of what came true.
    """

    needs = Needs(gives_odds=True)

    def __init__(
        self,
        branches: int = 1,
        *,
        max_depth: int = 16,
        min_odds: int = 10,
        kept_tokens: int = 32_768,
        coupled: bool = True,
    ) -> None:
        self._branches, self._max_depth, self._min_odds = branches, max_depth, min_odds / 100
        self._coupled = coupled
        self._texts: dict[int, _Text] = {}
        self._past = _Past(kept_tokens)

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        return [self._look_up(ask) for ask in asks]

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        """The next ask holds the committed tokens; nothing to learn from their verdicts."""

    def forget(self, seq: int) -> None:
        """A sequence has ended: what it was told may help others."""
        text = self._texts.pop(seq, None)
        if text is not None:
            self._past.add(text.own.tokens[text.num_prompt :], text.seed, text.num_prompt)

    def _look_up(self, ask: Ask) -> TokenTree:
        text = self._texts.setdefault(ask.seq, _Text(ask.num_prompt, ask.sampling.seed))
        text.become(ask.tokens)
        futures = _Futures(text, self._branches)
        end, is_free = ask.tokens[-self._max_depth :], self._coupled or ask.sampling.temperature == 0
        noise = None if is_free else (ask.sampling.seed, len(ask.tokens))
        for said in (text.own, *self._past.halves):
            found = said.find(end).items()
            futures.places += [
                _Place(said, at, agreed) for at, agreed in found if noise is None or said.noise.get(at) != noise
            ]
        tree = futures.likeliest(ask.num_tokens, self._min_odds)
        text.guessed = futures.weighed
        return tree


class _Said:
    """Tokens, and for each short run of them the position after its latest place, and those before that.

    noise: of the tokens of answers that have ended, the seed and the position by which each was drawn.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.noise: dict[int, tuple[int, int]] = {}
        self._latest: dict[tuple[int, ...], int] = {}
        self._before: list[tuple[int, ...]] = []  # by position, for each size of run; 0: none

    def push(self, token: int) -> None:
        at = len(self.tokens)
        grams = [tuple(self.tokens[at - size :]) for size in GRAMS if size <= at]
        self._before.append(tuple([self._latest.get(gram, 0) for gram in grams]))
        self._latest.update(dict.fromkeys(grams, at))
        self.tokens.append(token)

    def find(self, end: Sequence[int]) -> dict[int, int]:
        """Positions after the latest places of `end`, as much as is found of it; and how many tokens agree there."""
        found: dict[int, int] = {}
        for which in reversed(range(len(GRAMS))):
            size = GRAMS[which]
            at = self._latest.get(tuple(end[-size:]), 0) if size <= len(end) else 0
            while at and len(found) < MOST_PLACES:
                if at not in found:
                    found[at] = self._agreed(at, end, size)
                at = self._before[at][which]
        return found

    def _agreed(self, at: int, end: Sequence[int], known: int) -> int:
        most = min(at, len(end))
        return next((n for n in range(known, most) if self.tokens[at - n - 1] != end[-n - 1]), most)


class _Past:
    """Answers of sequences that have ended, in two halves: when the younger is full, the elder goes."""

    def __init__(self, kept: int) -> None:
        self._half = kept // 2
        self.halves = [_Said()] if self._half else []

    def add(self, answer: Sequence[int], seed: int, start: int) -> None:
        """start: where the answer began in its text."""
        for position, token in enumerate((*answer, END) if self._half else (), start):
            if len(self.halves[0].tokens) == self._half:
                self.halves = [_Said(), self.halves[0]]
            self.halves[0].noise[len(self.halves[0].tokens)] = seed, position
            self.halves[0].push(token)


class _Text:
    """A sequence. guessed: after each path, the tokens that were thought of and their kinds."""

    def __init__(self, num_prompt: int, seed: int) -> None:
        self.own, self.num_prompt, self.seed = _Said(), num_prompt, seed
        self.record = Record(BELIEF, BELIEF_WEIGHT)
        self.guessed: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def become(self, tokens: Sequence[int]) -> None:
        path: tuple[int, ...] = ()
        for token in tokens[len(self.own.tokens) :]:
            for said, kind in self.guessed.pop(path, ()):
                self.record.add(kind, right=said == token)
            if self.guessed:
                path = (*path, token)
            self.own.push(token)


class _Place(NamedTuple):
    """Where a text once stood as it does now: the position after it, and how many tokens agree before that."""

    said: _Said
    at: int
    agreed: int


class _Guess(NamedTuple):
    """A token, how likely, and the places that say so."""

    odds: float
    share: float
    token: int
    kind: int
    places: list[_Place]


class _Futures:
    """What may follow a text, as far as its places tell."""

    def __init__(self, text: _Text, branches: int) -> None:
        self.places: list[_Place] = []
        self.weighed: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._text, self._branches = text, branches

    def likeliest(self, most: int, floor: float) -> TokenTree:
        """The tree of at most `most` tokens, best first, none less likely than `floor`."""
        tokens: list[int] = []
        parents: list[int] = []
        odds: list[float] = []
        number = count()  # of the equally likely the one nearest to the root
        open: list[tuple[float, int, int, tuple[int, ...], _Guess]] = []
        path: tuple[int, ...] = ()
        parent, path_odds, places = ROOT, 1.0, self.places
        while len(tokens) < most:
            for guess in self._after(path, places):
                if (p := path_odds * guess.odds) >= floor:
                    heappush(open, (-p, next(number), parent, (*path, guess.token), guess))
            if not open:
                break
            minus_p, _, above, path, guess = heappop(open)
            parent, path_odds, places = len(tokens), -minus_p, guess.places
            tokens.append(guess.token)
            parents.append(above)
            odds.append(guess.odds)
        return TokenTree(tuple(tokens), tuple(parents), None, tuple(odds))

    def _after(self, path: tuple[int, ...], places: Sequence[_Place]) -> list[_Guess]:
        """The likeliest tokens after a path that `places` share."""
        by_token: dict[int, list[_Place]] = defaultdict(list)
        for place in places:
            token = self._token(place, path)
            if token != END:
                by_token[token].append(place)
        votes = {token: sum(1 << place.agreed for place in shared) for token, shared in by_token.items()}
        total, is_alone = sum(votes.values()), sum(map(len, by_token.values())) == 1
        guesses = [
            self._guess(token, votes[token] / total, len(path), shared, is_alone=is_alone)
            for token, shared in by_token.items()
        ]
        guesses.sort(key=lambda guess: (-guess.odds, -guess.share, guess.token))
        self.weighed[path] = [(guess.token, guess.kind) for guess in guesses[: self._branches]]
        return guesses[: self._branches]

    def _token(self, place: _Place, path: tuple[int, ...]) -> int:
        """What stands there after the path. Past the end of the text stands the path itself: so a period goes on."""
        at, known = place.at + len(path), len(place.said.tokens)
        if at < known:
            return place.said.tokens[at]
        return path[at - known] if place.said is self._text.own else END

    def _guess(self, token: int, share: float, depth: int, places: list[_Place], *, is_alone: bool) -> _Guess:
        agreed = bisect(AGREED, max(place.agreed for place in places) + depth)
        own = any(place.said is self._text.own for place in places)
        row = agreed if own else agreed + len(AGREED) + 1
        kind = row * (ALONE + 1) + (ALONE if is_alone else bisect(SHARES, share))
        return _Guess(self._text.record.odds(kind), share, token, kind, places)
