"""Who holds which slice of a model, over any number of ranks and any weights, without padding.

Integers only: knows no tensors, no files and no devices. Query heads are the unit of attention (design, section 6).
What a slice takes: sizes.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from tpspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.topology.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Shard:
    """One target rank's part: query heads, the KV heads these read, MLP channels, and rows of the head.

    dense, shared: channels of MLPs that are no experts in a model with experts, whose `channels` are an expert's.
    delta_values, delta_keys: value heads of layers of linear attention, and the key heads these read.
    """

    index: int
    heads: range
    kv_heads: range
    channels: range
    vocab: range
    dense: range = range(0)
    shared: range = range(0)
    delta_values: range = range(0)
    delta_keys: range = range(0)


def split(shape: ModelShape, weights: Sequence[float]) -> tuple[Shard, ...]:
    """One shard for each weight, each part proportional to it; together they hold the model exactly once.

    Only a KV head on a boundary is held by both sides. UserError when there are more shards than query heads.
    """
    heads = _ranges(shape.num_heads, weights, "query heads")
    channels = _aligned_ranges(shape.intermediate, weights, "MLP channels")
    vocab = _aligned_ranges(shape.vocab, weights, "vocabulary rows")
    read = _read(heads, shape.group)
    net = shape.delta_net
    values = [range(0)] * len(weights) if net is None else _ranges(net.value_heads, weights, "value heads")
    keys = values if net is None else _read(values, net.group)
    experts, none = shape.experts, [range(0)] * len(weights)
    dense = _aligned_ranges(experts.dense, weights, "MLP channels") if experts and experts.dense else none
    shared = _aligned_ranges(experts.shared, weights, "MLP channels") if experts and experts.shared else none
    parts = zip(heads, read, channels, vocab, dense, shared, values, keys, strict=True)
    return tuple(Shard(index, *part) for index, part in enumerate(parts))


def _read(heads: Sequence[range], group: int) -> list[range]:
    """Heads that those read which share one, `group` each."""
    return [range(own.start // group, (own.stop - 1) // group + 1) for own in heads]


def _ranges(total: int, weights: Sequence[float], what: str) -> list[range]:
    bounds = accumulate(_counts(total, weights, what), initial=0)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _aligned_ranges(total: int, weights: Sequence[float], what: str) -> list[range]:
    """Boundaries at multiples of 16 or 8, which kernels like, where that moves little between ranks."""
    step = _alignment(total, len(weights))
    units = _ranges(-(-total // step), weights, what)
    return [range(own.start * step, min(own.stop * step, total)) for own in units]


def _alignment(total: int, num_shards: int) -> int:
    """The largest alignment that is at most a sixteenth of an equal part: below that, the slowest rank pays for it."""
    return next((step for step in (16, 8) if total >= 16 * step * num_shards), 1)


def _counts(total: int, weights: Sequence[float], what: str) -> list[int]:
    """`total` things in proportion to `weights` by largest remainder (the first rank wins a tie), at least one each."""
    if len(weights) > total:
        raise UserError(f"{len(weights)} shards for {total} {what}; should be at most {total} target ranks")
    # Exact, so that every rank of a world of unlike machines comes to the same slices.
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts
