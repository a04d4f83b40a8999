"""Numbers of a config that what a model's matrices give, or read, is multiplied by, as Falcon-H1's (arXiv 2507.22448).

They are multiplied into the matrices as those are read, or into scores, embeddings and the final norm. Must not know
shards or tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from tpspec.published.reads import Reads

SINGLE = (
    "embedding_multiplier", "lm_head_multiplier", "attention_in_multiplier", "key_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip
SCORES = ("attention_in_multiplier", "key_multiplier")  # must be above 0, for the least score is no sign of a mask
LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}


@dataclass(frozen=True, slots=True)
class Scales:
    """embedding, logits, scores: of those. out: of what attention gives. gate, down: of an MLP. mixed, made: what the
    gate, values, keys, queries and rates of Mamba-2 are, and what that gives."""

    embedding: float = 1.0
    logits: float = 1.0
    scores: float = 1.0
    out: float = 1.0
    gate: float = 1.0
    down: float = 1.0
    mixed: tuple[float, ...] = (1.0,) * 5
    made: float = 1.0


NO_SCALES = Scales()


def scales_of(read: Reads) -> Scales:
    """UserError for what is no number, or not as many as there should be."""
    embedding, logits, attention_in, key, attention_out, mixer_in, made = (_number(read, key) for key in SINGLE)
    (gate, down), parts = (_numbers(read, key, count) for key, count in LISTS.items())
    return Scales(
        embedding=embedding,
        logits=logits,
        scores=attention_in**2 * key,
        out=attention_in * attention_out,
        gate=gate,
        down=down,
        mixed=tuple(mixer_in * part for part in parts),
        made=made,
    )


def _number(read: Reads, key: str) -> float:
    value = read.config.get(key)
    if not _is_number(value) or (key in SCORES and not value > 0):
        raise read.refusal(key, f"a number{' above 0' if key in SCORES else ''}")
    return float(value)


def _numbers(read: Reads, key: str, count: int) -> list[float]:
    listed = read.config.get(key)
    if not isinstance(listed, list | tuple) or len(listed) != count or not all(map(_is_number, listed)):
        raise read.refusal(key, f"{count} numbers")
    return [float(value) for value in listed]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
