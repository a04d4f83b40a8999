"""What a head takes over from its target: sizes, the embedding table, rows of the output head. Reads, never runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.model.architecture import FINAL_NORM
from tpspec.model.embedding import TABLE
from tpspec.model.head import head_numbers
from tpspec.model.spec import read_spec
from tpspec.model.weights import Checkpoint
from tpspec.published.checkpoint import read_config

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from torch import Tensor

    from tpspec.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Taught:
    """A target as its heads see it. config: its config.json. num_heads, num_kv_heads, head_dim: theirs; where latents
    are cached, as the values that are made of them. cap: of logits, or None. embedding_VD, head_VD: its own numbers.
    head_bias_V: or None. norm_D: what its last norm multiplies by.
    """

    folder: Path
    config: dict[str, Any]
    eos_ids: tuple[int, ...]
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    has_experts: bool
    has_states: bool
    vocab: int
    eps: float
    rope_theta: float
    cap: float | None
    embedding_VD: Tensor
    head_VD: Tensor
    head_bias_V: Tensor | None
    norm_D: Tensor


def taught(folder: Path) -> Taught:
    """Raises UserError for a folder that is no model of ours."""
    config: dict[str, Any] = read_config(folder)
    spec, checkpoint = read_spec(folder), Checkpoint(folder)
    eos = config.get("eos_token_id")
    embedding_VD = checkpoint.mapped(f"{TABLE}.weight", (spec.shape.vocab, spec.shape.hidden))
    head_VD, head_bias_V = head_numbers(folder, spec.shape)
    of_values = spec.shape.num_kv_heads if spec.shape.latent is None else spec.shape.num_heads
    num_heads, num_kv_heads = _head_counts(spec.shape.hidden, spec.shape.num_heads, of_values)
    return Taught(
        folder=folder,
        config=config,
        eos_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        hidden=spec.shape.hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=spec.shape.head_dim if spec.shape.latent is None else spec.shape.latent.values,
        num_layers=len(spec.layers),
        has_experts=spec.shape.experts is not None,
        has_states=(spec.shape.delta_net or spec.shape.short_conv) is not None,
        vocab=spec.shape.vocab,
        eps=spec.eps,
        rope_theta=_theta(config),
        cap=spec.cap,
        embedding_VD=embedding_VD,
        head_VD=head_VD,
        head_bias_V=head_bias_V,
        norm_D=_final_norm(spec, checkpoint),
    )


def _theta(config: dict[str, Any]) -> float:
    """Of rope; the largest, where a config lists one for each layer."""
    rope = config.get("rope_parameters") or {}
    said = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
    return float(max(said) if isinstance(said, list) else said)


def _final_norm(spec: ModelSpec, checkpoint: Checkpoint) -> Tensor:
    hidden = spec.shape.hidden
    weight_D = checkpoint.read(FINAL_NORM, (hidden,)) if spec.norms_weighed else torch.ones(hidden)
    return (weight_D + spec.adds_one(FINAL_NORM)) * spec.final_scale


def _head_counts(hidden: int, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """The target's, or the next fewer that divide its hidden size: transformers reads no Llama with others, and that is
    what heads are published as."""
    count = next(count for count in range(num_heads, 0, -1) if hidden % count == 0)
    return count, count if num_kv_heads == num_heads else math.gcd(count, num_kv_heads)
