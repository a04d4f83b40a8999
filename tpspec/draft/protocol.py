"""What every draft source is: asked for trees, told verdicts. Knows tokens and, if it needs one, a `run` it is handed.

A source knows no rank, device, clock or communicator: where it runs is the host's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.model.batch import Span
    from tpspec.request import Sampling
    from tpspec.tokens import Draws, TokenTree, Verdict
    from tpspec.verify.rows import Draw


@dataclass(frozen=True, slots=True)
class Needs:
    """What a source needs to be given; the one place where sources differ for the rest of the house.

    gives_odds: its trees have odds, and proposing costs next to nothing, whatever is asked for.
    """

    own_model: bool = False
    gives_q: bool = False
    gives_odds: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Please propose up to num_tokens tokens after `tokens` (prompt and output of sequence `seq`, the root last).

    tokens only ever grow from one ask of a sequence to the next. costs: when given, fewer are welcome where more do not
    pay; None wants exactly num_tokens of a source that can go on for ever.
    """

    seq: int
    tokens: Sequence[int]
    num_prompt: int
    num_tokens: int
    sampling: Sampling
    costs: Pays | None = None


class Pays(Protocol):
    """What a round and a draft token cost, as far as a source may want to know."""

    @property
    def draft_s(self) -> float: ...
    @property
    def row_s(self) -> float: ...
    @property
    def rate(self) -> float: ...
    def seconds(self, num_rows: int) -> float: ...


class Run(Protocol):
    """A model with a cache of its own, handed to sources that need one."""

    @property
    def vocab(self) -> int: ...
    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for; None when it does not say."""

    def __call__(self, spans: Sequence[Span]) -> Tensor:
        """One forward; the logits of the spans' last num_logits rows, in order. Writes the rows' keys and values."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy cache slots; all sources are read before any target is written."""


@dataclass(frozen=True, slots=True)
class Place:
    """A token to read (the last of `span`), and what to say after it: the `width` likeliest tokens drawn as `draw`."""

    span: Span
    draw: Draw
    width: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What may follow: tokens, and the odds that the target says so. The first is what a chain goes on with.

    draws: how the first was drawn, for a source that gives q.
    """

    tokens: tuple[int, ...]
    odds: tuple[float, ...]
    draws: Draws | None = None


@runtime_checkable
class Extender(Protocol):
    """A source that makes one token after another with a model of its own. How far, and where: growth.py decides."""

    @property
    def needs(self) -> Needs: ...
    def extend(self, places: Sequence[Place], run: Run) -> list[Offer]:
        """Reads every place in one forward; an offer for each, in order."""


@dataclass(frozen=True, slots=True)
class Taps:
    """Kept outputs of target layers for the committed rows of a round. Empty until a source asks for some."""


class Drafter(Protocol):
    """Proposes tokens. Late, dead or wrong, it costs speed only."""

    @property
    def needs(self) -> Needs: ...
    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        """One tree for each ask, in order; an empty tree where the source is silent."""

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None: ...
    def forget(self, seq: int) -> None: ...
