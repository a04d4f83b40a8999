"""One checkpoint's architecture, resolved: its config, as transformers reads it, by the declaration of its type.

Must not know shards, ranks or tensors' values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from tpspec.errors import UserError
from tpspec.model.architecture import FINAL_NORM, ONE_THETA, THETA, THETAS
from tpspec.model.architectures import ACTS, GATES, declared
from tpspec.model.frequencies import (
    check_one_theta,
    frequencies_of,
    growth_alone,
    head_dim_of,
    num_of_turned,
    ropes_by_theta,
    ropes_of,
    scaled,
    still,
    stretched,
)
from tpspec.model.layer_spec import LayerSpec, head_order, layers_of
from tpspec.model.limits import Limits, limits_of
from tpspec.model.mlp import GAIN, MOST
from tpspec.model.product_scales import NO_SCALES, Scales, scales_of
from tpspec.model.scales import (
    Multipliers,
    cap,
    embedding_scale,
    flag,
    latent_scale,
    logit_scale,
    multipliers_of,
    score_scale,
    value_scale,
)
from tpspec.published.blocks import blocks_of
from tpspec.published.checkpoint import read_config
from tpspec.published.delta_net import delta_net_of
from tpspec.published.experts import experts_of
from tpspec.published.gating import gating_of
from tpspec.published.global_heads import global_heads_of, key_heads, query_heads
from tpspec.published.latent import latent_of
from tpspec.published.mixtures import mlp_names
from tpspec.published.model_types import MODEL_TYPES
from tpspec.published.multimodal import text_config
from tpspec.published.per_layer import num_ids_of, per_layer_of
from tpspec.published.reads import Reads
from tpspec.published.shape import ModelShape, intermediate_key, values_of
from tpspec.published.sharing import sharing_of
from tpspec.published.short_conv import adjusted, short_conv_of
from tpspec.published.windows import FULL

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tpspec.model.architecture import Architecture, NormNames
    from tpspec.model.frequencies import Frequencies
    from tpspec.model.layers import Gate
    from tpspec.published.delta_net import DeltaNet
    from tpspec.published.experts import Experts
    from tpspec.published.formats import Stored
    from tpspec.published.gating import Gating
    from tpspec.published.global_heads import GlobalHeads
    from tpspec.published.latent import Latent
    from tpspec.published.sharing import Sharing
    from tpspec.published.short_conv import ShortConv


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One checkpoint's architecture, resolved: sizes, options and rope frequencies; how quantized matrices are stored.
    Source: its config.json. What has no comment is as in Architecture."""

    model_type: str
    layers: tuple[LayerSpec, ...]
    hidden: int
    num_heads: int  # as the next two, of layers that have no GlobalHeads
    num_kv_heads: int
    head_dim: int
    intermediate: int  # of each expert, where there are some
    vocab: int
    tied: bool

    # Attention
    qkv_bias: bool
    o_bias: bool
    values: int  # see ModelShape
    value_scale: float
    sinks: str | None  # this, parallel, turns_first: see Defaults
    parallel: bool
    qk_norm: bool
    joint_norm: bool  # that is of all heads
    plain_norm: bool
    v_norm: bool
    turns_first: bool
    gating: Gating | None
    score_scale: float  # of products of queries and keys
    score_cap: float | None
    ropes: tuple[Frequencies, ...]

    # Norms of rows
    norms: NormNames
    linear_norms: NormNames
    norms_weighed: bool
    norms_biased: bool  # see Defaults
    one_more: bool | Literal["layers"]
    centred: bool
    eps: float
    out_eps: float  # of what layers give

    # MLPs
    mlp_bias: bool
    gate: Gate

    # Embeddings and logits
    head_bias: bool
    embedding_scale: float | None  # None: 1
    embedding_eps: float | None  # of their norm, if they have one
    scaled_layers: bool
    cap: float | None  # of logits
    hidden_scale: float = 1.0  # this and the next: see Multipliers
    final_scale: float = 1.0

    # What few have
    stored: Stored | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    alternate_rope: bool = False  # see model/latent.py
    delta_net: DeltaNet | None = None
    short_conv: ShortConv | None = None
    blocks: tuple[str, ...] = ()  # this and per_layer: see ModelShape
    global_heads: GlobalHeads | None = None
    sharing: Sharing | None = None
    per_layer: int = 0
    num_per_layer_ids: int = 0
    limits: tuple[Limits, ...] = ()  # of each layer; or none
    scales: Scales = NO_SCALES  # of products

    def adds_one(self, norm: str) -> bool:
        """Whether the norm with a weight of that name multiplies by 1 + weight."""
        return self.one_more is True or (self.one_more == "layers" and norm != FINAL_NORM)


