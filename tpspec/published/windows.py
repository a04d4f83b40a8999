"""Which layers of a model see the last tokens only, or those of a chunk, and how many: from a config.json, as
transformers reads it.

Knows keys. What such layers keep of a text is the cache's matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpspec.published.reads import Reads

# As layer_types calls a layer that sees so, and one that has a short convolution instead.
SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
CONV = "conv"
KEYS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}  # of how many tokens it sees


@dataclass(frozen=True, slots=True)
class Sliding:
    """What a type of model means by keys that its config.json leaves out.

    usual: the window, where the key is left out; null there is none. switch: the flag that has to be set, or None.
    has_one: whether a layer has it, where no layer_types say so; None: all have, whatever those say. last_sees_all: as
    the last layer does, whatever those say. kind: of layers that have it: a chunk begins at a multiple of its size, and
    what is in it sees no more than that. others: what else layer_types may call a layer, which then has none.
    """

    usual: int | None = None
    switch: str | None = None
    has_one: Callable[[Reads, int], bool] | None = None
    last_sees_all: bool = False
    kind: str = SLIDING
    others: tuple[str, ...] = ()


def _all_but_every(number: int, key: str = "sliding_window_pattern") -> Callable[[Reads, int], bool]:
    return lambda read, layer: bool((layer + 1) % read.size(key, number))


def _from_layer(usual: int) -> Callable[[Reads, int], bool]:
    return lambda read, layer: layer >= read.size("max_window_layers", usual, least=0)


def _behind_dense(read: Reads, layer: int) -> bool:
    first = read.size("first_k_dense_replace", 0, least=0)
    if layer < first:
        return bool((layer + 1) % read.size("prefix_dense_sliding_window_pattern", 1))
    return _all_but_every(4)(read, layer - first)


def _between_full(read: Reads, layer: int) -> bool:
    return layer > 1 and layer % 4 != 1 and layer != read.size("num_hidden_layers", 49) - 1


def _before_last(read: Reads, layer: int) -> bool:
    return bool((read.size("num_hidden_layers", 52) - 1 - layer) % 4)


def _before_layer(read: Reads, layer: int) -> bool:
    return layer % 2 == 0 and layer < read.size("max_window_layers", 28, least=0)


def _has_rope(read: Reads, layer: int) -> bool:
    ropes = read.config.get("no_rope_layers")
    if isinstance(ropes, list) and layer < len(ropes):
        return bool(ropes[layer])
    return bool((layer + 1) % read.size("no_rope_layer_interval", 4))


GEMMA4 = Sliding(512, has_one=lambda _, layer: bool((layer + 1) % 6), last_sees_all=True)
GRANITE = Sliding(128, has_one=lambda _, layer: layer % 4 != 0)
SLIDES = {
    "afmoe": Sliding(1024, has_one=_all_but_every(4, "global_attn_every_n_layers")),
    "cohere2": Sliding(4096, has_one=_all_but_every(4)),
    "cohere2_moe": Sliding(4096, has_one=_behind_dense),
    "cwm": Sliding(8192, has_one=lambda _, layer: layer % 4 != 0),
    "dots1": Sliding(4096, has_one=_from_layer(62)),
    "exaone4": Sliding(4096, has_one=_all_but_every(4)),
    "exaone_moe": Sliding(4096, has_one=_all_but_every(4)),
    "flint": Sliding(513, has_one=_between_full),
    "gemma2": Sliding(4096, has_one=lambda _, layer: layer % 2 == 0),
    "gemma3_text": Sliding(4096, has_one=_all_but_every(6)),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": replace(GEMMA4, usual=1024),
    "gpt_oss": Sliding(128, has_one=lambda _, layer: layer % 2 == 0),
    "granite_swa": GRANITE,
    "granitemoe_swa": GRANITE,
    "kolibri1": Sliding(513, has_one=lambda _, layer: bool((layer + 1) % 5)),
    "laguna": Sliding(512, has_one=lambda _, __: False),
    "lfm3": Sliding(256, has_one=lambda _, layer: layer > 0 and layer % 4 == 0, others=(CONV,)),
    "llama4_text": Sliding(8192, has_one=_has_rope, kind=CHUNKED),
    "mellum": Sliding(1024, has_one=lambda _, __: False),
    "mimo_v2_flash": Sliding(129, has_one=lambda _, layer: layer > 0 and bool((layer + 1) % 6)),
    "ministral": Sliding(4096, has_one=lambda _, __: True),
    "ministral3": Sliding(),
    "mistral": Sliding(4096),
    "mixtral": Sliding(),
    "muse_glimmer_text": Sliding(2048, has_one=_before_last),
    "olmo3": Sliding(4096, has_one=lambda _, layer: bool((layer + 1) % 4)),
    "phi3": Sliding(),
    "phimoe": Sliding(),
    "qwen2": Sliding(4096, "use_sliding_window", _from_layer(28)),
    "qwen2_5_vl_text": Sliding(4096, "use_sliding_window", _from_layer(80)),
    "qwen2_moe": Sliding(4096, "use_sliding_window", _before_layer),
    "qwen2_vl_text": Sliding(4096, "use_sliding_window", _from_layer(80)),
    "qwen3": Sliding(4096, "use_sliding_window", _from_layer(28)),
    "qwen3_moe": Sliding(4096, "use_sliding_window"),
    "smollm3": Sliding(
        has_one=lambda read, layer: not _has_rope(read, layer) and read.flag("use_sliding_window", False)
    ),
    "starcoder2": Sliding(),
    "step3p5": Sliding(has_one=lambda _, __: False),
    "vaultgemma": Sliding(4096, has_one=lambda _, layer: layer % 2 == 0),
}


def windows_of(read: Reads, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer, how many last positions a token sees there; None: all."""
    slides = SLIDES.get(model_type)
    if slides is None or (slides.switch is not None and not read.flag(slides.switch, False)):
        return (None,) * num_layers
    if (key := KEYS[slides.kind]) in read.config and read.config[key] is None:
        if CHUNKED in read.texts("layer_types"):
            raise read.refusal(key, "a whole number above 0")
        return (None,) * num_layers
    kinds = (slides.kind,) * num_layers if slides.has_one is None else kinds_of(read, model_type, num_layers)
    # Not read where no layer has one: it may be 0 there, as Laguna M.1 has it.
    window = read.size_if_given(key) or slides.usual if slides.kind in kinds else None
    return tuple(window if kind == slides.kind else None for kind in kinds)


def kinds_of(read: Reads, model_type: str, num_layers: int) -> tuple[str, ...]:
    """Of each layer, as layer_types calls it, or would."""
    kinds, slides = read.texts("layer_types"), SLIDES.get(model_type)
    own, others = (SLIDING, ()) if slides is None else (slides.kind, slides.others)
    known = (own, FULL, *others)
    if len(kinds) not in (0, num_layers) or set(kinds) - {*known}:
        right = f"{' or '.join(known)} for each of {num_layers} layers, not for {len(kinds)}"
        raise read.refusal("layer_types", right)
    if not kinds:
        has_one = None if slides is None else slides.has_one
        has = [has_one is not None and has_one(read, layer) for layer in range(num_layers)]
        kinds = tuple(own if one else FULL for one in has)
    if slides is not None and slides.last_sees_all:
        return *kinds[:-1], FULL
    return kinds
