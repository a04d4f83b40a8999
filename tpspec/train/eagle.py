"""An EAGLE-3 head in training (Li et al., arXiv 2503.01840): module names are the published tensor names.

Trained as it will be used ("training-time test"): draft step k reads the head's own output of step k - 1 and attends
to the keys of true features up to its row, and to those of its own steps. Must not know loops, files or optimisers.

Shapes: B texts, S positions, A rows that predict, D hidden, H query heads, G kv heads, E head dim, V draft ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from tpspec.train.taps import tapped_layers

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from tpspec.train.batches import Batch
    from tpspec.train.target import Taught
    from tpspec.train.vocabulary import DraftVocabulary

MODESTY = 0.15  # of the target's last norm: at full size a head that knows nothing yet is sure of everything


class Norm(nn.Module):
    """RMSNorm, in float32 whatever the precision around it."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(hidden)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)


class Attention(nn.Module):
    """Queries, keys and values from an embedding and a hidden state side by side; Llama's rotation."""

    frequencies: Tensor

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, rope_theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(2 * hidden, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden, bias=False)
        frequencies = rope_theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def keys(self, z_BSX: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """[B, G, S, E] each."""
        return self._turned(self._heads(self.k_proj(z_BSX)), positions_BS), self._heads(self.v_proj(z_BSX))

    def forward(
        self,
        z_BAX: Tensor,
        positions_BA: Tensor,
        context: tuple[Tensor, Tensor],
        seen_BAS: Tensor,
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """context: keys and values of true features, of which a row sees seen_BAS; own: of its own steps."""
        k_BGSE, v_BGSE = context
        q_BHAE = self._turned(self._heads(self.q_proj(z_BAX)), positions_BA) * self.head_dim**-0.5
        q_BGFAE = q_BHAE.unflatten(1, (k_BGSE.shape[1], -1))
        scores = (q_BGFAE.flatten(2, 3) @ k_BGSE.mT).view(*q_BGFAE.shape[:-1], -1)
        scores = scores.masked_fill_(~seen_BAS[:, None, None], float("-inf"))
        mine = [(q_BGFAE * k_BGAE[:, :, None]).sum(-1, keepdim=True) for k_BGAE, _ in own]
        weights = torch.cat([scores, *mine], -1).softmax(-1)
        num_context = scores.shape[-1]
        out_BGFAE = (weights[..., :num_context].flatten(2, 3) @ v_BGSE).view(q_BGFAE.shape)
        for index, (_, v_BGAE) in enumerate(own, start=num_context):
            out_BGFAE = out_BGFAE + weights[..., index, None] * v_BGAE[:, :, None]
        projected: Tensor = self.o_proj(out_BGFAE.flatten(1, 2).transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x_BSX: Tensor) -> Tensor:
        return x_BSX.view(*x_BSX.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _turned(self, x_BHSE: Tensor, positions_BS: Tensor) -> Tensor:
        angles_BSF = positions_BS[..., None] * self.frequencies
        cos, sin = (
            torch.cat([turn, turn], -1)[:, None].to(x_BHSE.dtype) for turn in (angles_BSF.cos(), angles_BSF.sin())
        )
        first, second = x_BHSE.chunk(2, -1)
        return x_BHSE * cos + torch.cat([-second, first], -1) * sin


class MLP(nn.Module):
    def __init__(self, hidden: int, channels: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, channels, bias=False)
        self.up_proj = nn.Linear(hidden, channels, bias=False)
        self.down_proj = nn.Linear(channels, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class MidLayer(nn.Module):
    def __init__(self, target: Taught, channels: int) -> None:
        super().__init__()
        self.self_attn = Attention(
            target.hidden, target.num_heads, target.num_kv_heads, target.head_dim, target.rope_theta
        )
        self.mlp = MLP(target.hidden, channels)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            Norm(target.hidden, target.eps) for _ in range(3)
        )

    def inputs(self, embedded: Tensor, h: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(h)], -1)


class EagleHead(nn.Module):
    """depth: draft steps that are unrolled. channels: of the MLP. scale_X: the usual size of each feature.

    Features are divided by their size while training, and the first matrix instead when it is published: some are
    thousands of times larger than others, and at their own size drown what the layer adds to the residual stream.
    """

    scale_X: Tensor
    d2t: Tensor
    t2d: Tensor
    embedding_VD: Tensor

    def __init__(self, target: Taught, vocabulary: DraftVocabulary, scale_X: Tensor, channels: int, depth: int) -> None:
        super().__init__()
        self.depth, self._target, self._channels = depth, target, channels
        self.fc = nn.Linear(3 * target.hidden, target.hidden, bias=False)
        self.midlayer = MidLayer(target, channels)
        self.norm = Norm(target.hidden, target.eps)
        self.lm_head = nn.Linear(target.hidden, len(vocabulary.ids), bias=False)
        self.register_buffer("d2t", vocabulary.d2t())
        self.register_buffer("t2d", vocabulary.t2d())
        self.register_buffer("embedding_VD", target.embedding_VD, persistent=False)
        self.register_buffer("scale_X", scale_X, persistent=False)
        with torch.no_grad():  # the target's own rows: what a logit is about need not be learnt again
            self.lm_head.weight.copy_(target.head_VD[list(vocabulary.ids)])
            self.norm.weight.copy_(MODESTY * target.norm_D)

    def forward(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """For each draft step its rows that predict, [B, A] bool, and what enters lm_head there, [rows, D]."""
        layer, rows_BA = self.midlayer, batch.rows_BA
        positions_BS = torch.arange(batch.ids_BS.shape[1], device=rows_BA.device).expand_as(batch.ids_BS)
        h_BSD = self.fc(batch.features_BSX.float() / self.scale_X).float()  # the residual stream stays wide
        next_BS = torch.cat([batch.ids_BS[:, 1:], batch.ids_BS[:, -1:]], 1)
        z_BSX = layer.inputs(self._embedded(next_BS), h_BSD)
        context = layer.self_attn.keys(z_BSX, positions_BS)
        seen_BAS = positions_BS[:, None] <= rows_BA[..., None]
        h_BAD, z_BAX = (x.gather(1, rows_BA[..., None].expand(-1, -1, x.shape[-1])) for x in (h_BSD, z_BSX))
        own: list[tuple[Tensor, Tensor]] = []
        drafts: list[tuple[Tensor, Tensor]] = []
        for step in range(self.depth):
            if step:
                z_BAX = layer.inputs(self._embedded(batch.tokens(step + 1)), h_BAD)
                own.append(layer.self_attn.keys(z_BAX, rows_BA + step))
            h_BAD = h_BAD + layer.self_attn(z_BAX, rows_BA + step, context, seen_BAS, own)
            h_BAD = h_BAD + layer.mlp(layer.post_attention_layernorm(h_BAD))
            predicts_BA = batch.predicts(step)
            drafts.append((predicts_BA, self.norm(h_BAD[predicts_BA])))
        return drafts

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.embedding_VD[ids].to(self.fc.weight.dtype)

    @property
    def output(self) -> Tensor:
        """[V, D]: what turns the rows into logits."""
        return self.lm_head.weight

    def tensors(self) -> dict[str, Tensor]:
        """The head as published."""
        found = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        return found | {"fc.weight": found["fc.weight"] / self.scale_X}

    def config(self) -> dict[str, Any]:
        """config.json as SafeAILab and SpecForge publish it, with what loaders would otherwise have to guess."""
        target = self._target
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": target.hidden,
            "intermediate_size": self._channels,
            "num_hidden_layers": 1,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "vocab_size": target.vocab,
            "draft_vocab_size": self.lm_head.out_features,
            "max_position_embeddings": target.config.get("max_position_embeddings", 2048),
            "rms_norm_eps": target.eps,
            "rope_theta": target.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "bos_token_id": target.config.get("bos_token_id"),
            "eos_token_id": target.config.get("eos_token_id"),
            "target_hidden_size": target.hidden,
            # As transformers counts hidden_states: the input of these layers, not their output.
            "eagle_aux_hidden_state_layer_ids": list(tapped_layers(target.num_layers)),
        }
