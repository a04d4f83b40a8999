"""What a family of checkpoints may do. Knows no family: architectures.py declares them. Sizes, biases, windows and the
norms that there are belong to its shape (published/).

Where a field of an Architecture may be a text, that is the key of the config that says it, unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FINAL_NORM = "model.norm.weight"
# Layers without rope, where their type alone does not say it.
NOPE_BESIDE = "full_attention beside sliding_attention"  # in models of which some have a window
NOPE_WITH_EXPERTS = "full_attention with experts"  # and in those without, unless all of these are full
THETAS = "layer_rope_theta"  # of each layer's own rope; 0: it has none
ONE_THETA = "layer_rope_theta beside rope_theta"  # in models whose ropes are all the same: 0 or not is what counts
THETA = "rope_theta"  # of rope, where a model may have none: null says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """See above. What is None or false is not there, or not supported."""

    # Attention: a norm of each query and key head without a weight, the same of each value head.
    plain_norm: bool | str = False
    v_norm: bool = False
    score_scale: str | float | None = None  # what scores are divided by the root of, if not head_dim; or the factor
    sharpened: str | None = None  # a number that scores are multiplied by besides
    value_scale: str | None = None  # a number that values are multiplied by, or null
    scores_capped: bool = False  # whether the config may say so

    # Rope: whether there is any, or the key that says "rope" or "nope", or THETA.
    turned: bool | str = True
    nope: str | None = None  # a list that says which layers skip it, such as THETAS; their type; or one of those above
    partial_rope: bool = False  # whether the config may say that it turns the first part of a head alone
    alternate_rope: bool | str = False  # it turns a number with the next, not with one half a head away
    backwards: bool = False  # by the negative of its angle
    stretched: bool = False  # whether a dynamic one may have an alpha (frequencies.py)
    own_scales: bool = False  # a longrope says what its cosines and sines are multiplied by
    tuned: bool = False  # whether queries that it does not turn may grow, as attn_temperature_tuning says
    ropes_by_kind: bool = False  # each kind of layers says of its own

    # Norms of rows
    weighed: bool = True  # whether they have weights
    one_more: bool | Literal["layers"] = False  # they multiply by 1 + weight; of "layers": but the final one does not
    centred: bool = False  # the mean of a row is taken off before, as LayerNorm does
    eps: str | float = "rms_norm_eps"  # of all, or how much it always is
    rms_eps: str | None = None  # of those that are not centred, as all are where a config gives one
    out_eps: str | None = None  # of those of what layers give, where that is another

    # MLPs
    gate: tuple[str | None, str] = ("hidden_act", "silu")  # the key, if there is one, and what it must say
    clamped: bool = False  # see rows.inc
    limited: bool = False  # whether the config may say limits (limits.py)

    # Embeddings and logits
    scaled_embeddings: bool | str = False  # by the root of their size
    normed_embeddings: bool = False  # by RMSNorm without a weight
    scaled_layers: bool = False  # what leaves a layer, by a number of its own
    # Embeddings, what is added to them, scores and logits are multiplied by numbers of the config (scales.py), but that
    # logits are divided by theirs, unless this is "logits".
    multiplied: bool | Literal["logits"] = False
    scaled: bool = False  # embeddings, scores, products and logits are by numbers of their own (product_scales.py)
    logit_scale: str | None = None  # what logits alone are multiplied by
    capped: bool = False  # whether the config may say so of logits
