"""Medusa heads in training (Cai et al., arXiv 2401.10774), in vLLM's layout: module names are the published names.

All heads share one reduced output head, `lm_heads.0` (`original_lm_head`), so that a small model's heads stay small.
Must not know loops, files or optimisers.

Shapes: B texts, A rows that predict, D hidden, V draft ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from tpspec.train.batches import Batch
    from tpspec.train.target import Taught
    from tpspec.train.vocabulary import DraftVocabulary


class Block(nn.Module):
    """x + SiLU(Wx + b), some times over. Begins as the identity, as the paper has it."""

    def __init__(self, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """Head k predicts the token k + 2 places after the row, from the target's last hidden state alone."""

    token_map: Tensor

    def __init__(self, target: Taught, vocabulary: DraftVocabulary, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.depth, self._target, self._num_layers = num_heads, target, num_layers
        self.blocks = nn.ModuleList(Block(target.hidden, num_layers) for _ in range(num_heads))
        head = nn.Linear(target.hidden, len(vocabulary.ids), bias=False)
        self.lm_heads = nn.ModuleList([head])
        self.register_buffer("token_map", torch.tensor(vocabulary.ids))
        with torch.no_grad():
            head.weight.copy_(target.head_VD[list(vocabulary.ids)])

    def forward(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """For each head its rows that predict, [B, A] bool, and what enters the output head there, [rows, D]."""
        final_BSD = batch.final_BSD.float()
        final_BAD = final_BSD.gather(1, batch.rows_BA[..., None].expand(-1, -1, final_BSD.shape[-1]))
        predicts = [batch.predicts(step) for step in range(self.depth)]
        blocks = zip(predicts, self.blocks, strict=True)
        return [(predicts_BA, block(final_BAD[predicts_BA])) for predicts_BA, block in blocks]

    @property
    def output(self) -> Tensor:
        """[V, D]: what turns the rows into logits."""
        weight: Tensor = self.lm_heads[0].weight  # type: ignore[assignment]
        return weight

    def tensors(self) -> dict[str, Tensor]:
        """The heads as published."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}

    def config(self) -> dict[str, Any]:
        """config.json as vLLM reads it."""
        target = self._target
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.hidden,
            "vocab_size": target.vocab,
            "num_heads": self.depth,
            "num_hidden_layers": self._num_layers,
            "truncated_vocab_size": len(self.token_map),
            "original_lm_head": True,
            "medusa_fc_bias": True,
            "dtype": "bfloat16",
        }
