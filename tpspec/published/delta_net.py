"""Layers of linear attention, Gated DeltaNet (Yang et al., arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692)
or Mamba-2 (Dao, Gu, arXiv 2405.21060): which of a model's those are, and their sizes, from a config.json.

In place of keys and values of every token such a layer keeps one matrix for each of its value heads, however long a
text is. Knows keys; must not know tensors or shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpspec.published.reads import Reads

LINEAR, FULL = "linear_attention", "full_attention"  # as layer_types calls layers
OLDER = {"mamba": LINEAR, "attention": FULL}  # what lists called them
UNLIMITED = [0.0, math.inf]  # steps of Mamba-2's time
EVERY = 4  # layers: one of so many has full attention, where the config does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Of a layer, and which layers are such."""

    key_heads: int  # of queries and of keys, of key_dim numbers
    value_heads: int  # of value_dim numbers, which share those evenly
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution before them sees
    layers: frozenset[int] = frozenset()  # where a model has this in place of attention
    beside: bool = False  # or beside it: it reads the same, and both are summed (Falcon-H1, arXiv 2507.22448)

    # What checkpoints call it within a layer, and within that the matrices of what the convolution sees, which may be
    # three, of the gate, of the two rates, and of what is summed. The first two may be one, and so may the rates: their
    # rows are then those of one key head after another, each with what its value heads have.
    module: str = "linear_attn"
    mixed: tuple[str, ...] = ("in_proj_qkv",)
    gate: str = "in_proj_z"
    writes: str = "in_proj_b"
    decays: str = "in_proj_a"
    out: str = "out_proj"
    reduced: tuple[str, str] | None = None  # what makes the key_dim numbers that decays and the gate are made of
    norm: str | None = "norm"  # of what a head answers
    eps: float | None = None  # of that, where the model's is another
    biased: bool = False  # the convolution

    # What of a value a state does not say yet is written by up to so much: above 1, it may say the opposite then.
    most_written: int = 1
    by_channel: bool = False  # each number of a key is forgotten in its own way, and gates are sigmoids (Kimi)
    # A state takes values as they are, and not what it does not say of their keys already: Mamba-2, whose C, B and x
    # are queries, keys and values, its groups key heads, and both rates one. All are rows of one matrix, and value
    # heads that share a key head have one norm, so that one rank holds them.
    sums: bool = False
    # But where they all share one, ranks may hold some each, for what they give is summed before it is normed
    # (model/late_norm.py); float16 might not hold that.
    late: bool = False

    @property
    def alone(self) -> frozenset[int]:
        """Layers without attention."""
        return frozenset() if self.beside else self.layers

    @property
    def shares_norm(self) -> bool:
        """Whether heads of several ranks have one norm."""
        return self.late and self.key_heads == 1

    @property
    def whole(self) -> tuple[int, str]:
        """What a rank has one of, at least: how many there are, and what they are. Value heads that have one norm stay
        together, unless that is made of a sum."""
        if not self.sums or self.shares_norm or self.norm is None:
            return self.value_heads, "value heads"
        return self.key_heads, "groups of heads with a state"

    @property
    def is_in_groups(self) -> bool:
        """Whether rows are those of one key head after another."""
        return self.mixed == (self.gate,) and not self.sums

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def num_decays(self) -> int:
        """Of a value head."""
        return self.key_dim if self.by_channel else 1

    @property
    def num_normed(self) -> int:
        """Numbers of a norm's weight."""
        return 0 if self.norm is None else self.value_dim * (self.value_heads if self.sums else 1)

    @property
    def num_mixed(self) -> int:
        """Numbers of a token that the convolution sees."""
        return self.mixed_of(self.key_heads, self.value_heads)

    def mixed_of(self, num_keys: int, num_values: int) -> int:
        """The same of some heads: queries, keys and values."""
        return 2 * num_keys * self.key_dim + num_values * self.value_dim

    def row_of(self, num_keys: int, num_values: int) -> int:
        """Numbers of a token that such heads read: those, writes and decays."""
        return self.mixed_of(num_keys, num_values) + num_values * (1 + self.num_decays)


