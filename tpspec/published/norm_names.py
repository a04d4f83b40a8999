"""What the norms of a layer are called.

Data. Which types of models have which is the matter of the tables of model_types.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormNames:
    """Of a layer: of what attention and the MLP read, and of what they give before it is added; None where that is not
    normed, or the MLP reads what attention does. mixture_out: in place of mlp_out in layers with experts. queries,
    keys: within attention, where those have some."""

    attention: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_out: str | None = None
    mixture_out: str | None = None
    queries: str = "q_norm"
    keys: str = "k_norm"

    @property
    def num(self) -> int:
        """Of the hidden state, in each layer; one that is a sublayer alone has the norm of either."""
        return len({self.attention, self.attention_out, self.mlp, self.mlp_out} - {None})


USUAL = NormNames()
GEMMA = NormNames(
    attention_out="post_attention_layernorm", mlp="pre_feedforward_layernorm", mlp_out="post_feedforward_layernorm"
)
GLM4 = NormNames(attention_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm")
HUNYUAN = NormNames(queries="query_layernorm", keys="key_layernorm")
LFM2 = NormNames("operator_norm", mlp="ffn_norm", queries="q_layernorm", keys="k_layernorm")
OLMO2 = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
PARALLEL = NormNames(mlp=None)
