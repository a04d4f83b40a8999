"""By which steps the rows of a forward run, and whether they are recorded. Knows devices; must not know what rows mean.

Few rows take steps made for them: in C on a CPU, by kernels on a card, where they are recorded besides, as are those
that verify for many texts. Many take kernels on a card, too; torch's steps on a CPU but for attention (chunks.py), and
where a card has none for such heads.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING

import torch

from tpspec.comm.ledger import Ledger
from tpspec.model.attention import fused
from tpspec.model.chunks import compiled_attend
from tpspec.model.compiled import compiled_steps
from tpspec.model.graphs import CardRecorder, Graphs
from tpspec.model.torch_steps import TorchSteps
from tpspec.topology.working import ROW_COUNTS, wide_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tpspec.cache.states import StateStore
    from tpspec.cache.store import KVStore
    from tpspec.model.batch import Span
    from tpspec.model.card.many import ManySteps
    from tpspec.model.embedding import Tables
    from tpspec.model.graphs import Gate, Recorder, Run, Taps
    from tpspec.model.rope import Rope
    from tpspec.model.sight import Shape
    from tpspec.model.steps import MadeSteps, RecordedSteps, Steps


class Runner:
    """Of the forwards of one decoder or head.

    fixed_rows: every forward runs exactly that many, which on a card torch's steps do. compiled: whether there may be
    steps for few rows, and attention of ours for many. recorded: whether a card may record them. ledger: see `Graphs`.
    states: of layers that keep some, where there are such. most_verified: rows of a round, beside chunks of
    prompts; as far as they are more than few, such rounds are recorded, too.
    """

    def __init__(
        self,
        shape: Shape,
        ropes: Sequence[Rope],
        store: KVStore,
        embedding: Tables,
        *,
        fixed_rows: int | None = None,
        compiled: bool = True,
        recorded: bool = True,
        ledger: Ledger | None = None,
        states: StateStore | None = None,
        most_verified: int = 0,
    ) -> None:
        self._shape, self._embedding, self._ledger = shape, embedding, ledger or Ledger()
        attend = compiled_attend(shape) if compiled else None
        self._torchs: Steps = TorchSteps(shape, ropes, store, fixed_rows, attend or fused, states)
        self._graphs: list[Graphs] = []
        self._gate: Gate | None = None
        self._is_compiled = False
        self._on_card = shape.device.type == "cuda"
        if self._on_card:
            torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every new number of keys
        compiled = compiled and not (self._on_card and fixed_rows is not None)
        self.few: MadeSteps | None = None
        self.many: ManySteps | None = None
        if compiled and not self._on_card:
            self.few = compiled_steps(shape, ropes, store, states)
        elif compiled:
            from tpspec.model.card.many import many_steps  # Triton comes with torch for cards only
            from tpspec.model.card.steps import card_steps
            from tpspec.model.card.wide import wide_steps

            self.many = many_steps(shape, ropes, store, states)
            self.few = steps = card_steps(shape, ropes, store, states)
            if steps is not None and recorded:
                from tpspec.card_words import gate_of

                recorder, counts = CardRecorder(), wide_counts(most_verified)
                self.record(steps, recorder, gate_of(shape.device))
                if counts and (wide := wide_steps(shape, ropes, store, counts[-1], states)) is not None:
                    self._graphs.append(self._recordings(wide, recorder, counts))

    def record(self, steps: RecordedSteps, recorder: Recorder, gate: Gate | None = None) -> None:
        """From now on few rows take these steps, which are the same launches for every forward of as many rows, and no
        others are recorded. gate: of the card."""
        self._gate = gate
        self.few, self._graphs = steps, [self._recordings(steps, recorder, ROW_COUNTS)]

    def beside(self, *, recorded: bool) -> Runner:
        """Of another forward, which never runs while one of these does. recorded: where these are, of few rows."""
        other = copy(self)
        other._graphs = [graphs.beside() for graphs in self._graphs[:1] if recorded]
        return other

    def is_replay(self, num_rows: int, num_logits: int) -> bool:
        """Whether so many rows, of which so many have logits, are a replay; unless their keys are too scattered, or one
        text has very many."""
        return any(graphs.holds(num_rows, num_logits) for graphs in self._graphs)

    @property
    def most_prepared(self) -> int:
        """Rows of what `prepare` runs, at most."""
        rehearsed: tuple[int, ...] = () if self.many is None else self.many.rehearsed
        return max((ROW_COUNTS[-1], *rehearsed, *(graphs.most_rows for graphs in self._graphs)))

    def can_launch(self, everywhere: Callable[[bool], bool], *, here: bool) -> bool:
        """Whether every rank has a gate, and says `here`: or some would make collectives that others do not, for
        forwards that are launched in vain."""
        return self._on_card and everywhere(here and self._gate is not None)

    def agree(self, everywhere: Callable[[bool], bool]) -> None:
        """Ranks may have unlike cards, and run the same collectives: rows take steps made for them on all or none.
        everywhere: whether something holds on every rank; collective."""
        if self._on_card and not everywhere(self.few is not None):
            self.few = self.many = None
            self._graphs = []

    def prepare(self, run: Run, taps: Taps = (), everywhere: Callable[[bool], bool] = bool) -> None:
        """What would otherwise make the first forward of each row count slow. Every rank calls it. everywhere: as of
        `agree`, where there is more than one."""
        for graphs in reversed(self._graphs):  # what the largest takes serves the others
            graphs.prepare(run, taps, everywhere)
        if self._gate is not None:  # whose kernel compiles as it is launched
            self._gate.open()
            self._gate.wait()
        if not self._on_card or self._is_compiled:
            return
        if not self._graphs and self.few is not None:
            self._compile(self.few, reversed(ROW_COUNTS), run, taps)
        if self.many is not None:
            self._compile(self.many, self.many.rehearsed, run, taps)
        self._is_compiled = True

    def agree_on_flash(self, everywhere: Callable[[bool], bool]) -> None:
        """See ManySteps. Every rank calls it, once all have compiled what is ours."""
        if self.many is not None:
            self.many.agree_on_flash(everywhere)

    def close(self) -> None:
        """Nothing runs afterwards."""
        for graphs in self._graphs:
            graphs.close()

    def graphs(self, spans: Sequence[Span], num_rows: int) -> Graphs | None:
        """What these rows are a replay of, if they are."""
        for graphs in self._graphs:
            if graphs.fits(spans, num_rows):
                return graphs
        return None

    def steps(self, spans: Sequence[Span], num_rows: int) -> Steps:
        """What these rows take where they are no replay."""
        for steps in (self.few, self.many):
            if steps is not None and steps.fits(spans, num_rows):
                return steps
        return self._torchs

    def _recordings(self, steps: RecordedSteps, recorder: Recorder, row_counts: Sequence[int]) -> Graphs:
        shape = self._shape
        return Graphs(steps, recorder, self._embedding, shape.dtype, shape.device, self._ledger, row_counts, self._gate)

    @torch.inference_mode()
    def _compile(self, steps: MadeSteps, row_counts: Iterable[int], run: Run, taps: Taps) -> None:
        """The kernels of these row counts, which compile as they first run: rows that are all padding."""
        for num_rows in row_counts:
            x_TD = torch.zeros(num_rows, self._embedding.width, dtype=self._shape.dtype, device=self._shape.device)
            self._ledger.aside(partial(run, x_TD, steps, steps.begin((), num_rows), taps))
