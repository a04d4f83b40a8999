"""Mixtures of experts: what stands in place of a layer's MLP in some types of models, and what its matrices are called.

Each rank holds its channels of every expert, as of any MLP, and the whole router: a mixture costs no collective more.
Knows keys and names; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.topology.reads import shown

if TYPE_CHECKING:
    from tpspec.topology.reads import Reads


@dataclass(frozen=True, slots=True)
class MlpNames:
    """module: of the MLP, or the mixture, within its layer; empty where a mixture's parts are the layer's own. router,
    and shared, of an MLP beside the experts: within a mixture; the others within an MLP or expert. Where gate and up
    have one name they are one matrix, gate's rows first.

    together: of what holds gate and up of all experts of a layer, as `down` then holds theirs; None: each expert has
    matrices of its own. upright: it has a row for each output; else a row is an input's. alternate: the outputs of gate
    and up stand in turn; else gate's before up's, and checkpoints may have it the other way round, or a matrix for each
    expert instead. shared_gate: of what the MLP beside the experts is multiplied with. correction: of the bias by which
    experts are chosen, within the mixture.
    """

    module: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared: str = "shared_experts"
    together: str | None = None
    upright: bool = False
    alternate: bool = False
    shared_gate: str = "shared_expert_gate"
    correction: str = "gate.e_score_correction_bias"

    def within(self, layer: str) -> str:
        """What the names of its parts begin with. layer: the same of its layer."""
        return f"{layer}{self.module}." if self.module else layer


@dataclass(frozen=True, slots=True)
class Experts:
    """count: in each layer. chosen: how many of them a token is sent to. sums_to_one: whether the weights of those are
    scaled to, or stay parts of a softmax over all.

    sigmoid: the weight of an expert is no part of a softmax but its own sigmoid; to choose experts, a bias is added to
    it (DeepSeek-V3, arXiv 2412.19437). of_parts: that sigmoid is a part of a softmax after all, and only the bias makes
    it another (Ernie 4.5). scale: of all weights, after that. groups: into which experts are divided; each
    token is sent to experts of the `groups_chosen` that are best for it.
    first_layer: those before it have an MLP of `dense` channels instead. shared: channels of an MLP beside the experts,
    through which every row goes; 0: there is none. shared_gated: whether what that gives has a gate. apart: whether
    that and the experts have norms of their own, before and behind; then ranks sum them side by side, and an expert's
    weight is multiplied with a number of its own. biased: the matrices of experts, and the router.
    """

    count: int
    chosen: int
    sums_to_one: bool
    sigmoid: bool = False
    scale: float = 1.0
    first_layer: int = 0
    dense: int = 0
    shared: int = 0
    shared_gated: bool = False
    apart: bool = False
    biased: bool = False
    groups: int = 1
    groups_chosen: int = 1
    of_parts: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether a row cannot be sent to any of them."""
        return self.groups > self.groups_chosen

    def share_read(self, num_rows: int) -> float:
        """The part of all that so many rows are sent to, if each expert is as likely as any other."""
        return 1 - (1 - self.chosen / self.count) ** num_rows


@dataclass(frozen=True, slots=True)
class Beside:
    """Of types that mix as DeepSeek's do, what is beside the experts. dense, first_layer, scale, sigmoid, of_parts: see
    Experts. shared: MLPs beside the experts, as wide as `channels` each. groups: of experts, and how many are chosen;
    None: they are in one. listed: mlp_layer_types says which layers have experts; if not, the key for the first does.
    keys: what a config.json calls the first layer, the MLPs beside the experts, and the scale."""

    dense: int
    shared: int | None
    channels: int
    first_layer: int = 1
    groups: tuple[int, int] | None = (1, 1)
    scale: float = 1.0
    sigmoid: bool = True
    of_parts: bool = False
    listed: bool = False
    keys: tuple[str, str, str] = ("first_k_dense_replace", "n_shared_experts", "routed_scaling_factor")


@dataclass(frozen=True, slots=True)
class Mixing:
    """What a type of model means by keys that its config.json leaves out, as transformers does. chosen: None where the
    config has to say; chosen_key: as what. count: likewise. sums_to_one: None where norm_topk_prob says, of which
    `norms` is the default. sigmoid, biased: see Experts. gated: channels of an MLP beside the experts that has a gate.
    apart: channels of its MLP, of a type that has experts besides where enable_moe_block says so, with norms of their
    own.
    """

    names: MlpNames
    count: int | None
    chosen: int | None
    chosen_key: str = "num_experts_per_tok"
    sums_to_one: bool | None = None
    norms: bool = False
    sigmoid: bool = False
    beside: Beside | None = None
    gated: int | None = None
    biased: bool = False
    apart: int | None = None


