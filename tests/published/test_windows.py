"""Which layers have a window is read from a config.json as transformers reads it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import AKIN, BASE, KINDS, LIKE, WITHIN
from tpspec.errors import UserError
from tpspec.model.spec import read_spec
from tpspec.published.delta_net import DELTA_NETS
from tpspec.published.model_types import MODEL_TYPES
from tpspec.published.reads import Reads
from tpspec.published.shape import ModelShape, shape_of
from tpspec.published.short_conv import KERNELS
from tpspec.published.windows import SLIDES, Sliding, windows_of
from tpspec.topology.caches import kv_bytes, recent_of
from tpspec.topology.config import CacheConfig, EngineConfig, ServeConfig
from tpspec.topology.shards import split

LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sliding_window": None},
    {"sliding_window": 32},
    {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 32, "use_sliding_window": True, "layer_types": LAYER_TYPES},
    {"use_sliding_window": True, "max_window_layers": 0},
    {"sliding_window": 32, "sliding_window_pattern": 3},
]
BEHIND_DENSE: list[dict[str, Any]] = [
    {"sliding_window": 32, "first_k_dense_replace": 2},
    {"sliding_window": 32, "first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2},
]
CASES = [*product(sorted(MODEL_TYPES), OPTIONS), *product(["cohere2_moe"], BEHIND_DENSE)]
OF_TYPE = {fields["model_type"]: BASE | fields for fields in (KINDS | AKIN | WITHIN).values()}
OF_TYPE |= {kind: BASE | KINDS[like] | {"model_type": kind} for kind, like in LIKE.items()}
LEFT_OUT = ("attention_chunk_size", "layer_rope_theta", "layer_types", "linear_attn_config", "mlp_layer_types",
            "num_kv_shared_layers", "sliding_window", "sliding_window_pattern", "swiglu_limits",
            "swiglu_limits_shared")  # fmt: skip


@pytest.mark.parametrize(("model_type", "options"), CASES, ids=str)
def test_windows_are_those_of_transformers(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Stands against a default of ours that is another's, by which pages would be dropped that rows still see."""
    fields = {key: value for key, value in OF_TYPE[model_type].items() if key not in LEFT_OUT}
    fields |= {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]} | options
    if model_type == "llama4_text":  # which has chunks instead
        said = json.dumps(fields).replace("sliding_window", "attention_chunk_size")
        fields = json.loads(said.replace("sliding_attention", "chunked_attention"))
    if model_type in DELTA_NETS or model_type in KERNELS:
        fields.pop("layer_types", None)  # which say no window there
    if model_type in ("granitemoehybrid", "kimi_linear"):  # and have to be said
        fields["layer_types"] = ["linear_attention", "full_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(fields))
    windows = windows_of(Reads(fields, "here"), model_type, 4)
    try:
        spec = read_spec(tmp_path)
    except UserError as error:
        if not options or "not a configuration transformers can read" not in str(error):
            raise
        pytest.skip("transformers refuses it")
    assert list(windows) == [layer.window for layer in spec.layers]
    shape = ModelShape.of(tmp_path)
    assert shape.num_windowed == sum(window is not None for window in windows)
    assert shape.window == max((window for window in windows if window is not None), default=None)


def test_windows_that_are_read_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against another transformers, whose defaults have changed: pages would be dropped that rows still see."""
    (tmp_path / "config.json").write_text(json.dumps(OF_TYPE["gpt_oss"]))
    monkeypatch.setitem(SLIDES, "gpt_oss", Sliding(128, has_one=lambda _, layer: layer % 3 == 0))
    with pytest.raises(UserError, match="num_windowed 1 is not what this version of transformers reads, 2;"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("model", "window", "num_windowed"),
    [
        ("google/gemma-2-27b-it", 4096, 23),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 8192, 36),
        ("meta-models/Muse-Glimmer-30B", 2048, 39),
        ("google/gemma-3-1b-it", 512, 22),
        ("google/gemma-3-27b-it", 1024, 52),
        ("openai/gpt-oss-120b", 128, 18),
        ("stepfun-ai/Step-3.5-Flash", 512, 33),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", None, 0),
        ("Qwen/Qwen3-30B-A3B", None, 0),
    ],
)
def test_well_known_models_have_the_windows_that_are_published(
    model: str, window: int | None, num_windowed: int
) -> None:
    shape = shape_of(model)
    assert (shape.window, shape.num_windowed) == (window, num_windowed)


def test_gemma_keeps_what_the_readmes_say() -> None:
    """Of 32,768 tokens 9.3 GiB, and 4.3 for four requests, where all layers would keep 15.5."""
    shape = shape_of("google/gemma-3-27b-it")
    (whole,) = split(shape, (1.0,))
    serves = (ServeConfig(), ServeConfig(max_running=4))
    recents = [recent_of(shape, CacheConfig(tokens=32768), serve, EngineConfig()) for serve in serves]
    gib = [kv_bytes(shape, whole, "bfloat16", 32768, num_recent) / 2**30 for num_recent in (0, *recents)]
    assert [round(size, 1) for size in gib] == [15.5, 9.3, 4.3]
