"""Mixtures of experts: what stands in place of a layer's MLP in some types of models.

Each rank holds its channels of every expert, as of any MLP, and the whole router: a mixture costs no collective more.
Knows keys and names; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Literal

from tpspec.errors import UserError
from tpspec.published.blocks import MIXTURE, MLP
from tpspec.published.mixtures import MIXTURES, channels_key
from tpspec.published.reads import shown

if TYPE_CHECKING:
    from tpspec.published.mixture import Beside, ByLogits, Mixing
    from tpspec.published.reads import Reads


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a layer, and which layers have some."""

    count: int
    chosen: int  # how many of them a token is sent to

    # Weights: parts of a softmax over all experts, scaled so that those of the chosen sum to one or left as they are.
    sums_to_one: bool
    _: KW_ONLY
    sigmoid: bool = False  # or each its own sigmoid
    of_parts: bool = False  # that is a part of a softmax after all, and only the bias makes it another (Ernie 4.5)
    added: float = 1e-20  # to the sum of sigmoids that are to sum to one, as transformers does
    scale: float = 1.0  # of all weights, after that
    cap: float | None = None  # what the router says stays below, by cap * tanh(x / cap)
    on_inputs: bool = False  # what an expert reads is multiplied by its weight, not what it gives
    # The weight of an expert is its part of a softmax over those not chosen before it whose logits are below its own by
    # no more than this part of theirs, or of its own if that is more (SparseMixer, arXiv 2409.12136).
    margin: float | None = None

    # Choice: what a bias is added to only to choose experts, the sigmoids (DeepSeek-V3, arXiv 2412.19437) or the
    # logits; None: there is none, and the largest logits are chosen.
    corrected: Literal["sigmoids", "logits"] | None = None
    groups: int = 1  # into which experts are divided
    groups_chosen: int = 1  # each token is sent to experts of as many, those that are best for it

    # Layers: from the first on each `every`-th has experts; the others have an MLP of `dense` channels.
    first_layer: int = 0
    every: int = 1
    dense: int = 0

    # Beside experts: an MLP through which every row goes.
    shared: int = 0  # its channels; 0: there is none
    shared_gated: bool = False
    shared_scale: float = 1.0  # of what it gives
    # Whether it and the experts have norms of their own, before and behind; then ranks sum them side by side, and an
    # expert's weight is multiplied with a number of its own.
    apart: bool = False

    biased: bool = False  # the matrices of experts, and the router
    latent: int = 0  # numbers of a row that they read, and give, by matrices that all share; 0: those of the row

    def layers(self, num_layers: int) -> range:
        """Those with experts, of so many."""
        return range(self.first_layer, num_layers, self.every)

    @property
    def is_divided(self) -> bool:
        """Whether a row cannot be sent to any of them."""
        return self.groups > self.groups_chosen

    def share_read(self, num_rows: int) -> float:
        """The part of all that so many rows are sent to, if each expert is as likely as any other."""
        return 1 - (1 - self.chosen / self.count) ** num_rows


BEFORE, BEHIND = "fc1_latent_proj", "fc2_latent_proj"  # matrices around experts that read latents, within a mixture
SPARSE = "sparse"  # as mlp_layer_types calls a layer with experts
# Of parts of a softmax: with less, transformers does not make them sum to one. Those chosen have more.
LEAST_SUM = 1e-12
GROUP_SCORES = 2  # of the best experts, which are summed to compare groups, where experts have sigmoids
NUM_LAYERS = "num_hidden_layers"
CAP = "moe_router_logit_softcapping"  # 0: there is none
DENSE_LAYERS = (0, 1)  # without experts, where mlp_only_layers may say which, and does not
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # all are in use for the same


def experts_of(read: Reads, model_type: str, blocks: tuple[str, ...] = ()) -> Experts | None:
    """From the keys of a config; None for a type without experts. blocks: see blocks.py. UserError for what is no
    number, or not supported."""
    if model_type not in MIXTURES or (blocks and MIXTURE not in blocks):
        return None
    usual = MIXTURES[model_type]
    read = read.alike(usual.by_layer)
    if usual.alone is not None and not _has_some(read, usual):
        return None
    _check_layers(read, usual)
    experts = _chosen(read, usual)
    if usual.margin is not None:
        read.one_of(usual.chosen_key, (2,), usual.chosen)
        return replace(experts, margin=2 * read.number(*usual.margin))
    if usual.by_logits is not None:
        return _by_logits(experts, read, usual.by_logits)
    if usual.apart is not None:
        return replace(experts, shared=read.size("intermediate_size", usual.apart), apart=True)
    if usual.shared is not None:
        channels = read.size(*usual.shared, least=0)
        if usual.by_layer:  # one is as wide as the other
            read.one_of("num_shared_expert", (1,), 1)
            read.one_of("moe_intermediate_size", (channels,), channels)
        return replace(experts, shared=channels)
    if usual.gated is not None:
        return replace(experts, shared=read.size("shared_expert_intermediate_size", usual.gated), shared_gated=True)
    if usual.beside is None:
        return experts
    return _as_deepseek(experts, read, usual.beside, channels_key(model_type), has_mlps=not blocks or MLP in blocks)


