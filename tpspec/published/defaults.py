"""What a type of model means by the keys that its config.json leaves out, as transformers does.

Knows keys and numbers. What a shape is made of them is `shape`'s matter, which layers one has `model/`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpspec.published.norm_names import USUAL, NormNames

BIAS_KEY = "attention_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Of one type. None: a config has to say it, see ModelShape.from_config."""

    # Sizes
    hidden: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    values: tuple[str, int] | None = None  # the key for numbers of a head's value, if they are not those of its key
    vocab: int | None = None
    intermediate: tuple[str, int | None] = ("intermediate_size", None)  # the key for channels of an MLP, or an expert
    tied: bool = False
    float16: bool = True  # whether numbers stay within those

    # Attention: what it is called within a layer, and the matrices of queries, keys and values within that (of one name
    # they are one, their rows in that order), and the one behind.
    attention: str = "self_attn"
    qkv: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    biased: bool | Literal["always"] = False  # whether qkv are, where bias_key is left out; or whatever it says
    bias_key: str | None = BIAS_KEY  # None: they never are
    o_biased: bool | str = True  # whether `out` is where those are, or the key that says it
    sinks: str | None = None  # what those of query heads are called (model/attention.py)
    sinks_everywhere: bool = True  # layers without a window have them, too
    normed: bool | str = False  # queries and keys have norms, always or where that key says so
    joint_norm: bool = False  # those are of all heads together (model/joint_norm.py)
    turns_first: bool = False  # of heads that rope has turned

    # MLPs: whether mlp_bias counts (where it is left out, "usually" means that they have biases), or bias_key.
    mlp_biased: bool | Literal["likewise", "usually"] = False

    # Norms: their names, and those in layers of linear attention, if they are others
    norms: NormNames = USUAL
    linear_norms: NormNames | None = None
    norms_biased: bool = False  # those of the hidden state
    out_normed: str | None = None  # the key that may say that those of what layers give are missing

    head_biased: bool | str = False  # the output head is, always or where that key says so

    always: tuple[str, ...] = ()  # keys that must be true where they are said
    never: tuple[str, ...] = ()  # keys that must be null, false or empty
    only: tuple[tuple[str, str], ...] = ()  # keys that may be this, null or false
