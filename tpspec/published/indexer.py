"""What chooses the tokens that rows attend to, where they do not attend to all (DeepSeek-V3.2, arXiv 2512.02556, 2.1):
its sizes, from a config.json.

An index of few and small heads beside latent attention: a token's key in it is cached, too, and a row attends to those
tokens alone whose keys meet its queries best. Some layers choose; those behind them, up to the next that does, attend
to what that one chose. Knows keys; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpspec.published.latent import Latent
    from tpspec.published.reads import Reads

MODULE = "indexer"  # within a layer's attention
QUERIES, KEY, WEIGHTS, NORM = "wq_b", "wk", "weights_proj", "k_norm"  # as checkpoints call what makes each
FULL, SHARED = "full", "shared"  # as indexer_types calls a layer that chooses, and one that does not
LETTERS = {"F": FULL, "S": SHARED}  # as index_topk_pattern does


@dataclass(frozen=True, slots=True)
class Indexer:
    """num_heads: of queries; all have one key. dim: of either. chosen: tokens that a row attends to at most. turned: of
    a head's numbers, the first ones, which rope turns. alternate: each with the next, not with one half of them away.
    layers: those that choose."""

    num_heads: int
    dim: int
    chosen: int
    alternate: bool
    turned: int = 0
    layers: frozenset[int] = frozenset()

    def chooser(self, layer: int) -> int:
        """The layer whose choice this one goes by."""
        return max(one for one in self.layers if one <= layer)


# What types mean by keys that their config.json leaves out, as transformers does.
INDEXERS = {
    "deepseek_v32": Indexer(num_heads=64, dim=128, chosen=2048, alternate=False),
    "glm_moe_dsa": Indexer(num_heads=32, dim=128, chosen=2048, alternate=True),
}
SHARES = ("glm_moe_dsa",)  # whose layers need not all choose


def indexer_of(read: Reads, model_type: str, num_layers: int, latent: Latent | None) -> Indexer | None:
    """None for a type whose rows attend to all tokens. UserError for what is no size, or not supported."""
    if model_type not in INDEXERS or latent is None:
        return None
    usual = INDEXERS[model_type]
    if latent.queries is None:
        raise read.refusal("q_lora_rank", "a whole number above 0: the indexer's queries are made of so many")
    read.one_of("indexer_rope_interleave", (usual.alternate,), usual.alternate)
    dim = read.even("index_head_dim", usual.dim)
    if dim < latent.turned:
        raise read.refusal("index_head_dim", f"at least qk_rope_head_dim ({latent.turned})")
    return replace(
        usual,
        num_heads=read.size("index_n_heads", usual.num_heads),
        dim=dim,
        chosen=read.size("index_topk", usual.chosen),
        turned=latent.turned,
        layers=_layers(read, num_layers) if model_type in SHARES else frozenset(range(num_layers)),
    )


def _layers(read: Reads, num_layers: int) -> frozenset[int]:
    """Those that choose; the first does."""
    key = "indexer_types" if read.config.get("indexer_types") is not None else "index_topk_pattern"
    if read.config.get(key) is None:
        every, first = max(1, read.size("index_topk_freq", 1, least=0)), read.size("index_skip_topk_offset", 2)
        return frozenset(layer for layer in range(num_layers) if max(0, layer - first + 1) % every == 0)
    said = read.config[key]
    kinds = tuple(LETTERS.get(letter, letter) for letter in said) if isinstance(said, str) else read.texts(key)
    # A layer behind the last, for multi-token prediction, may be told of, too.
    if len(kinds) < num_layers or set(kinds) - {FULL, SHARED} or kinds[0] != FULL:
        right = f"{FULL} or {SHARED} for each of {num_layers} layers, not for {len(kinds)}, and {FULL} for the first"
        raise read.refusal(key, right)
    return frozenset(layer for layer in range(num_layers) if kinds[layer] == FULL)
