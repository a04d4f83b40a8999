"""A small model that attends to what layers of the target keep, and keeps nothing itself (Gemma 4's assistants).

A row reads a token together with a feature of the token before it: what leaves the target where that one is text, else
what the assistant itself made of it. It stands at the place of the root, however far its drafts go, and sees the text
before that alone: so drafts see nothing of each other, and a text costs what two of the target's layers keep of it.
Must not know ranks or files.

Shapes: T rows of a forward, D hidden of the target, A of the assistant, V ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tpspec.cache.store import as_slots
from tpspec.draft.texts import FED, OverTexts, as_it_is, slots_at_end
from tpspec.model.batch import Span
from tpspec.model.graphs import Forward
from tpspec.model.runner import Runner
from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpspec.draft.texts import Text
    from tpspec.model.decoder import Decoder
    from tpspec.model.embedding import Embedding
    from tpspec.model.keeping import Keeper
    from tpspec.model.linear import Linear
    from tpspec.model.steps import Steps


@dataclass(frozen=True, slots=True)
class Assistant:
    """What was read of a checkpoint.

    taps: layers of the target, as in `Needs`; what leaves the final norm is the last. keepers: those that make keys and
    values of them again, by the layer of the assistant's store that has those. embedding: the target's. enter: [2 D] ->
    [A], of a token and a feature; leave: [A] -> [D], the next feature.
    """

    taps: tuple[int, ...]
    keepers: Mapping[int, Keeper]
    embedding: Embedding
    enter: Linear
    model: Decoder
    leave: Linear
    max_positions: int | None


class AssistantRun(OverTexts):
    """The `Run` of an assistant. vocab: ids of the target."""

    def __init__(self, assistant: Assistant, vocab: int) -> None:
        super().__init__(as_it_is, assistant.model.shape.dtype, assistant.model.shape.device)
        self._assistant, model = assistant, assistant.model
        self.vocab, self.max_positions = vocab, model.store.positions_of(assistant.max_positions)
        # A row stands where the last token of the text does, whose keys it sees, and is turned as the next.
        ropes = [rope.one_later() for rope in model.ropes]
        self._runner = Runner(model.shape, ropes, model.store, assistant.embedding)
        self._hidden = assistant.embedding.width
        size = self._runner.most_prepared, self._hidden
        self._feature_TD = torch.zeros(size, dtype=self._dtype, device=self._device)  # of a replay

    def prepare(self) -> None:
        """What would otherwise make the first drafts slow."""
        self._runner.prepare(self._recorded)

    @torch.inference_mode()
    def __call__(self, spans: Sequence[Span]) -> Tensor:
        texts = self._read(spans)
        self._keep(spans, texts)
        asked = [(text, span) for text, span in zip(texts, spans, strict=True) if span.num_logits]
        if not asked:
            return self._feature_TD.new_zeros(0, self.vocab)
        rows = [_at_the_root(span, text.num_known) for text, span in asked]
        feature_TD = torch.cat([self._before(text, span) for text, span in asked])
        tokens = [row.tokens[0] for row in rows]
        if (graphs := self._runner.graphs(rows, len(rows))) is not None:
            self._feature_TD[: len(rows)] = feature_TD
            made = graphs.forward(self._recorded, rows, tokens, ())
            fed_TD = made.tapped[FED].clone()
        else:
            steps = self._runner.steps(rows, len(rows))
            x_TD = sent(self._assistant.embedding.rows(tokens), self._device)
            made = self._forward(x_TD, feature_TD, steps, steps.begin(rows, len(rows)))
            fed_TD = made.tapped[FED]
        for i, (text, span) in enumerate(asked):
            text.made[slots_at_end(span)[1]] = fed_TD[i : i + 1]
        return made.logits_TV

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._assistant.model.store.move(sources, targets)

    def _keep(self, spans: Sequence[Span], texts: Sequence[Text]) -> None:
        """Keys and values of all rows that are text."""
        read: list[Tensor] = []
        positions: list[int] = []
        slots: list[int] = []
        for span, text in zip(spans, texts, strict=True):
            stop = min(span.start + len(span.tokens), text.num_known)
            read.append(text.features.read(span.start, stop))
            positions += range(span.start, stop)
            slots += span.own_slots()[: max(0, stop - span.start)]
        if not positions:
            return
        model, device = self._assistant.model, self._device
        taps_TW, positions_T, at = torch.cat(read), sent(positions, device), as_slots(slots, device)
        for i, (layer, keeper) in enumerate(self._assistant.keepers.items()):
            x_TD = taps_TW[:, i * self._hidden : (i + 1) * self._hidden]
            rope = None if keeper.rope is None else model.ropes[keeper.rope]
            keeper.keep(x_TD, rope, positions_T, model.store, layer, at)

    def _before(self, text: Text, span: Span) -> Tensor:
        """[1, D], the feature of the token before the span's last."""
        last = span.start + len(span.tokens) - 1
        if last <= text.num_known:
            return text.features.read(last - 1, last)[:, -self._hidden :]
        return text.made[slots_at_end(span)[0]]

    def _recorded(self, x_TD: Tensor, steps: Steps, round: Any, taps: tuple[int, ...]) -> Forward:
        return self._forward(x_TD, self._feature_TD[: len(x_TD)].clone(), steps, round)

    def _forward(self, embedded_TD: Tensor, feature_TD: Tensor, steps: Steps, round: Any) -> Forward:
        """Logits, and what the next draft reads."""
        assistant = self._assistant
        x_TA = assistant.enter(torch.cat([embedded_TD, feature_TD], 1))
        normed_TA, _ = assistant.model.rows(x_TA, steps, round, ())
        return Forward(assistant.model.head(normed_TA), {FED: assistant.leave(normed_TA)})


def _at_the_root(span: Span, num_known: int) -> Span:
    """The span's last row, where the last token of the text before the root stands."""
    num_text = min(num_known, span.start + len(span.tokens) - 1)
    runs, missing = [], num_text
    for first, count in span.runs:
        if missing:
            runs.append((first, min(count, missing)))
            missing -= runs[-1][1]
    return Span(span.seq, num_text - 1, span.tokens[-1:], tuple(runs), 1)
