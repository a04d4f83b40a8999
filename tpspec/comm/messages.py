"""The control plane's words: what the frontend tells the lead, what the lead tells it, what the lead tells other ranks.

msgspec structs, one encoder, no pickle. Must not know sockets (link.py) or what an engine does with them.
"""

from __future__ import annotations

import msgspec

from tpspec.request import Delta, Request


class Tally(msgspec.Struct, frozen=True):
    """Collectives of one purpose: how many, payload bytes this rank contributed, seconds this rank spent in them."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Stats(msgspec.Struct, frozen=True):
    """The engine's counters since start (rounds, tokens, preemptions, collectives by purpose) and its load now.

    forward_s: in the target's forwards and their verdicts, collectives included. drafting_s: spent on drafts by the
    rank itself, or waiting for them.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    forward_s: float = 0.0
    drafting_s: float = 0.0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    collectives: dict[str, Tally] = {}


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Frontend to lead: a new request."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Frontend to lead: the client left; frees the pages in the next round. Unknown ids are ignored."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Frontend to lead: finish nothing more; the whole world ends with exit code `code`."""

    code: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Lead to frontend: weights are loaded, rounds run. cache_tokens: the longest prompt plus output that fits."""

    cache_tokens: int
    num_ranks: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """Lead to frontend, after every round that changed anything: what each request gained, and the counters."""

    deltas: list[Delta]
    stats: Stats


class News(msgspec.Struct, frozen=True, tag=True):
    """Lead to the other target ranks, before every round: what changed, and a digest of what the lead did last.

    digest: field name -> checksum. A rank whose own checksum differs has diverged and says in which field.
    """

    round: int
    requests: tuple[Request, ...] = ()
    cancels: tuple[int, ...] = ()
    stop: int | None = None  # exit code
    digest: dict[str, int] = {}


ToLead = Submit | Cancel | Stop
ToFrontend = Ready | Report
