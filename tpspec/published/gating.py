"""A gate that what a query head gives is multiplied with: of which types of models, and what it is; from a config.json.

Knows keys. What is multiplied is model/gates.py's matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tpspec.published.reads import Reads


@dataclass(frozen=True, slots=True)
class Gating:
    """own: the matrix that makes it; None: its rows stand behind those of each head's query. act: what that goes
    through. by_head: one number is for all that a head gives; else each of those has its own."""

    own: str | None = None
    act: Literal["sigmoid", "softplus"] = "sigmoid"
    by_head: bool = False

    def num_rows(self, num_heads: int, head_dim: int) -> int:
        """Of that matrix."""
        return num_heads if self.by_head else num_heads * head_dim


BEHIND_QUERIES = Gating()
GATINGS = {
    "afmoe": Gating("gate_proj"),
    "laguna": Gating("g_proj", "softplus"),
    "lfm3": Gating("gate_proj", by_head=True),
    "muse_glimmer_text": Gating("gate_proj"),
    "qwen3_5_moe_text": BEHIND_QUERIES,
    "qwen3_5_text": BEHIND_QUERIES,
    "qwen3_next": BEHIND_QUERIES,
    "step3p5": Gating("g_proj", by_head=True),
}
SWITCHES = {"lfm3": "use_attention_gate"}  # that may say that there is none
SAYING = ("laguna",)  # whose config says for what it is
BY_HEAD, BY_ELEMENT = (True, "per-head"), ("per-element",)  # as it does


def gating_of(read: Reads, model_type: str) -> Gating | None:
    """None for a model without one."""
    usual, switch = GATINGS.get(model_type), SWITCHES.get(model_type)
    if switch is not None and not read.flag(switch, True):
        return None
    if usual is None or model_type not in SAYING:
        return usual
    said = read.one_of("gating", (*BY_HEAD, *BY_ELEMENT), BY_HEAD[0])
    return replace(usual, by_head=said not in BY_ELEMENT)
