"""EAGLE heads as people publish them, read into one description: SafeAILab, SpecForge, AngelSlim, vLLM, speculators.

The layouts name the same tensors differently, and what a config leaves out means what its trainer did, not what the
target does. A tensor that is missing, misshapen or unknown is refused by name. Must not know how a head is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tpspec.draft.eagle import Fused, Head, SideBySide
from tpspec.draft.head_files import HeadFiles
from tpspec.draft.head_parts import Parts
from tpspec.draft.texts import as_it_is
from tpspec.errors import UserError
from tpspec.model.decoder import FINAL
from tpspec.model.spec import ModelSpec, resolved
from tpspec.published.checkpoint import read_config
from tpspec.published.head_files import is_third, layer_fields, layer_of, layer_shape, other_width
from tpspec.published.shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpspec.draft.protocol import Given

ROPE_THETA = 10000.0  # what the heads' trainers use whatever the target does, and where a config says nothing
UNUSED = ("t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True, slots=True)
class Form:
    """What a config says, whichever its layout.

    layer: of the head's transformer layer, in transformers' words. third: EAGLE-3, else 1 or 2. norms_output: whether
    the norm stands before the logits. unused: tensors of this layout that mean nothing.
    """

    layer: dict[str, Any]
    third: bool
    taps: tuple[int, ...]
    draft_vocab: int | None = None
    fc_bias: bool = False
    normed_residual: bool = False
    norms_together: bool = False
    norms_apart: bool = False
    norms_output: bool = True
    feeds_normed: bool = False
    unused: tuple[str, ...] = UNUSED


def load_head(given: Given) -> Head:
    """The head in `given.folder`. Raises UserError, naming the file and what would be right."""
    assert given.folder is not None, "the rules of a topology ask for it"
    where = str(given.folder)
    layer_shape(given.folder)  # which refuses by name what is no such head
    target = ModelShape.of(given.target)
    files = HeadFiles(given.folder, _plain_name)
    form = _form(read_config(given.folder), files, target, f"{where}/config.json")
    return _Loader(Parts(given, _spec(form.layer, where), target, files), form).head()


def _plain_name(name: str) -> str:
    """One name for what the layouts call midlayer.x, layers.0.x, model.layers.0.x or model.model.layers.0.x."""
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _form(config: dict[str, Any], files: HeadFiles, target: ModelShape, where: str) -> Form:
    layer = layer_of(config, where)
    if config.get("speculators_model_type") is not None:
        return _third(config, layer, target, where)
    if layer is config.get("model"):
        return _wrapped(config, layer, where)
    if is_third(config, layer, files.names):
        return _third(layer, layer, target, where)
    return Form(layer, third=False, taps=(FINAL,), fc_bias=layer.get("bias", True))


def _wrapped(config: dict[str, Any], layer: dict[str, Any], where: str) -> Form:
    """As vLLM once wanted EAGLE-1; it put a layer's norm and a last one there that the head does not have."""
    for key in ("add_para_norm", "truncated_vocab_size"):
        if config.get(key) not in (None, False, layer.get("vocab_size")):
            raise UserError(f"{where}: {key} {config[key]!r} is not supported; should be absent")
    unused = (*UNUSED, "layers.0.input_layernorm.weight", "norm.weight")
    return Form(layer, False, (FINAL,), fc_bias=config.get("eagle_fc_bias", False), unused=unused)


def _third(config: dict[str, Any], layer: dict[str, Any], target: ModelShape, where: str) -> Form:
    """EAGLE-3. `norm_output` means two things: a norm before the logits (SpecForge), or that the next draft reads what
    comes after it (speculators, and heads with `fc_norm`)."""
    feeds = config.get("speculators_model_type") is not None or bool(config.get("fc_norm"))
    return Form(
        layer,
        third=True,
        taps=_taps(config.get("eagle_aux_hidden_state_layer_ids"), target.num_layers, where),
        draft_vocab=config.get("draft_vocab_size"),
        normed_residual=bool(config.get("norm_before_residual", False)),
        norms_together=bool(config.get("norm_before_fc", False)),
        norms_apart=bool(config.get("fc_norm", False)),
        norms_output=feeds or config.get("norm_output") is not False,
        feeds_normed=feeds and bool(config.get("norm_output", False)),
    )


