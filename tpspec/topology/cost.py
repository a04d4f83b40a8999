"""The cost model: seconds of a forward of m rows, tokens of a round, and what both make of tokens per second.

Pure functions of sizes, cards and links, or of constants fitted to a box (`calibration.py`); must not know a file, a
device or why a number was chosen.

    step(m) = max over ranks of [max(read(m) / bandwidth, m * arithmetic) + KV / bandwidth]
              + reduces * (link(m * row_bytes) + skew) + norms * (link(m * 8) + skew) + launches + head + host
    read(m) = weights, of experts only the part that m rows are sent to: 1 - (1 - chosen / count)^m
    E       = (1 - a^(K+1)) / (1 - a), or 1 + the sum of the products of acceptance by position
    round   = K * draft + step(K + 1), or what drafting ahead leaves of the first term
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import TYPE_CHECKING

from tpspec.topology.rounds import NORM_BYTES, AllReduces, all_reduces

if TYPE_CHECKING:
    from tpspec.published.experts import Experts
    from tpspec.published.shape import ModelShape
    from tpspec.topology.cards import Card
    from tpspec.topology.links import LinkTable
    from tpspec.topology.sublayers import Sublayers


@dataclass(frozen=True, slots=True)
class Assumptions:
    """How far from the data sheet decoding is. All estimated; 0.90 of bandwidth was measured (llama.cpp, 3090, 4 bit).

    weights, kv, arithmetic: parts of bandwidth and of TFLOPS; weights by bits. layer_s: launches and what is fused into
    them, of each layer; head_s, host_s: of each step.
    """

    weights: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({16: 0.88, 8: 0.85, 4: 0.80}))
    kv: float = 0.7
    arithmetic: float = 0.55
    layer_s: float = 15e-6
    head_s: float = 40e-6
    host_s: float = 100e-6


@dataclass(frozen=True, slots=True)
class Load:
    """What one rank holds, reads and computes in a step. weights, kv: bytes; kv of the whole context.

    params: multiplied with each row, numbers of its context too. expert_weights: what of weights is for experts.
    experts: None where none are.
    """

    weights: float
    params: float
    kv: float
    bits: int
    expert_weights: float = 0.0
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class RankCost:
    """Seconds of one rank's part. What it reads hides arithmetic_s (of a row) where it is longer, and never row_s.

    weights_s: of all its weights; experts_s: what of that is for experts, all of them.
    """

    weights_s: float
    arithmetic_s: float = 0.0
    kv_s: float = 0.0
    row_s: float = 0.0
    experts_s: float = 0.0
    experts: Experts | None = None

    def reading_s(self, num_rows: int) -> float:
        """Of the weights that so many rows need."""
        idle = 0.0 if self.experts is None else 1 - self.experts.share_read(num_rows)
        return self.weights_s - idle * self.experts_s

    def seconds(self, num_rows: int) -> float:
        return max(self.reading_s(num_rows), num_rows * self.arithmetic_s) + num_rows * self.row_s + self.kv_s


def rank_cost(load: Load, card: Card, assume: Assumptions) -> RankCost:
    bytes_per_s = card.gbytes_per_s * 1e9
    weights_per_s = bytes_per_s * assume.weights[load.bits]
    return RankCost(
        weights_s=load.weights / weights_per_s,
        arithmetic_s=2 * load.params / (card.tflops * 1e12 * assume.arithmetic),
        kv_s=load.kv / (bytes_per_s * assume.kv),
        experts_s=load.expert_weights / weights_per_s,
        experts=load.experts,
    )


@dataclass(frozen=True, slots=True)
class StepCost:
    """A target's forward. reduces: all-reduces in it, of row_bytes for each row; norms: others, of NORM_BYTES. link:
    None on one rank.

    dilation: of the link, when it is emulated. fixed_s: launches, head, host.
    """

    ranks: tuple[RankCost, ...]
    fixed_s: float = 0.0
    reduces: int = 0
    row_bytes: int = 0
    link: LinkTable | None = None
    dilation: float = 1.0
    norms: int = 0

    def compute_s(self, num_rows: int) -> float:
        return max(rank.seconds(num_rows) for rank in self.ranks) + self.fixed_s

    @property
    def all_reduces(self) -> int:
        return self.reduces + self.norms

    @property
    def collectives(self) -> int:
        """The all-reduces, and the gather of picks."""
        return self.all_reduces + 1 if self.reduces else 0

    def waiting_s(self, num_rows: int) -> float:
        """In collectives: the link's time and the skew."""
        if self.link is None or not self.reduces:
            return 0.0
        return self._all_s(self.reduces, num_rows * self.row_bytes) + self._all_s(self.norms, num_rows * NORM_BYTES)

    def _all_s(self, count: int, num_bytes: int) -> float:
        """Of so many all-reduces."""
        assert self.link is not None, "where there are some"
        return count * (self.link.seconds(num_bytes) + self.link.skew_s) * self.dilation

    def seconds(self, num_rows: int) -> float:
        return self.compute_s(num_rows) + self.waiting_s(num_rows)


