"""What every draft source is: asked for trees, told verdicts. Knows tokens and, if it needs one, a `run` it is handed.

A source knows no rank, device, clock or communicator: where it runs is the host's matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from tpspec.cache.pages import PagePool, Pages
    from tpspec.cache.seats import Seats
    from tpspec.draft.shapes import Shape
    from tpspec.model.batch import Span
    from tpspec.model.decoder import Decoder
    from tpspec.model.target import ShardedTarget
    from tpspec.request import Sampling
    from tpspec.tokens import Draws, TokenTree, Verdict
    from tpspec.topology.config import Quantize
    from tpspec.topology.sublayers import Sublayers
    from tpspec.verify.noise import Noise
    from tpspec.verify.rows import Draw


@dataclass(frozen=True, slots=True)
class Needs:
    """What a source needs to be given; the one place where sources differ for the rest of the house.

    gives_odds: its trees have odds, and proposing costs next to nothing, whatever is asked for.
    taps: layers of the target whose input is kept for it (0: the embeddings; as many as there are layers: what leaves
    the last), or decoder.FINAL: what the head is given.
    whole: tokens of its trees, when what is said at all of their nodes is of use to it, so that none may be cut off.
    is_silent: it never proposes anything.
    """

    own_model: bool = False
    gives_q: bool = False
    gives_odds: bool = False
    taps: tuple[int, ...] = ()
    whole: int = 0
    is_silent: bool = False


class Ask(msgspec.Struct, frozen=True):
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
    """A model with a cache of its own, handed to sources that need one.

    rereads: drafted tokens are read anew once they are text, because it reads them differently then.
    seats: of a model that keeps a state of each text (cache/states.py), which takes no draft in: with every draft it
    reads all drafts above that one again. None of a model without.
    """

    @property
    def vocab(self) -> int:
        """Ids that it can read, and has logits of."""

    @property
    def rereads(self) -> bool: ...
    @property
    def seats(self) -> Seats | None: ...
    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for; None when it does not say."""

    def __call__(self, spans: Sequence[Span]) -> Tensor:
        """One forward; the logits of the spans' last num_logits rows, in order. Writes the rows' keys and values."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy cache slots; all sources are read before any target is written."""

    def observe(self, taps: Taps) -> None:
        """What the target's layers made of texts, for a model that goes on from there."""

    def can_read(self, seq: int, num_tokens: int) -> bool:
        """Whether it has been given what it needs to read so many tokens of a text."""

    def forget(self, seq: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A token of sequence `seq` that is read, and what follows it: the `width` likeliest tokens, drawn as `draw`."""

    seq: int
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


class Extender(Protocol):
    """A source that makes one token after another with a model of its own. How far, and where: growth.py decides."""

    @property
    def needs(self) -> Needs: ...
    def extend(self, spans: Sequence[Span], places: Sequence[Place], run: Run) -> list[Offer]:
        """Reads the spans in one forward; an offer for each place, which are, in order, the rows that have logits."""


@dataclass(frozen=True, slots=True)
class Modelled:
    """A source that drafts with a model of its own, and that model.

    pool: the target's, for a model that reads and writes the target's own cache; None for a new one.
    """

    source: Extender
    run: Run
    pool: Pages | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What the house has for a source that is made.

    accept: the rule's name. vocab: ids of the target. target, folder: of the target's checkpoint, and of what
    draft.model names. num_slots, num_states, quantize: of what it has of its own, tokens and texts of its cache and
    its matrices. num_positions: of a text at most; None: as many as slots. shard: this rank's part of the target,
    loaded when it is first asked for, and pool its pages; thinned: that part without some sublayers, on the same cache.
    None where the source runs beside no shard. branches: children of a node that its trees may have; 1 makes chains.
    shape: makes what its trees of so many levels look like, where odds are not to decide.
    """

    noise: Noise
    accept: str
    vocab: int
    target: Path
    folder: Path | None
    dtype: torch.dtype
    device: torch.device
    num_slots: int
    num_states: int = 1
    num_positions: int | None = None
    quantize: Quantize | None = None
    shard: Callable[[], Decoder] | None = None
    pool: PagePool | None = None
    thinned: Callable[[Sublayers], ShardedTarget] | None = None
    branches: int = 1
    shape: Callable[[int], Shape] | None = None


@dataclass(frozen=True, slots=True)
class Taps:
    """What the target's layers made of the text that a round has read.

    rows: for each sequence the position of the first token and [n, W], W the taps of a token side by side in the order
    of `Needs.taps`. Consecutive rounds give consecutive positions; a text that is read anew begins again at 0.
    before: the same of sequences that begin with what others have read, from 0 on: what `rows` has of them comes behind
    it. In host memory, and there as long as the text is, unless that is told anew.
    """

    rows: Mapping[int, tuple[int, Tensor]]
    before: Mapping[int, Tensor] = field(default_factory=dict)


class Drafter(Protocol):
    """Proposes tokens. Late, dead or wrong, it costs speed only."""

    @property
    def needs(self) -> Needs: ...
    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        """One tree for each ask, in order; an empty tree where the source is silent."""

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None: ...
    def forget(self, seq: int) -> None: ...
