"""What a drafter that runs beside the rounds does: hears outcomes, drafts, answers; between two messages it reads one
forward ahead.

In a process of its own, started by guard.py, or in a thread of a shard's (beside.py): these start it again when it
dies, and then it knows nothing, says so, and is told. Must not know the target's tensors, and takes part in no
collective.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, TextIO

import msgspec
import torch

from tpspec.comm.draft_link import DrafterDraftLink
from tpspec.comm.gap import GapReader, Share
from tpspec.comm.messages import Draft, Drafts, Outcome, Outcomes, Stop
from tpspec.comm.process import is_alive, settle
from tpspec.draft.protocol import Ask, Taps
from tpspec.engine.tapped import tensor_of
from tpspec.errors import UserError
from tpspec.roles.build_drafter import build_ahead, reaching
from tpspec.roles.memory import memory_suffices
from tpspec.topology.config import from_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpspec.comm.draft_link import OutcomeLink
    from tpspec.draft.ahead import Ahead

IDLE_S = 0.5  # how often a drafter without work looks whether the lead is still there
READY = "ready"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Orders(msgspec.Struct, frozen=True):
    """What a drafter is told: a process on its standard input."""

    topology: str
    endpoint: str
    lead_pid: int
    device: str
    is_filler: bool  # runs only where a core has nothing else to do
    gap: str = ""  # path of the sums of the rank beside it, where there are some


class Drafter:
    """One drafter at its link."""

    def __init__(self, ahead: Ahead, link: OutcomeLink, gap: GapReader | None = None) -> None:
        self._ahead, self._link, self._gap = ahead, link, gap

    def run(self, is_wanted: Callable[[], bool]) -> int:
        """Until told to stop, or until nobody wants it, as its lead is gone; the exit code."""
        busy = False
        while True:
            outcomes: list[Outcomes] = []
            for message in self._link.receive(0.0 if busy else IDLE_S):
                if isinstance(message, Stop):
                    return message.code
                outcomes.append(message)
            self.hear(*outcomes)
            busy = self.work()
            if not is_wanted():
                return 0

    def hear(self, *messages: Outcomes) -> None:
        """Takes in what has become of the sequences, and answers what it has foreseen.

        Messages that have queued up are one step: only the last ask of a sequence is still of use to anybody.
        """
        asks: dict[int, Ask] = {}
        answered: set[int] = set()
        lost: set[int] = set()
        for message in messages:
            for seq in message.gone:
                self._ahead.forget(seq)
                asks.pop(seq, None)
                lost.discard(seq)
            for outcome in message.outcomes:
                self._follow(outcome, asks, lost)
                answered.discard(outcome.seq)
                if outcome.answered:
                    answered.add(outcome.seq)
            self._ahead.policy = reaching(self._ahead.policy, message.reach)
        for ask in asks.values():
            self._ahead.hear(ask, answered=ask.seq in answered)
        self._answer(sorted(lost))

    def work(self) -> bool:
        """One forward, and the answers that it completes. False when there is nothing to read."""
        busy = self._ahead.work()
        self._answer([])
        return busy

    def _follow(self, outcome: Outcome, asks: dict[int, Ask], lost: set[int]) -> None:
        """An outcome that does not continue what is known makes its sequence a lost one, until one comes that does."""
        seq = outcome.seq
        known = asks[seq].tokens if seq in asks else self._ahead.text(seq)
        if outcome.base > len(known):
            lost.add(seq)
            return
        lost.discard(seq)
        new = outcome.tokens[len(known) - outcome.base :]
        if outcome.taps is not None:
            self._ahead.observe(Taps({seq: (outcome.taps.first, tensor_of(outcome.taps))}))
        if new:  # else it has been heard before
            text = [*known, *new]
            asks[seq] = Ask(seq, text, outcome.num_prompt, outcome.num_tokens, outcome.sampling, outcome.costs)

    def _answer(self, lost: list[int]) -> None:
        answers, branches = self._ahead.answers(), self._ahead.branches()
        if answers or lost or branches:
            drafts = tuple(Draft(answer.seq, answer.base, answer.tree, answer.foreseen) for answer in answers)
            share = self._gap.share() if self._gap is not None else Share()
            counters = self._ahead.num_read, self._ahead.num_dropped, *share
            self._link.send(Drafts(drafts, tuple(lost), tuple(branches), *counters))


def draft(orders: Orders, ready: Callable[[], None], is_wanted: Callable[[], bool]) -> int:
    """One drafter, from its weights to its end; the exit code. ready: called when it can answer."""
    with closing(DrafterDraftLink(orders.endpoint)) as link:
        with memory_suffices():
            ahead = build_ahead(from_json(orders.topology), torch.device(orders.device))
        try:
            gap = GapReader(orders.gap) if orders.gap else None
        except FileNotFoundError:  # it is the shard's, which is gone, and its world with it
            return 0
        ready()
        return Drafter(ahead, link, gap).run(is_wanted)


def main() -> int:
    """Says to its guard that it is ready, or what is wrong; nothing where that is gone, and its world with it."""
    end_with_parent()
    try:
        orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    except msgspec.DecodeError:  # cut short where its guard was
        return 0
    with suppress(BrokenPipeError), own_stdout() as guard:

        def ready() -> None:
            guard.write(f"{READY}\n")
            guard.flush()
            settle()

        if torch.device(orders.device).type == "cuda":
            torch.cuda.set_device(orders.device)
        try:
            return draft(orders, ready, partial(is_alive, orders.lead_pid))
        except UserError as error:
            guard.write(f"{error.exit_code} {error}\n")
            return error.exit_code
    return 0


def end_with_parent() -> None:
    """Killed with it, even while stopped. Where the OS does not offer that, looking after the lead has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def own_stdout() -> TextIO:
    """Standard output for the caller alone; what others print goes to standard error."""
    alone = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return alone


if __name__ == "__main__":
    sys.exit(main())