def read_spec(folder: Path) -> ModelSpec:
    """The architecture of the checkpoint in `folder`, through transformers' own configuration classes."""
    where = f"{folder}/config.json"
    shape = ModelShape.of(folder)  # which refuses by name what is no size
    spec = resolved(read_config(folder), where, shape.stored)
    windows = [layer.window for layer in spec.layers if layer.window is not None]
    if (max(windows, default=None), len(windows)) != (shape.window, shape.num_windowed):  # the cache goes by the shape
        raise UserError(
            f"{where}: {shape.num_windowed} layers have a window of {shape.window} tokens, but not as this version of "
            "transformers reads it; should be tried with another version"
        )
    for kind in ("experts", "latent", "delta_net", "short_conv", "blocks", "global_heads", "sharing"):
        own, its = getattr(shape, kind), getattr(spec, kind)
        if own != its:
            raise UserError(
                f"{where}: {own} is not what this version of transformers reads, {its}; should have no two keys of "
                "which each says something else (head_dim, layer_types, num_experts_per_tok)"
            )
    return spec


def resolved(fields: Mapping[str, Any], where: str, stored: Stored | None = None) -> ModelSpec:
    """`resolve` of a config's keys. UserError for what transformers cannot read."""
    from huggingface_hub.errors import StrictDataclassError  # of no other class: Exception is its base

    try:
        return resolve(transformers_config(fields), where, stored)
    except (
        OSError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
        StrictDataclassError,
    ) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{where}: not a configuration transformers can read: {reason}") from error


def transformers_config(fields: Mapping[str, Any]) -> Any:
    """Its class for a config of these keys, as `read_config` gives them."""
    from transformers import AutoConfig

    rest = {key: value for key, value in fields.items() if key != "model_type"}
    return AutoConfig.for_model(fields["model_type"], **rest)


def resolve(config: Any, where: str, stored: Stored | None = None) -> ModelSpec:
    """A transformers configuration, checked against its declaration. `where` names it in errors.

    stored: how it says that matrices are stored, for a caller that can read such; others' are refused.
    """
    if stored is None and getattr(config, "quantization_config", None):
        raise UserError(f"{where}: quantized checkpoints are not supported here; use the unquantized weights")
    said, whole = Reads(text_config(config.to_dict()), where), config
    if getattr(config, "is_heterogeneous", False):  # it does not tell of a model what some layers have otherwise
        config = SimpleNamespace(**said.config)
    arch, kind = _declaration(config, where), config.model_type
    ropes = _ropes(config, said, arch, where)
    latent = latent_of(said, kind)
    head_dim, num_layers = head_dim_of(config) if latent is None else latent.cached, config.num_hidden_layers
    num_heads = query_heads(said, kind, num_layers, config.num_attention_heads)
    num_kv_heads = 1 if latent is not None else config.num_key_value_heads or num_heads
    num_kv_heads = key_heads(said, kind, num_layers, num_heads, num_kv_heads)
    growth = growth_alone(config, where) if arch.tuned else None
    usual = LayerSpec(None if growth is None else len(ropes), None, num_heads, num_kv_heads, head_dim)
    wide = global_heads_of(said, kind, num_layers, num_heads, num_kv_heads, head_dim)
    blocks = blocks_of(said, kind)
    experts = experts_of(said, kind, blocks)
    key, _ = intermediate_key(kind, experts)
    intermediate = adjusted(said, kind, getattr(config, key))
    sharing = sharing_of(said, kind, num_layers, intermediate)
    per_layer = per_layer_of(said, kind, config.vocab_size)
    dims: dict[str | None, int] = {FULL: wide.dim} if wide is not None else {}
    orders = {kinds: None if latent else head_order(config, arch, rope, where) for kinds, rope in ropes.items()}
    if latent is not None and ropes:
        _check_turned(config, arch, latent, list(ropes.values()), where)
    numbers = multipliers_of(config, arch, where) if arch.multiplied else Multipliers()
    scales = scales_of(config, where) if arch.scaled else NO_SCALES
    norms = arch.norms
    if arch.out_norms is not None and not flag(config, arch.out_norms):
        norms = replace(norms, attention_out=None, mlp_out=None)
    return ModelSpec(
        model_type=kind,
        hidden=config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=config.vocab_size,
        eps=_eps(config, arch) / numbers.residual**2,
        out_eps=_eps(config, arch) if arch.out_eps is None else getattr(config, arch.out_eps),
        tied=getattr(config, "tie_word_embeddings", False),
        qkv_bias=flag(config, arch.qkv_bias),
        o_bias=flag(config, arch.o_bias),
        mlp_bias=flag(config, arch.mlp_bias),
        head_bias=said.said(MODEL_TYPES[kind].head_biased),
        values=values_of(said, MODEL_TYPES[kind], head_dim),
        value_scale=value_scale(config, arch, where),
        sinks=MODEL_TYPES[kind].sinks,
        qk_norm=flag(config, arch.qk_norm),
        joint_norm=MODEL_TYPES[kind].jointly,
        turns_first=MODEL_TYPES[kind].turns_first,
        plain_norm=flag(config, arch.plain_norm),
        v_norm=arch.v_norm,
        norms=norms,
        norms_weighed=arch.weighed,
        linear_norms=arch.linear_norms or norms,
        one_more=arch.one_more,
        centred=arch.centred,
        norms_biased=MODEL_TYPES[kind].norms_biased,
        parallel=MODEL_TYPES[kind].parallel,
        gating=gating_of(said, kind),
        gate=_gate(arch, kind),
        score_scale=score_scale(config, arch, where) * scales.scores
        if latent is None
        else latent_scale(config, latent),
        embedding_scale=scales.embedding if arch.scaled else embedding_scale(config, arch, numbers),
        embedding_eps=_eps(config, arch) if arch.normed_embeddings else None,
        scaled_layers=arch.scaled_layers,
        cap=cap(config, "final_logit_softcapping", where) if arch.capped else None,
        score_cap=cap(config, "attn_logit_softcapping", where) if arch.scores_capped else None,
        layers=layers_of(config, arch, orders, usual, wide, sharing, where),
        ropes=(
            *(
                frequencies_of(config, whole, layers, rope, dims.get(layers, head_dim), where)
                for layers, rope in ropes.items()
            ),
            *([] if growth is None else [still(head_dim, growth)]),
        ),
        stored=stored,
        experts=experts,
        latent=latent,
        alternate_rope=flag(config, arch.alternate_rope),
        delta_net=delta_net_of(said, kind, num_layers, config.hidden_size, blocks),
        short_conv=short_conv_of(said, kind, num_layers, config.hidden_size),
        blocks=blocks,
        global_heads=wide,
        sharing=sharing,
        per_layer=per_layer,
        num_per_layer_ids=num_ids_of(said) if per_layer else 0,
        limits=limits_of(said, num_layers, experts.first_layer) if arch.limited and experts else (),
        hidden_scale=numbers.residual,
        final_scale=logit_scale(config, arch, numbers, where) * scales.logits,
        scales=scales,
    )


