"""Numbers that a checkpoint multiplies by, and what stays within limits: from its config, as its architecture says.

Knows keys; must not know layers or tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from tpspec.errors import UserError
from tpspec.model.frequencies import head_dim_of

if TYPE_CHECKING:
    from tpspec.model.architecture import Architecture
    from tpspec.published.latent import Latent


def flag(config: Any, flag: bool | str | None) -> bool:
    return bool(getattr(config, flag)) if isinstance(flag, str) else bool(flag)


class Multipliers(NamedTuple):
    """Numbers of a config: of embeddings, of what layers add to them, and what logits are divided by.

    Granite adds r times what a layer gives. Here r is divided out of the hidden state, x / r, to which layers then add
    what they give: embeddings are multiplied by 1 / r more, and norms of it, which do not see it otherwise, divide by
    the root of the mean square and eps / r^2. What is told of it (taps) is multiplied by r, `hidden_scale`; what the
    final norm gives, and the head reads, by `final_scale`.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


def multipliers_of(config: Any, arch: Architecture, where: str) -> Multipliers:
    keys = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
    for key in keys:
        if not (number := getattr(config, key)) > 0:
            raise UserError(f"{where}: {key} is {number}; should be above 0")
    embedding, residual, logits = (float(getattr(config, key)) for key in keys[:3])
    return Multipliers(embedding, residual, 1 / logits if arch.multiplied == "logits" else logits)


def logit_scale(config: Any, arch: Architecture, numbers: Multipliers, where: str) -> float:
    if arch.logit_scale is None:
        return 1 / numbers.logits
    if not (number := getattr(config, arch.logit_scale)):
        raise UserError(f"{where}: {arch.logit_scale} is {number}; should be a number, and not 0")
    return float(number)


def embedding_scale(config: Any, arch: Architecture, numbers: Multipliers) -> float | None:
    if arch.multiplied:
        return numbers.embedding / numbers.residual
    return float(config.hidden_size**0.5) if flag(config, arch.scaled_embeddings) else None


def score_scale(config: Any, arch: Architecture, where: str) -> float:
    if arch.multiplied:
        return float(config.attention_multiplier)
    if arch.score_scale is None:
        return float(head_dim_of(config) ** -0.5) * _sharpness(config, arch, where)
    if isinstance(arch.score_scale, float):
        return arch.score_scale
    if not (number := getattr(config, arch.score_scale)) > 0:
        raise UserError(f"{where}: {arch.score_scale} is {number}; should be above 0")
    return float(number**-0.5)


def _sharpness(config: Any, arch: Architecture, where: str) -> float:
    if arch.sharpened is None:
        return 1.0
    if not (number := getattr(config, arch.sharpened)) > 0:
        raise UserError(f"{where}: {arch.sharpened} is {number}; should be above 0")
    return float(number)


def value_scale(config: Any, arch: Architecture, where: str) -> float:
    number = 1.0 if arch.value_scale is None else getattr(config, arch.value_scale)
    if number is not None and not number > 0:
        raise UserError(f"{where}: {arch.value_scale} is {number}; should be above 0, or null")
    return 1.0 if number is None else float(number)


def cap(config: Any, key: str, where: str) -> float | None:
    if (cap := getattr(config, key)) is not None and not cap > 0:
        raise UserError(f"{where}: {key} is {cap}; should be above 0, or null")
    return None if cap is None else float(cap)


def latent_scale(config: Any, latent: Latent) -> float:
    """DeepSeek's yarn scales products of queries and keys, not their cosines and sines."""
    rope, sharper = getattr(config, "rope_parameters", None) or {}, 1.0
    if rope.get("rope_type", "default") != "default" and (more := rope.get("mscale_all_dim")):
        sharper = 1 + 0.1 * more * max(0.0, math.log(rope["factor"]))
    return float(latent.head_dim**-0.5 * sharper**2)
