"""The layer for multi-token prediction that some targets' own checkpoints hold: it runs as an EAGLE head does.

Two layouts: DeepSeek's, which GLM shares (the layer after the last), and Qwen3-Next's (names that begin with mtp).
Its rope, biases and norms are the target's. DeepSeek-AI, arXiv 2412.19437, 2.2. Must not know how a head is run.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tpspec.draft.eagle import Fused, Head
from tpspec.draft.head_files import HeadFiles
from tpspec.draft.head_parts import Parts
from tpspec.draft.texts import as_it_is
from tpspec.errors import UserError
from tpspec.model.decoder import FINAL
from tpspec.model.spec import read_spec
from tpspec.model.stored import StoredMatrices
from tpspec.model.weights import Checkpoint
from tpspec.published.head_files import behind_last, no_layer
from tpspec.published.indexer import KEY, MODULE
from tpspec.published.shape import ModelShape
from tpspec.topology.sources import check_behind

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from tpspec.draft.protocol import Given
    from tpspec.model.spec import ModelSpec
    from tpspec.published.formats import Stored
    from tpspec.published.places import Place

# What the layouts call the same things; the rest of a layer has a whole model's names.
DEEPSEEK = {
    "enorm": "embedding_norm",
    "hnorm": "feature_norm",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}
QWEN = {"pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "feature_norm", "fc": "fc", "norm": "norm"}
EXPERTS = re.compile(r"mlp\.(gate\.|experts\.|shared_expert)")


def load_mtp(given: Given) -> Head:
    """The layer in the target's folder. Raises UserError where there is none, or one that we cannot run."""
    target = ModelShape.of(given.target)
    check_behind(target)
    spec = read_spec(given.target)
    mtp, behind = behind_last(target.num_layers)
    plain = None
    if target.stored is not None:
        plain = partial(_plain, StoredMatrices(Checkpoint(given.target)), target.stored, given.dtype)
    for at, layer_at, names in ((mtp, f"{mtp}layers.0.", QWEN), (behind, behind, DEEPSEEK)):
        files = HeadFiles(given.target, _renamed(at, layer_at, names), _spelt(at, layer_at, names), plain)
        if files:
            return _head(Parts(given, _indexed(spec, files), target, files), feeds_normed=names is QWEN)
    raise no_layer(given.target, target.num_layers)


def _indexed(spec: ModelSpec, files: HeadFiles) -> ModelSpec:
    """Of a layer that has an index, or has none, whether the target's last has its own or not."""
    if spec.shape.indexer is None:
        return spec
    if f"layers.0.self_attn.{MODULE}.{KEY}.weight" not in files:
        return replace(spec, shape=replace(spec.shape, indexer=None))
    return replace(spec, layers=(*spec.layers[:-1], replace(spec.layers[-1], chooses=True)))


def _plain(matrices: StoredMatrices, stored: Stored, dtype: torch.dtype, place: Place) -> Tensor | None:
    """Of floats of 8 bits alone."""
    scheme = stored.scheme_of(place.name)
    if scheme is None or scheme.kind != "float8":
        return None
    return matrices.plain(scheme, place, dtype)


def _renamed(at: str, layer_at: str, names: dict[str, str]) -> Callable[[str], str | None]:
    def rename(name: str) -> str | None:
        if not name.startswith(at):
            return None
        stem, _, kind = name.removeprefix(at).rpartition(".")
        return f"{names[stem]}.{kind}" if stem in names else name.replace(layer_at, "layers.0.", 1)

    return rename


def _spelt(at: str, layer_at: str, names: dict[str, str]) -> Callable[[str], str]:
    stems = {new: stem for stem, new in names.items()}

    def spelt(name: str) -> str:
        stem, _, kind = name.rpartition(".")
        return f"{at}{stems[stem]}.{kind}" if stem in stems else name.replace("layers.0.", layer_at, 1)

    return spelt


def _head(parts: Parts, *, feeds_normed: bool) -> Head:
    spec, files, hidden = parts.spec, parts.files, parts.spec.shape.hidden
    if spec.shape.experts is None and (experts := files.like(EXPERTS)):
        raise UserError(f"{files.folder}: the layer for multi-token prediction has experts ({experts}); none run here")
    enter = Fused(
        parts.matrix("fc", 2 * hidden),
        parts.norm("embedding_norm.weight"),
        parts.norm("feature_norm.weight"),
        parts.norm("layers.0.input_layernorm.weight"),
    )
    made = Head(
        taps=(FINAL,),
        project=as_it_is,
        embedding=parts.embedding(),
        enter=enter,
        layer=parts.layer("layers.0.", width=hidden),
        norm=parts.norm("norm.weight"),
        feeds_normed=feeds_normed,
        ids=None,
        lm_head=parts.lm_head(parts.target.vocab),
        shape=parts.shape(),
        ropes=spec.ropes,
        max_positions=parts.target.max_positions,
    )
    files.check_all_taken(("rotary_emb.inv_freq",))
    return made
