"""What a target rank does: hear the news, run the round, again. The lead also makes the news and tells the outcome.

Every rank runs the same loop on the same news. Must not know where requests come from (an `Inbox`) or how news travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tpspec.comm.messages import Cancel, News, Stop, Submit
from tpspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.comm.channel import Channel
    from tpspec.comm.messages import Stats, ToLead
    from tpspec.engine.engine import Engine
    from tpspec.engine.hosts import Gathered
    from tpspec.request import Delta


class Inbox(Protocol):
    """The lead's other side: who sends requests and reads tokens."""

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        """What has arrived; with wait, may block a while (not for long: the other ranks hear nothing meanwhile)."""

    def report(self, deltas: list[Delta], stats: Stats) -> None: ...


class Untold:
    """What the last round gave, until the inbox has it.

    Who reads may be gone, which must not keep the lead from a round that the other ranks are in: it fails afterwards,
    unless the round has failed.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._kept: tuple[list[Delta], Stats] | None = None
        self._fault: UserError | None = None

    def keep(self, deltas: list[Delta], stats: Stats) -> None:
        self._kept = deltas, stats

    def give(self) -> None:
        given, self._kept = self._kept, None
        if given is not None:
            self._inbox.report(*given)

    def try_to_give(self) -> None:
        try:
            self.give()
        except UserError as fault:
            self._fault = fault

    def check(self) -> None:
        """Raises what was wrong when it was given last."""
        if self._fault is not None:
            raise self._fault


def lead_rounds(engine: Engine, channel: Channel, inbox: Inbox) -> int:
    """Runs rounds until told to stop; the exit code.

    What a round gave is reported before the next one begins, or while a card computes it, which then does not wait.
    """
    untold, number = Untold(inbox), 0
    try:
        while True:
            number += 1
            if engine.is_idle or not engine.runs_ahead:
                untold.give()
            gathered = engine.gather()
            news = _news(number, inbox.receive(wait=engine.is_idle), engine, gathered, is_heard=channel.is_heard)
            if news.stop is not None:
                untold.give()
            channel.share(news)
            if news.stop is not None:
                return news.stop
            deltas = engine.hear(news) + engine.step(untold.try_to_give)
            untold.check()
            if deltas or news.cancels or not engine.is_idle:  # rounds that only read a prompt are progress too
                untold.keep(deltas, engine.stats())
    finally:
        untold.try_to_give()  # of the round before one that failed


def follow_rounds(engine: Engine, channel: Channel) -> int:
    """Runs the lead's rounds until it says stop; the exit code."""
    while True:
        news = channel.share(None)
        if news.stop is not None:
            return news.stop
        engine.hear(news)
        engine.step()


def _news(number: int, messages: Sequence[ToLead], engine: Engine, gathered: Gathered, *, is_heard: bool) -> News:
    """A request that was cancelled before its first round does not get one. is_heard: whether others compare digests
    with theirs."""
    cancels = [message.id for message in messages if isinstance(message, Cancel)]
    requests = [message.request for message in messages if isinstance(message, Submit)]
    stops = [message.code for message in messages if isinstance(message, Stop)]
    return News(
        round=number,
        requests=tuple(request for request in requests if request.id not in cancels),
        cancels=tuple(cancels),
        stop=stops[0] if stops else None,
        digest=engine.digest if is_heard else {},
        costs=engine.meter.costs,
        trees=gathered.trees,
        held=gathered.held,
    )
