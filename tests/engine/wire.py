"""The link between a lead and a drafter inside a test, with faults on the way.

Time is virtual: a lead that waits lets the drafter work, and each forward of the drafter takes a while.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tpspec.comm.emulate import VirtualClock
from tpspec.comm.messages import Drafts, Outcomes, Stop, ToDrafter
from tpspec.roles.drafter import Drafter

FORWARD_S = 0.004
MOST_QUEUED = 5  # by a stopped drafter


@dataclass(frozen=True)
class Faults:
    """Chances of a message to be lost, to come twice, to be late (behind later ones); and of a drafter that stops."""

    lost: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    stops: float = 0.0


@dataclass
class Wire:
    """Both ends. make: a new drafter at the other end, the first time and after each death."""

    make: Callable[[Wire], Drafter]
    faults: Faults = Faults()
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    clock: VirtualClock = field(default_factory=VirtualClock)
    num_messages: int = 0
    num_bytes: int = 0
    answers: list[Drafts] = field(default_factory=list)
    alive: bool = True
    stopped: bool = False
    queue: list[Outcomes] = field(default_factory=list)  # what a stopped drafter has not read

    def __post_init__(self) -> None:
        self.drafter = self.make(self)

    # The lead's end

    def send(self, message: ToDrafter) -> bool:
        assert not isinstance(message, Stop)
        self.num_messages += 1
        if not self.alive or len(self.queue) == MOST_QUEUED:
            return False
        self.queue += self._spoilt(message)
        self._read()
        return True

    def receive(self, timeout_s: float) -> list[Drafts]:
        until = self.clock.now() + timeout_s
        while self.clock.now() < until and not self.answers:
            self.work(1)
        arrived, self.answers = self.answers, []
        return arrived

    def close(self) -> None: ...

    # The drafter's time

    def work(self, num_forwards: int) -> None:
        for _ in range(num_forwards):
            self.clock.advance(FORWARD_S)
            if self.alive and not self.stopped and self.chance.random() >= self.faults.stops:
                self.drafter.work()

    def kill(self) -> None:
        self.alive, self.stopped, self.queue = False, False, []

    def restart(self) -> None:
        self.kill()
        self.drafter, self.alive, self.answers = self.make(self), True, []

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        self._read()

    def _read(self) -> None:
        if self.alive and not self.stopped and self.queue:
            heard, self.queue = self.queue, []
            self.drafter.hear(*heard)

    def _spoilt(self, message: Outcomes) -> list[Outcomes]:
        if self.chance.random() < self.faults.lost:
            return []
        return [message] * (2 if self.chance.random() < self.faults.twice else 1)

    def answer(self, message: Drafts) -> None:
        if self.chance.random() < self.faults.lost:
            return
        place = self.chance.randint(0, len(self.answers)) if self.chance.random() < self.faults.late else 0
        self.answers[len(self.answers) - place :] = [message] * (2 if self.chance.random() < self.faults.twice else 1)


@dataclass
class DrafterEnd:
    """The drafter's end of a wire."""

    wire: Wire

    def send(self, message: Drafts) -> None:
        self.wire.answer(message)

    def receive(self, timeout_s: float) -> list[ToDrafter]:
        return []

    def close(self) -> None: ...
