"""What a type of model means by keys of its mixtures of experts that a config.json leaves out, as transformers does.

Kinds of data: mixtures.py has them type by type; what is read with it is experts.py's matter.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tpspec.published.mlp_names import MlpNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Of types that mix as DeepSeek's do, what is beside the experts. What has no comment is as in Experts."""

    dense: int
    shared: int | None  # MLPs beside the experts, each as wide as one of those
    first_layer: int = 1
    # mlp_layer_types says which layers have experts; if not, the key for the first does; "or": where that is left out.
    listed: bool | Literal["or counted"] = False
    groups: tuple[int, int] | None = (1, 1)  # of experts, and how many are chosen; None: they are in one
    scale: float = 1.0
    sigmoid: bool = True
    of_parts: bool = False
    added: float = 1e-20
    own: str | None = None  # the key for the channels of the MLP beside them, if not so many experts'
    switch: str | None = None  # the flag that may say that no bias corrects
    # The keys for the first layer, the MLPs beside the experts, and the scale.
    keys: tuple[str, str, str] = ("first_k_dense_replace", "n_shared_experts", "routed_scaling_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByLogits:
    """Of types that choose experts by logits, and weigh what these make by sigmoids."""

    shared: tuple[str, int]  # the key for the channels of the MLP beside them, and how many there are without it
    each: tuple[str, int] | None = None  # likewise of one of several such MLPs, whose number `shared` is then
    corrected: bool = False  # a bias is added to those logits
    listed: str | None = None  # the list that says which layers have no experts
    dense: str = "intermediate_size"  # the key for the channels of the MLP there
    usual_dense: int | None = None  # how many there are without it; None: as many as `each`
    spaced: bool = False  # interleave_moe_layer_step or moe_layers says which layers have some
    on_inputs: bool = False  # see Experts
    # Whether expert_selection_fn says if parts of a softmax over the chosen experts are weights instead, and
    # shared_expert_combination_strategy if what experts and that MLP give is summed, or its mean taken.
    varied: bool = False


@dataclass(frozen=True, slots=True)
class Mixing:
    """Of one type. None: the config has to say."""

    names: MlpNames
    _: KW_ONLY
    count: int | None
    chosen: int | None
    chosen_key: str = "num_experts_per_tok"
    channels: tuple[str, int | None] | None = None  # the key for an expert's, and how many; None: as an MLP's
    sums_to_one: bool | None = None  # None: norm_topk_prob says
    norms: bool = False  # whether it does where it is left out
    sigmoid: bool = False  # as the next, see Experts
    biased: bool = False
    beside: Beside | None = None
    by_logits: ByLogits | None = None
    gated: int | None = None  # channels of an MLP beside the experts that has a gate
    shared: tuple[str, int] | None = None  # of one without: the key, and how many without it; 0: there is none
    # Channels of the MLP of a type that has experts besides where enable_moe_block says so, with norms of their own.
    apart: int | None = None
    alone: MlpNames | None = None  # of the MLP of models without experts, where a config may say that there are none
    by_layer: tuple[str, ...] = ()  # keys that may list for each layer what has to be the same for all
    margin: tuple[str, float] | None = None  # the key for half of that of Experts, and how much it is without it
