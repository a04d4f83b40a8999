"""Embeddings are the table's rows, in the model's dtype, scaled as it rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import tiny
from tpspec.model.batch import Span
from tpspec.model.embedding import Embedding
from tpspec.model.loader import load_whole
from tpspec.published.shape import ModelShape
from tpspec.staged import WORDS

TABLE_VD = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
TOKENS = [3, 0, 10, 3]


@pytest.mark.parametrize("scale", [None, 11.3125])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_are_those_of_the_table(stored: torch.dtype, dtype: torch.dtype, scale: float | None) -> None:
    """Also where they are put into memory that holds something else behind them. Stands against bits of one dtype that
    are read as another's."""
    table_VD = TABLE_VD.to(stored)
    embedding = Embedding(table_VD, dtype, scale)
    wanted_TD = table_VD[TOKENS].to(dtype) * (1 if scale is None else scale)
    assert torch.equal(embedding.rows(TOKENS), wanted_TD)
    room = torch.full((40,), 7.0, dtype=dtype)
    embedding.put(TOKENS, room.view(WORDS[dtype.itemsize]).numpy())
    assert torch.equal(room[:24].view(4, 6), wanted_TD)
    assert (room[24:] == 7).all()
    embedding.put(TOKENS[2:3], room.view(WORDS[dtype.itemsize]).numpy())
    assert torch.equal(room[:24].view(4, 6), wanted_TD[[2, 1, 2, 3]])
    assert embedding.rows([]).shape == (0, 6)


def test_rows_are_nobody_elses_memory() -> None:
    """What runs on them may overwrite them. Stands against a view of the table."""
    embedding = Embedding(TABLE_VD.clone(), torch.float32)
    embedding.rows([2]).zero_()
    assert torch.equal(embedding.rows([2]), TABLE_VD[[2]])


@pytest.mark.parametrize("token", [-1, 11])
def test_a_token_that_is_none_is_refused(token: int) -> None:
    """Stands against the last row in place of none."""
    with pytest.raises(IndexError):
        Embedding(TABLE_VD, torch.float32).rows([5, token])
    with pytest.raises(IndexError):
        Embedding(TABLE_VD, torch.float32).put([5, token], np.zeros(12, np.int32))


@pytest.mark.parametrize("is_same", [True, False])
def test_a_head_that_is_there_and_differs_is_the_head_whatever_the_config_says(
    is_same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers reads it. Stands against logits of the wrong matrix, in silence, where a head was trained and the
    config was not told."""
    folder, ids = tiny("smollm2", tmp_path, tie_word_embeddings=True), [5, 6, 7, 9]
    file = folder / "model.safetensors"
    weights = load_file(file)
    table_VD = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = table_VD.clone() if is_same else table_VD.roll(1, 0)
    save_file(weights, file, {"format": "pt"})
    shape = ModelShape.of(folder)
    logits_V = load_whole(folder, shape, torch.float32, torch.device("cpu"), 16).forward(
        [Span(0, 0, tuple(ids), ((0, len(ids)),), 1)]
    )[0]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected_V = model(torch.tensor([ids])).logits[0, -1]
    assert torch.allclose(logits_V[: shape.vocab], expected_V, atol=1e-4)
    assert bool(caplog.records) == (not is_same)
    assert is_same or "should be tie_word_embeddings: false" in caplog.text
