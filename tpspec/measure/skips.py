"""Which sublayers a model can do without when it drafts: a greedy search, and what it is worth.

Zhang et al., Draft & Verify, arXiv 2309.08168, search by Bayesian optimisation for tokens per second; so do we, by what
the cost model predicts of the agreement found. Must not know a model, a file or who prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from tpspec.topology.cost import tokens_per_round
from tpspec.topology.rounds import collectives_per_draft, collectives_per_round
from tpspec.topology.shards import whole_shard
from tpspec.topology.sizes import attention_params, expert_params, held_params
from tpspec.topology.sublayers import NOTHING, Sublayers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tpspec.published.shape import ModelShape

MOST_DRAFTED = 16
LEAST_AGREEMENT = 0.2  # a draft that is right less often is on no way to anything
SHARDED = 2  # ranks, of which there are some
Sublayer = tuple[str, int]  # attention or mlp, and the layer


@dataclass(frozen=True, slots=True)
class Found:
    """A set that was tried. agreement: of its next tokens with the model's own. speed: predicted, plain decoding 1."""

    left_out: Sublayers
    agreement: float
    speed: float


@dataclass(frozen=True, slots=True)
class Price:
    """What a drafted token costs, of a plain step. waiting: the part of such a step that is spent in collectives.

    Of a mixture, a token costs the experts that it is sent to, and several rows those that any of them is sent to.
    """

    shape: ModelShape
    waiting: float

    def share(self, left_out: Sublayers) -> float:
        mlp = self._mlp(1)
        sent = collectives_per_draft(self.shape, SHARDED, left_out) / collectives_per_round(self.shape, SHARDED)
        computed = 1 - (len(left_out.attention) * self._attention + len(left_out.mlp) * mlp) / self._model(1)
        return self.waiting * sent + (1 - self.waiting) * computed

    def judged(self, num_rows: int) -> float:
        """What so many rows cost together through the whole model, of a plain step; collectives cost what they do."""
        return self.waiting + (1 - self.waiting) * self._model(num_rows) / self._model(1)

    def speed(self, left_out: Sublayers, agreement: float) -> float:
        """With as many drafts as suit it best, one at least."""
        share = self.share(left_out)
        return max(
            tokens_per_round(agreement, k) / (self.judged(k + 1) + k * share) for k in range(1, MOST_DRAFTED + 1)
        )

    def _model(self, num_rows: int) -> float:
        """Weights that so many rows read, of the whole model."""
        weights, experts = _weights(self.shape), self.shape.experts
        return (
            weights.model if experts is None else weights.model - weights.experts * (1 - experts.share_read(num_rows))
        )

    @property
    def _attention(self) -> int:
        """Weights of one layer's."""
        return _weights(self.shape).attention

    def _mlp(self, num_rows: int) -> float:
        """Weights that so many rows read of one layer's, or of its router and experts; of unlike layers the mean."""
        shape = self.shape
        layers = self._model(num_rows) - shape.hidden * shape.vocab
        return layers / shape.num_layers - self._attention


class _Weights(NamedTuple):
    """Numbers of a whole model, of all its experts, and of one layer's attention."""

    model: int
    experts: int
    attention: int


@cache
def _weights(shape: ModelShape) -> _Weights:
    whole = whole_shard(shape)
    return _Weights(held_params(shape, whole), expert_params(shape, whole), attention_params(shape, whole))


def search(price: Price, agreement: Callable[[Sublayers], float], tries: int) -> Iterator[Found]:
    """What was best at each turn, each set larger than the one before by a sublayer.

    First every sublayer is left out alone; then the `tries` that were missed least are tried beside those already gone.
    """

    def found(left_out: Sublayers) -> Found:
        share = agreement(left_out)
        return Found(left_out, share, price.speed(left_out, share))

    alone = {one: found(_with(NOTHING, one)) for one in _every(price.shape)}
    waiting = sorted(alone, key=lambda one: -alone[one].agreement)
    best = alone[waiting.pop(0)]
    while best.agreement >= LEAST_AGREEMENT:
        yield best
        if not waiting:
            return
        tried = {one: found(_with(best.left_out, one)) for one in waiting[:tries]}
        chosen = max(tried, key=lambda one: tried[one].speed)
        waiting.remove(chosen)
        best = tried[chosen]


def _every(shape: ModelShape) -> list[Sublayer]:
    """But those whose keys and values other layers read."""
    kept = set(shape.keepers.values())
    return [(kind, layer) for layer in range(shape.num_layers) for kind in ("attention", "mlp")
            if kind == "mlp" or layer not in kept]  # fmt: skip


def _with(left_out: Sublayers, one: Sublayer) -> Sublayers:
    kind, layer = one
    if kind == "attention":
        return Sublayers(left_out.attention | {layer}, left_out.mlp)
    return Sublayers(left_out.attention, left_out.mlp | {layer})
