"""What a drafter's process does: hears outcomes, drafts, answers; between two messages it reads one forward ahead.

Started by guard.py, which starts it again when it dies: then it knows nothing, says so, and is told. Must not know the
target's tensors, and takes part in no collective.
"""

from __future__ import annotations

import os
import sys
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import torch

from tpspec.comm.draft_link import DrafterDraftLink, is_alive
from tpspec.comm.messages import Draft, Drafts, Outcome, Outcomes, Stop
from tpspec.draft.protocol import Ask
from tpspec.errors import UserError
from tpspec.roles.build_drafter import build_ahead
from tpspec.topology.config import from_json

if TYPE_CHECKING:
    from tpspec.comm.draft_link import OutcomeLink
    from tpspec.draft.ahead import Ahead

IDLE_S = 0.5  # how often a drafter without work looks whether the lead is still there
READY = "ready"


class Orders(msgspec.Struct, frozen=True):
    """What a drafter's process is told on its standard input."""

    topology: str
    endpoint: str
    lead_pid: int
    device: str
    is_filler: bool  # runs only where a core has nothing else to do


class Drafter:
    """One drafter at its link."""

    def __init__(self, ahead: Ahead, link: OutcomeLink) -> None:
        self._ahead, self._link = ahead, link
        self._busy_s = 0.0

    def run(self, lead_pid: int) -> int:
        """Until told to stop, or until the lead is gone; the exit code."""
        busy = False
        while True:
            for message in self._link.receive(0.0 if busy else IDLE_S):
                if isinstance(message, Stop):
                    return message.code
                self.hear(message)
            busy = self.work()
            if not busy and not is_alive(lead_pid):
                return 0

    def hear(self, message: Outcomes) -> None:
        """Takes in what has become of the sequences, and answers what it has foreseen."""
        for seq in message.gone:
            self._ahead.forget(seq)
        lost = [outcome.seq for outcome in message.outcomes if not self._follow(outcome)]
        self._answer(lost)

    def work(self) -> bool:
        """One forward, and the answers that it completes. False when there is nothing to read."""
        begin = perf_counter()
        busy = self._ahead.work()
        self._busy_s += perf_counter() - begin
        self._answer([])
        return busy

    def _follow(self, outcome: Outcome) -> bool:
        """False for an outcome that does not continue what is known."""
        known = self._ahead.text(outcome.seq)
        if outcome.base > len(known):
            return False
        new = outcome.tokens[len(known) - outcome.base :]
        if new:  # else it has been heard before
            text = [*known, *new]
            ask = Ask(outcome.seq, text, outcome.num_prompt, outcome.num_tokens, outcome.sampling, outcome.costs)
            self._ahead.hear(ask)
        return True

    def _answer(self, lost: list[int]) -> None:
        answers = self._ahead.answers()
        if answers or lost:
            drafts = tuple(Draft(answer.seq, answer.base, answer.tree, answer.foreseen) for answer in answers)
            counters = self._ahead.num_read, self._ahead.num_dropped, self._busy_s
            self._link.send(Drafts(drafts, tuple(lost), *counters))


def main() -> int:
    """Says on standard output, once, that it is ready or what is wrong."""
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    if orders.is_filler:
        step_back()
    link = DrafterDraftLink(orders.endpoint)
    try:
        ahead = build_ahead(from_json(orders.topology), torch.device(orders.device))
        say(READY)
        return Drafter(ahead, link).run(orders.lead_pid)
    except UserError as error:
        say(f"{error.exit_code} {error}")
        return error.exit_code
    finally:
        link.close()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def step_back() -> None:
    """The lowest class of the scheduler: this process runs where nobody else wants to."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


if __name__ == "__main__":
    sys.exit(main())
