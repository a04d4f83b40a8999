"""Trials between the pairs: requests whose rounds draft set lengths, timed one by one for the cost model.

Knows hosts, requests and stats; must not know how constants are fitted (topology/calibration.py) nor what is predicted
with them. A trial's request has an id below 0, which is nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from time import perf_counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tpspec.engine.hosts import Gathered
from tpspec.measure.trace import Mark, Round, round_between, samples_of
from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.request import Request
from tpspec.tokens import NO_DRAFT, TokenTree
from tpspec.topology.calibration import Calibration, Sample, fit
from tpspec.topology.rounds import mean_bytes
from tpspec.topology.target_shape import target_shape

if TYPE_CHECKING:
    from tpspec.comm.messages import Drafting, Stats
    from tpspec.draft.protocol import Ask, Taps
    from tpspec.engine.hosts import DraftHost
    from tpspec.request import Delta
    from tpspec.tokens import Verdict
    from tpspec.topology.config import Topology

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
        self._host, self.waits = host, host.waits
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


class Timed:
    """The trials as they ran: each of their rounds but the prompt's."""

    def __init__(self) -> None:
        self._trials: list[tuple[int, list[Round]]] = []
        self._mark: Mark | None = None

    def begin(self, request: Request) -> None:
        self._trials.append((len(request.prompt), []))
        self._mark = None

    def add(self, delta: Delta, stats: Stats) -> None:
        before, self._mark = self._mark, Mark(perf_counter(), stats)
        if before is not None:
            self._trials[-1][1].append(round_between(before, self._mark, [delta]))

    def samples(self) -> list[Sample]:
        return [sample for context, rounds in self._trials for sample in samples_of(rounds, context)]


def calibration(samples: Sequence[Sample], topology: Topology) -> Calibration:
    """The constants of the box that the samples are of."""
    link, target = topology.link, topology.target
    row_bytes = round(mean_bytes(target_shape(topology), DTYPE_BYTES[target.dtype]))
    return fit(samples, row_bytes, link.cost if link.emulate else None, link.dilation)
