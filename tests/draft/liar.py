"""A source that drafts nonsense, quickly and with confidence: whatever trusts it costs speed, never text."""

from __future__ import annotations

from collections.abc import Sequence

from tpspec.draft.protocol import Ask, Needs, Taps
from tpspec.tokens import TokenTree, Verdict


class Liar:
    """Drafts the most-wanted number of arbitrary ids below `vocab`, another chain every time."""

    needs = Needs()

    def __init__(self, vocab: int) -> None:
        self._vocab, self._lies = vocab, 0

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        return [TokenTree.chain([self._lie() for _ in range(ask.num_tokens)]) for ask in asks]

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        return

    def forget(self, seq: int) -> None:
        return

    def _lie(self) -> int:
        self._lies = (self._lies * 5 + 7) % 65536
        return self._lies % self._vocab
