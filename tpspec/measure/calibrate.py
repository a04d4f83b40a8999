"""Trials between the pairs: requests whose rounds draft set lengths, timed one by one for the cost model.

Knows hosts, requests and stats; must not know how constants are fitted (topology/calibration.py) nor what is predicted
with them. A trial's request has an id below 0, which is nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from tpspec.comm.communicator import Purpose
from tpspec.engine.hosts import Gathered
from tpspec.measure.stats import tally_between
from tpspec.request import Request
from tpspec.tokens import NO_DRAFT, TokenTree
from tpspec.topology.calibration import Calibration, Sample, fit
from tpspec.topology.shape import shape_of
from tpspec.topology.shards import DTYPE_BYTES

if TYPE_CHECKING:
    from tpspec.comm.messages import Drafting, Stats
    from tpspec.draft.protocol import Ask, Taps
    from tpspec.engine.hosts import DraftHost
    from tpspec.request import Delta
    from tpspec.tokens import Verdict
    from tpspec.topology.config import Topology

REDUCES = (Purpose.attention.value, Purpose.mlp.value)
LENGTHS = (0, 1, 2, 4, 8)  # drafts of the rounds, in turn, so that a drift of the machine favours none
ROUNDS = 4 * len(LENGTHS)  # of a trial
FEWEST, MOST = 4, 20  # trials


def trials(texts: Sequence[tuple[int, ...]], capacity: int) -> list[Request]:
    """About one for each text, of the whole of one and the first half of the next in turn, for context has its cost.

    capacity: tokens that can be served, prompt and output together.
    """
    number = min(max(len(texts), FEWEST), MOST)
    chosen = [texts[len(texts) * i // number][: capacity // 2] for i in range(number)]
    prompts = [text[: (len(text) + 1) // 2] if i % 2 else text for i, text in enumerate(chosen)]
    room = ROUNDS + max(LENGTHS)
    return [
        Request(-1 - i, prompt, min(room, capacity - len(prompt)), num_drafts=max(LENGTHS))
        for i, prompt in enumerate(prompts)
    ]


class Filled:
    """A host as it is, but for trials: they get as many drafts as it is their round's turn to have.

    The source is asked for as many, so that it takes the time that it takes; what it left out is filled up.
    """

    def __init__(self, host: DraftHost) -> None:
        self._host = host
        self._lengths = cycle(LENGTHS)
        self._asks: dict[int, Ask] = {}

    def prepare(self, asks: Sequence[Ask]) -> None:
        self._host.prepare(asks)

    def ask(self, asks: Sequence[Ask]) -> None:
        asks = [self._shortened(ask) if ask.seq < 0 else ask for ask in asks]
        self._asks = {ask.seq: ask for ask in asks if ask.seq < 0}
        self._host.ask(asks)

    def take(self) -> dict[int, TokenTree]:
        trees = self._host.take()
        return trees | {seq: filled(trees.get(seq, NO_DRAFT), ask) for seq, ask in self._asks.items()}

    def gather(self, ready: Sequence[int]) -> Gathered:
        trees, held = self._host.gather(ready)
        trials = {seq: filled(trees[seq], ask) for seq, ask in self._asks.items() if seq in trees}
        return Gathered(trees | trials, held)

    def drafting(self) -> Drafting | None:
        return self._host.drafting()

    def tell(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        self._host.tell(verdicts, taps)

    def forget(self, seq: int) -> None:
        self._host.forget(seq)

    def _shortened(self, ask: Ask) -> Ask:
        return replace(ask, num_tokens=min(next(self._lengths), ask.num_tokens))


def filled(tree: TokenTree, ask: Ask) -> TokenTree:
    """Its tokens, and behind them ids from the beginning of the text: they exist, and hardly any is right."""
    more = [ask.tokens[i % len(ask.tokens)] for i in range(ask.num_tokens)]
    return TokenTree.chain([*tree.tokens, *more][: ask.num_tokens])


class Mark(NamedTuple):
    """The end of a round. context: tokens before the rows of the next. num_drafts: verified in it."""

    at: float
    context: int
    num_drafts: int
    stats: Stats


class Timed:
    """The trials as they ran: the end of each of their rounds."""

    def __init__(self) -> None:
        self._context = 0
        self._marks: list[list[Mark]] = []

    def begin(self, request: Request) -> None:
        self._context = len(request.prompt) - 1
        self._marks.append([])

    def add(self, delta: Delta, stats: Stats) -> None:
        self._context += len(delta.tokens)
        self._marks[-1].append(Mark(perf_counter(), self._context, sum(delta.drafted), stats))

    def samples(self) -> list[Sample]:
        """A round drafts what the next verifies; so neither the prompt's round nor the last is among them."""
        return [_sample(*three) for marks in self._marks for three in zip(marks, marks[1:], marks[2:], strict=False)]


def _sample(before: Mark, end: Mark, after: Mark) -> Sample:
    forward_s = end.stats.forward_s - before.stats.forward_s
    draft_s = end.stats.drafting_s - before.stats.drafting_s
    reduced = tally_between(before.stats.collectives, end.stats.collectives)
    reduces = [tally for purpose, tally in reduced.items() if purpose in REDUCES]
    return Sample(
        rows=1 + end.num_drafts,
        step_s=forward_s,
        reduce_s=sum(tally.seconds for tally in reduces),
        reduces=sum(tally.count for tally in reduces),
        draft_s=draft_s,
        num_drafted=after.num_drafts,
        host_s=end.at - before.at - forward_s - draft_s,
        context=before.context,
    )


def calibration(samples: Sequence[Sample], topology: Topology) -> Calibration:
    """The constants of the box that the samples are of."""
    link, target = topology.link, topology.target
    row_bytes = shape_of(target.model).hidden * DTYPE_BYTES[target.dtype]
    return fit(samples, row_bytes, link.cost if link.emulate else None, link.dilation)
