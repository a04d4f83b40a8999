"""One checkpoint's architecture, resolved: its config, as transformers reads it, by the declaration of its type.

Must not know shards, ranks or tensors' values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from tpspec.errors import UserError
from tpspec.model.architecture import FINAL_NORM, ONE_THETA, THETA, THETAS
from tpspec.model.architectures import ACTS, ARCHITECTURES, GATES
from tpspec.model.frequencies import (
    PART,
    ROPE,
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
from tpspec.model.scales import embedding_scale, latent_scale, logit_scale, multipliers_of, score_scale
from tpspec.published.checkpoint import read_config
from tpspec.published.multimodal import STORAGE, text_config
from tpspec.published.per_layer import num_ids_of
from tpspec.published.reads import Reads
from tpspec.published.shape import ModelShape
from tpspec.published.windows import FULL

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tpspec.model.architecture import Architecture
    from tpspec.model.curves import Curve
    from tpspec.model.frequencies import Frequencies
    from tpspec.published.formats import Stored
    from tpspec.published.indexer import Indexer
    from tpspec.published.latent import Latent


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One checkpoint's architecture, resolved: its shape, options and rope frequencies. Source: its config.json, as
    transformers reads it. What has no comment is as in Architecture."""

    shape: ModelShape
    layers: tuple[LayerSpec, ...]

    # Attention
    value_scale: float
    plain_norm: bool
    v_norm: bool
    score_scale: float  # of products of queries and keys
    score_cap: float | None
    ropes: tuple[Frequencies, ...]  # the last that of an indexer, where the shape has one
    alternate_rope: bool  # see model/latent.py

    # Norms of rows
    norms_weighed: bool
    one_more: bool | Literal["layers"]
    centred: bool
    eps: float
    out_eps: float  # of what layers give

    # MLPs
    gate: Curve
    limits: tuple[Limits, ...]  # of each layer; or none

    # Embeddings and logits
    embedding_scale: float | None  # None: 1
    embedding_eps: float | None  # of their norm, if they have one
    num_per_layer_ids: int
    scaled_layers: bool
    cap: float | None  # of logits
    hidden_scale: float  # this and the next: see Multipliers
    final_scale: float

    scales: Scales  # of products

    def adds_one(self, norm: str) -> bool:
        """Whether the norm with a weight of that name multiplies by 1 + weight."""
        return self.one_more is True or (self.one_more == "layers" and norm != FINAL_NORM)


def read_spec(folder: Path) -> ModelSpec:
    """The architecture of the checkpoint in `folder`, through transformers' own configuration classes. UserError where
    these read another shape than we do: memory and caches go by ours."""
    where = f"{folder}/config.json"
    shape = ModelShape.of(folder)  # which refuses by name what is no size
    spec = resolved(read_config(folder), where, shape.stored)
    for name in [field.name for field in fields(ModelShape) if field.name != "max_positions"]:  # which it makes up
        own, its = getattr(shape, name), getattr(spec.shape, name)
        if own != its:
            raise UserError(
                f"{where}: {name} {own} is not what this version of transformers reads, {its}; should have no two keys "
                "of which each says something else (head_dim, layer_types, num_experts_per_tok)"
            )
    return replace(spec, shape=shape)


