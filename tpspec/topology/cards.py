"""The cards a box may hold: memory, bandwidth and arithmetic, and how a list such as `8x3090` is read.

Knows data sheets; must not import torch or look whether a card is there.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from tpspec.errors import UserError
from tpspec.topology.faults import suggestion

if TYPE_CHECKING:
    from collections.abc import Iterable

# What CUDA, graphs and activations leave of a card; estimated.
USABLE = 0.92
FIRST_SM_WITH_BFLOAT16 = 80
MOST_CARDS = 999
_COUNTED = re.compile(r"(?:(\d{1,9})\s*x\s*)?(.+)")


class Card(BaseModel):
    """See cards.yaml for units and where the numbers come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    gbytes: float = Field(gt=0)
    gbytes_per_s: float = Field(gt=0)
    tflops: float = Field(gt=0)
    sm: int = Field(ge=60)
    kind: Literal["seen", "recalled"] = Field(alias="from")
    note: str = ""

    @property
    def usable_bytes(self) -> int:
        return int(self.gbytes * 2**30 * USABLE)

    @property
    def dtype(self) -> str:
        """The 16-bit type it computes in."""
        return "bfloat16" if self.sm >= FIRST_SM_WITH_BFLOAT16 else "float16"


@cache
def cards() -> dict[str, Card]:
    text = Path(__file__).with_name("cards.yaml").read_text(encoding="utf-8")
    entries = TypeAdapter(dict[str, dict[str, object]]).validate_python(
        {str(name): entry for name, entry in yaml.safe_load(text).items()}
    )
    return {name: Card.model_validate({"name": name, **entry}) for name, entry in entries.items()}


def card(name: str) -> Card:
    """By its short name, however it is dressed: `RTX 3090`, `rtx3090` and `3090` are one."""
    plain = re.sub(r"[\s_]|nvidia|geforce|^rtx|tesla|-pcie|-sxm\d|generation|blackwell.*edition", "", name.lower())
    plain = re.sub(r"^rtx", "", plain)
    if plain not in cards():
        raise UserError(f"no card {name!r} is known; {suggestion(plain, cards())}")
    return cards()[plain]


def parse_gpus(words: Iterable[str]) -> tuple[Card, ...]:
    """The cards of `8x3090` or `1x4090 2x3090`, in that order."""
    found: list[Card] = []
    for word in words:
        match = _COUNTED.fullmatch(word.strip())
        count = int(match[1] or 1) if match else 0
        if match is None or not 1 <= count <= MOST_CARDS:
            should = f"should be a number of cards, 1 to {MOST_CARDS}, and their name, for example 8x3090"
            raise UserError(f"--gpus {word!r}: {should}")
        found += [card(match[2])] * count
    return tuple(found)
