"""The one decoder: a shard of a Llama-like transformer whose two all-reduces per layer stand in plain sight.

Knows rows and slots; must not know drafts, sequences' fates or which architecture it is (that is data, in its layers).

Shapes: T rows of the round, D hidden, V vocabulary rows of this shard.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tpspec.comm.communicator import Purpose
from tpspec.model.compiled import MOST_ROWS, compiled_steps
from tpspec.model.steps import Layer, Norm, Shape, Steps, TorchSteps
from tpspec.topology.sublayers import NOTHING, Sublayers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.cache.store import KVStore
    from tpspec.comm.communicator import Communicator
    from tpspec.model.batch import Span
    from tpspec.model.linear import Linear
    from tpspec.model.rope import Rope

FINAL = -1  # as a layer: what leaves the final norm


class Decoder:
    """embed -> layers -> norm -> head, over this rank's heads, channels and vocabulary rows.

    Every rank of `comm` runs the same spans. fixed_rows: every forward runs exactly that many rows (deterministic).
    compiled: whether few rows may take the compiled steps (where there are some).
    """

    def __init__(
        self,
        *,
        embedding_VD: Tensor,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        rope: Rope,
        shape: Shape,
        comm: Communicator,
        store: KVStore,
        fixed_rows: int | None = None,
        compiled: bool = True,
    ) -> None:
        self.embedding_VD, self.layers, self.norm, self.head = embedding_VD, layers, norm, head
        self.shape, self.comm, self.store, self.fixed_rows = shape, comm, store, fixed_rows
        self.left_out = NOTHING
        self._many: Steps = TorchSteps(shape, rope, store, fixed_rows)
        self._few: Steps | None = compiled_steps(shape, rope, store) if compiled else None

    def thinned(self, left_out: Sublayers, comm: Communicator) -> Decoder:
        """The same weights and cache without some sublayers, whose keys and values it neither writes nor reads."""
        thin = copy(self)
        thin.left_out, thin.comm = left_out, comm
        return thin

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], tap: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """Logits of the last num_logits rows of every span, in order: [sum of num_logits, V] of this shard.

        Keys and values of all rows are written to the spans' slots. tap: shown what enters each layer, what leaves the
        last (as the layer after it), and what leaves the final norm (as layer -1): [T, D], to be copied at once.
        """
        x_TD, delta_TD = self._embed(spans), None
        num_rows = x_TD.shape[0]
        steps = self._few if self._few is not None and num_rows <= MOST_ROWS else self._many
        round = steps.begin(spans, num_rows)
        for layer in self.layers:
            if layer.index not in self.left_out.attention:
                x_TD, normed_TD = steps.add_norm(x_TD, delta_TD, layer.attention_norm)
                if tap is not None:
                    tap(layer.index, x_TD)
                partial_TD = layer.o(steps.attention(layer, layer.qkv(normed_TD), round))
                delta_TD = self.comm.all_reduce(partial_TD, Purpose.attention)
            if layer.index not in self.left_out.mlp:
                x_TD, normed_TD = steps.add_norm(x_TD, delta_TD, layer.mlp_norm)
                partial_TD = layer.down(steps.gate(layer.gate_up(normed_TD)))
                delta_TD = self.comm.all_reduce(partial_TD, Purpose.mlp)
        x_TD, normed_TD = steps.add_norm(x_TD, delta_TD, self.norm)
        if tap is not None:
            tap(len(self.layers), x_TD)
            tap(FINAL, normed_TD)
        return self._logits(spans, normed_TD)

    def _embed(self, spans: Sequence[Span]) -> Tensor:
        """Rows of the table, which stays in host memory: no collective, no card memory."""
        ids = torch.tensor([token for span in spans for token in span.tokens])
        x_TD = self.embedding_VD[ids].to(self.shape.device, self.shape.dtype)
        padding = 0 if self.fixed_rows is None else self.fixed_rows - len(ids)
        return F.pad(x_TD, (0, 0, 0, padding)) if padding else x_TD

    def _logits(self, spans: Sequence[Span], normed_TD: Tensor) -> Tensor:
        if self.fixed_rows is not None:  # all rows go through the head: its row count is part of the promise
            return self.head(normed_TD)[_logit_rows(spans)]
        if sum(span.num_logits for span in spans) < normed_TD.shape[0]:
            normed_TD = normed_TD[_logit_rows(spans)]
        return self.head(normed_TD)


def _logit_rows(spans: Sequence[Span]) -> Tensor:
    rows: list[int] = []
    first = 0
    for span in spans:
        first += len(span.tokens)
        rows += range(first - span.num_logits, first)
    return torch.tensor(rows, dtype=torch.long)
