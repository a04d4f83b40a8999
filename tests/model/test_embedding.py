"""Embeddings are the table's rows, in the model's dtype, scaled as it rounds."""

from __future__ import annotations

import pytest
import torch

from tpspec.model.embedding import Embedding

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
    embedding.put(TOKENS, room)
    assert torch.equal(room[:24].view(4, 6), wanted_TD)
    assert (room[24:] == 7).all()
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
