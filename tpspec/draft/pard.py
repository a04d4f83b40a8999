"""A small model that says several tokens in one forward: behind the text it reads mask tokens, each a place to fill.

An et al., "PARD" (arXiv 2504.18583; github.com/AMD-AGI/PARD): an ordinary checkpoint whose config.json names a
`pard_token`. The row of the root says the first token, the row of each mask token the next; the keys and values of mask
tokens are dropped. Knows no rank, target or device.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from tpspec.cache.pages import OutOfPages, PagePool
from tpspec.draft.levels import Levels
from tpspec.draft.outlook import Outlook
from tpspec.draft.protocol import Needs
from tpspec.draft.record import Record
from tpspec.draft.run import load_run
from tpspec.model.batch import Span
from tpspec.published.parallel import mask_of
from tpspec.published.shape import ModelShape
from tpspec.tokens import NO_DRAFT, NO_TOKEN, TokenTree
from tpspec.topology.sources import SOURCES
from tpspec.verify.draw import Draw, rank, sample
from tpspec.verify.rows import RowLogits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.draft.protocol import Ask, Given, Run, Taps
    from tpspec.draft.shapes import Shape
    from tpspec.tokens import Verdict
    from tpspec.verify.noise import Noise

PAGE = 16
MAX_ROWS = 256  # of one forward; a longer text is read in pieces
BELIEF, BELIEF_WEIGHT = 0.7, 8.0  # that what was drafted of a place is right, if the places before it were


class Pard:
    """Proposes the likeliest tree of what the places may hold.

    mask: the token that stands for a place. most: places that are filled at most, as many as the model was trained for.
    branches: candidates of a place that are considered; 1 makes chains. shape: of every tree; None where odds decide.
    support: ids that a token is drawn from, for a rule that asks from what (`gives_q`); such drafts are chains.
    """

    def __init__(
        self,
        run: Run,
        num_slots: int,
        vocab: int,
        noise: Noise,
        mask: int,
        *,
        most: int = 12,
        support: int = 64,
        branches: int = 1,
        shape: Shape | None = None,
        gives_q: bool = False,
    ) -> None:
        self.needs = Needs(own_model=True, gives_q=gives_q, gives_odds=True)
        self._run, self._vocab, self._noise, self._mask = run, min(run.vocab, vocab), noise, mask
        self._most, self._support = most, support
        self._width = branches if shape is None else shape.branches
        self._levels = Levels(most, None if gives_q else shape)
        self._pool = PagePool(max(1, num_slots // PAGE), PAGE)
        self._num_read: dict[int, int] = {}  # tokens of a text whose keys and values are cached
        self._right, self._outlook = Record((BELIEF,), BELIEF_WEIGHT), Outlook()

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        for ask in asks:
            for right in self._levels.judge(ask):
                self._right.add(0, right=right)
        spans = {ask.seq: span for ask in asks if self._pays(ask) and (span := self._span(ask)) is not None}
        able = [ask for ask in asks if ask.seq in spans]
        if not able:
            return [NO_DRAFT] * len(asks)
        places = [spans[ask.seq].num_logits for ask in able]
        rows = RowLogits(self._run([spans[ask.seq] for ask in able]), self._vocab)
        for ask in able:
            self._num_read[ask.seq] = len(ask.tokens)
            self._pool.shrink(ask.seq, len(ask.tokens))
        trees = self._drawn(able, places, rows) if self.needs.gives_q else self._ranked(able, places, rows)
        return [trees.get(ask.seq, NO_DRAFT) for ask in asks]

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        """The next ask holds the committed tokens; nothing to learn from their verdicts."""

    def forget(self, seq: int) -> None:
        self._pool.release(seq)
        self._num_read.pop(seq, None)
        self._levels.forget(seq)

    def _ranked(self, asks: Sequence[Ask], places: Sequence[int], rows: RowLogits) -> dict[int, TokenTree]:
        ranked = iter(rank(rows, self._draws(asks, places), self._width, self._noise))
        for ask, num_places in zip(asks, places, strict=True):
            self._levels.guess(ask, [next(ranked) for _ in range(num_places)])
        return {ask.seq: self._levels.tree(ask) for ask in asks}

    def _drawn(self, asks: Sequence[Ask], places: Sequence[int], rows: RowLogits) -> dict[int, TokenTree]:
        drawn = iter(sample(rows, self._draws(asks, places), self._noise, self._support))
        trees: dict[int, TokenTree] = {}
        for ask, num_places in zip(asks, places, strict=True):
            said = [*takewhile(lambda one: one[0] != NO_TOKEN, [next(drawn) for _ in range(num_places)])]
            trees[ask.seq] = TokenTree.chain([token for token, _ in said], [q for _, q in said])
            self._levels.guess(ask, [((token,), [BELIEF]) for token, _ in said])
        return trees

    def _draws(self, asks: Sequence[Ask], places: Sequence[int]) -> list[Draw]:
        """Which tokens lie between is not known where all are drawn at once, only how many."""
        return [
            Draw(ask.tokens, ask.num_prompt, ask.sampling, (ask.tokens[-1],) * place)
            for ask, num_places in zip(asks, places, strict=True)
            for place in range(num_places)
        ]

    def _span(self, ask: Ask) -> Span | None:
        """The rows that read what is new and fill the places; None where there is no room for them, or a token has no
        row in the model's table, as padding of the target's."""
        size, limit = len(ask.tokens), self._run.max_positions
        num_masks = min(ask.num_tokens, self._most, (limit or size + self._most) - size + 1) - 1
        start = min(self._num_read.get(ask.seq, 0), size - 1)
        is_foreign = max(ask.tokens[start:]) >= self._run.vocab
        if num_masks < 0 or is_foreign or not self._hold(ask.seq, size + num_masks):
            return None
        while size - start > MAX_ROWS:
            stop = start + MAX_ROWS
            self._run([Span(ask.seq, start, tuple(ask.tokens[start:stop]), self._pool.runs(ask.seq, stop), 0)])
            start = stop
        tokens = (*ask.tokens[start:], *[self._mask] * num_masks)
        return Span(ask.seq, start, tokens, self._pool.runs(ask.seq, size + num_masks), num_masks + 1)

    def _hold(self, seq: int, num_slots: int) -> bool:
        """Without room for a text, what it holds is of use to others."""
        try:
            self._pool.grow(seq, num_slots)
        except OutOfPages:
            self.forget(seq)
            return False
        return True

    def _pays(self, ask: Ask) -> bool:
        """Whether a forward brings more than the same time does without; if not, it is tried now and then."""
        if ask.num_tokens < 1 or ask.costs is None or not ask.costs.rate:
            return ask.num_tokens > 0
        num_tokens, right = min(ask.num_tokens, self._most), self._right.odds(0)
        wins = sum(right**place for place in range(1, num_tokens + 1))
        takes = num_tokens * ask.costs.draft_s + wins * ask.costs.row_s
        pays = wins > takes * ask.costs.rate or self._outlook.tries
        self._outlook.answered(drafted=pays)
        return pays


def pard(given: Given, places: int, support: int, *, gives_q: bool) -> Pard:
    """The drafter of the model in `given.folder`. UserError for one that has no mask token."""
    assert given.folder is not None, "the rules of a topology ask for it"
    SOURCES["pard"].check_model(ModelShape.of(given.folder), given.folder)
    mask = mask_of(given.folder)
    return Pard(
        load_run(given), given.num_slots, given.vocab, given.noise, mask,
        most=places, support=support, gives_q=gives_q, branches=given.branches,
        shape=None if given.shape is None else given.shape(places),
    )  # fmt: skip