def _has_some(read: Reads, usual: Mixing) -> bool:
    """Of a type that may have none."""
    if usual.apart is not None:
        return read.flag("enable_moe_block", False)
    return read.size(COUNTS[0], usual.count, least=0) > 0


def _check_layers(read: Reads, usual: Mixing) -> None:
    """UserError where a config says which layers have experts by a list that its type does not go by."""
    read.one_of("decoder_sparse_step", (1,), 1)
    listed = None if usual.by_logits is None else usual.by_logits.listed
    if listed != "mlp_only_layers" and not (usual.beside is not None and usual.beside.listed):
        read.refuse("mlp_only_layers")
    if usual.beside is None and listed != "mlp_layer_types" and set(read.texts("mlp_layer_types")) - {SPARSE}:
        raise read.refusal("mlp_layer_types", f"{SPARSE} for all layers")


def _chosen(read: Reads, usual: Mixing) -> Experts:
    """How many there are, and how they are chosen and weighed."""
    given = [key for key in COUNTS if key in read.config]
    if len({shown(read.config[key]) for key in given}) > 1:
        said = " and ".join(f"{key} is {shown(read.config[key])}" for key in given)
        raise UserError(f"{read.where}: {said}; should be the same")
    key = given[0] if given else "num_experts"
    count, chosen = read.size(key, usual.count), read.size(usual.chosen_key, usual.chosen)
    if chosen > count:
        raise read.refusal(usual.chosen_key, f"at most {key} ({count})")
    sums_to_one = read.flag("norm_topk_prob", usual.norms) if usual.sums_to_one is None else usual.sums_to_one
    if usual.sums_to_one is False:
        read.refuse("norm_topk_prob")
    if usual.sigmoid:
        read.one_of("scoring_func", ("sigmoid",), "sigmoid")
        read.one_of("use_routing_bias", (True,), True)
        read.refuse("shared_intermediate_size")
    by_sigmoids = usual.sigmoid or (usual.beside is not None and usual.beside.sigmoid)
    corrected: Literal["sigmoids"] | None = "sigmoids" if by_sigmoids else None
    return Experts(count, chosen, sums_to_one, sigmoid=by_sigmoids, corrected=corrected, biased=usual.biased)


def _as_deepseek(
    experts: Experts, read: Reads, usual: Beside, channels: tuple[str, int | None], *, has_mlps: bool
) -> Experts:
    """channels: the key for an expert's, and how many there are without it. has_mlps: whether there are layers without
    experts."""
    read.one_of("moe_layer_freq", (1,), 1)
    scores = ("sigmoid", "noaux_tc") if usual.sigmoid and not usual.of_parts else ("softmax",)
    read.one_of("scoring_func", scores, scores[0])
    read.one_of("score_function", scores, scores[0])
    read.one_of("moe_router_score_func", ("sigmoid",), "sigmoid")
    read.one_of("moe_router_use_sigmoid", (True,), True)
    if usual.of_parts:
        read.one_of("moe_norm_min", (LEAST_SUM,), LEAST_SUM)
    _, shared, scale = usual.keys
    groups, groups_chosen = _groups(read, usual, experts)
    own = read.size(shared, usual.shared, least=0) * read.size(*channels)
    is_corrected = usual.switch is None or read.flag(usual.switch, True)
    return replace(
        experts,
        corrected=experts.corrected if is_corrected else None,
        added=usual.added,
        of_parts=usual.of_parts,
        cap=read.number(CAP, 1.0) if read.config.get(CAP) else None,
        scale=read.number(scale, usual.scale),
        first_layer=_first_mixed(read, usual),
        dense=read.size("intermediate_size", usual.dense) if has_mlps else 0,
        shared=own if usual.own is None else read.size(usual.own, channels[1]),
        latent=read.size_if_given("moe_latent_size") or 0,
        groups=groups,
        groups_chosen=groups_chosen,
    )


