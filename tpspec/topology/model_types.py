"""What types of models mean by the keys that their config.json leaves out, as transformers does: data, type by type.

Knows keys and numbers. What a shape is made of them is `shape`'s matter, which layers one has `model/`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a type of model means by a key that its config.json leaves out, as transformers does; None: see
    ModelShape.from_config, which refuses a config that has to say it.

    qkv: what the matrices of queries, keys and values are called; of one name they are one, their rows in that order.
    biased: whether those have biases, as bias_key says; or "always", whatever the config says. o_biased: what attention
    gives has one where they do. mlp_biased: what mlp_bias says of an MLP's counts. sinks: query heads have them
    (attention.py). normed: queries and keys have norms, always or where the flag of that name says so. gated: what a
    query head gives is multiplied with a gate, whose rows stand behind those of its query, or in a matrix of that name.
    layer_norms: of the hidden state, in each layer; out_normed: the flag that may say that two are missing. float16:
    whether its numbers stay within those. intermediate: the key for an MLP's, or an expert's, channels, and how many
    there are without it.
    """

    hidden: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    tied: bool = False
    qkv: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    biased: bool | Literal["always"] = False
    bias_key: str = "attention_bias"
    o_biased: bool | str = True
    mlp_biased: bool = False
    sinks: bool = False
    normed: bool | str = False
    gated: bool | str = False
    layer_norms: int = 2
    out_normed: str | None = None
    float16: bool = True
    intermediate: tuple[str, int | None] = ("intermediate_size", None)


