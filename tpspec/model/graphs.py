"""Forwards of some rows, recorded once for each of some row counts, and replayed: no launch but the replay's stands
between the host and the card, which fetches what changes from where the host has written it. A round takes the least
recorded count that holds its rows; the rest is padding.

Collectives are part of a recording. They are counted at every replay; their seconds are those of a rehearsal before the
recording, when nothing stood between a launch and the next one. Must not know layers: it is handed a forward.

Shapes: T rows of a recording, D hidden, V vocabulary rows of this shard or head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from tpspec.capture import captured
from tpspec.comm.ledger import Ledger
from tpspec.staged import Staged
from tpspec.topology.working import ROW_COUNTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpspec.comm.communicator import Purpose
    from tpspec.comm.messages import Tally
    from tpspec.model.batch import Span
    from tpspec.model.embedding import Tables
    from tpspec.model.steps import MadeSteps, RecordedSteps

REHEARSALS = 2  # the first compiles kernels and sets up communicators; the second is timed

Made = TypeVar("Made")
Taps = tuple[int, ...]


class Gate(Protocol):
    """See card_words.py."""

    def wait(self) -> None: ...
    def open(self) -> None: ...


class Recorder(Protocol):
    """Where work is recorded."""

    def record(self, work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
        """What the work makes, in memory of its own, and how it is done again into the same memory."""

    def forget(self) -> None:
        """All that was recorded, for good."""


class CardRecorder:
    """CUDA graphs that share their working memory: one is replayed at a time, and in one stream, whose priority they
    are recorded with."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            priority=torch.cuda.current_stream().priority
        )
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with captured(graph, pool=self._pool, stream=self._stream):
            made = work()
        graph.replay()  # the first time it is brought to the card, and that may wait for what waits at a gate
        self._graphs.append(graph)
        return made, graph.replay

    def forget(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward gives: logits [T, V] of its rows, and [T, D] for each layer that was tapped."""

    logits_TV: Tensor
    tapped: Mapping[int, Tensor]

    def first(self, num_rows: int) -> Forward:
        return Forward(self.logits_TV[:num_rows], {tap: x_TD[:num_rows] for tap, x_TD in self.tapped.items()})


Run = Callable[["Tensor", "MadeSteps", Any, Taps], Forward]


@dataclass(frozen=True, slots=True)
class _Recording:
    forward: Forward
    replay: Callable[[], None]
    collectives: Mapping[Purpose, Tally]


class Graphs:
    """The recordings of one decoder or head, which hands in its own forward, `run`, each time: over x [T, D], which it
    may overwrite, by `steps`, with what their `write` returned; of no spans, that makes rows that are all padding.

    embedding: of the spans' tokens. ledger: of the collectives in a recording, where there are some. row_counts: of
    recordings, from the least. gate: where forwards may be launched before it is known what of.
    """

    def __init__(
        self,
        steps: RecordedSteps,
        recorder: Recorder,
        embedding: Tables,
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger | None = None,
        row_counts: Sequence[int] = ROW_COUNTS,
        gate: Gate | None = None,
    ) -> None:
        self._steps, self._recorder, self._ledger = steps, recorder, ledger or Ledger()
        self._row_counts, self._gate = row_counts, gate
        self._rows = Staged(row_counts[-1] * embedding.width, dtype, device)
        self._embedding = embedding
        self._recordings: dict[tuple[int, Taps], _Recording] = {}
        self._num_launched = 0  # rows of the recording that was launched last

    def beside(self) -> Graphs:
        """Of another forward of the same steps, which never runs while this one does. What is its ends with this."""
        other = copy(self)
        other._recordings = {}
        return other

    @property
    def most_rows(self) -> int:
        return self._row_counts[-1]

    def holds(self, num_rows: int, num_logits: int) -> bool:
        """Whether such rows are worth a replay, which makes logits of all: few are, more where most have some."""
        return num_rows <= self._row_counts[-1] and (num_rows <= ROW_COUNTS[-1] or 2 * num_logits >= num_rows)

    def fits(self, spans: Sequence[Span], num_rows: int) -> bool:
        num_logits = num_rows if num_rows <= ROW_COUNTS[-1] else sum(span.num_logits for span in spans)
        return self.holds(num_rows, num_logits) and self._steps.fits(spans, num_rows)

    def prepare(self, run: Run, taps: Taps, everywhere: Callable[[bool], bool]) -> None:
        """Records every row count, on all ranks or none: the collectives in it meet each other, and some ranks may have
        recordings with the taps that are theirs where others have none."""
        if everywhere(all((num_rows, taps) in self._recordings for num_rows in self._row_counts)):
            return
        for num_rows in reversed(self._row_counts):  # what the largest takes serves the others
            self._recordings[num_rows, taps] = self._record(run, num_rows, taps)

    def forward(self, run: Run, spans: Sequence[Span], tokens: Sequence[int], taps: Taps) -> Forward:
        """Of the rows of the spans, whose tokens these are. The next forward overwrites what it returns."""
        num_rows = self._recorded(len(tokens))
        recording = self._recording(run, num_rows, taps)
        self._steps.write(spans, num_rows)
        self._put(tokens, num_rows)
        recording.replay()
        self._sent()
        return self._given(recording, len(tokens))

    def launch(self, spans: Sequence[Span], num_rows: int) -> bool:
        """Whether a forward without taps has been launched of which all is known but its tokens: the card waits for
        `release`, and until then nothing may be asked of it. What of the last forward is to be read has been asked
        for."""
        num_rows = self._recorded(num_rows)
        recording = self._recordings.get((num_rows, ()))
        if self._gate is None or recording is None or not self._steps.is_copied_whole(spans):
            return False
        self._gate.wait()
        is_launched = False
        try:
            recording.replay()
            self._steps.write(spans, num_rows)  # while the card is at work
            self._num_launched, is_launched = num_rows, True
        finally:
            if not is_launched:  # or the card would wait for ever
                self._gate.open()
                self._sent()
        return True

    def release(self, tokens: Sequence[int]) -> Callable[[], Forward]:
        """The card goes on, whatever befalls: the last forward has ended, for what it gave has been read. What gives
        the one that was launched, as from `forward`, and counts it. tokens: of its rows."""
        assert self._gate is not None, "what was launched waits at it"
        self._rows.left()
        self._steps.left()
        try:
            self._put(tokens, self._num_launched)
        finally:
            self._gate.open()
        return partial(self._given, self._recordings[self._num_launched, ()], len(tokens))

    def replay(self, num_rows: int, taps: Taps = ()) -> None:
        """The last forward once more, without the host's part: for who times a card. It must have had about so many
        rows, for what they are is fetched from where the last forward put it."""
        self._recordings[self._recorded(num_rows), taps].replay()

    def close(self) -> None:
        """NCCL's communicators do not end before the recordings that they are in."""
        self._recordings.clear()
        self._recorder.forget()

    def _recording(self, run: Run, num_rows: int, taps: Taps) -> _Recording:
        found = self._recordings.get((num_rows, taps))
        if found is None:
            found = self._recordings[num_rows, taps] = self._record(run, num_rows, taps)
        return found

    @torch.inference_mode()
    def _record(self, run: Run, num_rows: int, taps: Taps) -> _Recording:
        width, begun = self._embedding.width, self._steps.write((), num_rows)
        self._put((), num_rows)
        x_TD = self._rows.there.view(-1, width)[:num_rows]

        def work() -> Forward:
            self._rows.copy(0, num_rows * width)
            self._steps.copy()
            return run(x_TD, self._steps, begun, taps)

        for _ in range(REHEARSALS):
            collectives = self._ledger.aside(work)
        forward, replay = self._recorder.record(work)
        self._sent()
        return _Recording(forward, replay, collectives)

    def _given(self, recording: _Recording, num_rows: int) -> Forward:
        self._ledger.enter(recording.collectives)
        return recording.forward.first(num_rows)

    def _recorded(self, num_rows: int) -> int:
        """Rows of the recording that they take."""
        return self._row_counts[bisect_left(self._row_counts, num_rows)]

    def _put(self, tokens: Sequence[int], num_rows: int) -> None:
        """What changes from forward to forward, where a recording takes it from: rows of tokens, and what the steps
        have written of them."""
        width, room = self._embedding.width, self._rows.room()
        self._embedding.put(tokens, room)
        if len(tokens) < num_rows:
            room[len(tokens) * width : num_rows * width] = 0
        self._steps.put()

    def _sent(self) -> None:
        self._rows.sent()
        self._steps.sent()


class RowGraphs:
    """Recordings of a function of rows alone: x [T, D] on the card -> one result a row, without collectives.

    most: rows that are recorded at most; more are launched. Each call may overwrite what the last one returned.
    """

    def __init__(
        self, run: Callable[[Tensor], Tensor], recorder: Recorder, most: int, hidden: int, like: Tensor
    ) -> None:
        self._run = run
        self._counts = [count for count in ROW_COUNTS if count <= most]
        self._rows_TD = like.new_zeros(self._counts[-1], hidden)
        self._recordings = {count: self._record(recorder, count) for count in reversed(self._counts)}

    @torch.inference_mode()
    def __call__(self, x_TD: Tensor) -> Tensor:
        num_real = len(x_TD)
        if num_real > self._counts[-1]:
            return self._run(x_TD)
        self._rows_TD[:num_real] = x_TD
        made, replay = self._recordings[self._counts[bisect_left(self._counts, num_real)]]
        replay()
        return made[:num_real]

    @torch.inference_mode()
    def _record(self, recorder: Recorder, num_rows: int) -> tuple[Tensor, Callable[[], None]]:
        def work() -> Tensor:
            return self._run(self._rows_TD[:num_rows])

        for _ in range(REHEARSALS):
            work()
        return recorder.record(work)