def step_cost(
    loads: Sequence[Load],
    on: Sequence[Card],
    shape: ModelShape,
    row_bytes: int,
    link: LinkTable | None,
    assume: Assumptions | None = None,
) -> StepCost:
    """A model's forward on cards, one load each. row_bytes: of one row in an all-reduce."""
    assume = assume or Assumptions()
    num_sublayers = len(shape.mixing) + len(shape.feeding)
    sent = all_reduces(shape) if len(loads) > 1 else AllReduces(0)
    return StepCost(
        ranks=tuple(rank_cost(load, card, assume) for load, card in zip(loads, on, strict=True)),
        fixed_s=num_sublayers / 2 * assume.layer_s + assume.head_s + assume.host_s,
        reduces=sent.rows,
        norms=sent.norms,
        row_bytes=row_bytes,
        link=link,
    )


def thin_step(step_of: Callable[[ModelShape], StepCost], shape: ModelShape, left_out: Sublayers) -> StepCost:
    """A step of a model without some of its sublayers; attention and MLP compute alike, and so do layers with a window
    and without. step_of: of a whole one."""
    whole, kept = step_of(shape), 1 - len(left_out) / (2 * shape.num_layers)
    num_layers, num_windowed = (round(kept * count) for count in (shape.num_layers, shape.num_windowed))
    thin = step_of(replace(shape, num_layers=num_layers, num_windowed=num_windowed))
    sent = all_reduces(shape, left_out)
    return replace(thin, reduces=sent.rows, norms=sent.norms) if whole.reduces else thin


def tokens_per_round(acceptance: float, num_drafted: int) -> float:
    """Expected tokens of a round, the target's own included, when each draft is accepted with the same probability.

    Leviathan et al. 2023, equation 1.
    """
    return tokens_by_position((acceptance,) * num_drafted)


def tokens_by_position(acceptance: Sequence[float]) -> float:
    """As `tokens_per_round`, with each position's acceptance, given that all before it were accepted."""
    return 1.0 + float(sum(accumulate(acceptance, mul)))


def sequential_round_s(step_s: float, draft_s: float) -> float:
    """First the drafts (all of them: draft_s), then the target."""
    return draft_s + step_s


def overlapped_round_s(step_s: float, draft_s: float, hit_rate: float) -> float:
    """Drafts are made on another card while the target verifies; they serve in hit_rate of the rounds, else wait."""
    return hit_rate * max(step_s, draft_s) + (1 - hit_rate) * (step_s + draft_s)


def gaps_round_s(step_s: float, draft_s: float, hit_rate: float, gap_s: float) -> float:
    """Drafts are made beside a shard while it waits, gap_s in a step; what does not fit the gaps delays that shard."""
    return step_s + hit_rate * max(0.0, draft_s - gap_s) + (1 - hit_rate) * draft_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """One way to decode, predicted. collectives: all-reduces and the gather of picks, for each token."""

    tokens_per_round: float
    step_s: float
    round_s: float
    waiting_s: float
    collectives: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_round / self.round_s

    @property
    def waiting_share(self) -> float:
        """Of the round, spent in collectives."""
        return self.waiting_s / self.round_s


def predict(
    step: StepCost, num_drafted: int, tokens: float, round_s: float, thin: StepCost | None = None
) -> Prediction:
    """tokens: of a round of num_drafted drafts and the root; round_s: what such a round takes.

    thin: a drafted token's step, where it has collectives of its own.
    """
    rows = num_drafted + 1
    collectives, waiting_s = step.collectives, step.waiting_s(rows)
    if thin is not None:
        collectives += num_drafted * thin.collectives
        waiting_s += num_drafted * thin.waiting_s(1)
    return Prediction(tokens, step.seconds(rows), round_s, waiting_s, collectives / tokens)
