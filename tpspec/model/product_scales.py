"""Numbers of a config that what a model's matrices give, or read, is multiplied by, as Falcon-H1's (arXiv 2507.22448).

They are multiplied into the matrices as those are read, or into scores, embeddings and the final norm. Must not know
shards or tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tpspec.errors import UserError

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


def scales_of(config: Any, where: str) -> Scales:
    """UserError for what is no number, or not as many as there should be."""
    embedding, logits, attention_in, key, attention_out, mixer_in, made = (
        _number(config, key, getattr(config, key), where) for key in SINGLE
    )
    (gate, down), parts = (_numbers(config, key, count, where) for key, count in LISTS.items())
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


def _number(config: Any, key: str, value: object, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (key in SCORES and not value > 0):  # type: ignore[operator]
        raise UserError(f"{where}: {key} is {value!r}; should be a number{' above 0' if key in SCORES else ''}")
    return float(value)  # type: ignore[arg-type]


def _numbers(config: Any, key: str, count: int, where: str) -> list[float]:
    listed = getattr(config, key)
    if not isinstance(listed, list | tuple) or len(listed) != count:
        raise UserError(f"{where}: {key} is {listed!r}; should be {count} numbers")
    return [_number(config, key, value, where) for value in listed]