def _taps(ids: Any, num_layers: int, where: str) -> tuple[int, ...]:
    """Layers whose input is tapped. Configs whose first id is 1 count outputs of layers (SpecForge), others inputs."""
    ids = [2, num_layers // 2, num_layers - 3] if ids is None else ids
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise UserError(f"{where}: eagle_aux_hidden_state_layer_ids is {ids!r}; should be a list of layers")
    taps = tuple(i + 1 if ids[0] == 1 else i for i in ids)
    if not all(0 <= tap <= num_layers for tap in taps):
        raise UserError(
            f"{where}: eagle_aux_hidden_state_layer_ids is {ids}; should be of the {num_layers} layers of the target"
        )
    return taps


def _spec(layer: Mapping[str, Any], where: str) -> ModelSpec:
    """The head's one layer, by the same rules as a whole model's."""
    fields = {"rope_theta": ROPE_THETA} | layer_fields(layer)
    fields = {key: value for key, value in fields.items() if key not in ("dtype", "torch_dtype")}
    return resolved(fields, f"{where}/config.json")


@dataclass(frozen=True, slots=True)
class _Loader:
    parts: Parts
    form: Form

    def head(self) -> Head:
        form, parts = self.form, self.parts
        spec, files = parts.spec, parts.files
        if not form.third and spec.shape.hidden != parts.target.hidden:
            raise other_width(files.folder, spec.shape.hidden, parts.target.hidden)
        made = Head(
            taps=form.taps,
            project=self._projection() if form.third else as_it_is,
            embedding=parts.embedding(),
            enter=self._side_by_side() if form.third else self._fused(),
            layer=parts.layer("layers.0.", width=2 * spec.shape.hidden if form.third else spec.shape.hidden),
            norm=parts.norm("norm.weight") if form.third and form.norms_output else None,
            feeds_normed=form.feeds_normed,
            ids=self._ids(),
            lm_head=parts.lm_head(self._num_ids()),
            shape=parts.shape(),
            ropes=spec.ropes,
            max_positions=form.layer.get("max_position_embeddings"),
        )
        files.check_all_taken(form.unused if form.norms_output else (*form.unused, "norm.weight"))
        return made

    def _projection(self) -> Callable[[Tensor], Tensor]:
        """From the taps of a token to its feature."""
        parts, num = self.parts, len(self.form.taps)
        width = parts.target.hidden
        together = parts.norm("input_norm.weight", num * width) if self.form.norms_together else None
        apart = [parts.norm(f"fc_norm.{i}.weight", width) for i in range(num)] if self.form.norms_apart else None
        fc = parts.matrix("fc", num * width)

        def project(taps_TW: Tensor) -> Tensor:
            if together is not None:
                taps_TW = together(taps_TW)
            if apart is not None:
                each = zip(apart, taps_TW.chunk(num, 1), strict=True)
                taps_TW = torch.cat([norm(tap_TD) for norm, tap_TD in each], 1)
            return fc(taps_TW)

        return project

    def _fused(self) -> Fused:
        return Fused(self.parts.matrix("fc", 2 * self.parts.spec.shape.hidden, biased=self.form.fc_bias))

    def _side_by_side(self) -> SideBySide:
        norms = self.parts.norm("layers.0.input_layernorm.weight"), self.parts.norm("layers.0.hidden_norm.weight")
        return SideBySide(*norms, self.form.normed_residual)

    def _num_ids(self) -> int:
        return self.form.draft_vocab or (self.parts.spec.shape.vocab if self.form.third else self.parts.target.vocab)

    def _ids(self) -> Tensor | None:
        """d2t is an offset: the target's id less the head's own."""
        size, files, given = self._num_ids(), self.parts.files, self.parts.given
        if "d2t" not in files and size >= given.vocab:
            return None
        ids = files.take("d2t", size) + torch.arange(size)
        if int(ids.min()) < 0 or int(ids.max()) >= given.vocab or len(set(ids.tolist())) < size:
            raise UserError(
                f"{files.folder}: d2t does not lead to {size} ids of the target's {given.vocab}; "
                "should hold what is added to each id of the head"
            )
        return ids.to(given.device)