DENSE = MlpNames("mlp")
FUSED = MlpNames("mlp", gate="gate_up_proj", up="gate_up_proj")
FUSED_TYPES = ("glm", "glm4", "glm4v_text", "phi3")
MIXTURES = {
    "afmoe": Mixing(
        MlpNames("mlp", router="router.gate", correction="expert_bias"),
        count=64,
        chosen=6,
        sums_to_one=True,
        beside=Beside(
            dense=6144,
            shared=2,
            channels=1408,
            groups=None,
            keys=("num_dense_layers", "num_shared_experts", "route_scale"),
        ),
    ),
    "deepseek_v2": Mixing(
        DENSE,
        count=64,
        chosen=None,
        sums_to_one=False,
        beside=Beside(dense=11008, shared=2, channels=1407, first_layer=0, sigmoid=False),
    ),
    "deepseek_v3": Mixing(
        DENSE,
        count=256,
        chosen=8,
        norms=True,
        beside=Beside(dense=18432, shared=1, channels=2048, first_layer=3, groups=(8, 4), scale=2.5),
    ),
    "dots1": Mixing(
        DENSE, count=None, chosen=None, beside=Beside(dense=10944, shared=None, channels=1408, first_layer=0)
    ),
    "ernie4_5_moe": Mixing(
        MlpNames("mlp", correction="moe_statics.e_score_correction_bias"),
        count=64,
        chosen=6,
        chosen_key="moe_k",
        sums_to_one=True,
        beside=Beside(
            dense=12288,
            shared=2,
            channels=1536,
            groups=None,
            of_parts=True,
            keys=("moe_layer_start_index", "moe_num_shared_experts", "routed_scaling_factor"),
        ),
    ),
    "exaone_moe": Mixing(
        MlpNames("mlp", correction="e_score_correction_bias"),
        count=64,
        chosen=8,
        norms=True,
        beside=Beside(
            dense=16384,
            shared=1,
            channels=1024,
            scale=2.5,
            listed=True,
            keys=("first_k_dense_replace", "num_shared_experts", "routed_scaling_factor"),
        ),
    ),
    "flex_olmo": Mixing(DENSE, count=7, chosen=5),
    "gemma4_text": Mixing(
        MlpNames("", router="router.proj", shared="mlp", together="gate_up_proj", upright=True),
        count=None,
        chosen=None,
        chosen_key="top_k_experts",
        sums_to_one=True,
        apart=9216,
    ),
    "glm4_moe": Mixing(DENSE, count=128, chosen=8, norms=True, beside=Beside(dense=10944, shared=1, channels=1408)),
    "glm4_moe_lite": Mixing(
        DENSE,
        count=64,
        chosen=4,
        norms=True,
        beside=Beside(dense=10240, shared=1, channels=1536, scale=1.8, listed=True),
    ),
    "glm4v_moe_text": Mixing(
        DENSE, count=128, chosen=8, norms=True, beside=Beside(dense=10944, shared=1, channels=1408)
    ),
    "gpt_oss": Mixing(
        MlpNames("mlp", router="router", together="gate_up_proj", alternate=True),
        count=128,
        chosen=4,
        sums_to_one=True,
        biased=True,
    ),
    "hy_v3": Mixing(
        MlpNames("mlp", router="router.gate", shared="shared_mlp", correction="expert_bias"),
        count=192,
        chosen=8,
        sums_to_one=True,
        beside=Beside(
            dense=13312,
            shared=1,
            channels=1536,
            groups=None,
            scale=2.826,
            listed=True,
            keys=("first_k_dense_replace", "num_shared_experts", "router_scaling_factor"),
        ),
    ),
    "mellum": Mixing(DENSE, count=64, chosen=8, norms=True),
    "minimax_m2": Mixing(
        MlpNames("block_sparse_moe", "w1", "w3", "w2", correction="e_score_correction_bias"),
        count=256,
        chosen=8,
        sums_to_one=True,
        sigmoid=True,
    ),
    "mistral4": Mixing(
        MlpNames("mlp", together="gate_up_proj", upright=True),
        count=128,
        chosen=4,
        norms=True,
        beside=Beside(dense=12288, shared=1, channels=2048, first_layer=0, groups=None, sigmoid=False),
    ),
    "mixtral": Mixing(MlpNames("block_sparse_moe", "w1", "w3", "w2"), count=8, chosen=2, sums_to_one=True),
    "olmoe": Mixing(DENSE, count=64, chosen=8),
    "qwen2_moe": Mixing(MlpNames("mlp", shared="shared_expert"), count=60, chosen=4, gated=5632),
    "qwen3_5_moe_text": Mixing(
        MlpNames("mlp", shared="shared_expert", together="gate_up_proj", upright=True),
        count=256,
        chosen=8,
        sums_to_one=True,
        gated=512,
    ),
    "qwen3_moe": Mixing(DENSE, count=128, chosen=8),
    "qwen3_vl_moe_text": Mixing(MlpNames("mlp", together="gate_up_proj"), count=60, chosen=4, sums_to_one=True),
    "qwen3_next": Mixing(MlpNames("mlp", shared="shared_expert"), count=512, chosen=10, norms=True, gated=512),
    "solar_open": Mixing(
        DENSE,
        count=128,
        chosen=8,
        norms=True,
        beside=Beside(dense=10944, shared=1, channels=1280, first_layer=0),
    ),
}
SPARSE = "sparse"  # as mlp_layer_types calls a layer with experts
# Of parts of a softmax: with less, transformers does not make them sum to one. Those chosen have more.
LEAST_SUM = 1e-12
GROUP_SCORES = 2  # of the best experts, which are summed to compare groups, where experts have sigmoids
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # all are in use for the same
NAMES = {mixing.names for mixing in MIXTURES.values()}


