"""Which steps run few rows on a device. Knows devices; must not know what rows mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.model.compiled import compiled_steps

if TYPE_CHECKING:
    from tpspec.cache.store import KVStore
    from tpspec.model.rope import Rope
    from tpspec.model.steps import FewSteps, Shape


def few_steps(shape: Shape, rope: Rope, store: KVStore) -> FewSteps | None:
    """In C on a CPU, by kernels on a card; None where there are none for such heads or such a machine."""
    if shape.device.type != "cuda":
        return compiled_steps(shape, rope, store)
    from tpspec.model.card_steps import card_steps  # Triton comes with torch for cards only

    return card_steps(shape, rope, store)
