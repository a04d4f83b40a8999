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
from tpspec.measure.calibrate import Timed
from tpspec.measure.stats import Drafts, Pair, Record, elsewhere_between, tally_between
from tpspec.measure.trace import Mark, Recording, Round, guesses_of, round_between
from tpspec.prompts import Prompt
from tpspec.request import Request, Sampling

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
    """One prompt to decode: its ids, how many tokens the answer may have, and how they are drawn."""

    category: str
    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)


def recordings(tasks: Sequence[Task], pairs: Sequence[Pair], asked: int) -> list[Recording]:
    """What `simulate` may replay. asked: draft tokens, in every speculative round."""
    return [_recording(task, pair, asked) for task, pair in zip(tasks, pairs, strict=True)]


def _recording(task: Task, pair: Pair, asked: int) -> Recording:
    speculative = pair.speculative
    return Recording(
        category=task.category,
        prompt_tokens=len(task.ids),
        guesses=guesses_of(speculative.timed, len(speculative.ids), task.max_tokens, asked),
        max_tokens=task.max_tokens,
        draft_tokens=asked,
        plain=pair.plain.timed,
        speculative=speculative.timed,
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """index: of the prompt; None is the warm-up, which is not recorded."""

    index: int | None
    speculative: bool


def turns(num_prompts: int) -> list[Turn]:
    """A warm-up pair, then pairs whose order alternates, so that a drift of the machine favours neither way."""
    pairs = [[Turn(index, False), Turn(index, True)][:: 1 if index % 2 == 0 else -1] for index in range(num_prompts)]
    return [Turn(None, False), Turn(None, True), *(turn for pair in pairs for turn in pair)]


def schedule(num_prompts: int, trials: Sequence[Request]) -> list[Turn | Request]:
    """The turns, with the trials spread evenly between the pairs, so that both meet the machine in the same moods."""
    warm_up, pairs = turns(num_prompts)[:2], turns(num_prompts)[2:]
    made: list[Turn | Request] = [*warm_up]
    for index in range(num_prompts):
        first, after = (len(trials) * i // num_prompts for i in (index, index + 1))
        made += [*trials[first:after], *pairs[2 * index : 2 * index + 2]]
    return made


@dataclass(slots=True)
class Attempt:
    """One turn while it runs. at_first: what had been counted when the first token came."""

    begun: float
    first_at: float | None = None
    at_first: Stats = field(default_factory=Stats)
    ids: list[int] = field(default_factory=list)
    rounds: list[Drafts] = field(default_factory=list)
    timed: list[Round] = field(default_factory=list)
    mark: Mark = field(default_factory=lambda: Mark(0.0, Stats()))

    def add(self, delta: Delta, stats: Stats) -> None:
        self.ids += delta.tokens
        before, self.mark = self.mark, Mark(perf_counter(), stats)
        if self.first_at is None:
            self.first_at, self.at_first = self.mark
        else:
            self.rounds.append((delta.drafted, delta.accepted))
            self.timed.append(round_between(before, self.mark, [delta]))

    def record(self, task: Task, stats: Stats) -> Record:
        """To be called as soon as the last token is there."""
        assert self.first_at is not None
        return Record(
            category=task.category,
            ids=tuple(self.ids),
            ttft=self.first_at - self.begun,
            seconds=perf_counter() - self.first_at if self.rounds else 0.0,
            rounds=tuple(self.rounds),
            tallies=tally_between(self.at_first.collectives, stats.collectives),
            forward_s=stats.forward_s - self.at_first.forward_s,
            drafting_s=stats.drafting_s - self.at_first.drafting_s,
            num_prompt=len(task.ids),
            timed=tuple(self.timed),
            elsewhere=elsewhere_between(self.at_first.elsewhere, stats.elsewhere),
        )


class Pairwise:
    """The lead's inbox: the next turn when the last has ended. done: called after each with how many have ended."""

    def __init__(self, tasks: Sequence[Task], trials: Sequence[Request], stop_ids: frozenset[int]) -> None:
        self.timed = Timed()
        self.done: Callable[[int], None] = lambda _: None
        self._tasks, self._stop_ids = tasks, stop_ids
        self._turns = schedule(len(tasks), trials)
        self._next = 0
        self._attempt = Attempt(0.0)
        self._records: dict[Turn, Record] = {}

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        if not wait:
            return []
        if self._next == len(self._turns):
            return [Stop()]
        turn = self._turns[self._next]
        self._next += 1
        if isinstance(turn, Request):
            self.timed.begin(turn)
            return [Submit(turn)]
        self._attempt = Attempt(perf_counter())
        return [Submit(self._request(turn))]

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        turn = self._turns[self._next - 1]
        for delta in deltas:
            if delta.error is not None:
                raise UserError(delta.error)
            if isinstance(turn, Request):
                self.timed.add(delta, stats)
            else:
                self._add(turn, delta, stats)
            if delta.finish is not None:
                self.done(self._next)

    def pairs(self) -> list[Pair]:
        """One for each prompt, in their order, when all turns have ended."""
        indices = range(len(self._tasks))
        return [Pair(self._records[Turn(index, False)], self._records[Turn(index, True)]) for index in indices]

    def _add(self, turn: Turn, delta: Delta, stats: Stats) -> None:
        self._attempt.add(delta, stats)
        if delta.finish is not None:
            self._records[turn] = self._attempt.record(self._tasks[turn.index or 0], stats)

    def _request(self, turn: Turn) -> Request:
        task = self._tasks[turn.index or 0]
        drafts = None if turn.speculative else 0
        return Request(self._next, task.ids, task.max_tokens, task.sampling, stop_ids=self._stop_ids, num_drafts=drafts)
