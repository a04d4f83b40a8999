"""Mixtures of experts: what stands in place of a layer's MLP in some types of models, and what its matrices are called.

Each rank holds its channels of every expert, as of any MLP, and the whole router: a mixture costs no collective more.
Knows keys and names; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


DENSE = MlpNames("mlp")
NAMES = {"mixtral": MlpNames("block_sparse_moe", "w1", "w3", "w2")}


def mlp_names(model_type: str) -> MlpNames:
    return NAMES.get(model_type, DENSE)


def experts_of(read: Reads, model_type: str) -> Experts | None:
    """From the keys of a config, with transformers' defaults; None for a type without experts. Raises UserError."""
    match model_type:
        case "mixtral":
            return _experts(read, 8, 2, sums_to_one=True)
        case "qwen3_moe":
            read.one_of("decoder_sparse_step", (1,), 1)
            read.refuse("mlp_only_layers")
            return _experts(read, 128, 8, sums_to_one=read.flag("norm_topk_prob", False))
    return None


def _experts(read: Reads, count: int, chosen: int, *, sums_to_one: bool) -> Experts:
    """count, chosen: by default."""
    key = "num_local_experts" if "num_local_experts" in read.config else "num_experts"  # both are in use for both
    count, chosen = read.size(key, count), read.size("num_experts_per_tok", chosen)
    if chosen > count:
        raise read.refusal("num_experts_per_tok", f"at most {key} ({count})")
    return Experts(count, chosen, sums_to_one)
