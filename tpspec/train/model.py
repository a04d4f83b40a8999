"""A draft model in training: a small decoder of transformers' own, that reads the target's tokens and no taps.

It begins at random, as a Llama, or as some of the target's own layers between its embeddings and head, which then stay
as they are. Must not know loops, files or optimisers.

Shapes: B texts, S positions, A rows that predict, D hidden of the draft model, V ids.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tpspec.errors import UserError
from tpspec.model.spec import resolve, transformers_config
from tpspec.model.weights import Checkpoint
from tpspec.published.defaults import Defaults
from tpspec.published.global_heads import OVERRIDES, TYPES as GEMMA4
from tpspec.published.model_types import MODEL_TYPES
from tpspec.published.per_layer import KEY as PER_LAYER_SIZE
from tpspec.published.windows import SLIDING

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.train.batches import Batch
    from tpspec.train.target import Taught

CHANNELS = 3  # of the MLP, for each of the hidden ones
PER_LAYER = ("layer_types", "no_rope_layers")  # what a config says of each layer


@dataclass(frozen=True, slots=True)
class Design:
    """config: of transformers, for the draft model. layers: of the target, that it begins with; none: at random."""

    config: Any
    layers: tuple[int, ...] = ()


def at_random(target: Taught, num_layers: int, hidden: int) -> Design:
    """A Llama with the target's vocabulary and head size, one table for its embeddings and its head."""
    from transformers import LlamaConfig

    if hidden % target.head_dim:
        raise UserError(f"--hidden {hidden} should be a multiple of {target.head_dim}, the size of the target's heads")
    num_heads = hidden // target.head_dim
    special = {name: target.config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return Design(
        LlamaConfig(
            vocab_size=target.vocab,
            hidden_size=hidden,
            intermediate_size=CHANNELS * hidden,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=math.gcd(num_heads, target.num_kv_heads),
            head_dim=target.head_dim,
            max_position_embeddings=target.config.get("max_position_embeddings", 2048),
            rms_norm_eps=target.eps,
            rope_parameters={"rope_type": "default", "rope_theta": target.rope_theta},
            tie_word_embeddings=True,
            **special,
        )
    )


def of_layers(target: Taught, num_layers: int, *, spread: bool) -> Design:
    """The target with so few of its layers: its first, or from its first to its last in like steps."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    if target.has_experts:
        raise UserError("--from-layers: the target's have experts, which are not trained here; should be --hidden")
    if target.has_states:
        raise UserError("--from-layers: the target's keep states, which drafts do not go back from; should be --hidden")
    if target.head_bias_V is not None:
        raise UserError("--from-layers: the target's head has a bias, which is not trained here; should be --hidden")
    if num_layers > target.num_layers:
        raise UserError(f"--layers {num_layers} is more than the target's own {target.num_layers}")
    step = (target.num_layers - 1) / max(1, num_layers - 1) if spread else 1
    layers = tuple(round(i * step) for i in range(num_layers))
    config = transformers_config(target.config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"--from-layers: transformers has no {config.model_type} that does not see; should be --hidden")
    fields = config.to_dict()
    if MODEL_TYPES[fields["model_type"]].attention != Defaults().attention:
        raise UserError(
            f"--from-layers: transformers calls tensors of {fields['model_type']} otherwise than its checkpoints do; "
            "should be --hidden"
        )
    if fields["model_type"] in GEMMA4:
        _check_alone(fields, layers)
    lists: dict[str, Any] = {name: [fields[name][i] for i in layers] for name in PER_LAYER if fields.get(name)}
    if own := fields.get(OVERRIDES):
        lists[OVERRIDES] = {str(i): own[str(layer)] for i, layer in enumerate(layers) if str(layer) in own}
    return Design(AutoConfig.for_model(**fields | lists | {"num_hidden_layers": num_layers}), layers)


def _check_alone(fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    """UserError where some layers of Gemma 4 are no model."""
    if fields.get("num_kv_shared_layers") or fields.get(PER_LAYER_SIZE):
        raise UserError(
            "--from-layers: the target's read what others keep, or numbers that tokens have for each layer; should be "
            "--hidden"
        )
    if fields["layer_types"][layers[-1]] == SLIDING:
        raise UserError(
            f"--layers {len(layers)}: the last of them, layer {layers[-1]} of the target, has a window, and the last "
            "layer of such a model has none; should be so many that it sees everything"
        )


class DraftModel(nn.Module):
    """depth: drafts in a row that are measured. One step is all that it gives: the next is the same, a row on."""

    def __init__(self, target: Taught, design: Design, depth: int) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.depth, self._layers = depth, design.layers
        self._final_scale = resolve(design.config, "the draft model").final_scale
        self.model = AutoModelForCausalLM.from_config(design.config, dtype=torch.float32)
        if design.layers:
            self._begin_as(target)

    def forward(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Of the first draft step the rows that predict, [B, A] bool, and what enters the head there, [rows, D]."""
        x_BSD = self.model.base_model(batch.ids_BS, use_cache=False).last_hidden_state
        predicts_BA = batch.predicts(0)
        texts, _ = predicts_BA.nonzero(as_tuple=True)
        return [(predicts_BA, x_BSD[texts, batch.rows_BA[predicts_BA] + 1] * self._final_scale)]

    @property
    def output(self) -> Tensor:
        """[V, D]: what turns the rows into logits."""
        weight: Tensor = self.model.lm_head.weight
        return weight

    @property
    def cap(self) -> float | None:
        """Of its logits."""
        found: float | None = getattr(self.model.config, "final_logit_softcapping", None)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """The model as published: of shared tensors the first name alone; with what is kept and not trained."""
        kept = self.model.state_dict().keys()
        buffers = {name: tensor for name, tensor in self.model.named_buffers() if name in kept}
        return buffers | {name: tensor.detach() for name, tensor in self.model.named_parameters()}

    def config(self) -> dict[str, Any]:
        """config.json as transformers writes it, and the layers of the target that the model began with."""
        config: dict[str, Any] = json.loads(self.model.config.to_json_string())
        return config | {
            "architectures": [type(self.model).__name__],
            "dtype": "bfloat16",
            "from_layers": list(self._layers),
        }

    @torch.no_grad()
    def _begin_as(self, target: Taught) -> None:
        checkpoint = Checkpoint(target.folder)
        for name, own in self.tensors().items():
            theirs = re.sub(r"layers\.(\d+)", lambda found: f"layers.{self._layers[int(found[1])]}", name)
            own.copy_(checkpoint.read(theirs, tuple(own.shape)))
        for shared in (self.model.get_input_embeddings(), self.model.lm_head):
            shared.requires_grad_(False)