def _groups(read: Reads, usual: Beside, experts: Experts) -> tuple[int, int]:
    """Of experts, and how many of those are chosen."""
    if usual.groups is None:
        read.one_of("n_group", (1,), 1)
        return 1, 1
    methods = ("noaux_tc",) if usual.sigmoid else ("greedy", "group_limited_greedy")
    if read.one_of("topk_method", methods, methods[0]) == "greedy":
        return 1, 1
    count, chosen = read.size("n_group", usual.groups[0]), read.size("topk_group", usual.groups[1])
    if experts.count % count or experts.count // count < GROUP_SCORES:
        raise read.refusal("n_group", f"a divisor of the number of experts ({experts.count}), and at most half of it")
    if chosen > count or chosen * (experts.count // count) < experts.chosen:
        right = f"at most n_group ({count}), and so many that num_experts_per_tok ({experts.chosen}) are in them"
        raise read.refusal("topk_group", right)
    return count, chosen


def _by_logits(experts: Experts, read: Reads, usual: ByLogits) -> Experts:
    sigmoid = not usual.varied or read.one_of("expert_selection_fn", ("sigmoid", "softmax"), "softmax") == "sigmoid"
    means = ("average", "sum")
    averaged = usual.varied and read.one_of("shared_expert_combination_strategy", means, means[0]) == means[0]
    each = 1 if usual.each is None else read.size(*usual.each)
    shared = each * read.size(*usual.shared, least=0)
    first, every = _spaced(read) if usual.spaced else (_first_listed(read, usual.listed), 1)
    part = 0.5 if averaged and shared else 1.0
    return replace(
        experts,
        sums_to_one=experts.sums_to_one or not sigmoid,
        sigmoid=sigmoid,
        corrected="logits" if usual.corrected else None,
        scale=part,
        first_layer=first,
        every=every,
        dense=read.size(usual.dense, usual.usual_dense or each) if first or every > 1 else 0,
        shared=shared,
        shared_scale=part,
        on_inputs=usual.on_inputs,
    )


def _first_listed(read: Reads, listed: str | None) -> int:
    """The first layer with experts, as a list of that name says it."""
    if listed == "mlp_only_layers":
        dense = read.config.get(listed)
        if dense is not None and (not isinstance(dense, list) or dense != list(range(len(dense)))):
            raise read.refusal(listed, "the first layers in their order, as [0, 1], which it is by default")
        return len(DENSE_LAYERS if dense is None else dense)
    if listed is None:
        return 0
    return _first_sparse(read, read.size("first_k_dense_replace", 0, least=0))


def _spaced(read: Reads) -> tuple[int, int]:
    """The first layer with experts, and how many there are from one to the next."""
    every, listed = read.size("interleave_moe_layer_step", 1), read.config.get("moe_layers")
    if listed is None:
        return every - 1, every
    right, num_layers = "the layers with experts, each as far behind the one before it", read.size_if_given(NUM_LAYERS)
    if not isinstance(listed, list) or not listed or not all(type(one) is int and one >= 0 for one in listed):
        raise read.refusal("moe_layers", right)
    first, every = listed[0], listed[1] - listed[0] if len(listed) > 1 else every
    if every < 1 or listed != [*range(first, num_layers or listed[-1] + 1, every)]:
        raise read.refusal("moe_layers", right)
    return first, every


def _first_mixed(read: Reads, usual: Beside) -> int:
    """The first layer with experts; all after it have some."""
    key, *_ = usual.keys
    read.one_of("moe_layer_interval", (1,), 1)
    read.one_of("moe_layer_end_index", (-1, *_last_layer(read)), -1)
    if not usual.listed:
        return read.size(key, usual.first_layer, least=0)
    counted = usual.first_layer
    if usual.listed == "or counted":
        counted = read.size(key, counted, least=0)
    else:
        read.one_of(key, (counted,), counted)
    first = _first_sparse(read, min(counted, read.size_if_given(NUM_LAYERS) or counted))
    if read.config.get("mlp_only_layers") not in (None, [], [*range(first)]):  # which Laguna says besides
        raise read.refusal("mlp_only_layers", f"{[*range(first)]}, as mlp_layer_types is, or null")
    return first


def _first_sparse(read: Reads, usual: int) -> int:
    """Of mlp_layer_types; usual: where a config has none."""
    kinds = read.texts("mlp_layer_types")
    first = kinds.index(SPARSE) if SPARSE in kinds else len(kinds)
    if set(kinds[:first]) - {"dense"} or set(kinds[first:]) - {SPARSE}:
        raise read.refusal("mlp_layer_types", "dense for the first layers, and sparse for all after them")
    return first if kinds else usual


def _last_layer(read: Reads) -> tuple[int, ...]:
    """Where a config says how many there are."""
    count = read.size_if_given(NUM_LAYERS)
    return () if count is None else (count - 1,)