def _declaration(config: Any, where: str) -> Architecture:
    arch = declared(config.model_type, where)
    key, act = arch.gate
    if key is not None and getattr(config, key) != act:
        raise UserError(f"{where}: {key} {getattr(config, key)!r} is not supported; only {act!r} is")
    for option, number in (("swiglu_alpha", GAIN), ("swiglu_limit", MOST)) if arch.clamped else ():
        if getattr(config, option, number) != number:
            raise UserError(f"{where}: {option} {getattr(config, option)} is not supported; only {number} is")
    for option, fine in arch.apart.items():
        if (value := getattr(config, option, None)) and value not in fine:
            raise UserError(f"{where}: {option}: {value} is not supported for {config.model_type}")
    for option in ("attention_bias", "mlp_bias"):
        covered = (arch.qkv_bias, arch.o_bias, arch.mlp_bias, "attention_bias" if arch.qkv_bias is True else None)
        if getattr(config, option, False) and option not in covered:
            raise UserError(f"{where}: {option}: true is not supported for {config.model_type}")
    if arch.rms_eps is not None and getattr(config, arch.rms_eps) is not None:
        return replace(arch, centred=False, eps=arch.rms_eps)
    return arch


def _gate(arch: Architecture, model_type: str) -> Gate:
    if arch.clamped:
        return "clamped"
    return (ACTS if mlp_names(model_type).gate is None else GATES)[arch.gate[1]]


def _ropes(config: Any, said: Reads, arch: Architecture, where: str) -> dict[str | None, dict[str, Any]]:
    is_turned = arch.turned
    if is_turned == THETA:
        is_turned = config.rope_parameters.get(THETA) is not None
    elif isinstance(is_turned, str):
        is_turned = said.one_of(is_turned, ("rope", "nope"), "nope") == "rope"
    if not is_turned:
        return {}
    if arch.nope == THETAS:
        return ropes_by_theta(config, THETAS, where)
    if arch.nope == ONE_THETA:
        check_one_theta(config, THETAS, where)
    ropes = ropes_of(config, where, by_kind=arch.ropes_by_kind)
    if arch.own_scales:
        return {kinds: scaled(rope, where) for kinds, rope in ropes.items()}
    return {kinds: stretched(config, rope, where) for kinds, rope in ropes.items()} if arch.stretched else ropes


def _eps(config: Any, arch: Architecture) -> float:
    return float(getattr(config, arch.eps)) if isinstance(arch.eps, str) else arch.eps


def _check_turned(config: Any, arch: Architecture, latent: Latent, ropes: list[dict[str, Any]], where: str) -> None:
    """That rope turns what the latent's sizes say, and all of it: transformers goes by head_dim, of that part alone or,
    where a part may be said, of a whole query."""
    size, key = (latent.head_dim, "qk_head_dim") if arch.partial_rope else (latent.turned, "qk_rope_head_dim")
    if head_dim_of(config) != size:
        raise UserError(f"{where}: head_dim is {head_dim_of(config)}; should be {key}, {size}")
    if any(num_of_turned(config, parameters) != latent.turned for parameters in ropes):
        raise UserError(f"{where}: partial_rotary_factor is not supported for {config.model_type}")
