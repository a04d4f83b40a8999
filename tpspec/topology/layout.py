"""What is asked of a planner, and what it may answer: who holds what, how fast that would be, or what it lacks.

Pure data. Which are worth asking about, and which fit, is `plan.py`'s matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tpspec.published.checkpoint import local
from tpspec.topology.links import link_for
from tpspec.topology.sources import SOURCES, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.published.shape import ModelShape
    from tpspec.topology.cards import Card
    from tpspec.topology.cost import Prediction, StepCost
    from tpspec.topology.links import LinkTable
    from tpspec.topology.sublayers import Sublayers


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked: a box, a link by name, a model and what drafts for it (a model, or a source that loads none).

    link: None where there is one card. acceptance: of a draft token, between 0 and 1. context: tokens that are cached,
    and read in every step.
    """

    gpus: tuple[Card, ...]
    link: str | None
    model: str
    draft: str
    acceptance: float = 0.75
    context: int = 4096

    @property
    def draft_model(self) -> str | None:
        return None if self.kind is not None and self.kind.loads == "nothing" else self.draft

    @property
    def kind(self) -> Kind | None:
        """Of a source; None of a model."""
        return SOURCES.get(self.draft)

    @property
    def behind(self) -> bool:
        """Whether a layer of the target's own files drafts, behind its last."""
        return self.kind is not None and self.kind.behind

    def left_out(self, target: ModelShape) -> Sublayers | None:
        """Of the target, where it drafts itself."""
        return None if self.kind is None else self.kind.left_out({}, local(self.model), target)

    @property
    def page_context(self) -> int:
        """context in whole pages of the cache."""
        return -(-self.context // 16) * 16

    def link_for(self, num_shards: int) -> LinkTable | None:
        """Between so many cards; None where nothing is to be linked."""
        return None if self.link is None or num_shards == 1 else link_for(self.link, num_shards)


@dataclass(frozen=True, slots=True)
class Layout:
    """Who holds what. shards: indices of the cards that hold one, in rank order; drafter: index of a card, or None.
    replicates_norm: see ModelShape."""

    shards: tuple[int, ...]
    bits: int
    placement: Literal["none", "inline", "dedicated", "gaps"]
    drafter: int | None = None
    replicates_norm: bool = False

    @property
    def rank_of_drafter(self) -> int | None:
        if self.drafter is None:
            return None
        return self.shards.index(self.drafter) if self.placement == "gaps" else len(self.shards)

    @property
    def drafts_at(self) -> int:
        """Index of the card that a draft model is on: inline, the first of the target's."""
        return self.shards[0] if self.drafter is None else self.drafter

    @property
    def cards(self) -> tuple[int, ...]:
        """Indices of the cards in rank order."""
        if self.drafter is None or self.drafter in self.shards:
            return self.shards
        return (*self.shards, self.drafter)


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout that fits, with the draft length that suits it best. weights: how much of the target each card holds,
    beside others. memory: bytes of each rank. dtype: of models."""

    layout: Layout
    weights: tuple[float, ...]
    num_drafted: int
    prediction: Prediction
    step: StepCost
    draft_s: float
    memory: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A layout that does not fit: by how many bytes, and on which card."""

    layout: Layout
    short_bytes: int
    card: Card


@dataclass(frozen=True, slots=True)
class Ranking:
    """plans: the fastest first. refusals: the nearest to fitting first."""

    plans: tuple[Plan, ...]
    refusals: tuple[Refusal, ...]


def boxed(gpus: Sequence[Card]) -> str:
    """`8x3090`, or `1x4090 + 2x3090`."""
    names = [card.name for card in gpus]
    return " + ".join(f"{names.count(name)}x{name}" for name in dict.fromkeys(names))
