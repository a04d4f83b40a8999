"""What a row computes does not depend on the rows beside it: `deterministic` decoders give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny
from tpspec.comm.communicator import OneRank
from tpspec.model.batch import Span
from tpspec.model.decoder import Decoder
from tpspec.model.linear import PackedLinear, PlainLinear, can_pack
from tpspec.model.loader import Loader
from tpspec.topology import checkpoint
from tpspec.topology.shape import ModelShape
from tpspec.topology.shards import split

CPU = torch.device("cpu")
FIXED_ROWS = 12
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Decoder]:
    folder = tiny("smollm2", tmp_path_factory.mktemp("tiny"))
    return lambda: decoder(folder, request.param)


def decoder(folder: Path, dtype: torch.dtype) -> Decoder:
    shape = ModelShape.from_config(checkpoint.read_config(folder), str(folder))
    (whole,) = split(shape, (1.0,))
    return Loader.open(folder, whole, dtype, CPU).decoder(OneRank(), 512, fixed_rows=FIXED_ROWS)


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 263, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def one_by_one(make: Callable[[], Decoder], ids: tuple[int, ...]) -> torch.Tensor:
    """Logits of every position, each row alone in its round."""
    model = make()
    rows = [model.forward([Span(0, at, (token,), ((0, at + 1),), 1)]) for at, token in enumerate(ids)]
    return torch.cat(rows)


@pytest.mark.parametrize("size", [2, 5, 12])
def test_a_row_has_the_same_bits_in_a_chunk_as_alone(make: Callable[[], Decoder], size: int) -> None:
    """Stands against kernels chosen by the row count: bfloat16 texts then change with the draft length."""
    ids = text(0, 150)
    model, rows = make(), []
    for start in range(0, len(ids), size):
        stop = min(start + size, len(ids))
        rows.append(model.forward([Span(0, start, ids[start:stop], ((0, stop),), stop - start)]))
    assert torch.equal(torch.cat(rows), one_by_one(make, ids))


def test_a_row_has_the_same_bits_beside_other_sequences(make: Callable[[], Decoder]) -> None:
    """Stands against a batch mate, a place in the batch or scattered pages that change the order of a sum."""
    ids, other = text(1, 60), text(2, 120)
    model, rows = make(), []
    for at, token in enumerate(ids):
        mate = Span(1, 4 * (at % 30), other[4 * (at % 30) :][:4], ((256, 4 * (at % 30) + 4),), 4)
        pieces = ((32, min(at + 1, 16)), (96, at + 1 - 16))[: 1 + (at >= 16)]
        mine = Span(0, at, (token,), pieces, 1)
        spans = [mine, mate] if at % 2 else [mate, mine]
        rows.append(model.forward(spans)[0 if at % 2 else -1])
    assert torch.equal(torch.stack(rows), one_by_one(make, ids))


def test_a_row_of_a_tree_has_the_bits_of_its_own_path(make: Callable[[], Decoder]) -> None:
    """Stands against siblings' keys between a row and its ancestors: their places differ from those of a chain, and
    only the sum's order may not. Exact equality does not hold for a tree; near equality must."""
    ids = text(3, 40)
    model = make()
    model.forward([Span(0, 0, ids[:8], ((0, 8),), 0)])
    tree = Span(0, 8, (ids[8], 7, ids[9], 9, ids[10]), ((0, 13),), 5, (-1, 0, 0, 1, 2))
    logits = model.forward([tree])[[0, 2, 4]].float()
    assert (logits - one_by_one(make, ids[:11])[8:].float()).abs().max() < 0.25


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_packed_product_is_the_plain_one(dtype: torch.dtype) -> None:
    """The plain product is the reference; they differ by rounding only."""
    assert can_pack(CPU, dtype), "this machine's torch has no packed product; nothing here is measured"
    noise = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(70, 96, generator=noise).to(dtype), torch.randn(70, generator=noise).to(dtype)
    x = torch.randn(9, 96, generator=noise).to(dtype)
    packed, plain = PackedLinear(weight, bias)(x).float(), PlainLinear(weight, bias)(x).float()
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    assert torch.allclose(packed, plain, rtol=tolerance, atol=tolerance * plain.abs().max().item())