def resolved(said: Mapping[str, Any], where: str, stored: Stored | None = None) -> ModelSpec:
    """`resolve` of a config's keys. UserError for what transformers cannot read."""
    from huggingface_hub.errors import StrictDataclassError  # of no other class: Exception is its base

    try:
        return resolve(transformers_config(said), where, stored)
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
    said = Reads(text_config(config.to_dict()), where)
    shape = ModelShape.from_config({key: said.config[key] for key in said.config if key not in STORAGE}, where)
    arch = _declaration(said, shape.model_type)
    latent, wide, num_layers = shape.latent, shape.global_heads, shape.num_layers
    if latent is not None:  # of which transformers may call another size so than a file does
        said = said.but({"head_dim": getattr(config, "head_dim", None)})
    ropes = _ropes(said, arch)
    growth = growth_alone(said) if arch.tuned else None
    still_rope = None if growth is None else len(ropes)
    usual = LayerSpec(still_rope, None)
    dims: dict[str | None, int] = {FULL: wide.dim} if wide is not None else {}
    orders = {kinds: None if latent else head_order(said, arch, rope) for kinds, rope in ropes.items()}
    if latent is not None and ropes:
        _check_turned(said, arch, latent, list(ropes.values()))
    numbers = multipliers_of(said, arch)
    scales = scales_of(said) if arch.scaled else NO_SCALES
    return ModelSpec(
        shape=replace(shape, stored=stored),
        layers=layers_of(said, arch, orders, usual, shape),
        value_scale=(said.number_if_given(arch.value_scale) if arch.value_scale else None) or 1.0,
        plain_norm=said.said(arch.plain_norm),
        v_norm=arch.v_norm,
        score_scale=score_scale(said, arch, shape.head_dim) * scales.scores
        if latent is None
        else latent_scale(said, latent),
        score_cap=said.number_if_given("attn_logit_softcapping") if arch.scores_capped else None,
        ropes=(
            *(
                frequencies_of(said, config, layers, rope, dims.get(layers, shape.head_dim))
                for layers, rope in ropes.items()
            ),
            *([] if growth is None else [still(shape.head_dim, growth)]),
            *([] if shape.indexer is None else [_index_rope(said, config, ropes, shape.indexer)]),
        ),
        alternate_rope=said.said(arch.alternate_rope),
        norms_weighed=arch.weighed,
        one_more=arch.one_more,
        centred=arch.centred,
        eps=_eps(said, arch) / numbers.residual**2,
        out_eps=_eps(said, arch) if arch.out_eps is None else said.number(arch.out_eps),
        gate=_gate(arch, shape),
        limits=limits_of(said, num_layers, shape.experts.first_layer) if arch.limited and shape.experts else (),
        embedding_scale=scales.embedding if arch.scaled else embedding_scale(said, arch, numbers, shape.hidden),
        embedding_eps=_eps(said, arch) if arch.normed_embeddings else None,
        num_per_layer_ids=num_ids_of(said) if shape.per_layer else 0,
        scaled_layers=arch.scaled_layers,
        cap=said.number_if_given("final_logit_softcapping") if arch.capped else None,
        hidden_scale=numbers.residual,
        final_scale=logit_scale(said, arch, numbers) * scales.logits,
        scales=scales,
    )


def _declaration(read: Reads, model_type: str) -> Architecture:
    arch = ARCHITECTURES[model_type]
    key, act = arch.gate
    if key is not None:
        read.one_of(key, (act,))
    for option, number in (("swiglu_alpha", GAIN), ("swiglu_limit", MOST)) if arch.clamped else ():
        if read.number(option, number) != number:
            raise read.refusal(option, str(number))
    if arch.rms_eps is not None and read.number_if_given(arch.rms_eps) is not None:
        return replace(arch, centred=False, eps=arch.rms_eps)
    return arch


def _gate(arch: Architecture, shape: ModelShape) -> Curve:
    if arch.clamped:
        return "clamped"
    return (ACTS if shape.mlp_names.gate is None else GATES)[arch.gate[1]]


def _ropes(read: Reads, arch: Architecture) -> dict[str | None, Reads]:
    is_turned = arch.turned
    if is_turned == THETA:
        is_turned = read.section(ROPE).config.get(THETA) is not None
    elif isinstance(is_turned, str):
        is_turned = read.one_of(is_turned, ("rope", "nope"), "nope") == "rope"
    if not is_turned:
        return {}
    if arch.nope == THETAS:
        return ropes_by_theta(read, THETAS)
    if arch.nope == ONE_THETA:
        check_one_theta(read, THETAS)
    ropes = ropes_of(read, by_kind=arch.ropes_by_kind)
    if arch.own_scales:
        return {kinds: scaled(rope) for kinds, rope in ropes.items()}
    return {kinds: stretched(read, rope) for kinds, rope in ropes.items()} if arch.stretched else ropes


def _index_rope(read: Reads, whole: Any, ropes: dict[str | None, Reads], indexer: Indexer) -> Frequencies:
    """Attention's own, of longer heads."""
    ((layers, rope),) = ropes.items()
    return frequencies_of(read, whole, layers, rope, indexer.dim)


def _eps(read: Reads, arch: Architecture) -> float:
    return read.number(arch.eps) if isinstance(arch.eps, str) else arch.eps


def _check_turned(read: Reads, arch: Architecture, latent: Latent, ropes: list[Reads]) -> None:
    """That rope turns what the latent's sizes say, and all of it: transformers goes by head_dim, of that part alone or,
    where a part may be said, of a whole query."""
    size, key = (latent.head_dim, "qk_head_dim") if arch.partial_rope else (latent.turned, "qk_rope_head_dim")
    if head_dim_of(read) != size:
        raise UserError(f"{read.where}: head_dim is {head_dim_of(read)}; should be {key}, {size}")
    if any(num_of_turned(read, rope) != latent.turned for rope in ropes):
        raise UserError(f"{read.where}: {PART} is not supported for {read.text('model_type')}")
