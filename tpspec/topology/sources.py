"""What draft sources are called in a topology, and what each asks of it. draft/sources.py says how they are made.

Knows names; must not know what a source does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Kind:
    """loads: what draft.model names: nothing, a whole model, or a head that goes on from the target's own layers.

    moves: whether it can run in a process of its own.
    """

    loads: Literal["nothing", "model", "head"] = "nothing"
    moves: bool = False


SOURCES = {
    "none": Kind(),
    "ngram": Kind(),
    "model": Kind(loads="model", moves=True),
}
