"""What several types of models mean alike by keys that a config.json leaves out. Data, as of single types."""

from __future__ import annotations

from dataclasses import replace

from tpspec.published import norm_names
from tpspec.published.defaults import Defaults

GEMMA2 = Defaults(
    hidden=2304,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    vocab=256000,
    tied=True,
    norms=norm_names.GEMMA,
    float16=False,
    intermediate=("intermediate_size", 9216),
    never=("use_bidirectional_attention",),
)
GEMMA4 = replace(
    GEMMA2,
    num_layers=30,
    vocab=262144,
    normed=True,
    never=(),
    only=(("use_bidirectional_attention", "vision"),),  # text looks back all the same
)
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
COHERE = Defaults(
    hidden=8192,
    num_layers=40,
    num_heads=64,
    vocab=256000,
    tied=True,
    norms=norm_names.PARALLEL,
    intermediate=("intermediate_size", 22528),
    always=("use_parallel_block", "use_gated_activation"),
    never=("use_qk_norm",),
)
DEEPSEEK = Defaults(
    hidden=7168,
    num_layers=61,
    num_heads=128,
    vocab=129280,
    float16=False,
    intermediate=("moe_intermediate_size", 2048),
)
GRANITE_MOE = Defaults(
    hidden=4096,
    num_layers=32,
    num_heads=32,
    vocab=32000,
    float16=False,
    intermediate=("intermediate_size", 11008),
)
HUNYUAN = Defaults(
    hidden=4096,
    num_layers=32,
    num_heads=32,
    vocab=290943,
    normed=True,
    turns_first=True,
    norms=norm_names.HUNYUAN,
    intermediate=("intermediate_size", 11008),
    always=("use_qk_norm", "use_rotary_pos_emb"),
    never=("position_embedding_xdrope", "use_cla", "use_mla"),
)
MINISTRAL = Defaults(
    hidden=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    vocab=32000,
    bias_key=None,
    intermediate=("intermediate_size", 14336),
)
OLMO2 = Defaults(
    hidden=4096,
    num_layers=32,
    num_heads=32,
    vocab=50304,
    normed=True,
    joint_norm=True,
    norms=norm_names.OLMO2,
    intermediate=("intermediate_size", 11008),
    never=("clip_qkv",),
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
