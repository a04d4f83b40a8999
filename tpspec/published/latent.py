"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1): its sizes, from a config.json.

Keys and values of all heads are made of one short latent for each token, beside a few numbers that rope turned; those
alone are cached. All query heads read them as one key, which is its own value: to the cache such a model has one head,
and every rank keeps it whole (model/latent.py). Knows keys; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpspec.published.reads import Reads


REDUCED, LATENT, MADE = "q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"  # as checkpoints call what makes each


@dataclass(frozen=True, slots=True)
class Latent:
    """rank: numbers of the latent. plain, turned: of a query head, those that rope leaves and those that it turns.
    values: what a head gives. queries: numbers that the hidden state is reduced to, and queries are made of; None: of
    the hidden state itself.
    """

    rank: int
    plain: int
    turned: int
    values: int
    queries: int | None

    @property
    def head_dim(self) -> int:
        """Of a query, as the checkpoint has it."""
        return self.plain + self.turned

    @property
    def cached(self) -> int:
        """Numbers of a token."""
        return self.rank + self.turned

    @property
    def query_name(self) -> str:
        """What a checkpoint calls the matrix of queries."""
        return "q_proj" if self.queries is None else "q_b_proj"

    @property
    def made(self) -> int:
        """Numbers that each head makes of a latent: of its key, and its value."""
        return self.plain + self.values


# What types mean by keys that their config.json leaves out, as transformers does.
LATENTS = {
    "axk1": Latent(rank=512, plain=128, turned=64, values=128, queries=1536),
    "deepseek_v2": Latent(rank=512, plain=128, turned=64, values=128, queries=1536),
    "deepseek_v3": Latent(rank=512, plain=128, turned=64, values=128, queries=1536),
    "deepseek_v32": Latent(rank=512, plain=128, turned=64, values=128, queries=1536),
    "glm4_moe_lite": Latent(rank=512, plain=192, turned=64, values=256, queries=768),
    "glm_moe_dsa": Latent(rank=512, plain=192, turned=64, values=256, queries=2048),
    "kimi_linear": Latent(rank=512, plain=128, turned=64, values=128, queries=None),
    "mistral4": Latent(rank=256, plain=64, turned=64, values=128, queries=1024),
    "sarvam_mla": Latent(rank=512, plain=128, turned=64, values=128, queries=None),
    "youtu": Latent(rank=512, plain=128, turned=64, values=128, queries=1536),
}


def latent_of(read: Reads, model_type: str) -> Latent | None:
    """None for a type whose attention is another. UserError for what is no size, or not supported."""
    if model_type not in LATENTS:
        return None
    usual = LATENTS[model_type]
    read.refuse("attention_bias")
    is_reduced = read.config.get("q_lora_rank", usual.queries) is not None
    return Latent(
        rank=read.even("kv_lora_rank", usual.rank),
        plain=read.size("qk_nope_head_dim", usual.plain),
        turned=read.even("qk_rope_head_dim", usual.turned),
        values=read.size("v_head_dim", usual.values),
        queries=read.size("q_lora_rank", usual.queries) if is_reduced else None,
    )