GEMMA2 = Defaults(
    hidden=2304,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    vocab=256000,
    tied=True,
    layer_norms=4,
    float16=False,
    intermediate=("intermediate_size", 9216),
)
GEMMA4 = replace(GEMMA2, num_layers=30, vocab=262144, normed=True)
GLM = Defaults(
    hidden=4096,
    num_layers=40,
    num_heads=32,
    num_kv_heads=2,
    head_dim=128,
    vocab=151552,
    biased=True,
    o_biased=False,
    intermediate=("intermediate_size", 13696),
)
QWEN2_VL = Defaults(
    hidden=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    vocab=152064,
    biased="always",
    o_biased=False,
    intermediate=("intermediate_size", 29568),
)
# The types that model/architectures.py declares.
MODEL_TYPES = {
    "afmoe": Defaults(
        hidden=2048,
        num_layers=32,
        num_heads=16,
        head_dim=128,
        vocab=200192,
        normed=True,
        gated="gate_proj",
        layer_norms=4,
        intermediate=("moe_intermediate_size", 1408),
    ),
    "cwm": Defaults(
        hidden=6144,
        num_layers=64,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        vocab=128256,
        intermediate=("intermediate_size", 21504),
    ),
    "deepseek_v2": Defaults(
        hidden=4096,
        num_layers=32,
        num_heads=32,
        vocab=102400,
        float16=False,
        intermediate=("moe_intermediate_size", 1407),
    ),
    "deepseek_v3": Defaults(
        hidden=7168,
        num_layers=61,
        num_heads=128,
        vocab=129280,
        float16=False,
        intermediate=("moe_intermediate_size", 2048),
    ),
    "dots1": Defaults(
        hidden=4608,
        num_layers=62,
        num_heads=32,
        num_kv_heads=32,
        vocab=152064,
        normed=True,
        intermediate=("moe_intermediate_size", 1408),
    ),
    "ernie4_5": Defaults(
        hidden=1024,
        num_layers=18,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        vocab=103424,
        tied=True,
        intermediate=("intermediate_size", 3072),
    ),
    "ernie4_5_moe": Defaults(
        hidden=2560,
        num_layers=28,
        num_heads=20,
        num_kv_heads=4,
        vocab=103424,
        tied=True,
        intermediate=("moe_intermediate_size", 1536),
    ),
    "exaone_moe": Defaults(
        hidden=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        vocab=102400,
        normed=True,
        intermediate=("moe_intermediate_size", 1024),
    ),
    "gemma": Defaults(
        hidden=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=16,
        head_dim=256,
        vocab=256000,
        tied=True,
        intermediate=("intermediate_size", 24576),
    ),
    "gemma2": GEMMA2,
    "gemma3_text": replace(GEMMA2, vocab=262208, normed=True),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "glm": GLM,
    "glm4": replace(GLM, layer_norms=4),
    "glm4_moe": Defaults(
        hidden=4096,
        num_layers=46,
        num_heads=96,
        num_kv_heads=8,
        vocab=151552,
        o_biased=False,
        normed="use_qk_norm",
        intermediate=("moe_intermediate_size", 1408),
    ),
    "glm4_moe_lite": Defaults(
        hidden=2048,
        num_layers=47,
        num_heads=20,
        vocab=154880,
        intermediate=("moe_intermediate_size", 1536),
    ),
    "glm4v_moe_text": Defaults(
        hidden=4096,
        num_layers=46,
        num_heads=96,
        num_kv_heads=8,
        vocab=151424,
        biased=True,
        o_biased=False,
        intermediate=("moe_intermediate_size", 1408),
    ),
    "glm4v_text": Defaults(
        hidden=4096,
        num_layers=40,
        num_heads=32,
        num_kv_heads=2,
        vocab=151552,
        biased="always",
        o_biased=False,
        layer_norms=4,
        intermediate=("intermediate_size", 13696),
    ),
    "gpt_oss": Defaults(
        hidden=2880,
        num_layers=36,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        vocab=201088,
        biased=True,
        sinks=True,
        float16=False,
        intermediate=("intermediate_size", 2880),
    ),
    "granite": Defaults(mlp_biased=True, float16=False),
    "hy_v3": Defaults(
        hidden=4096,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab=120832,
        normed=True,
        intermediate=("moe_intermediate_size", 1536),
    ),
    "hyperclovax": Defaults(mlp_biased=True, layer_norms=4, out_normed="use_post_norm"),
    "iquestcoder": Defaults(
        hidden=5120,
        num_layers=80,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        vocab=76800,
        mlp_biased=True,
        intermediate=("intermediate_size", 27648),
    ),
    "llama": Defaults(mlp_biased=True),
    "mellum": Defaults(
        hidden=2304,
        num_layers=28,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab=98304,
        normed=True,
        intermediate=("moe_intermediate_size", 896),
    ),
    "ministral": Defaults(
        hidden=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        vocab=32000,
        intermediate=("intermediate_size", 14336),
    ),
    "ministral3": Defaults(
        hidden=4096,
        num_layers=34,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab=131072,
        intermediate=("intermediate_size", 14336),
    ),
    "mistral": Defaults(num_kv_heads=8),
    "mistral4": Defaults(
        hidden=4096,
        num_layers=36,
        num_heads=32,
        vocab=131072,
        intermediate=("moe_intermediate_size", 2048),
    ),
    "mixtral": Defaults(num_kv_heads=8),
    "phi3": Defaults(
        hidden=3072,
        num_layers=32,
        num_heads=32,
        vocab=32064,
        qkv=("qkv_proj", "qkv_proj", "qkv_proj"),
        intermediate=("intermediate_size", 8192),
    ),
    "qwen2": Defaults(num_kv_heads=32, biased="always", o_biased=False),
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen2_moe": Defaults(
        hidden=2048,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        vocab=151936,
        biased=True,
        bias_key="qkv_bias",
        o_biased=False,
        intermediate=("moe_intermediate_size", 1408),
    ),
    "qwen2_vl_text": QWEN2_VL,
    "qwen3": Defaults(num_kv_heads=32, head_dim=128, normed=True),
    "qwen3_5_moe_text": Defaults(
        hidden=2048,
        num_layers=40,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        vocab=248320,
        normed=True,
        gated=True,
        intermediate=("moe_intermediate_size", 512),
    ),
    "qwen3_5_text": Defaults(
        hidden=4096,
        num_layers=32,
        num_heads=16,
        num_kv_heads=4,
        head_dim=256,
        vocab=248320,
        normed=True,
        gated=True,
        intermediate=("intermediate_size", 12288),
    ),
    "qwen3_moe": Defaults(num_kv_heads=4, normed=True, intermediate=("moe_intermediate_size", 768)),
    "qwen3_next": Defaults(
        hidden=2048,
        num_layers=48,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        vocab=151936,
        normed=True,
        gated=True,
        intermediate=("moe_intermediate_size", 512),
    ),
    "qwen3_vl_moe_text": Defaults(
        hidden=2048,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        vocab=151936,
        tied=True,
        normed=True,
        intermediate=("moe_intermediate_size", 1408),
    ),
    "qwen3_vl_text": Defaults(
        hidden=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        vocab=151936,
        normed=True,
        intermediate=("intermediate_size", 22016),
    ),
    "seed_oss": Defaults(
        hidden=4096,
        num_layers=64,
        num_heads=80,
        num_kv_heads=8,
        head_dim=128,
        vocab=155136,
        biased=True,
        o_biased="attention_out_bias",
        mlp_biased=True,
        intermediate=("intermediate_size", 27648),
    ),
    "smollm3": Defaults(num_kv_heads=4, tied=True, mlp_biased=True),
    "solar_open": Defaults(
        hidden=4096,
        num_layers=48,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab=196608,
        o_biased=False,
        intermediate=("moe_intermediate_size", 1280),
    ),
    "vaultgemma": replace(GEMMA2, layer_norms=2),
    "youtu": Defaults(
        hidden=2048,
        num_layers=32,
        num_heads=16,
        vocab=128256,
        tied=True,
        intermediate=("intermediate_size", 6144),
    ),
}
