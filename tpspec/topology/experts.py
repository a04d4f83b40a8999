"""Mixtures of experts: what stands in place of a layer's MLP in some types of models, and what its matrices are called.

Each rank holds its channels of every expert, as of any MLP, and the whole router: a mixture costs no collective more.
Knows keys and names; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.topology.reads import shown

if TYPE_CHECKING:
    from tpspec.topology.reads import Reads


@dataclass(frozen=True, slots=True)
class MlpNames:
    """module: of the MLP, or the mixture, within its layer; the others within that, or within an expert."""

    module: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Experts:
    """count: in each layer. chosen: how many of them a token is sent to. sums_to_one: whether the weights of those are
    scaled to, or stay parts of a softmax over all."""

    count: int
    chosen: int
    sums_to_one: bool

    def share_read(self, num_rows: int) -> float:
        """The part of all that so many rows are sent to, if each expert is as likely as any other."""
        return 1 - (1 - self.chosen / self.count) ** num_rows


@dataclass(frozen=True, slots=True)
class Mixing:
    """What a type of model means by keys that its config.json leaves out, as transformers does. sums_to_one: None where
    norm_topk_prob says."""

    names: MlpNames
    count: int
    chosen: int
    sums_to_one: bool | None = None


DENSE = MlpNames("mlp")
MIXTURES = {
    "mixtral": Mixing(MlpNames("block_sparse_moe", "w1", "w3", "w2"), count=8, chosen=2, sums_to_one=True),
    "qwen3_moe": Mixing(DENSE, count=128, chosen=8),
}
NAMES = {mixing.names for mixing in MIXTURES.values()}


def has_narrow_columns(name: str) -> bool:
    """Whether the columns of the matrix of that name are the channels of one expert."""
    return ".experts." in name and name.endswith(tuple(names.down for names in NAMES))


def mlp_names(model_type: str) -> MlpNames:
    return MIXTURES[model_type].names if model_type in MIXTURES else DENSE


def experts_of(read: Reads, model_type: str) -> Experts | None:
    """From the keys of a config; None for a type without experts. UserError for what is no number, or not supported."""
    if model_type not in MIXTURES:
        return None
    usual = MIXTURES[model_type]
    read.one_of("decoder_sparse_step", (1,), 1)
    read.refuse("mlp_only_layers")
    given = [key for key in ("num_local_experts", "num_experts") if key in read.config]  # both are in use for both
    if len({shown(read.config[key]) for key in given}) > 1:
        said = " and ".join(f"{key} is {shown(read.config[key])}" for key in given)
        raise UserError(f"{read.where}: {said}; should be the same")
    key = given[0] if given else "num_experts"
    count, chosen = read.size(key, usual.count), read.size("num_experts_per_tok", usual.chosen)
    if chosen > count:
        raise read.refusal("num_experts_per_tok", f"at most {key} ({count})")
    sums_to_one = read.flag("norm_topk_prob", False) if usual.sums_to_one is None else usual.sums_to_one
    return Experts(count, chosen, sums_to_one)
