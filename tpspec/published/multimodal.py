"""Models that see besides reading: their text model alone runs. Where that stands in a config.json and among tensors.

Knows keys and names; must not know what they mean.
"""

from __future__ import annotations

from tpspec.published import keys as published_keys, kimi_linear, mimo, short_conv, step

TEXT_TYPES = {
    "cohere2_vision": "cohere2",
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "muse_glimmer": "muse_glimmer_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "step3p7": "step3p5",
}  # of the text model, where its section does not say
OTHER_NAMES = {
    "AXK1": "axk1",
    "exaone4_5_text": "exaone4",
    "kimi_k2": "deepseek_v3",
}  # of types of text models, as configs were published
# Sizes of text models that sections of others leave out, as transformers once wrote them: what differs from its own.
SIZES: dict[str, dict[str, object]] = {
    "llama": {"intermediate_size": 11008, "vocab_size": 32000},
    "mistral": {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32000},
    "qwen2": {"intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936},
    "qwen3": {"intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936},
}
TUNING = "attn_temperature_tuning"  # of Llama 4, which transformers first wrote as a number
COMMON = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
# Whether a head is tied where a whole model does not say so; of the others where either does, as they once were saved.
WHOLE_TIED = {
    "cohere2_vision": True,
    "glm46v": False,
    "internvl": True,
    "kimi_k25": True,
    "lfm2_vl": True,
    "lfm3_vl": True,
    "llava_next": False,
    "muse_glimmer": False,
    "qwen3_vl": False,
    "qwen3_vl_moe": False,
    "step3p7": False,
}
SECTION_TIED = ("llama4",)  # of these the text model has a head of its own, whatever the whole says
EITHER_TIED = ("glm4v", "glm4v_moe", "llava", "llava_onevision", "qwen2_5_vl", "qwen2_vl")
FLAT = ("qwen2_5_vl", "qwen2_vl")  # as these were published: what a text model says stands beside its eyes
SECTION = "text_config"
TIED = "tie_word_embeddings"  # which the whole model decides, where its head is not the text model's; see _tied
# Files of older tools that say how weights are stored, where config.json does not, and what method they need not name.
BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
STORAGE = ("compression_config", "quantization_config", *BESIDE)  # of the whole model, text model included
# How names of tensors begin otherwise: of Nemotron-H, as it was published and as transformers has it, LFM2, EXAONE,
# Phi, Falcon-H1 and Sarvam.
RENAMED = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
    "model.embedding_norm.": "model.norm.",
    "model.embeddings.": "model.embed_tokens.",
    "model.final_layernorm.": "model.norm.",
    "model.norm_f.": "model.norm.",
    "model.word_embeddings.": "model.embed_tokens.",
    "transformer.h.": "model.layers.",
    "transformer.ln_f.": "model.norm.",
    "transformer.wte.": "model.embed_tokens.",
}
# How parts of names are called otherwise, in any model: OLMo Hybrid's norms before layers of linear attention, and, as
# transformers writes them, those behind the attention of others, and Kimi Linear's MLPs in place of experts.
PARTS = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    **{f".block_sparse_moe.{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")},
}
PREFIXES = ("model.language_model.", "language_model.")  # transformers' own since 4.52, and what was published before


def text_config(config: dict[str, object]) -> dict[str, object]:
    """A config.json as its text model alone would have it, its type and keys by transformers' names; any other as it
    is."""
    alone = _alone(config)
    kind = alone.get("model_type")
    if isinstance(kind, str) and kind in OTHER_NAMES:
        alone = alone | {"model_type": OTHER_NAMES[kind]}
    if alone.get("model_type") == "llama4_text" and type(tuning := alone.get(TUNING)) is int:
        alone = alone | {TUNING: bool(tuning)}
    for one in (published_keys, step, mimo, short_conv, kimi_linear):
        alone = one.as_now(alone)
    return alone


def _alone(config: dict[str, object]) -> dict[str, object]:
    kind, text = config.get("model_type"), config.get(SECTION)
    if kind in FLAT and text is None:
        text = {}
    if not isinstance(kind, str) or kind not in TEXT_TYPES or not isinstance(text, dict):
        return config
    section = {"model_type": TEXT_TYPES[kind]} | text
    sizes = COMMON | SIZES[own] if (own := str(section["model_type"])) in SIZES else {}
    whole = {key: value for key, value in config.items() if not key.endswith("_config") or key in STORAGE}
    return sizes | whole | section | _tied(kind, config, text)


def _tied(kind: str, config: dict[str, object], text: dict[str, object]) -> dict[str, object]:
    """What a model says of its head, as transformers takes it; empty where that is the text model's default."""
    if kind in SECTION_TIED:
        return {TIED: text.get(TIED, False)}
    if kind in EITHER_TIED:
        said = [one[TIED] for one in (config, text) if TIED in one]
        return {TIED: True if True in said else said[0] if said else False}
    if kind in WHOLE_TIED:
        return {TIED: config.get(TIED, WHOLE_TIED[kind])}
    return {TIED: config[TIED]} if TIED in config else {}


def text_name(name: str) -> str:
    """What a tensor or module of the text model would be called in that model alone; any other as it is."""
    whole, old = PREFIXES
    for other, usual in PARTS.items():
        name = name.replace(other, usual)
    name = "model." + name.removeprefix(whole) if name.startswith(whole) else name.removeprefix(old)
    for other, usual in RENAMED.items():
        if name.startswith(other):
            return usual + name.removeprefix(other)
    return name


def spellings(name: str) -> tuple[str, ...]:
    """A name in a text model, and what it is called where that is part of another."""
    whole, old = PREFIXES
    inside = (whole + name.removeprefix("model."),) if name.startswith("model.") else ()
    renamed = (other + name.removeprefix(usual) for other, usual in RENAMED.items() if name.startswith(usual))
    return (name, old + name, *inside, *renamed)
