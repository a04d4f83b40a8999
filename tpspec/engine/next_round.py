"""The forward of a round that is launched before the verdicts of the one before it: where every text goes on by a token
of its own, all is known of it but those tokens. A card that waits for them begins when they are known, and the host
does the rest of its work beside it.

Knows spans and drawn tokens; must not know why a text goes on, nor what a card is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tpspec.model.batch import with_tokens
from tpspec.tokens import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.model.batch import Span

ANY = 0  # a token that has an embedding, for rows that nobody will ask for


class Ahead(Protocol):
    """Of a target."""

    def launch(self, spans: Sequence[Span]) -> bool: ...
    def release(self, tokens: Sequence[int]) -> None: ...


class NextRound:
    """A `Listener` of a round whose rows are the roots of `seqs`. foreseen: spans of the next round, of those that go
    on, without their tokens. spans: with them; none before they are drawn, nor of a round that was given up.
    is_launched: whether the target could."""

    def __init__(self, target: Ahead, seqs: Sequence[int], foreseen: Sequence[Span]) -> None:
        self._target, self._foreseen = target, foreseen
        self._num_rows, rows = len(seqs), {seq: row for row, seq in enumerate(seqs)}
        self._rows = [rows[span.seq] for span in foreseen]
        self._waits = self._is_vain = self.is_launched = False
        self.spans: Sequence[Span] = ()

    def asked(self) -> None:
        self._waits = self.is_launched = self._target.launch(self._foreseen)

    def given_up(self) -> None:
        self._is_vain = True
        self.end()

    def drawn(self, tokens: Sequence[int]) -> None:
        if self._is_vain:
            return
        assert len(tokens) == self._num_rows
        drawn = [ANY if (token := tokens[row]) == NO_TOKEN else token for row in self._rows]
        self._release(drawn)
        self.spans = tuple(with_tokens(self._foreseen, drawn))

    def end(self) -> None:
        """Whatever has become of the round, the card need not wait any longer."""
        self._release([ANY] * len(self._foreseen))

    def _release(self, tokens: Sequence[int]) -> None:
        if self._waits:
            self._waits = False
            self._target.release(tokens)
