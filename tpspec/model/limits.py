"""What numbers within an MLP stay within, where a config says so of its layers one by one. Step's does.

Knows keys; what is kept within them is steps.py's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.published.reads import MOST

if TYPE_CHECKING:
    from tpspec.published.reads import Reads

EXPERTS, SHARED = "swiglu_limits", "swiglu_limits_shared"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one layer: of its experts, and of the MLP beside them, one or none. What a gate's act gives is at most that,
    and what it gates between that and as much below 0."""

    experts: tuple[float, ...] = ()
    shared: tuple[float, ...] = ()


def limits_of(read: Reads, num_layers: int, first_layer: int) -> tuple[Limits, ...]:
    """Of each layer. first_layer: with experts. UserError for what is no limit, or one of an MLP without experts."""
    each = (_listed(read, key, num_layers, first_layer) for key in (EXPERTS, SHARED))
    return tuple(Limits(experts, shared) for experts, shared in zip(*each, strict=True))


def _listed(read: Reads, key: str, num_layers: int, first_layer: int) -> list[tuple[float, ...]]:
    said = read.config.get(key) or [None] * num_layers
    right = f"a number above 0, or 0 or null where there is no limit, for each of {num_layers} layers"
    if not isinstance(said, list) or len(said) != num_layers or not all(map(_is_limit, said)):
        raise read.refusal(key, right)
    if any(said[:first_layer]):
        raise read.refusal(key, f"0 or null for the first {first_layer} layers, which have no experts")
    return [(float(one),) if one else () for one in said]


def _is_limit(one: object) -> bool:
    return one is None or (isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one < MOST)
