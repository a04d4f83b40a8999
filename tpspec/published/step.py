"""Step's config.json as it was published: what transformers says by other keys in other ways (keys.py has the
rest), and what else it says, which is always so.

Knows keys. What those of transformers mean is read where those of other models are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tpspec.published.keys import say
from tpspec.published.model_types import MODEL_TYPES
from tpspec.published.windows import FULL, SLIDING, kinds_of

if TYPE_CHECKING:
    from tpspec.published.reads import Reads

TYPE = "step3p5"
MIXED, KINDS = "moe_layers_enum", "mlp_layer_types"
SLIDING_SETTING, SLIDING_HEADS = "attention_other_setting", "num_sliding_attention_heads"
ROPES = ("rope_theta", "partial_rotary_factors")
# Lists of layers, which go on with those for multi-token prediction.
LISTS = ("layer_types", KINDS, "swiglu_limits", "swiglu_limits_shared", *ROPES)
NUM_LAYERS = MODEL_TYPES[TYPE].num_layers
ALWAYS: dict[str, tuple[object, ...]] = {
    "att_impl_type": ("GQA",),
    "gating": (True, "per-head"),
    "hidden_act": ("silu",),
    "moe_dynamic_exp_p": (1.0, 1),
    "moe_every_n_layer": (1,),
    "moe_layer_offset": (0,),
    "moe_router_activation": ("sigmoid",),
    "norm_expert_weight": (True,),
    "use_head_wise_attn_gate": (True,),
    "use_moe": (True,),
    "use_moe_router_bias": (True,),
    "use_qk_norm": (True,),
    "zero_centered": (True,),
}
NEVER = ("sink", "use_rope_layers", "swa_num_attention_heads", "use_bidirectional_attention", "sparse_attention_config")


def as_now(config: dict[str, object]) -> dict[str, object]:
    """A config of any type, one of Step by transformers' keys. What cannot be said by those stays, for `check`."""
    if config.get("model_type") != TYPE:
        return config
    made = dict(config)
    num_layers, behind = made.get("num_hidden_layers") or NUM_LAYERS, made.get("num_nextn_predict_layers") or 0
    if type(num_layers) is not int or type(behind) is not int:
        return made
    for key in LISTS:
        if isinstance(listed := made.get(key), list) and len(listed) == num_layers + behind:
            made[key] = listed[:num_layers]
    if (mixed := _numbers(made.get(MIXED))) is not None:
        say(made, MIXED, KINDS, ["sparse" if layer in mixed else "dense" for layer in range(num_layers)])
    if isinstance(other := made.get(SLIDING_SETTING), dict) and _differs_by_heads_alone(other, made):
        say(made, SLIDING_SETTING, SLIDING_HEADS, other.get("num_attention_heads"))
    return made


def check(read: Reads, model_type: str, num_layers: int) -> None:
    """UserError for what is said otherwise than such models are, or twice; nothing for other types."""
    if model_type != TYPE:
        return
    for key, right in ALWAYS.items():
        read.one_of(key, right, right[0])
    read.refuse(*NEVER)
    if read.config.get(MIXED) is not None:
        raise read.refusal(MIXED, f"numbers of layers, as [3, 4] or '3,4', and those that {KINDS} says, if it does")
    if read.config.get(SLIDING_SETTING) is not None:
        own = f"num_attention_heads of its own, as {SLIDING_HEADS} if that is said"
        raise read.refusal(SLIDING_SETTING, f"what {SLIDING} has: {own}, all else as others")
    if (listed := read.texts(KINDS)) and len(listed) != num_layers:
        raise read.refusal(KINDS, f"one for each of {num_layers} layers")
    kinds = kinds_of(read, model_type, num_layers)
    if SLIDING in kinds:
        read.size("sliding_window")
    _check_ropes(read, kinds)


def _check_ropes(read: Reads, kinds: tuple[str, ...]) -> None:
    """transformers takes what the first layer of each type has; or rope_parameters, if those are of each type."""
    if (of_kinds := read.section("rope_parameters")).config:
        for kind in sorted({*kinds}):
            if not isinstance(of_kinds.config.get(kind), dict):
                raise of_kinds.refusal(kind, "a section, as of each type of layers")
        read.refuse(*ROPES, "rope_scaling")
    for key in ROPES:
        if isinstance(each := read.config.get(key), list) and not _is_of_kinds(each, kinds):
            raise read.refusal(key, f"one for each of {len(kinds)} layers, the same for all of a type")
    if (scaling := read.section("rope_scaling")).config:
        scaling.text("rope_type")
        if read.texts("yarn_only_types") != (FULL,):
            raise read.refusal("yarn_only_types", f"[{FULL!r}], whose rope alone is scaled")


def _is_of_kinds(each: list[object], kinds: tuple[str, ...]) -> bool:
    of_kind = dict(zip(kinds, each, strict=False))
    return len(each) == len(kinds) and each == [of_kind[kind] for kind in kinds]


def _numbers(said: object) -> set[int] | None:
    """Of layers; None where it says none."""
    each = [one.strip() for one in said.split(",") if one.strip()] if isinstance(said, str) else said
    if not isinstance(each, list) or not all(type(one) is int or str(one).isdecimal() for one in each):
        return None
    return {int(cast("int | str", one)) for one in each}


def _differs_by_heads_alone(other: dict[str, object], config: dict[str, object]) -> bool:
    head_dim = config.get("head_dim")
    usual = {"attention_type": SLIDING, "num_attention_groups": config.get("num_key_value_heads"),
             "head_dim": head_dim, "true_head_dim": head_dim}  # fmt: skip
    return all(other.get(key, value) == value for key, value in usual.items())
