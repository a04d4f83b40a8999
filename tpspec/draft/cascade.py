"""Several sources in order: where one is silent, the next is asked. Knows no source by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.draft.protocol import Needs
from tpspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.draft.protocol import Ask, Drafter, Taps
    from tpspec.tokens import TokenTree, Verdict


class Cascade:
    """Asks the first source, then the next for what the first is silent on, and so on to the last.

    All of them see all taps; a source that needs others than another is refused.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        needs = [drafter.needs for drafter in self._drafters]
        taps = {need.taps for need in needs if need.taps}
        if len(taps) > 1:
            raise UserError("two of the sources tap different layers of the target; should be one of them at most")
        self.needs = Needs(
            own_model=any(need.own_model for need in needs),
            gives_q=any(need.gives_q for need in needs),
            gives_odds=all(need.gives_odds for need in needs),
            taps=taps.pop() if taps else (),
            whole=max(need.whole for need in needs),
        )

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        trees: dict[int, TokenTree] = {}
        for drafter in self._drafters:
            silent = [ask for ask in asks if not trees.get(ask.seq)]
            trees.update((ask.seq, tree) for ask, tree in zip(silent, drafter.propose(silent), strict=True))
        return [trees[ask.seq] for ask in asks]

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        for drafter in self._drafters:
            drafter.observe(verdicts, taps)

    def forget(self, seq: int) -> None:
        for drafter in self._drafters:
            drafter.forget(seq)
