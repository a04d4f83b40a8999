"""Simulated drafting: beside the target at no more than its cost, or the real drafter's logic in a process of its own.

The process lives in virtual time that is known only up to the lead's own: a link lets it live on, at the speed that its
card has for it. Must not know what the target does, where costs come from or how a result is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from sys import maxsize
from typing import TYPE_CHECKING

import msgspec
import torch

from tpspec.comm.emulate import VirtualClock
from tpspec.comm.messages import Outcomes
from tpspec.draft.ahead import Ahead, Policy
from tpspec.draft.protocol import Needs, Offer
from tpspec.measure.script import acceptance_of, rank_odds
from tpspec.roles.drafter import Drafter
from tpspec.roles.fit import draft_pool

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.comm.messages import Drafts, Outcome, ToDrafter
    from tpspec.draft.protocol import Ask, Place, Run, Taps
    from tpspec.measure.script import Script
    from tpspec.measure.timeline import Timeline
    from tpspec.model.batch import Span
    from tpspec.tokens import TokenTree, Verdict
    from tpspec.topology.config import Topology
    from tpspec.topology.cost import StepCost

DRAFTER, WAITS, OUTCOMES = "drafter", "waits", "outcomes"
READ_PROMPT, DRAFT, DRAFT_AHEAD = "read prompt", "draft", "draft ahead"


class ScriptedDrafter:
    """A draft source beside the target, whose time passes on the target's clock."""

    needs = Needs()

    def __init__(
        self, cost: StepCost | None, scripts: Mapping[int, Script], clock: VirtualClock, timeline: Timeline
    ) -> None:
        self._clock = clock
        self._cost, self._scripts, self._timeline = cost, scripts, timeline

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        trees = [self._tree(ask) for ask in asks]
        self._timeline.spend(self._clock, DRAFTER, DRAFT, self._seconds(trees), tokens=sum(map(len, trees)))
        return trees

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        return

    def forget(self, seq: int) -> None:
        return

    def _tree(self, ask: Ask) -> TokenTree:
        return self._scripts[ask.seq].chain(len(ask.tokens) - ask.num_prompt, ask.num_tokens)

    def _seconds(self, trees: Sequence[TokenTree]) -> float:
        """A step for each depth, over the sequences that go so deep."""
        if self._cost is None:
            return 0.0
        deepest = max(map(len, trees), default=0)
        return sum(self._cost.seconds(sum(len(tree) > depth for tree in trees)) for depth in range(deepest))


class Guesses:
    """A source that says what the scripts say it would: below a wrong token everything is wrong.

    Its odds are what comes true on average; it does not know where it is right.
    """

    needs = Needs(own_model=True)

    def __init__(self, scripts: Sequence[Script], fan_out_odds: float) -> None:
        self._scripts = {script.id: script for script in scripts}
        self._ranks = {script.id: script.ranks(fan_out_odds) for script in scripts}
        self._right, self._fan_out_odds = acceptance_of(scripts), fan_out_odds

    def extend(self, spans: Sequence[Span], places: Sequence[Place], run: Run) -> list[Offer]:
        run(spans)
        return [self._offer(place) for place in places]

    def _offer(self, place: Place) -> Offer:
        rank = self._rank(place)
        position = place.draw.position - place.draw.num_prompt
        truth = self._scripts[place.seq].truth(position)
        tokens = tuple(truth if i == rank else -i for i in range(place.width))
        wrong = [(1 - self._right) * rank_odds(self._fan_out_odds, i) for i in range(1, place.width)]
        return Offer(tokens, (self._right, *wrong))

    def _rank(self, place: Place) -> int | None:
        """Of the true next token; None where the text is not the true one, or over."""
        script, draw = self._scripts[place.seq], place.draw
        first = len(draw.context) - draw.num_prompt
        is_true = all(token == script.truth(first + i) for i, token in enumerate(draw.path))
        ranks, position = self._ranks[script.id], first + len(draw.path)
        return ranks[position] if is_true and position < len(ranks) else None


class SimulatedRun:
    """A draft model that only takes time. seconds: that it is still to take; speed: of its card, for the drafter.

    clock: as the drafter sees it, which takes a forward to be over when it returns.
    """

    vocab, max_positions, rereads, seats = maxsize, None, False, None  # of any trace

    def __init__(self, cost: StepCost | None) -> None:
        self.clock, self.seconds, self.speed = VirtualClock(), 0.0, 1.0
        self.num_rows, self.read_text = 0, False
        self._cost = cost

    def __call__(self, spans: Sequence[Span]) -> Tensor:
        self.num_rows = sum(len(span.tokens) for span in spans)
        self.read_text = any(span.start == 0 or not span.num_logits for span in spans)
        self.seconds = self._cost.seconds(self.num_rows) if self._cost else 0.0
        self.clock.advance(self.seconds / (self.speed or 1.0))
        return torch.empty(0, 0)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...
    def observe(self, taps: Taps) -> None: ...
    def can_read(self, seq: int, num_tokens: int) -> bool:
        return True

    def forget(self, seq: int) -> None: ...


