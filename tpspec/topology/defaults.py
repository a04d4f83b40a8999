"""What a type of model means by the keys that its config.json leaves out, as transformers does.

Knows keys and numbers. What a shape is made of them is `shape`'s matter, which layers one has `model/`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a type of model means by a key that its config.json leaves out, as transformers does; None: see
    ModelShape.from_config, which refuses a config that has to say it.

    qkv: what the matrices of queries, keys and values are called; of one name they are one, their rows in that order.
    biased: whether those have biases, as bias_key says; or "always", whatever the config says. o_biased: what attention
    gives has one where they do. mlp_biased: what mlp_bias says of an MLP's counts (if that is left out, it "usually"
    has some), or what bias_key says. sinks: what those of query heads are called (attention.py), or None. normed:
    queries and keys have norms, always or where the flag of that name says so. jointly: those are of all heads together
    (joint_norm.py). turns_first: of heads that rope has turned. parallel: attention and MLP of a layer read the same,
    and are summed at once. attention: what that is called within a layer, and out: the matrix behind it, within that.
    behind: of what layers give alone there are norms. layer_norms: of the hidden state, in each layer; norms_biased:
    those have biases. out_normed: the flag that may say that two are missing. float16: whether its numbers stay within
    those. intermediate: the key for an MLP's, or an expert's, channels, and how many there are without it. always:
    flags that must be true where they are said. never: keys that must be null, false or empty.
    """

    hidden: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    tied: bool = False
    qkv: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    biased: bool | Literal["always"] = False
    bias_key: str = "attention_bias"
    o_biased: bool | str = True
    mlp_biased: bool | Literal["likewise", "usually"] = False
    sinks: str | None = None
    normed: bool | str = False
    jointly: bool = False
    turns_first: bool = False
    parallel: bool = False
    attention: str = "self_attn"
    out: str = "o_proj"
    behind: bool = False
    layer_norms: int = 2
    norms_biased: bool = False
    out_normed: str | None = None
    float16: bool = True
    intermediate: tuple[str, int | None] = ("intermediate_size", None)
    always: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
