"""Whole worlds inside a test: N ranks as threads, real checkpoints, real engines, one list of requests.

The lead hands in all requests at the first round (or by a schedule) and stops when every one has finished.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tpspec.comm.channel import thread_channels
from tpspec.comm.communicator import Communicator, OneRank
from tpspec.comm.draft_link import DraftLink, LeadDraftLink
from tpspec.comm.messages import Cancel, Stats, Stop, Submit, ToLead
from tpspec.comm.threads import ThreadWorld
from tpspec.draft.protocol import Drafter
from tpspec.engine.engine import Engine
from tpspec.engine.hosts import Failsafe, InlineHost
from tpspec.engine.pace import Pace
from tpspec.engine.remote import RemoteHost
from tpspec.request import Delta, Request
from tpspec.roles.beside import Beside
from tpspec.roles.build import build_engine
from tpspec.roles.drafter import Orders
from tpspec.roles.target import follow_rounds, lead_rounds
from tpspec.topology.config import Topology, to_json

CPU = torch.device("cpu")
DEFAULTS: dict[str, Any] = {"cache": {"tokens": 2048, "page": 16}, "target": {"dtype": "float32"}, "device": "cpu"}


def topology(model: Path | str, num_ranks: int = 1, **keys: Any) -> Topology:
    """A topology of a model over so many ranks; `keys` as in the file, sections as mappings."""
    target = DEFAULTS["target"] | {"model": str(model), "ranks": tuple(range(num_ranks))} | keys.pop("target", {})
    return Topology.model_validate(DEFAULTS | {"name": "a test", "target": target} | keys)


@dataclass
class Told:
    """What the lead told its frontend."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    deltas: list[Delta] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)

    def texts(self) -> list[list[int]]:
        return [self.tokens[request] for request in sorted(self.tokens)]


@dataclass
class Script:
    """An inbox: messages by the number of the round before which they arrive; stops when all requests have ended."""

    messages: dict[int, list[ToLead]]
    told: Told = field(default_factory=Told)
    round: int = 0
    open: set[int] = field(default_factory=set)

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        self.round += 1
        arrived = self.messages.pop(self.round, [])
        self.open |= {message.request.id for message in arrived if isinstance(message, Submit)}
        self.open -= {message.id for message in arrived if isinstance(message, Cancel)}
        return arrived if arrived or self.open or self.messages else [Stop()]

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        self.told.stats.append(stats)
        for delta in deltas:
            self.told.deltas.append(delta)
            self.told.tokens.setdefault(delta.id, []).extend(delta.tokens)
            if delta.finish is not None:
                self.told.finish[delta.id] = delta.finish
                self.open.discard(delta.id)


def serve(
    made: Topology,
    requests: Sequence[Request] = (),
    *,
    messages: dict[int, list[ToLead]] | None = None,
    drafter: Callable[[], Drafter] | None = None,
    begin: Callable[[int, Engine], None] = lambda rank, engine: None,
    watch: Callable[[Engine], None] = lambda engine: None,
    device: torch.device = CPU,
    link: DraftLink | None = None,
    launches: bool = True,
) -> Told:
    """Runs the world until every request has ended; what the lead told. drafter: instead of the topology's own.

    link: of the lead, to a drafter. launches: as of `build_engine`. begin: called with every rank and its engine before
    the first round. watch: with its engine after the last.
    """
    script = Script(messages or {1: [Submit(request) for request in requests]})
    channels = thread_channels(len(made.target.ranks))

    def rank(comm: Communicator) -> None:
        comm = comm if comm.size > 1 else OneRank()  # as in a world of processes: it alone is recorded on a card
        built = build_engine(made, comm, device, link=None if comm.rank else link, launches=launches)
        built.own.prepare()
        engine = built.engine
        if drafter is not None:
            source = drafter()
            engine.host, engine.draft_tokens = InlineHost(Failsafe(source)), 5
            engine.pace = Pace(gives_odds=source.needs.gives_odds)
        begin(comm.rank, engine)
        if comm.rank == 0:
            lead_rounds(engine, channels[0], script)
        else:
            follow_rounds(engine, channels[comm.rank])
        watch(engine)

    ThreadWorld(len(made.target.ranks)).run(rank)
    return script.told


def once_it_drafts(rank: int, engine: Engine) -> None:
    """To `begin` with: no round of a text is begun before a drafter elsewhere has answered for one. A tiny target ends
    before that."""
    host, step = engine.host, engine.step
    assert isinstance(host, RemoteHost)

    def once_it_has_spoken(*given: Any) -> list[Delta]:
        while engine.scheduler.ready() and not host._live:
            host._listen(0.2)
        return step(*given)

    engine.step = once_it_has_spoken  # type: ignore[method-assign]


@contextmanager
def drafting_beside(made: Topology, device: torch.device = CPU) -> Iterator[tuple[LeadDraftLink, Beside]]:
    """A drafter in a thread of this process, as in the gaps of a card, and the link of a lead that it is of."""
    link = LeadDraftLink()
    try:
        kept = Beside(Orders(to_json(made), link.endpoint, os.getpid(), str(device), is_filler=False))
        try:
            kept.wait_until_ready()
            yield link, kept
        finally:
            kept.close()
    finally:
        link.close()
