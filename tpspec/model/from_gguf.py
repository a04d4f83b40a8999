"""One GGUF file of a Llama with a GPT-2 style tokenizer -> an ordinary Hugging Face folder in bfloat16.

Reads data only: nothing in the file is run. Refuses what it has not been checked against, instead of guessing.
Must not know where the file came from, nor anything of ranks, shards or devices.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tpspec.errors import UserError

Floats = npt.NDArray[np.float32]
Field = TypeVar("Field")

OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Header:
    """The key-value part of a GGUF file, read with types."""

    def __init__(self, reader: Any, path: Path) -> None:
        self._fields, self._path = reader.fields, path

    def read(self, kind: type[Field], key: str) -> Field:
        """The value of `key`; UserError when it is absent or of another type."""
        value = self._fields[key].contents() if key in self._fields else None
        if not isinstance(value, kind):
            raise UserError(f"{self._path}: {key} is {value!r}, expected a value of type {kind.__name__}")
        return value

    def require(self, key: str, *known: str) -> None:
        if (value := self.read(str, key)) not in known:
            raise UserError(f"{self._path}: {key} is {value!r}; only {' and '.join(known)} can be converted")


def convert(source: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Write `folder` (which exists) from the GGUF file `source`. progress(done, total) counts tensors.

    Holds the model once in bfloat16, and one tensor in float32 at a time.
    """
    reader = gguf.GGUFReader(str(source))
    header = Header(reader, source)
    header.require("general.architecture", "llama")
    header.require("tokenizer.ggml.model", "gpt2")
    header.require("tokenizer.ggml.pre", "smollm")
    weights = dict(_weights(reader, header, progress))
    _write_json(folder / "config.json", _config(header, tied="lm_head.weight" not in weights))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes files that only their owner may read; a cache may be shared.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    _write_json(folder / "generation_config.json", _special_ids(header))
    _tokenizer(header).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(header))


def _weights(reader: Any, header: Header, progress: Callable[[int, int], None]) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {
        "attn_q": header.read(int, "llama.attention.head_count"),
        "attn_k": header.read(int, "llama.attention.head_count_kv"),
    }
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        # The file is mapped read-only, and torch wants memory it may write: copy where nothing else has copied yet.
        yield _name(tensor.name), torch.from_numpy(np.require(weight, np.float32, ["C", "W"])).to(torch.bfloat16)
        progress(done, len(reader.tensors))


def _name(stored: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if stored == "output.weight":
        return "lm_head.weight"
    if stored in OUTSIDE:
        return OUTSIDE[stored]
    match stored.split("."):
        case ["blk", layer, kind, "weight"] if kind in INSIDE:
            return f"model.layers.{layer}.{INSIDE[kind]}.weight"
    raise UserError(f"the GGUF file holds a tensor {stored!r} that a Llama does not have")


def unpermute(weight: Floats, num_heads: int) -> Floats:
    """Rows of q or k from GGUF's order to Hugging Face's.

    GGUF keeps the two rows that rope rotates together side by side; Hugging Face has all first ones of a head, then all
    second ones (llama.cpp, convert_hf_to_gguf.py, does the reverse).
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _special_ids(header: Header) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: header.read(int, f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}


def _config(header: Header, *, tied: bool) -> dict[str, object]:
    # Stored as float32, where 1e-5 reads 9.9999997e-06: six digits give back what the author wrote.
    epsilon = float(f"{header.read(float, 'llama.attention.layer_norm_rms_epsilon'):.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(header.read(list, "tokenizer.ggml.tokens")),
        "hidden_size": header.read(int, "llama.embedding_length"),
        "intermediate_size": header.read(int, "llama.feed_forward_length"),
        "num_hidden_layers": header.read(int, "llama.block_count"),
        "num_attention_heads": header.read(int, "llama.attention.head_count"),
        "num_key_value_heads": header.read(int, "llama.attention.head_count_kv"),
        "head_dim": header.read(int, "llama.rope.dimension_count"),
        "max_position_embeddings": header.read(int, "llama.context_length"),
        "rope_theta": header.read(float, "llama.rope.freq_base"),
        "rms_norm_eps": epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **_special_ids(header),
    }


def _tokenizer(header: Header) -> Tokenizer:
    tokens = header.read(list, "tokenizer.ggml.tokens")
    kinds = header.read(list, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in header.read(list, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What GGUF calls `smollm`. Readers that know only "byte level" lose the digits, and 2026 becomes other tokens than
    # the ones the model was trained on.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _tokenizer_config(header: Header) -> dict[str, object]:
    tokens = header.read(list, "tokenizer.ggml.tokens")
    ids = _special_ids(header) | {"unk_token_id": header.read(int, "tokenizer.ggml.unknown_token_id")}
    return {
        # Any narrower class is rebuilt by transformers from vocabulary and merges alone, without the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header.read(int, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": header.read(str, "tokenizer.chat_template"),
        **{name.removesuffix("_id"): tokens[index] for name, index in ids.items()},
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
