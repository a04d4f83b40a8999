"""Numbers that a checkpoint multiplies by, and what stays within limits: from its config, as its architecture says.

Knows keys; must not know layers or tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tpspec.model.architecture import Architecture
    from tpspec.published.latent import Latent
    from tpspec.published.reads import Reads


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


def multipliers_of(read: Reads, arch: Architecture) -> Multipliers:
    if not arch.multiplied:
        return Multipliers()
    keys = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    embedding, residual, logits = (read.number(key) for key in keys)
    return Multipliers(embedding, residual, 1 / logits if arch.multiplied == "logits" else logits)


def logit_scale(read: Reads, arch: Architecture, numbers: Multipliers) -> float:
    """Which may be below 0."""
    if arch.logit_scale is None:
        return 1 / numbers.logits
    number = read.config.get(arch.logit_scale)
    if not isinstance(number, int | float) or not number:
        raise read.refusal(arch.logit_scale, "a number, and not 0")
    return float(number)


def embedding_scale(read: Reads, arch: Architecture, numbers: Multipliers, hidden: int) -> float | None:
    if arch.multiplied:
        return numbers.embedding / numbers.residual
    return float(hidden**0.5) if read.said(arch.scaled_embeddings) else None


def score_scale(read: Reads, arch: Architecture, head_dim: int) -> float:
    if arch.multiplied:
        return read.number("attention_multiplier")
    if arch.score_scale is None:
        return float(head_dim**-0.5) * (1.0 if arch.sharpened is None else read.number(arch.sharpened))
    return arch.score_scale if isinstance(arch.score_scale, float) else float(read.number(arch.score_scale) ** -0.5)


def latent_scale(read: Reads, latent: Latent) -> float:
    """DeepSeek's yarn scales products of queries and keys, not their cosines and sines."""
    rope, sharper = read.section("rope_parameters"), 1.0
    if rope.config.get("rope_type", "default") != "default" and rope.config.get("mscale_all_dim"):
        sharper = 1 + 0.1 * rope.number("mscale_all_dim") * max(0.0, math.log(rope.number("factor")))
    return float(latent.head_dim**-0.5 * sharper**2)
