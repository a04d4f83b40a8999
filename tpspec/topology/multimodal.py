"""Models that see besides reading: their text model alone runs. Where that stands in a config.json and among tensors.

Knows keys and names; must not know what they mean.
"""

from __future__ import annotations

TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}  # of the text model, where its section does not say
UNTIED = ("glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")  # unless the whole model says so
FLAT = ("qwen2_5_vl", "qwen2_vl")  # as these were published: what a text model says stands beside its eyes
SECTION = "text_config"
TIED = "tie_word_embeddings"  # which the whole model decides where it says so, for its head is not the text model's
STORAGE = ("quantization_config", "compression_config")  # of the whole model, text model included
PREFIXES = ("model.language_model.", "language_model.")  # transformers' own since 4.52, and what was published before


def text_config(config: dict[str, object]) -> dict[str, object]:
    """A config.json as its text model alone would have it; any other as it is."""
    kind, text = config.get("model_type"), config.get(SECTION)
    if kind in FLAT and text is None:
        text = {}
    if not isinstance(kind, str) or kind not in TEXT_TYPES or not isinstance(text, dict):
        return config
    tied = {TIED: config.get(TIED, False)} if kind in UNTIED or TIED in config else {}
    whole = {key: value for key, value in config.items() if not key.endswith("_config") or key in STORAGE}
    return whole | {"model_type": TEXT_TYPES[kind]} | text | tied


def text_name(name: str) -> str:
    """What a tensor or module of the text model would be called in that model alone; any other as it is."""
    whole, old = PREFIXES
    if name.startswith(whole):
        return "model." + name.removeprefix(whole)
    return name.removeprefix(old)


def spellings(name: str) -> tuple[str, ...]:
    """A name in a text model, and what it is called where that is part of another."""
    whole, old = PREFIXES
    inner = (whole + name.removeprefix("model."),) if name.startswith("model.") else ()
    return (name, old + name, *inner)
