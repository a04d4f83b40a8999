"""What a target rank does: hear the news, run the round, again. The lead also makes the news and tells the outcome.

Every rank runs the same loop on the same news. Must not know where requests come from (an `Inbox`) or how news travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tpspec.comm.messages import Cancel, News, Stop, Submit

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


def lead_rounds(engine: Engine, channel: Channel, inbox: Inbox) -> int:
    """Runs rounds until told to stop; the exit code.

    What a round gave is reported before the next one begins, or while a card computes it, which then does not wait.
    """
    untold: list[tuple[list[Delta], Stats]] = []

    def tell() -> None:
        while untold:
            inbox.report(*untold.pop(0))

    number = 0
    try:
        while True:
            number += 1
            if engine.is_idle or not engine.runs_ahead:
                tell()
            gathered = engine.gather()
            news = _news(number, inbox.receive(wait=engine.is_idle), engine, gathered)
            channel.share(news)
            if news.stop is not None:
                return news.stop
            deltas = engine.hear(news) + engine.step(tell)
            if deltas or news.cancels or not engine.is_idle:  # rounds that only read a prompt are progress too
                untold.append((deltas, engine.stats()))
    finally:
        tell()  # a round that failed, too, has one before it


def follow_rounds(engine: Engine, channel: Channel) -> int:
    """Runs the lead's rounds until it says stop; the exit code."""
    while True:
        news = channel.share(None)
        if news.stop is not None:
            return news.stop
        engine.hear(news)
        engine.step()


def _news(number: int, messages: Sequence[ToLead], engine: Engine, gathered: Gathered) -> News:
    """A request that was cancelled before its first round is in neither list."""
    cancels = [message.id for message in messages if isinstance(message, Cancel)]
    requests = [message.request for message in messages if isinstance(message, Submit)]
    stops = [message.code for message in messages if isinstance(message, Stop)]
    return News(
        round=number,
        requests=tuple(request for request in requests if request.id not in cancels),
        cancels=tuple(cancels),
        stop=stops[0] if stops else None,
        digest=engine.digest,
        costs=engine.meter.costs,
        trees=gathered.trees,
        held=gathered.held,
    )