# What types mean by keys that their config.json leaves out, as transformers does; of 0 numbers: see _by_heads.
USUAL = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
MAMBA = DeltaNet(
    key_heads=8,
    value_heads=128,
    key_dim=128,
    value_dim=64,
    kernel=4,
    mixed=("in_proj",),
    gate="in_proj",
    writes="in_proj",
    decays="in_proj",
    module="mixer",
    sums=True,
)
DELTA_NETS = {
    "falcon_h1": replace(MAMBA, key_heads=1, key_dim=256, value_dim=8, module="mamba", beside=True),
    "granitemoehybrid": replace(MAMBA, key_heads=1, key_dim=256, module="mamba", late=True),
    "kimi_linear": DeltaNet(
        key_heads=32,
        value_heads=32,
        key_dim=128,
        value_dim=128,
        kernel=4,
        mixed=("q_proj", "k_proj", "v_proj"),
        gate="g_b_proj",
        writes="b_proj",
        decays="f_b_proj",
        out="o_proj",
        norm="o_norm",
        module="self_attn",
        by_channel=True,
        reduced=("f_a_proj", "g_a_proj"),
    ),
    "nemotron_h": MAMBA,
    "olmo_hybrid": DeltaNet(
        key_heads=30,
        value_heads=30,
        key_dim=0,
        value_dim=0,
        kernel=4,
        mixed=("q_proj", "k_proj", "v_proj"),
        gate="g_proj",
        writes="b_proj",
        decays="a_proj",
        out="o_proj",
        norm="o_norm",
        eps=1e-5,
        most_written=2,
    ),
    "qwen3_5_moe_text": USUAL,
    "qwen3_5_text": USUAL,
    "qwen3_next": replace(
        USUAL, mixed=("in_proj_qkvz",), gate="in_proj_qkvz", writes="in_proj_ba", decays="in_proj_ba"
    ),
}


def _by_interval(read: Reads, layer: int, _: int) -> bool:
    return (layer + 1) % read.size("full_attention_interval", EVERY) == 0


# Whether a layer has full attention, of so many, where layer_types does not say which have.
ATTENDS: dict[str, Callable[[Reads, int, int], bool]] = {
    "kimi_linear": lambda _, layer, __: layer > 0 and layer % EVERY == 0,
    "olmo_hybrid": lambda _, layer, count: layer % EVERY == EVERY - 1 or layer == count - 1 < EVERY - 1,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _by_interval),
}


def delta_net_of(
    read: Reads, model_type: str, num_layers: int, hidden: int, blocks: tuple[str, ...] = ()
) -> DeltaNet | None:
    """None for a model without such layers. hidden: numbers of a row. blocks: see blocks.py. UserError for what is no
    size, or not supported."""
    usual = DELTA_NETS.get(model_type)
    if usual is None:
        return None
    kinds = (LINEAR,) * num_layers if usual.beside else blocks or _kinds(read, model_type, num_layers)
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    if not layers:
        return None
    sizes_of = _mamba_of if usual.sums else _kimi_of if usual.by_channel else _delta_of
    return replace(sizes_of(read, usual, hidden), layers=layers)


