"""The run behind `savings --sources`: each prompt plain and with every source in turn, on one target.

Every rank goes through the same turns: it exchanges where drafts come from, then runs rounds until the lead, whose
request has ended, says stop. Must not know how a source is made, nor how records are summed (stats) or shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from tpspec.comm.messages import Stop, Submit
from tpspec.errors import UserError, WorldFailure
from tpspec.measure.contenders import PLAIN, Contender, LeftOut
from tpspec.measure.savings import Attempt
from tpspec.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpspec.comm.messages import Stats, ToLead
    from tpspec.engine.engine import Supply
    from tpspec.measure.savings import Task
    from tpspec.measure.stats import Record
    from tpspec.request import Delta
    from tpspec.roles.seat import Seat


class Turn(NamedTuple):
    """prompt: its number; None is the warm-up, which is not recorded. way: 0 is plain, then the sources."""

    prompt: int | None
    way: int


def turns(num_prompts: int, num_ways: int) -> list[Turn]:
    """A warm-up of each way, then prompt by prompt, each begun by another way: a drift of the machine favours none."""
    ways = range(num_ways)
    order = [Turn(prompt, (prompt + way) % num_ways) for prompt in range(num_prompts) for way in ways]
    return [*(Turn(None, way) for way in ways), *order]


class One:
    """The lead's inbox for one turn: its request, and when that has ended the word to stop."""

    def __init__(self, request: Request, ended: Callable[[Attempt, Stats], None]) -> None:
        self._messages: list[ToLead] = [Submit(request), Stop()]
        self._ended = ended
        self._attempt = Attempt(0.0)

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        if not wait:
            return []
        self._attempt = Attempt(perf_counter())
        return [self._messages.pop(0)]

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        for delta in deltas:
            if delta.error is not None:
                raise UserError(delta.error)
            self._attempt.add(delta, stats)
            if delta.finish is not None:
                self._ended(self._attempt, stats)


class Recorder:
    """The lead's: a request for each turn, and what it took. done: called after each with how many have ended."""

    def __init__(self, tasks: Sequence[Task], stop_ids: frozenset[int]) -> None:
        self.done: Callable[[int], None] = lambda _: None
        self._tasks, self._stop_ids = tasks, stop_ids
        # No text that is measured may have been seen before by a source that remembers: the first prompt backwards.
        self._warm_up = replace(tasks[0], ids=tasks[0].ids[::-1])
        self._records: dict[Turn, Record] = {}
        self._num_turns = 0

    def inbox(self, turn: Turn) -> One:
        self._num_turns += 1
        task = self._warm_up if turn.prompt is None else self._tasks[turn.prompt]
        stop_ids = frozenset[int]() if turn.prompt is None else self._stop_ids

        def ended(attempt: Attempt, stats: Stats) -> None:
            self._records[turn] = attempt.record(task, stats)
            self.done(self._num_turns)

        return One(Request(self._num_turns, task.ids, task.max_tokens, task.sampling, stop_ids=stop_ids), ended)

    def records(self, way: int) -> list[Record]:
        """One for each prompt, in their order, when all turns have ended."""
        return [self._records[Turn(prompt, way)] for prompt in range(len(self._tasks))]


def made(seat: Seat, wanted: Iterable[Contender | LeftOut]) -> tuple[list[Supply | None], list[Contender | LeftOut]]:
    """Where the ways draw from, plain first, and what became of each contender. Collective."""
    supplies, outcomes = [seat.supply(seat.topology.drafting_from(PLAIN, None))], list[Contender | LeftOut]()
    for one in wanted:
        try:
            if isinstance(one, Contender):
                supplies.append(seat.own if one.own else seat.supply(one.topology))
            outcomes.append(one)
        except WorldFailure:
            raise
        except UserError as error:
            outcomes.append(LeftOut(one.label, str(error)))
    return supplies, outcomes


def run(seat: Seat, supplies: Sequence[Supply | None], num_prompts: int, recorder: Recorder | None) -> int:
    """The exit code. recorder: the lead's. Every rank calls it; one without a shard only waits."""
    if not seat.holds_shard:
        return seat.follow()
    for turn in turns(num_prompts, len(supplies)):
        supply = supplies[turn.way]
        assert supply is not None
        seat.engine.draw_from(supply)
        seat.engine.scheduler.reuse.is_on = False  # every way has its prompts to read
        code = seat.follow() if recorder is None else seat.lead(recorder.inbox(turn))
        if code:
            return code
    return 0
