"""MiMo's config.json as it was published: what transformers says by other keys, and what else it says, which is always
so (its lists and second sizes may not say otherwise).

Knows keys. What those of transformers mean is read where those of other models are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.published.keys import say
from tpspec.published.windows import FULL, SLIDING

if TYPE_CHECKING:
    from tpspec.published.reads import Reads

TYPE = "mimo_v2_flash"
# Lists of a 0 or 1 for each layer, and what transformers calls the list, and those.
LISTS = {
    "hybrid_layer_pattern": ("layer_types", (FULL, SLIDING)),
    "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse")),
}
BEFORE = "sliding_window_size"  # of tokens that are seen besides a row's own
THETAS = {FULL: "rope_theta", SLIDING: "swa_rope_theta"}
ROPES, PART = "rope_parameters", "partial_rotary_factor"
SAME = {"swa_num_attention_heads": "num_attention_heads", "swa_head_dim": "head_dim", "swa_v_head_dim": "v_head_dim"}
DOUBLED = "swa_num_key_value_heads"


def as_now(config: dict[str, object]) -> dict[str, object]:
    """A config of any type, one of MiMo by transformers' keys. What cannot be said by those stays, for `check`."""
    if config.get("model_type") != TYPE:
        return config
    made = dict(config)
    for old, (key, kinds) in LISTS.items():
        if isinstance(listed := made.get(old), list) and all(type(one) is int and one in (0, 1) for one in listed):
            say(made, old, key, [kinds[one] for one in listed])
    if type(before := made.get(BEFORE)) is int:
        made["sliding_window"] = before + 1
        del made[BEFORE]
    part = made.get(PART)
    thetas = {kind: made.get(key) for kind, key in THETAS.items()}
    if None not in (part, *thetas.values()):
        own = {kind: {"rope_type": "default", "rope_theta": theta, PART: part} for kind, theta in thetas.items()}
        if made.setdefault(ROPES, own) == own:
            for key in (PART, *THETAS.values()):
                del made[key]
    return made


def check(read: Reads, model_type: str) -> None:
    """UserError for what is said otherwise than such models are, or twice; nothing for other types."""
    if model_type != TYPE:
        return
    for old, (key, _) in LISTS.items():
        if read.config.get(old) is not None:
            raise read.refusal(old, f"0 or 1 for each layer, and as {key} says, if it does")
    read.refuse(BEFORE, "rope_scaling")
    for own, key in SAME.items():
        if read.config.get(own) is not None:
            read.one_of(own, (read.config.get(key),))
    if read.config.get(DOUBLED) is not None:
        read.one_of(DOUBLED, (2 * read.size("num_key_value_heads"),))
    ropes = read.section(ROPES)
    for key in (PART, *THETAS.values()):
        if read.config.get(key) is not None:
            raise read.refusal(key, f"beside the rest of {', '.join((PART, *THETAS.values()))}, and as {ROPES} says")
    for kind in ropes.config:
        ropes.section(kind).number(PART)  # what transformers takes without is no whole number of a head