def has_narrow_columns(name: str) -> bool:
    """Whether the columns of the matrix of that name are the channels of one expert."""
    return "experts." in name and name.endswith(tuple(names.down for names in NAMES))


def mlp_names(model_type: str, *, mixed: bool = True) -> MlpNames:
    """mixed: whether a model has experts, of a type that may have some or none."""
    if model_type in MIXTURES and (mixed or MIXTURES[model_type].apart is None):
        return MIXTURES[model_type].names
    return FUSED if model_type in FUSED_TYPES else DENSE


def experts_of(read: Reads, model_type: str) -> Experts | None:
    """From the keys of a config; None for a type without experts. UserError for what is no number, or not supported."""
    if model_type not in MIXTURES:
        return None
    usual = MIXTURES[model_type]
    if usual.apart is not None and not read.flag("enable_moe_block", False):
        return None
    read.one_of("decoder_sparse_step", (1,), 1)
    read.refuse("mlp_only_layers")
    if usual.beside is None and set(read.texts("mlp_layer_types")) - {SPARSE}:
        raise read.refusal("mlp_layer_types", f"{SPARSE} for all layers")
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
    experts = Experts(count, chosen, sums_to_one, sigmoid=usual.sigmoid, biased=usual.biased)
    if usual.apart is not None:
        return replace(experts, shared=read.size("intermediate_size", usual.apart), apart=True)
    if usual.gated is not None:
        return replace(experts, shared=read.size("shared_expert_intermediate_size", usual.gated), shared_gated=True)
    return experts if usual.beside is None else _as_deepseek(experts, read, usual.beside)


def _as_deepseek(experts: Experts, read: Reads, usual: Beside) -> Experts:
    read.one_of("moe_layer_freq", (1,), 1)
    scores = ("sigmoid", "noaux_tc") if usual.sigmoid and not usual.of_parts else ("softmax",)
    read.one_of("scoring_func", scores, scores[0])
    if usual.of_parts:
        read.one_of("moe_norm_min", (LEAST_SUM,), LEAST_SUM)
    _, shared, scale = usual.keys
    groups, groups_chosen = _groups(read, usual, experts)
    return replace(
        experts,
        sigmoid=usual.sigmoid,
        of_parts=usual.of_parts,
        scale=read.number(scale, usual.scale),
        first_layer=_first_mixed(read, usual),
        dense=read.size("intermediate_size", usual.dense),
        shared=read.size(shared, usual.shared, least=0) * read.size("moe_intermediate_size", usual.channels),
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


def _first_mixed(read: Reads, usual: Beside) -> int:
    """The first layer with experts; all after it have some."""
    key, *_ = usual.keys
    read.one_of("moe_layer_interval", (1,), 1)
    read.one_of("moe_layer_end_index", (-1, *_last_layer(read)), -1)
    if not usual.listed:
        return read.size(key, usual.first_layer, least=0)
    read.one_of(key, (usual.first_layer,), usual.first_layer)
    kinds = read.texts("mlp_layer_types")
    first = kinds.index(SPARSE) if SPARSE in kinds else len(kinds)
    if set(kinds[:first]) - {"dense"} or set(kinds[first:]) - {SPARSE}:
        raise read.refusal("mlp_layer_types", "dense for the first layers, and sparse for all after them")
    return first if kinds else usual.first_layer


def _last_layer(read: Reads) -> tuple[int, ...]:
    """Where a config says how many there are."""
    count = read.size_if_given("num_hidden_layers")
    return () if count is None else (count - 1,)
