"""The control plane's words: what the frontend tells the lead, what the lead tells it, what the lead tells other ranks.

msgspec structs, one encoder, no pickle. Must not know sockets (link.py) or what an engine does with them.
"""

from __future__ import annotations

import msgspec

from tpspec.request import Delta, Request, Sampling
from tpspec.tokens import Branch, TokenTree

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError)  # msgspec raises the latter for a str that is not UTF-8


class Tally(msgspec.Struct, frozen=True):
    """Collectives of one purpose: how many, payload bytes this rank contributed, seconds this rank spent in them."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Drafting(msgspec.Struct, frozen=True):
    """Drafts from elsewhere, counted by the lead since start.

    hits: answers that were ready when they were asked for; misses: those that had to be made; late: for a text that
    had moved on; timeouts: rounds that stopped waiting. messages, bytes: both ways. num_read, num_dropped: draft
    tokens, and those for nothing. waited_s: the target waited; waited_rounds: in which it did, beyond a moment.
    work_s: CPU time of a drafter beside a shard, inside_s: of that, while the shard was in a collective; delayed_s:
    the shard waited for a core. All three are 0 where nobody can tell.
    """

    hits: int = 0
    misses: int = 0
    late: int = 0
    timeouts: int = 0
    messages: int = 0
    bytes: int = 0
    num_read: int = 0
    num_dropped: int = 0
    waited_s: float = 0.0
    waited_rounds: int = 0
    work_s: float = 0.0
    inside_s: float = 0.0
    delayed_s: float = 0.0
    is_away: bool = False


class Stats(msgspec.Struct, frozen=True):
    """The engine's counters since start (rounds, tokens, preemptions, collectives by purpose) and its load now.

    corrupted: requests that ended because their logits were not finite.
    forward_s: in the target's forwards and their verdicts, collectives included. drafting_s: spent on drafts by the
    rank itself, or waiting for them. elsewhere: None where ranks draft for themselves. prefix_asked, prefix_found:
    tokens of texts that were looked up in the cache, and those found. pages_used: owned by a request.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    corrupted: int = 0
    forward_s: float = 0.0
    drafting_s: float = 0.0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prefix_asked: int = 0
    prefix_found: int = 0
    collectives: dict[str, Tally] = {}
    elsewhere: Drafting | None = None


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Frontend to lead: a new request."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Frontend to lead: the client left; frees the pages in the next round. Unknown ids are ignored."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Frontend to lead: finish nothing more; the whole world ends with exit code `code`."""

    code: int = 0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Lead to frontend, first of all: who leads from now on, and how often others may still come after it."""

    pid: int
    restarts_left: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Lead to frontend: weights are loaded, rounds run. cache_tokens: the longest prompt plus output.

    max_running: requests that it works on at a time, the oldest first.
    """

    cache_tokens: int
    num_ranks: int
    max_running: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """Lead to frontend, after every round that changed anything: what each request gained, and the counters."""

    deltas: list[Delta]
    stats: Stats


class Costs(msgspec.Struct, frozen=True):
    """What the lead measured: seconds of a round of one row, of each row more, of drafting one token; tokens a second.

    rate: over all sequences, of late, with all waiting; 0 while it is not known.
    """

    round_s: float
    row_s: float
    draft_s: float
    rate: float = 0.0

    def seconds(self, num_rows: int) -> float:
        """Of a round of so many rows, without its drafts."""
        return self.round_s + self.row_s * (num_rows - 1)


class News(msgspec.Struct, frozen=True, tag=True):
    """Lead to the other target ranks, before every round: what changed, and a digest of what the lead did last.

    digest: field name -> checksum. A rank whose own checksum differs has diverged and says in which field.
    costs: decide how much is drafted; the lead's, on every rank, so that all decide alike. None: not measured yet.
    trees: drafts that the lead made or that arrived from elsewhere, by sequence; what every rank makes for itself does
    not travel.
    held: sequences that wait for their turn.
    """

    round: int
    requests: tuple[Request, ...] = ()
    cancels: tuple[int, ...] = ()
    stop: int | None = None  # exit code
    digest: dict[str, int] = {}
    costs: Costs | None = None
    trees: dict[int, TokenTree] = {}
    held: tuple[int, ...] = ()


class Rows(msgspec.Struct, frozen=True):
    """What the target's layers made of `count` tokens from position `first` on: a tensor [count, W] of `dtype`."""

    first: int
    count: int
    dtype: str
    data: bytes


class Outcome(msgspec.Struct, frozen=True):
    """Lead to drafter: what a sequence has become, and that a draft for it is wanted.

    base: tokens the drafter has been told of before, which is the epoch of this message; 0 begins anew. tokens: those
    after them. num_tokens, costs: as of an `Ask`. answered: the lead had the draft from what it was told before.
    taps: for a drafter that goes on from the target's layers.
    """

    seq: int
    base: int
    tokens: tuple[int, ...]
    num_prompt: int
    num_tokens: int
    sampling: Sampling = Sampling()
    costs: Costs | None = None
    answered: bool = False
    taps: Rows | None = None


class Reach(msgspec.Struct, frozen=True):
    """How far a drafter goes before it is asked: not at all, or ahead, keeping `width` tokens after each."""

    ahead: bool = False
    width: int = 1


class Outcomes(msgspec.Struct, frozen=True, tag=True):
    """Lead to drafter, once a round: the outcomes of its sequences, sequences that are over, and how far to go."""

    outcomes: tuple[Outcome, ...] = ()
    gone: tuple[int, ...] = ()
    reach: Reach = Reach()


class Draft(msgspec.Struct, frozen=True):
    """The tree for a sequence of `base` tokens, stale for any other length. foreseen: made before it was asked for."""

    seq: int
    base: int
    tree: TokenTree
    foreseen: bool


class Drafts(msgspec.Struct, frozen=True, tag=True):
    """Drafter to lead: what is ready; sequences it must be told of from their beginning; and its counters since start.

    ahead: what it has read before anybody asked, so that the lead finds its answers at home.
    num_read: draft tokens read. num_dropped: of those, read for a future that did not come. work_s, inside_s,
    delayed_s: as in Drafting.
    """

    drafts: tuple[Draft, ...] = ()
    lost: tuple[int, ...] = ()
    ahead: tuple[Branch, ...] = ()
    num_read: int = 0
    num_dropped: int = 0
    work_s: float = 0.0
    inside_s: float = 0.0
    delayed_s: float = 0.0


ToLead = Submit | Cancel | Stop
ToDrafter = Outcomes | Stop
ToFrontend = Hello | Ready | Report
