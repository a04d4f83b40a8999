"""A head of one layer that goes on from the target's own layers, one token after another (EAGLE and its kin).

A row reads a token together with a feature of the token before it: what the target's layers made of that one where it
is text, else what the head itself did. What it made of drafts is thrown away when they are text (`rereads`). Must not
know ranks, files or which format a head came from. Li et al., arXiv 2401.15077, 2406.16858, 2503.01840.

Shapes: T rows of a forward, L of them with logits, D hidden, W taps of a token, V ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tpspec.cache.store import KVStore
from tpspec.draft.texts import FED, OverTexts, slots_at_end
from tpspec.model.batch import Span
from tpspec.model.graphs import Forward
from tpspec.model.rope import Rope
from tpspec.model.runner import Runner
from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.model.embedding import Embedding
    from tpspec.model.frequencies import Frequencies
    from tpspec.model.graphs import Graphs
    from tpspec.model.layers import Layer
    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm
    from tpspec.model.sight import Shape
    from tpspec.model.steps import Steps


class Entry(Protocol):
    """How an embedding and a feature become what the layer reads."""

    def __call__(self, embedded_TD: Tensor, feature_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, which may be overwritten, and what attention reads of it."""


@dataclass(frozen=True, slots=True)
class Fused:
    """One matrix makes one of the two: EAGLE-1 and 2 (no norms), multi-token prediction (all of them)."""

    fc: Linear
    embedding_norm: Norm | None = None
    feature_norm: Norm | None = None
    attention_norm: Norm | None = None

    def __call__(self, embedded_TD: Tensor, feature_TD: Tensor) -> tuple[Tensor, Tensor]:
        pair = _normed(self.embedding_norm, embedded_TD), _normed(self.feature_norm, feature_TD)
        x_TD = self.fc(torch.cat(pair, 1))
        return x_TD, _normed(self.attention_norm, x_TD)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Attention reads both at once: EAGLE-3. normed_residual: the stream, too, begins with the normed feature."""

    embedding_norm: Norm
    feature_norm: Norm
    normed_residual: bool

    def __call__(self, embedded_TD: Tensor, feature_TD: Tensor) -> tuple[Tensor, Tensor]:
        normed_TD = self.feature_norm(feature_TD)
        read_TX = torch.cat([self.embedding_norm(embedded_TD), normed_TD], 1)
        return normed_TD if self.normed_residual else feature_TD, read_TX


@dataclass(frozen=True, slots=True)
class Head:
    """What was read of a checkpoint.

    taps: layers of the target, as in `Needs`. project: [n, W] -> [n, D], features of text. ids: the target's id of each
    logit; None where they are 0, 1, 2 and so on. norm: before the logits; feeds_normed: whether the next draft reads
    what comes after it.
    """

    taps: tuple[int, ...]
    project: Callable[[Tensor], Tensor]
    embedding: Embedding
    enter: Entry
    layer: Layer
    norm: Norm | None
    feeds_normed: bool
    lm_head: Linear
    ids: Tensor | None
    shape: Shape
    ropes: tuple[Frequencies, ...]
    max_positions: int | None


class EagleRun(OverTexts):
    """The `Run` of a head, over num_slots slots of its own. vocab: ids of the target. num_positions: of a text at most,
    if they are fewer than slots."""

    def __init__(self, head: Head, vocab: int, num_slots: int, num_positions: int | None = None) -> None:
        super().__init__(head.project, head.shape.dtype, head.shape.device)
        self.vocab = vocab
        shape, kept = head.shape, {head.layer.index: head.layer.kept}
        self._head = head
        self.store = KVStore(
            kept, num_slots, shape.dtype, shape.device, keys_alone=shape.keys_alone, num_positions=num_positions
        )
        # A row stands at the position of the token before it, so one token more can be read.
        self.max_positions = 1 + self.store.positions_of(head.max_positions)
        ropes = [Rope(frequencies, self.store.num_positions, shape.dtype, shape.device) for frequencies in head.ropes]
        self._runner = Runner(shape, ropes, self.store, head.embedding)
        size = self._runner.most_prepared, head.embedding.width
        self._feature_TD = torch.zeros(size, dtype=shape.dtype, device=shape.device)  # of a replay

    def prepare(self) -> None:
        """What would otherwise make the first drafts slow."""
        self._runner.prepare(self._recorded)

    @torch.inference_mode()
    def __call__(self, spans: Sequence[Span]) -> Tensor:
        head, texts = self._head, self._read(spans)
        spans = [_paired(span) for span in spans]
        tokens = [token for span in spans for token in span.tokens]
        feature_TD = torch.cat([text.before(span) for text, span in zip(texts, spans, strict=True)])
        rows = _logit_rows(spans, len(tokens), head.shape.device)
        if (graphs := self._runner.graphs(spans, len(tokens))) is not None:
            made = self._replayed(graphs, spans, tokens, feature_TD, rows)
        else:
            made = self._launched(spans, tokens, feature_TD, rows)
        wanted = [(text, span) for text, span in zip(texts, spans, strict=True) if span.num_logits]
        for i, (text, span) in enumerate(wanted):
            text.made[slots_at_end(span)[1]] = made.tapped[FED][i : i + 1]
        return made.logits_TV

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.store.move(sources, targets)

    def _launched(
        self, spans: Sequence[Span], tokens: Sequence[int], feature_TD: Tensor, rows: Tensor | slice
    ) -> Forward:
        """Of the rows that are wanted."""
        num_rows = len(tokens)
        steps = self._runner.steps(spans, num_rows)
        x_TD = sent(self._head.embedding.rows(tokens), self._head.shape.device)
        return self._out(self._layer(x_TD, feature_TD, steps, steps.begin(spans, num_rows))[rows])

    def _replayed(
        self, graphs: Graphs, spans: Sequence[Span], tokens: Sequence[int], feature_TD: Tensor, rows: Tensor | slice
    ) -> Forward:
        """The same by a recording, which leaves what it makes where the next will leave its own."""
        self._feature_TD[: len(feature_TD)] = feature_TD
        made = graphs.forward(self._recorded, spans, tokens, ())
        return Forward(made.logits_TV[rows], {FED: made.tapped[FED][rows].clone()})

    def _recorded(self, x_TD: Tensor, steps: Steps, round: Any, taps: tuple[int, ...]) -> Forward:
        return self._out(self._layer(x_TD, self._feature_TD[: len(x_TD)].clone(), steps, round))

    def _layer(self, embedded_TD: Tensor, feature_TD: Tensor, steps: Steps, round: Any) -> Tensor:
        """What the layer makes of every row; writes their keys and values. Both may be overwritten."""
        layer = self._head.layer
        x_TD, read_TX = self._head.enter(embedded_TD, feature_TD)
        delta_TD = layer.mixed(read_TX, steps, round)
        x_TD, normed_TD = steps.add_norm(x_TD, delta_TD, layer.mlp_norm)
        assert layer.mlp is not None, "what is built for heads has one"
        return x_TD + layer.mlp(normed_TD, steps)

    def _out(self, made_TD: Tensor) -> Forward:
        """Logits, and what the next draft reads."""
        normed_TD = _normed(self._head.norm, made_TD)
        return Forward(self._head.lm_head(normed_TD), {FED: normed_TD if self._head.feeds_normed else made_TD})


def _normed(norm: Norm | None, x_TD: Tensor) -> Tensor:
    return x_TD if norm is None else norm(x_TD)


def _paired(span: Span) -> Span:
    """The rows that have a token before them, each at the position of that one."""
    (first, count), *others = span.runs
    runs = ((first + 1, count - 1), *others) if count > 1 else tuple(others)
    tokens = span.tokens if span.start else span.tokens[1:]
    return Span(span.seq, max(span.start - 1, 0), tokens, runs, span.num_logits)


def _logit_rows(spans: Sequence[Span], num_rows: int, device: torch.device) -> Tensor | slice:
    """The last row of every span that wants logits: what there is to read of a text branches nowhere."""
    rows, stop = [], 0
    for span in spans:
        stop += len(span.tokens)
        rows += [stop - 1] * span.num_logits
    return slice(None) if len(rows) == num_rows else sent(rows, device)