def _kinds(read: Reads, model_type: str, num_layers: int) -> tuple[str, ...]:
    kinds, attends = tuple(OLDER.get(kind, kind) for kind in read.texts("layer_types")), ATTENDS.get(model_type)
    if not kinds and attends is not None:
        kinds = tuple(FULL if attends(read, layer, num_layers) else LINEAR for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
        raise read.refusal("layer_types", f"{LINEAR} or {FULL} for each of {num_layers} layers")
    if not (attends == _by_interval or FULL in kinds):
        raise read.refusal("layer_types", f"{FULL} for one layer")
    return kinds


def _delta_of(read: Reads, usual: DeltaNet, hidden: int) -> DeltaNet:
    usual = usual if usual.key_dim else _by_heads(read, usual, hidden)
    key_heads = read.size("linear_num_key_heads", usual.key_heads)
    value_heads = read.size("linear_num_value_heads", usual.value_heads)
    if value_heads % key_heads:
        raise read.refusal("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    return replace(
        usual,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=read.size("linear_key_head_dim", usual.key_dim),
        value_dim=read.size("linear_value_head_dim", usual.value_dim),
        kernel=read.size("linear_conv_kernel_dim", usual.kernel),
    )


def _kimi_of(read: Reads, usual: DeltaNet, _: int) -> DeltaNet:
    heads, dim = read.size("linear_num_heads", usual.key_heads), read.size("linear_head_dim", usual.key_dim, least=2)
    kernel = read.size("linear_conv_kernel_dim", usual.kernel)
    return replace(usual, key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim, kernel=kernel)


def _by_heads(read: Reads, usual: DeltaNet, hidden: int) -> DeltaNet:
    """OLMo Hybrid's: as many heads as attention has, keys of all together three quarters as wide as a row, and values
    twice as wide as keys."""
    heads = read.size("num_attention_heads", usual.key_heads)
    key_dim = read.size("linear_key_head_dim", 3 * hidden // (4 * read.size("linear_num_key_heads", heads)))
    written = usual.most_written if read.flag("linear_allow_neg_eigval", True) else 1
    return replace(
        usual, key_heads=heads, value_heads=heads, key_dim=key_dim, value_dim=2 * key_dim, most_written=written
    )


def _mamba_of(read: Reads, usual: DeltaNet, hidden: int) -> DeltaNet:
    """By Nemotron-H's keys, or Granite's, which are Falcon-H1's, too."""
    groups = read.size("n_groups", read.size("mamba_n_groups", usual.key_heads))
    key = "mamba_n_heads" if "mamba_n_heads" in read.config else "mamba_num_heads"
    heads = read.size(key, usual.value_heads)
    if heads % groups:
        raise read.refusal(key, f"a multiple of n_groups ({groups})")
    read.one_of("mamba_hidden_act", ("silu",), "silu")
    read.refuse("use_bias", "mamba_proj_bias")
    for key in ("time_step_limit", "mamba_dt_limit"):
        said = read.config.get(key) or UNLIMITED
        if not isinstance(said, list | tuple) or list(said) != UNLIMITED:
            raise read.refusal(key, f"{UNLIMITED}: others are not supported")
    is_expanded, has_norm = usual.late or usual.beside, not usual.beside or read.flag("mamba_rms_norm", False)
    dim = _expanded(read, usual, hidden, heads) if is_expanded else read.size("mamba_head_dim", usual.value_dim)
    if usual.beside and has_norm:
        read.one_of("mamba_norm_before_gate", (False,), True)
    return replace(
        usual,
        key_heads=groups,
        value_heads=heads,
        norm=usual.norm if has_norm else None,
        key_dim=read.size("ssm_state_size", read.size("mamba_d_state", usual.key_dim)),
        value_dim=dim,
        kernel=read.size("conv_kernel", read.size("mamba_d_conv", usual.kernel)),
        biased=read.flag("use_conv_bias", read.flag("mamba_conv_bias", True)),
    )


def _expanded(read: Reads, usual: DeltaNet, hidden: int, heads: int) -> int:
    """Numbers of a value, where those of all heads are said, or that they are so many times those of a row."""
    said = read.size_if_given("mamba_d_ssm")
    if usual.beside and "mamba_d_ssm" not in read.config:  # null is none
        said = usual.value_heads * usual.value_dim
    numbers = said or read.size("mamba_expand", 2) * hidden
    if numbers % heads:
        whole = "mamba_d_ssm" if said else "mamba_expand times hidden_size"
        raise read.refusal("mamba_n_heads", f"a divisor of {whole} ({numbers})")
    if read.config.get("mamba_d_head") in (None, "auto"):
        return numbers // heads
    if (size := read.size("mamba_d_head")) * heads != numbers:
        raise read.refusal("mamba_d_head", f"{numbers // heads}, or mamba_expand another")
    return size