class SimulatedProcess:
    """A drafter's process, and its end of the link. sent: when it sent what, as far as nobody has taken it."""

    def __init__(self, topology: Topology, cost: StepCost | None, guesses: Guesses, timeline: Timeline) -> None:
        self.sent: deque[tuple[float, Drafts]] = deque()
        self._run, self._timeline = SimulatedRun(cost), timeline
        ahead = Ahead(guesses, self._run, draft_pool(topology), Policy(), self._run.clock.now)
        self._drafter = Drafter(ahead, self)
        self._inbox: deque[tuple[float, Outcomes]] = deque()
        self._made: list[Drafts] = []  # by the forward that is running, and sent when it ends
        self._asked: set[int] = set()
        self._now = self._begun_at = 0.0
        self._name = ""

    # What the drafter sees

    def send(self, message: Drafts) -> None:
        self._made.append(message)

    def receive(self, timeout_s: float) -> list[ToDrafter]:
        return []

    def close(self) -> None:
        return

    # What the world sees

    def reach(self, message: Outcomes, moment: float) -> None:
        """The message arrives then, later than all before it."""
        self._inbox.append((moment, message))

    def live(self, until: float, speed: float = 1.0, *, or_sent: bool = False) -> None:
        """What it does until then, or until it has sent something. speed: the part of the time it has its card for."""
        while self._now < until and not (or_sent and self.sent):
            if self._run.seconds > 0:
                self._read_on(until, speed)
            elif self._inbox and self._inbox[0][0] <= self._now:
                self._hear()
            elif not self._begin(speed):
                self._now = min([until, *(moment for moment, _ in self._inbox)][:2])

    def _hear(self) -> None:
        """All that has arrived, as one step."""
        messages: list[Outcomes] = []
        while self._inbox and self._inbox[0][0] <= self._now:
            messages.append(self._inbox.popleft()[1])
            self._asked.difference_update(messages[-1].gone)
            self._asked.update(outcome.seq for outcome in messages[-1].outcomes if not outcome.answered)
        self._drafter.hear(*messages)
        self._send_made()

    def _begin(self, speed: float) -> bool:
        """A forward, whose outcome is known now and told when it is over."""
        self._run.speed, self._begun_at = speed, self._now
        self._name = DRAFT if self._asked else DRAFT_AHEAD
        busy = self._drafter.work()
        if not self._run.seconds:
            self._send_made()
        return busy

    def _read_on(self, until: float, speed: float) -> None:
        left_s = self._run.seconds
        end = self._now + left_s / speed if speed else float("inf")
        if end > until:
            self._run.seconds, self._now = left_s - (until - self._now) * speed, until
            return
        self._run.seconds, self._now = 0.0, end
        name = READ_PROMPT if self._run.read_text else self._name
        self._timeline.add(DRAFTER, name, self._begun_at, end, rows=self._run.num_rows)
        self._send_made()

    def _send_made(self) -> None:
        for message in self._made:
            self._asked.difference_update(draft.seq for draft in message.drafts)
            self.sent.append((self._now, message))
        self._made.clear()


class SimulatedLink:
    """The lead's end of a link to a process; a message arrives message_s after it was sent.

    Only who waits here lets the lead's time pass.
    """

    def __init__(
        self,
        process: SimulatedProcess,
        scripts: Mapping[int, Script],
        clock: VirtualClock,
        timeline: Timeline,
        message_s: float,
    ) -> None:
        self.num_messages = self.num_bytes = 0
        self._drawn_until = 0.0
        self._process, self._scripts = process, scripts
        self._clock, self._timeline, self._message_s = clock, timeline, message_s

    def send(self, message: ToDrafter) -> bool:
        self._count(message)
        if isinstance(message, Outcomes):
            message = msgspec.structs.replace(message, outcomes=tuple(map(self._capped, message.outcomes)))
            self._process.live(self._clock.now())
            self._post(message)
        return True

    def _post(self, message: Outcomes) -> None:
        sent_at = self._clock.now()
        answered = sum(outcome.answered and outcome.base > 0 for outcome in message.outcomes)  # not of a new prompt
        asked = sum(not outcome.answered for outcome in message.outcomes)
        arrival = sent_at + self._message_s
        begin = min(max(sent_at, self._drawn_until), arrival)  # messages may overlap on their way, events may not
        self._timeline.add(OUTCOMES, "on their way", begin, arrival, answered=answered, asked=asked)
        self._drawn_until = arrival
        self._process.reach(message, arrival)

    def receive(self, timeout_s: float) -> list[Drafts]:
        begin, process = self._clock.now(), self._process
        process.live(begin + timeout_s, or_sent=True)
        moments = [sent_at + self._message_s for sent_at, _ in process.sent]
        self._clock.wait_until(min([begin + timeout_s, *moments]))
        process.live(self._clock.now())
        arrived: list[Drafts] = []
        while process.sent and process.sent[0][0] + self._message_s <= self._clock.now():
            arrived.append(process.sent.popleft()[1])
            self._count(arrived[-1])
        drafts = [draft for message in arrived for draft in message.drafts]
        foreseen = sum(draft.foreseen for draft in drafts)
        self._timeline.add(
            WAITS, "waiting for drafts", begin, self._clock.now(), foreseen=foreseen, made=len(drafts) - foreseen
        )
        return arrived

    def close(self) -> None:
        return

    def _capped(self, outcome: Outcome) -> Outcome:
        """Where less was drafted than was asked for, less is asked for."""
        script, start = self._scripts[outcome.seq], outcome.base + len(outcome.tokens) - outcome.num_prompt
        return msgspec.structs.replace(outcome, num_tokens=script.offered(start, outcome.num_tokens))

    def _count(self, message: ToDrafter | Drafts) -> None:
        self.num_messages += 1
        self.num_bytes += len(msgspec.msgpack.encode(message))
