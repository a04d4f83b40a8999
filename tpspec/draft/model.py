"""A draft model of its own: reads what was committed, then drafts one token at a time. Knows no rank, device or cache.

What was accepted or rejected needs no message: the committed tokens of the next ask say how much of what the model has
read still holds, and feeding from there overwrites the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tpspec.cache.pages import OutOfPages
from tpspec.draft.prefix import common_length
from tpspec.draft.protocol import Feed, Needs
from tpspec.tokens import TokenTree
from tpspec.verify.draw import pick, sample
from tpspec.verify.rows import Draw, RowLogits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tpspec.draft.protocol import Ask, Run, Taps
    from tpspec.tokens import Draws, Verdict
    from tpspec.verify.noise import Noise

Drawing = Literal["coupled", "sampled"]


@dataclass(slots=True)
class _Draft:
    """A chain in the making. `stuck`: the cache could not hold more of it."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    draws: list[Draws | None] = field(default_factory=list)
    stuck: bool = False

    @property
    def wants_more(self) -> bool:
        return len(self.tokens) < self.ask.num_tokens and not self.stuck

    def draw(self) -> Draw:
        return Draw(self.ask.tokens, self.ask.num_prompt, self.ask.sampling, tuple(self.tokens))


class ModelDrafter:
    """Drafts with an independent model that shares the target's vocabulary.

    coupled: draws as the target does, with the target's own noise, so that both choose the same token more often than
    two independent draws could (for `match`). sampled: draws with noise of its own from its `support` likeliest ids and
    says from what (for `rejection`). vocab: ids of the target; those beyond, or beyond the draft's own, are padding.
    """

    def __init__(self, noise: Noise, drawing: Drawing, vocab: int, support: int = 64) -> None:
        self.needs = Needs(own_model=True, gives_q=drawing == "sampled")
        self._noise, self._vocab, self._support = noise, vocab, support
        self._read: dict[int, list[int]] = {}  # the tokens whose keys and values the cache holds

    def propose(self, asks: Sequence[Ask], run: Run | None) -> list[TokenTree]:
        if run is None:
            raise ValueError("a model drafter must be handed its model")
        drafts = [_Draft(ask) for ask in asks]
        for wave in _waves(drafts):
            while active := [draft for draft in wave if draft.wants_more]:
                self._step(active, run)
        return [self._tree(draft) for draft in drafts]

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        """The next ask holds the committed tokens; nothing to learn from their verdicts."""

    def forget(self, seq: int) -> None:
        self._read.pop(seq, None)

    def _tree(self, draft: _Draft) -> TokenTree:
        return TokenTree.chain(draft.tokens, draft.draws if self.needs.gives_q else None)

    def _step(self, drafts: Sequence[_Draft], run: Run) -> None:
        """One more token for each, in one forward while the cache can hold them all."""
        try:
            self._extend(drafts, run)
        except OutOfPages:
            if len(drafts) == 1:
                self._give_up(drafts[0], run)
                return
            for draft in drafts:
                self._step([draft], run)

    def _give_up(self, draft: _Draft, run: Run) -> None:
        draft.stuck = True
        self.forget(draft.ask.seq)
        run.forget(draft.ask.seq)

    def _extend(self, drafts: Sequence[_Draft], run: Run) -> None:
        texts = [[*draft.ask.tokens, *draft.tokens] for draft in drafts]
        feeds = [self._missing(draft.ask.seq, text) for draft, text in zip(drafts, texts, strict=True)]
        logits_TV = run(feeds)
        for feed, text in zip(feeds, texts, strict=True):
            self._read[feed.seq] = text
        for draft, (token, draws) in zip(drafts, self._drawn(logits_TV, drafts, run.vocab), strict=True):
            draft.tokens.append(token)
            draft.draws.append(draws)

    def _missing(self, seq: int, text: list[int]) -> Feed:
        """What the cache lacks of a text; its last token in any case, for the logits after it."""
        start = min(common_length(self._read.get(seq, []), text), len(text) - 1)
        return Feed(seq, start, text[start:])

    def _drawn(self, logits_TV: Tensor, drafts: Sequence[_Draft], vocab: int) -> Sequence[tuple[int, Draws | None]]:
        rows = RowLogits(logits_TV, min(vocab, self._vocab))
        draws = [draft.draw() for draft in drafts]
        if self.needs.gives_q:
            return sample(rows, draws, self._noise, self._support)
        return [(token, None) for token in pick(rows, draws, self._noise)]


def _waves(drafts: Sequence[_Draft]) -> Iterator[list[_Draft]]:
    """Drafts in order, no sequence twice in a wave: two continuations of one sequence would share its cache."""
    while drafts:
        first = {draft.ask.seq: draft for draft in reversed(drafts)}
        yield [draft for draft in drafts if first[draft.ask.seq] is draft]
        drafts = [draft for draft in drafts if first[draft.ask.seq] is not draft]
