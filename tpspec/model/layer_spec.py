"""The layers of a model, as its attention has them: which heads, which rope, which window. From its config.

Must not know shards, tensors or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.model.architecture import NOPE_BESIDE, NOPE_WITH_EXPERTS, ONE_THETA, THETAS
from tpspec.model.frequencies import PART, PROPORTIONAL, head_dim_of, num_of_turned, theta_of
from tpspec.published.windows import CHUNKED, CONV, FULL, SLIDES, kinds_of, windows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.model.architecture import Architecture
    from tpspec.published.reads import Reads
    from tpspec.published.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """rope: which of the model's frequencies turn queries and keys here, or None. window: how many last positions a row
    sees, or None. chunked: those of its chunk of so many, up to it. head_order: of the numbers of queries' and keys'
    heads, such that rope turns a number with the one half a head away; None: as they are stored. is_global: whether its
    heads are the shape's GlobalHeads. kept_by: the layer whose keys and values it reads, if not its own. chooses:
    whether it has an indexer of its own, of a model with such."""

    rope: int | None
    window: int | None
    head_order: tuple[int, ...] | None = None
    is_global: bool = False
    kept_by: int | None = None
    chunked: bool = False
    chooses: bool = False


def layers_of(
    read: Reads,
    arch: Architecture,
    orders: dict[str | None, tuple[int, ...] | None],
    usual: LayerSpec,
    shape: ModelShape,
) -> tuple[LayerSpec, ...]:
    """orders: of heads, for each of the ropes, by the types of layers that it is for, or its theta; of None alone: of
    all. usual: a layer without window, and its rope where it is not turned."""
    model_type, num_layers, wide = shape.model_type, shape.num_layers, shape.global_heads
    kinds = kinds_of(read, model_type, num_layers) if model_type in SLIDES else (FULL,) * num_layers
    nope = THETAS if arch.nope == ONE_THETA else arch.nope
    rope = _turned(read, nope, kinds)
    sees = zip(kinds, windows_of(read, model_type, num_layers), strict=True)
    layers = [replace(usual, window=window, chunked=kind == CHUNKED) for kind, window in sees]
    for i, kind in enumerate(kinds):
        if rope[i] and orders:
            name = theta_of(rope[i]) if arch.nope == THETAS else kind
            own = name if name in orders else None
            layers[i] = replace(layers[i], rope=[*orders].index(own), head_order=orders[own])
    for i in () if wide is None else wide.layers:
        layers[i] = replace(layers[i], is_global=True)
    for i, kept_by in () if shape.sharing is None else enumerate(shape.sharing.kept_by, shape.sharing.first):
        layers[i] = replace(layers[i], kept_by=kept_by)
    for i in () if shape.indexer is None else shape.indexer.layers:
        layers[i] = replace(layers[i], chooses=True)
    return tuple(layers)


def _turned(read: Reads, nope: str | None, kinds: Sequence[str]) -> Sequence[float]:
    """Whether each layer has rope, or its theta."""
    if nope == NOPE_BESIDE:
        nope = None if read.config.get("sliding_window") is None else FULL
    if nope == NOPE_WITH_EXPERTS:
        all_full = read.config.get("prefix_dense_sliding_window_pattern") == 1
        mlps = read.texts("mlp_layer_types")
        return [kind != FULL or (all_full and mlps[i] == "dense") for i, kind in enumerate(kinds)]
    if nope is None or nope in (FULL, CONV):
        return [kind != nope for kind in kinds]
    listed = read.config.get(nope)
    if not isinstance(listed, list) or len(listed) < len(kinds):
        raise read.refusal(nope, f"a list with an entry for each of {len(kinds)} layers")
    return listed


def head_order(read: Reads, arch: Architecture, rope: Reads) -> tuple[int, ...] | None:
    """Rope turns the two halves of the first part of a head with each other, or its even numbers with the odd ones:
    those go where our two halves begin, and what it leaves as it is behind them. Backwards is forwards of halves that
    have changed places."""
    size, part = head_dim_of(read), rope.number(PART, 1.0)
    is_whole = part == 1.0 or rope.config.get("rope_type") == PROPORTIONAL
    if is_whole and arch.backwards:
        return (*range(size // 2, size), *range(size // 2))
    if is_whole and not arch.alternate_rope:
        return None
    if not (is_whole or arch.partial_rope):
        raise UserError(f"{read.where}: {PART} is not supported for {read.text('model_type')}")
    turned = num_of_turned(read, rope)
    if turned % 2 or size % 2 or not (is_whole or 0 < turned < size):
        raise UserError(f"{read.where}: {PART} is {part}; should leave an even part of {size}, the head_dim")
    return halves_apart(size, turned, alternate=bool(arch.alternate_rope))


def halves_apart(size: int, turned: int, *, alternate: bool) -> tuple[int, ...]:
    """An order of a head's numbers in which rope, that turns the first so many, turns each with the one half a head
    away. alternate: as it is stored, it turns a number with the next."""
    halves = range(turned // 2), range(turned // 2, turned)
    if alternate:
        halves = range(0, turned, 2), range(1, turned, 2)
    left = range(turned, (turned + size) // 2), range((turned + size) // 2, size)
    return (*halves[0], *left[0], *halves[1], *left[1])
