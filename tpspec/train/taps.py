"""What the heads learn from, on disk: the target's hidden states over the texts, in shards of whole texts.

A forward costs as much as a training step, and a run reads each text more than once, so it is done once and kept.
Must not know heads. Shards that are there already are kept.

Shapes: B texts, S positions, D hidden of the target, T positions of all texts of a shard.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from tpspec.errors import UserError
from tpspec.model.spec import read_spec, transformers_config
from tpspec.published.checkpoint import read_config
from tpspec.train.files import make_folder
from tpspec.written import whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from tpspec.train.texts import Told

PER_SHARD = 64  # texts
LOOKED_AT = 2**16  # bytes of a file of weights, at three places
ROWS = 1024  # positions of one forward, padding included; more do not fit a CPU's cache


@dataclass(frozen=True, slots=True)
class Tapped:
    """One text and its taps. features_S3D: the hidden states entering the tapped layers, side by side.

    final_SD: what enters the target's head, that is, after the last norm.
    """

    told: Told
    features_SX: Tensor
    final_SD: Tensor


def tapped_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's choice of layers whose input is tapped, or the nearest where there are fewer than three: also places in
    transformers' `hidden_states`. The first is never 1, by which readers of a head know that outputs are counted."""
    return (2, num_layers // 2, num_layers - 3) if num_layers > 2 else (0, num_layers // 2, num_layers - 1)


class Shards:
    """The taps of the texts of one folder. target: the fingerprint of the model whose they are."""

    def __init__(self, folder: Path, texts: Sequence[Told], target: str) -> None:
        self._folder, self._target = folder / "taps", target
        self._blocks = [texts[first : first + PER_SHARD] for first in range(0, len(texts), PER_SHARD)]

    def __len__(self) -> int:
        return len(self._blocks)

    def missing(self) -> list[int]:
        """Raises UserError where one that is there is another target's."""
        there = [index for index in range(len(self)) if self._path(index).exists()]
        for index in there:
            self._check_target(index)
        return sorted(set(range(len(self))) - {*there})

    def write(self, index: int, taps: Sequence[tuple[Tensor, Tensor]]) -> None:
        """taps: of each text of the shard, as in Tapped. The file appears whole or not at all."""
        make_folder("--data", self._folder)
        features, final = (torch.cat([pair[i] for pair in taps]).contiguous() for i in range(2))
        with whole(self._path(index)) as part:
            part.write_bytes(save({"features": features, "final": final}, {"target": self._target}))

    def texts(self, index: int) -> Sequence[Told]:
        return self._blocks[index]

    def read(self, index: int) -> list[Tapped]:
        texts = self.texts(index)
        sizes = [len(told.ids) for told in texts]
        self._check_target(index)
        tensors = load_file(self._path(index))
        if len(tensors["final"]) != sum(sizes):
            raise UserError(f"{self._path(index)}: is not of these texts; delete {self._folder} to make it again")
        parts = zip(texts, tensors["features"].split(sizes), tensors["final"].split(sizes), strict=True)
        return [Tapped(*part) for part in parts]

    def _check_target(self, index: int) -> None:
        path = self._path(index)
        try:
            with safe_open(path, framework="pt") as file:
                of = (file.metadata() or {}).get("target")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a whole safetensors file ({error}); delete it to make it again") from error
        if of != self._target:
            raise UserError(
                f"{path}: is of another target; delete {self._folder} to make it again, or use another --data"
            )

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:05}-{len(self._blocks[index])}.safetensors"


def fingerprint(folder: Path) -> str:
    """Of the model in a folder: its config.json, and the sizes, headers and ends of its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in (0, size // 2, max(0, size - LOOKED_AT)):
                file.seek(place)
                digest.update(file.read(LOOKED_AT))
    return digest.hexdigest()


class Tapper:
    """The target, run for its hidden states by transformers: a whole model on one device. What it is told of is what
    our decoder tells of."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        from transformers import (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
        )

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text, meant = config.get_text_config(), transformers_config(read_config(folder))
        if getattr(text, "rope_parameters", None) != (ropes := getattr(meant, "rope_parameters", None)):
            text.rope_parameters = ropes  # LFM3's, of which transformers takes the published ones for others
        has_eyes = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        auto = AutoModelForImageTextToText if has_eyes else AutoModelForCausalLM
        model, found = auto.from_pretrained(
            folder, config=config, dtype="auto", local_files_only=True, output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):
            raise UserError(
                f"{folder}: transformers finds no {missing[0]} in it; should be a checkpoint as it writes them"
            )
        decoder = model.get_decoder()
        body = getattr(decoder, "model", decoder)  # of Llama 4 that is the model with its head
        self._body, self._final_scale = body.to(device).eval(), read_spec(folder).final_scale
        self._layers = tapped_layers(text.num_hidden_layers)
        self._device = device

    @torch.inference_mode()
    def taps(self, texts: Sequence[Told]) -> list[tuple[Tensor, Tensor]]:
        """Of each text, in order: [S, 3D] and [S, D], in the model's dtype."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for group in groups([len(told.ids) for told in texts], ROWS):
            ids_BS = padded([torch.tensor(texts[i].ids) for i in group])
            # Padding stands behind the texts, where a causal model does not look.
            out = self._body(ids_BS.to(self._device), output_hidden_states=True, use_cache=False)
            features_BSX = torch.cat([out.hidden_states[layer] for layer in self._layers], -1).cpu()
            final_BSD = out.last_hidden_state.cpu() * self._final_scale
            for row, i in enumerate(group):
                size = len(texts[i].ids)
                found[i] = features_BSX[row, :size], final_BSD[row, :size]
        return [found[i] for i in range(len(texts))]


def usual_size(texts: Sequence[Tapped]) -> Tensor:
    """[3D]: the median size of each feature, which the few enormous ones at the start of a text do not move."""
    return torch.cat([tapped.features_SX for tapped in texts]).float().abs().median(0).values.clamp(min=1e-3)


def groups(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices in groups of like sizes, each with at most `most` positions when padded (or one text)."""
    group: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
        if group and (len(group) + 1) * sizes[group[0]] > most:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def padded(rows: Sequence[Tensor]) -> Tensor:
    """[S, ...] of several lengths -> [B, longest S, ...] with zeros behind."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
