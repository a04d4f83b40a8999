"""What will happen to a simulated request, known beforehand: its true tokens, and what a drafter would say of them.

Token p of an answer is the id p + 1; what is wrong is 0 or below, and never comes true.
Must not know an engine or a clock.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log

from tpspec.measure.trace import NO, SILENT, YES, Recording, drafts, offers, settled
from tpspec.request import Request
from tpspec.tokens import TokenTree

WRONG = 0
LISTED = 3  # alternatives that `fan_out_odds` speaks of
FAR = 1 << 30  # a rank that nobody offers


@dataclass(frozen=True, slots=True)
class Script:
    """What will happen to one request. guesses: see trace.py. offers: what is drafted at most, by output position."""

    id: int
    num_prompt: int
    guesses: str
    max_tokens: int
    offers: Mapping[int, int] = field(default_factory=dict)

    def request(self, num_drafts: int | None) -> Request:
        """The answer's last token ends it, as a model's own end would. num_drafts None: as many as pay."""
        stops = frozenset({len(self.guesses)})
        prompt = (WRONG,) * self.num_prompt
        return Request(self.id, prompt, self.max_tokens, stop_ids=stops, num_drafts=num_drafts)

    def truth(self, position: int) -> int:
        """The token at an output position."""
        return position + 1

    def offered(self, start: int, num_tokens: int) -> int:
        """How many of num_tokens drafts from output position `start` on there are at most."""
        return min(num_tokens, self.offers.get(start, num_tokens))

    def chain(self, start: int, num_tokens: int) -> TokenTree:
        """What is drafted from output position `start` on; who is wrong once goes on, and stays wrong."""
        num_tokens = self.offered(start, num_tokens)
        ahead = self.guesses[start : start + num_tokens].ljust(num_tokens, NO)
        num_right = len(ahead) - len(ahead.lstrip(YES))
        if ahead[num_right : num_right + 1] == SILENT:
            num_tokens = num_right
        right = [self.truth(start + i) for i in range(num_right)]
        return TokenTree.chain(right + [WRONG] * (num_tokens - num_right))

    def ranks(self, fan_out_odds: float) -> list[int]:
        """At which place a model that lists what may come would list each true token, 0 being its guess.

        fan_out_odds: that it is among the first LISTED alternatives to a wrong guess. Beyond the first F it is with the
        odds (F + 1) ** -r, as outcome caches are modelled.
        """
        draw = random.Random(self.id).random
        return [0 if guess == YES else _rank(1 - draw(), fan_out_odds) for guess in self.guesses]


def scripts_of(recordings: Sequence[Recording], seed: int) -> list[Script]:
    """For any draft length; what is unknown of a recording is drawn."""
    both = zip(recordings, settled(recordings, seed), strict=True)
    return [
        Script(number, one.prompt_tokens, guesses, one.max_tokens, offers(one))
        for number, (one, guesses) in enumerate(both)
    ]


def replays_of(recordings: Sequence[Recording]) -> list[Script]:
    """For draft lengths as they were: rounds draft and accept what the recorded ones did, if more is asked for."""
    return [
        Script(number, one.prompt_tokens, one.guesses, one.max_tokens, drafts(one))
        for number, one in enumerate(recordings)
    ]


def acceptance_of(scripts: Sequence[Script]) -> float:
    """The share of all tokens that are guessed."""
    letters = "".join(script.guesses for script in scripts)
    return letters.count(YES) / len(letters)


def rank_odds(fan_out_odds: float, rank: int) -> float:
    """That alternative `rank`, from 1 on, is the true token where the guess is wrong."""
    if fan_out_odds >= 1:
        return float(rank == 1)
    decay = -log(1 - fan_out_odds) / log(LISTED + 1)
    return float(rank**-decay - (rank + 1) ** -decay)


def _rank(beyond: float, fan_out_odds: float) -> int:
    """The first place beyond which it is with odds of at most `beyond`, above 0."""
    if not 0 < fan_out_odds < 1:
        return 1 if fan_out_odds else FAR
    exponent = log(LISTED + 1) / log(1 - fan_out_odds)
    place: float = beyond**exponent
    return max(1, ceil(min(place, FAR)) - 1)
