"""The one decoder: a shard of a Llama-like transformer whose all-reduces, two per layer, stand in plain sight.

Knows rows and slots; must not know drafts, sequences' fates or which architecture it is (that is data, in its layers).

Shapes: T rows of the round, D hidden, V vocabulary rows of this shard.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tpspec.comm.communicator import Purpose
from tpspec.model.graphs import Forward
from tpspec.model.layers import MixingLayer
from tpspec.model.runner import Runner
from tpspec.model.steps import AddNorm
from tpspec.staged import copied, sent
from tpspec.topology.sublayers import NOTHING, Sublayers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.cache.store import KVStore
    from tpspec.comm.communicator import Communicator
    from tpspec.comm.ledger import Ledger
    from tpspec.model.batch import Span
    from tpspec.model.embedding import Tables
    from tpspec.model.graphs import Gate, Graphs, Recorder, Taps
    from tpspec.model.layers import AnyLayer
    from tpspec.model.linear import Linear
    from tpspec.model.mlp import Mlp
    from tpspec.model.norm import Norm
    from tpspec.model.per_layer import TokenInputs
    from tpspec.model.rope import Rope
    from tpspec.model.sight import Shape
    from tpspec.model.steps import RecordedSteps, Steps

FINAL = -1  # as a layer: what leaves the final norm


class Decoder:
    """embed -> layers -> norm -> head, over this rank's heads, channels and vocabulary rows.

    Every rank of `comm` runs the same spans. fixed_rows: every forward runs exactly that many rows (deterministic).
    compiled: whether rows may take steps made for them (where there are some). ledger: where `comm` is counted.
    states: of layers that keep some, where there are such. inputs: of rows of the embedding, where they hold
    numbers for each layer. most_verified: see Runner. hidden_scale: of what is tapped between layers.
    """

    def __init__(
        self,
        *,
        embedding: Tables,
        layers: Sequence[AnyLayer],
        norm: Norm,
        head: Linear,
        ropes: Sequence[Rope],
        shape: Shape,
        comm: Communicator,
        store: KVStore,
        fixed_rows: int | None = None,
        compiled: bool = True,
        ledger: Ledger | None = None,
        states: StateStore | None = None,
        inputs: TokenInputs | None = None,
        most_verified: int = 0,
        hidden_scale: float = 1.0,
    ) -> None:
        self._hidden_scale = hidden_scale
        self.embedding, self.layers, self.norm, self.head = embedding, layers, norm, head
        self.shape, self.comm, self.store, self.ropes, self.fixed_rows = shape, comm, store, ropes, fixed_rows
        self.left_out, self.states, self.inputs = NOTHING, states, inputs
        self._waiting: Graphs | None = None
        self._runner = Runner(shape, ropes, store, embedding, fixed_rows=fixed_rows, compiled=compiled,
                              recorded=comm.is_queued, ledger=ledger, states=states,
                              most_verified=most_verified)  # fmt: skip

    def record(self, steps: RecordedSteps, recorder: Recorder, gate: Gate | None = None) -> None:
        """See `Runner`."""
        self._runner.record(steps, recorder, gate)

    def is_replay(self, num_rows: int, num_logits: int) -> bool:
        """See `Runner`."""
        return self._runner.is_replay(num_rows, num_logits)

    def prepare(self, taps: Taps = ()) -> bool:
        """What would otherwise make the first round of each row count slow. Every rank calls it. Whether forwards may
        be launched before it is known what of: on all, and without taps."""
        self._runner.agree(self._everywhere)
        self._runner.prepare(self._whole, taps, self._everywhere)
        self._runner.agree_on_flash(self._everywhere)
        return self._runner.can_launch(self._everywhere, here=not taps)

    def close(self) -> None:
        """Before the end of what `comm` sends through. Nothing runs afterwards."""
        self._runner.close()

    def thinned(self, left_out: Sublayers, comm: Communicator, *, recorded: bool = False) -> Decoder:
        """The same weights and cache without some sublayers, whose keys and values it neither writes nor reads.

        recorded: where this one is, which is worth it for many forwards. The two never run at once.
        """
        thin = copy(self)
        thin.left_out, thin.comm = left_out, comm
        thin._runner = self._runner.beside(recorded=recorded)
        return thin

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Logits of the last num_logits rows of every span, in order: [sum of num_logits, V] of this shard.

        Keys and values of all rows are written to the spans' slots. The next forward may overwrite what it returns.
        """
        return self.tapped(spans, ()).logits_TV

    def tapped(self, spans: Sequence[Span], taps: Taps) -> Forward:
        """`forward`, and of every row what enters the layers `taps`, what leaves the last (as the layer after it), and
        what leaves the final norm (as FINAL)."""
        tokens = [token for span in spans for token in span.tokens]
        num_rows = len(tokens) if self.fixed_rows is None else self.fixed_rows
        if (graphs := self._runner.graphs(spans, num_rows)) is not None:  # a replay does without torch's modes
            made = graphs.forward(self._whole, spans, tokens, taps)
            return Forward(_wanted(made.logits_TV, spans), made.tapped)
        return self._launched(spans, tokens, num_rows, taps)

    def launch(self, spans: Sequence[Span]) -> bool:
        """Whether their forward has been launched, before it is known which tokens their rows are: it waits for
        `release`. See `Graphs`."""
        num_rows = sum(len(span.tokens) for span in spans)
        graphs = self._runner.graphs(spans, num_rows) if self.fixed_rows is None else None
        if graphs is None or not graphs.launch(spans, num_rows):
            return False
        self._waiting = graphs
        return True

    def release(self, tokens: Sequence[int]) -> Callable[[], Forward]:
        """What gives the forward of these rows, all of whose logits are wanted, and counts it. See `Graphs`."""
        assert self._waiting is not None, "it has been launched"
        return self._waiting.release(tokens)

    @torch.inference_mode()
    def _launched(self, spans: Sequence[Span], tokens: Sequence[int], num_rows: int, taps: Taps) -> Forward:
        """`tapped` of rows that are no replay."""
        steps = self._runner.steps(spans, num_rows)
        x_TD = sent(_padded(self.embedding.rows(tokens), num_rows), self.shape.device)
        normed_TD, tapped = self.rows(x_TD, steps, steps.begin(spans, num_rows), taps)
        if self.fixed_rows is not None:  # all rows go through the head: its row count is part of the promise
            return Forward(_wanted(self.head(normed_TD), spans), tapped)
        return Forward(self.head(_wanted(normed_TD, spans)), tapped)

    def _everywhere(self, holds: bool) -> bool:
        """Whether it holds on every rank."""
        said = torch.tensor([holds], dtype=torch.uint8, device=self.shape.device)
        return bool(self.comm.all_gather(said, Purpose.control).all())

    def _whole(self, x_TD: Tensor, steps: Steps, round: Any, taps: Taps) -> Forward:
        """Every row goes through the head."""
        normed_TD, tapped = self.rows(x_TD, steps, round, taps)
        return Forward(self.head(normed_TD), tapped)

    def rows(self, x_TD: Tensor, steps: Steps, round: Any, taps: Taps) -> tuple[Tensor, dict[int, Tensor]]:
        """What leaves the final norm, and what was tapped, of rows of the embedding; they may be overwritten."""
        norms, inputs_LTP = self._norms(), x_TD  # no layer has any
        if self.inputs is not None:
            x_TD, inputs_LTP = self.inputs.split(x_TD)
        x_TD, normed_TD = steps.add_norm(x_TD, None, next(norms))
        tapped: dict[int, Tensor] = {}
        for layer in self.layers:
            if layer.index in taps:
                tapped[layer.index] = self._tapped(x_TD)
            mixing, mlp = self._kept(layer)
            inputs = layer.inputs if mixing or mlp else None
            if mixing and mlp and layer.parallel:  # in one all-reduce; such layers have nothing besides
                partial_TD = mixing.mixed(normed_TD, steps, round, self.comm) + mlp(normed_TD, steps)
                then = AddNorm(steps, x_TD, next(norms))
                x_TD, normed_TD = self.comm.all_reduce_then(partial_TD, Purpose.mlp, then)
                continue
            if mixing:
                scale = 1.0 if mlp or inputs else layer.scale
                then = AddNorm(steps, x_TD, next(norms), mixing.attention_out_norm, scale, late=mixing.late_norm)
                partial_TD = mixing.mixed(normed_TD, steps, round, self.comm)
                x_TD, normed_TD = self.comm.all_reduce_then(partial_TD, Purpose.attention, then)
            if mlp:
                scale = 1.0 if inputs else layer.scale
                then = AddNorm(steps, x_TD, next(norms), layer.mlp_out_norm, scale, layer.mlp_joined)
                x_TD, normed_TD = self.comm.all_reduce_then(mlp(normed_TD, steps), Purpose.mlp, then)
            if inputs is not None:
                delta_TD = inputs(x_TD, inputs_LTP[layer.index], steps)
                x_TD, normed_TD = steps.add_norm(x_TD, delta_TD, next(norms), inputs.norm, layer.scale)
            elif not (mixing or mlp) and layer.scale != 1:
                x_TD = x_TD * layer.scale  # and its norm is what it was
        if len(self.layers) in taps:
            tapped[len(self.layers)] = self._tapped(x_TD)
        if FINAL in taps:
            tapped[FINAL] = copied(normed_TD)
        return normed_TD, tapped

    def _tapped(self, x_TD: Tensor) -> Tensor:
        return copied(x_TD) if self._hidden_scale == 1 else x_TD * self._hidden_scale

    def _kept(self, layer: AnyLayer) -> tuple[MixingLayer | None, Mlp | None]:
        """The layer where its attention, and its MLP where that, is there and not left out."""
        mixing = layer if isinstance(layer, MixingLayer) and layer.index not in self.left_out.attention else None
        return mixing, None if layer.index in self.left_out.mlp else layer.mlp

    def _norms(self) -> Iterator[Norm | None]:
        """Of what enters each sublayer that is not left out, and of what leaves the last. What reads a token's numbers
        for a layer reads what is not normed: of that, too, for each step norms what the next reads."""
        for layer in self.layers:
            mixing, mlp = self._kept(layer)
            if mixing:
                yield mixing.attention_norm
            if mlp and not (mixing and layer.parallel):
                yield layer.mlp_norm
            if layer.inputs is not None and (mixing or mlp):
                yield layer.inputs.norm
        yield self.norm


def _padded(x_TD: Tensor, num_rows: int) -> Tensor:
    return x_TD if len(x_TD) == num_rows else F.pad(x_TD, (0, 0, 0, num_rows - len(x_TD)))


def _wanted(x_TX: Tensor, spans: Sequence[Span]) -> Tensor:
    """The rows whose logits are wanted; not copied where those are all."""
    if sum(span.num_logits for span in spans) == len(x_TX):
        return x_TX
    rows: list[int] = []
    first = 0
    for span in spans:
        first += len(span.tokens)
        rows += range(first - span.num_logits, first)
    return x_TX[sent(rows, x_TX.device)]
