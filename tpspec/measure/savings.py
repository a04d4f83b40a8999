"""The run behind `savings`: each prompt plain and speculative, one after the other, on one engine.

The lead's inbox hands in one request at a time and records what it took. Must not know how records are summed (stats)
or shown; touches no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from tpspec.comm.messages import Stats, Stop, Submit
from tpspec.errors import UserError
from tpspec.measure.stats import Drafts, Pair, Record, tally_between
from tpspec.prompts import Prompt
from tpspec.request import Request

if TYPE_CHECKING:
    from tpspec.comm.messages import ToLead
    from tpspec.request import Delta
    from tpspec.topology.config import Topology

BUILT_IN = {
    "prose": (
        "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
        "Describe an early morning in a small harbour town, in a few sentences.",
    ),
    "code": (
        "Write a Python function that returns the n-th Fibonacci number, with a docstring and two tests.",
        "Write a Python class for a bank account with deposit, withdraw and balance methods.",
    ),
    "edit": (
        "Repeat this text exactly, but write every number as a word:\nThe crew of 3 sailed 40 miles in 2 days. "
        "On day 1 the crew saw 5 whales. On day 2 the crew saw 7 dolphins and 1 turtle.",
        "Copy this function and rename x to value:\n"
        "def clamp(x, low, high):\n    if x < low:\n        return low\n    if x > high:\n        return high\n"
        "    return x\n",
    ),
    "list": (
        "List the planets of the solar system, one per line, each with one fact.",
        "Name ten things to pack for a week of hiking, as a numbered list.",
    ),
    "qa": (
        "Why is the sky blue? Answer in two sentences.",
        "What is the difference between a virus and a bacterium?",
    ),
}


def built_in_prompts(*, chat: bool) -> list[Prompt]:
    """What is measured when no file is given. chat: whether the model has a chat template."""
    return [Prompt(text, chat, category) for category, texts in BUILT_IN.items() for text in texts]


def refuse_plain_topology(topology: Topology) -> None:
    if topology.draft.source == "none":
        raise UserError(
            "draft.source is none: there is nothing to compare plain decoding with; name a source, for example "
            "--set draft.source=ngram"
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to decode: its ids, and how many tokens the answer may have."""

    category: str
    ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """index: of the prompt; None is the warm-up, which is not recorded."""

    index: int | None
    speculative: bool


def turns(num_prompts: int) -> list[Turn]:
    """A warm-up pair, then pairs whose order alternates, so that a drift of the machine favours neither way."""
    pairs = [[Turn(index, False), Turn(index, True)][:: 1 if index % 2 == 0 else -1] for index in range(num_prompts)]
    return [Turn(None, False), Turn(None, True), *(turn for pair in pairs for turn in pair)]


@dataclass(slots=True)
class Attempt:
    """One turn while it runs. at_first: what had been counted when the first token came."""

    begun: float
    first_at: float | None = None
    at_first: Stats = field(default_factory=Stats)
    ids: list[int] = field(default_factory=list)
    rounds: list[Drafts] = field(default_factory=list)

    def add(self, delta: Delta, stats: Stats) -> None:
        self.ids += delta.tokens
        if self.first_at is None:
            self.first_at, self.at_first = perf_counter(), stats
        else:
            self.rounds.append((delta.drafted, delta.accepted))

    def record(self, category: str, stats: Stats) -> Record:
        """To be called as soon as the last token is there."""
        assert self.first_at is not None
        return Record(
            category=category,
            ids=tuple(self.ids),
            ttft=self.first_at - self.begun,
            seconds=perf_counter() - self.first_at if self.rounds else 0.0,
            rounds=tuple(self.rounds),
            tallies=tally_between(self.at_first.collectives, stats.collectives),
            forward_s=stats.forward_s - self.at_first.forward_s,
            drafting_s=stats.drafting_s - self.at_first.drafting_s,
        )


class Pairwise:
    """The lead's inbox: the next turn when the last has ended. done: called after each with how many have ended."""

    def __init__(self, prompts: Sequence[Task], stop_ids: frozenset[int], done: Callable[[int], None]) -> None:
        self._prompts, self._stop_ids, self._done = prompts, stop_ids, done
        self._turns = turns(len(prompts))
        self._next = 0
        self._attempt = Attempt(0.0)
        self._records: dict[Turn, Record] = {}

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        if not wait:
            return []
        if self._next == len(self._turns):
            return [Stop()]
        request = self._request(self._next)
        self._next += 1
        self._attempt = Attempt(perf_counter())
        return [Submit(request)]

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        for delta in deltas:
            if delta.error is not None:
                raise UserError(delta.error)
            self._attempt.add(delta, stats)
            if delta.finish is not None:
                self._end(stats)

    def pairs(self) -> list[Pair]:
        """One for each prompt, in their order, when all turns have ended."""
        indices = range(len(self._prompts))
        return [Pair(self._records[Turn(index, False)], self._records[Turn(index, True)]) for index in indices]

    def _end(self, stats: Stats) -> None:
        turn = self._turns[self._next - 1]
        self._records[turn] = self._attempt.record(self._prompts[turn.index or 0].category, stats)
        self._done(self._next)

    def _request(self, number: int) -> Request:
        turn = self._turns[number]
        prompt = self._prompts[turn.index or 0]
        drafts = None if turn.speculative else 0
        return Request(number, prompt.ids, prompt.max_tokens, stop_ids=self._stop_ids, num_drafts=drafts)
