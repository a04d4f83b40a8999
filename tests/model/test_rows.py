"""What a row computes does not depend on the rows beside it: `deterministic` decoders give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from tests.checkpoints import tiny
from tpspec.comm.communicator import OneRank
from tpspec.model.batch import Carried, Span
from tpspec.model.compiled import compiled_rows
from tpspec.model.curves import gelu, sigmoid, silu, softplus
from tpspec.model.decoder import Decoder
from tpspec.model.linear import PackedLinear, PlainLinear, can_pack, linear
from tpspec.model.loader import Loader
from tpspec.model.products import TiledLinear, compiled_products
from tpspec.published import checkpoint
from tpspec.published.shape import ModelShape
from tpspec.topology.shards import split

CPU = torch.device("cpu")
FIXED_ROWS = 12
DTYPES = (torch.bfloat16, torch.float32)


Make = Callable[[], Decoder]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest) -> bool:
    if request.param and compiled_rows() is None:
        pytest.skip("the compiled steps were not built here")
    return request.param


@pytest.fixture(scope="module")
def make(dtype: torch.dtype, compiled: bool, tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tiny("smollm2", tmp_path_factory.mktemp("tiny"), head_dim=16)
    (whole,) = split(ModelShape.from_config(checkpoint.read_config(folder), str(folder)), (1.0,))
    loader = Loader.open(folder, whole, dtype, CPU)
    return lambda: loader.decoder(OneRank(), 512, fixed_rows=FIXED_ROWS, compiled=compiled)


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 263, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def one_by_one(make: Make, ids: tuple[int, ...]) -> torch.Tensor:
    """Logits of every position, each row alone in its round."""
    model = make()
    rows = [model.forward([Span(0, at, (token,), ((0, at + 1),), 1)]) for at, token in enumerate(ids)]
    return torch.cat(rows)


@pytest.mark.parametrize("size", [2, 5, 12])
def test_a_row_has_the_same_bits_in_a_chunk_as_alone(make: Make, size: int) -> None:
    """Stands against kernels chosen by the row count: bfloat16 texts then change with the draft length."""
    ids = text(0, 150)
    model, rows = make(), []
    for start in range(0, len(ids), size):
        stop = min(start + size, len(ids))
        rows.append(model.forward([Span(0, start, ids[start:stop], ((0, stop),), stop - start)]))
    assert torch.equal(torch.cat(rows), one_by_one(make, ids))


@pytest.mark.parametrize("kind", ["minimax_m2", "qwen3_moe", "step3p5"])
def test_a_row_that_is_sent_to_experts_has_the_same_bits_in_a_chunk_as_alone(kind: str, tmp_path: Path) -> None:
    """Of seven, whose sigmoids are no whole vectors: at the end of a tensor torch makes other bits of them."""
    folder, ids = tiny(kind, tmp_path), text(0, 60)
    (whole,) = split(ModelShape.of(folder), (1.0,))
    loader = Loader.open(folder, whole, torch.float32, CPU)

    def make() -> Decoder:
        return loader.decoder(OneRank(), 512, fixed_rows=FIXED_ROWS)

    model = make()
    chunks = [model.forward([Span(0, at, ids[at : at + 12], ((0, at + 12),), 12)]) for at in range(0, 60, 12)]
    assert torch.equal(torch.cat(chunks), one_by_one(make, ids))


def test_a_row_has_the_same_bits_beside_other_sequences(make: Make) -> None:
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


def test_a_row_of_a_tree_has_the_bits_of_its_own_path(make: Make) -> None:
    """Stands against siblings' keys between a row and its ancestors, which split its sums elsewhere."""
    ids = text(3, 40)
    model = make()
    model.forward([Span(0, 0, ids[:8], ((0, 8),), 0)])
    tree = Span(0, 8, (ids[8], 7, ids[9], 9, ids[10]), ((0, 13),), 5, (-1, 0, 0, 1, 2))
    assert torch.equal(model.forward([tree])[[0, 2, 4]], one_by_one(make, ids[:11])[8:])


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss", "llama4", "deepseek_v3", "falcon_h1"])
@pytest.mark.parametrize("ways", [True, False], ids=["compiled", "torch"])
def test_a_row_has_the_bits_of_its_own_path_whatever_it_sees(kind: str, ways: bool, tmp_path: Path) -> None:
    """Windows, chunks, sinks and latents; over an end of a block of keys. Stands against keys that begin elsewhere for
    a row of a tree, or of a chunk, than for the row alone."""
    folder, ids = tiny(kind, tmp_path), text(3, 65)
    (whole,) = split(ModelShape.of(folder), (1.0,))
    loader = Loader.open(folder, whole, torch.float32, CPU)

    def forward(model: Decoder, start: int, tokens: tuple[int, ...], parents: tuple[int, ...] | None) -> torch.Tensor:
        carried = Carried(0, (0,) if start else (), 1) if model.states is not None else None
        runs = ((0, start + len(tokens)),)
        return model.forward([Span(0, start, tokens, runs, len(tokens), parents, carried=carried)])

    def make() -> Decoder:
        return loader.decoder(OneRank(), 512, fixed_rows=FIXED_ROWS, compiled=ways, num_states=1)

    model, plain = make(), make()
    alone = torch.cat([forward(plain, at, (token,), None) for at, token in enumerate(ids[:65])])
    for at, token in enumerate(ids[:62]):
        forward(model, at, (token,), None)
    made = forward(model, 62, (ids[62], 7, ids[63], 9, ids[64]), (-1, 0, 0, 1, 2))
    assert torch.equal(made[[0, 2, 4]], alone[62:])


@pytest.mark.parametrize(
    ("kind", "rows", "compiled"),
    [("qwen3_5", 5, True), ("phi", 37, True), ("gpt_oss", 5, False), ("qwen2_moe", 41, True)],
)
def test_a_row_has_the_same_bits_behind_others_as_before_them(
    kind: str, rows: int, compiled: bool, tmp_path: Path
) -> None:
    """In rounds of so many rows, as they do not fill vectors. Stands against gates of attention, of MLPs and of what is
    beside experts that torch computes otherwise at the end of a tensor."""
    folder = tiny(kind, tmp_path)
    (whole,) = split(ModelShape.of(folder), (1.0,))
    loader = Loader.open(folder, whole, torch.float32, CPU)
    model = loader.decoder(OneRank(), 128, fixed_rows=rows, compiled=compiled, num_states=2)

    def span(seq: int, count: int) -> Span:
        return Span(seq, 0, text(seq, count), ((64 * seq, count),), count, carried=Carried(seq, (), count))

    for count in (1, 3):
        alone = model.forward([span(0, count)])
        for num_before in range(1, rows - count + 1):
            assert torch.equal(model.forward([span(1, num_before), span(0, count)])[-count:], alone)


@pytest.mark.parametrize("num_rows", [3, 8, 33])
def test_what_becomes_of_a_number_does_not_depend_on_its_place(num_rows: int) -> None:
    """It is what torch makes of it, but for the last bits, which torch makes others of at the end of a tensor."""
    row = 30 * torch.randn(1, 263, generator=torch.Generator().manual_seed(0))
    by_tanh = partial(F.gelu, approximate="tanh")
    for curve, usual in ((sigmoid, torch.sigmoid), (softplus, F.softplus), (silu, F.silu), (gelu, by_tanh)):
        for dtype in DTYPES:
            made = curve(row.to(dtype))
            assert torch.equal(curve(row.to(dtype).repeat(num_rows, 1)), made.expand(num_rows, -1))
            assert torch.allclose(made, usual(row.to(dtype)), rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6)


@pytest.mark.parametrize("num_outputs", [1, 2, 3, 5])
@pytest.mark.parametrize("num_rows", [5, 8, 13])
def test_a_product_of_few_outputs_adds_every_row_up_alike(num_outputs: int, num_rows: int) -> None:
    """As of a shard whose heads have a gate each. Stands against kernels of torch that take two rows at a time."""
    noise = torch.Generator().manual_seed(0)
    weight, bias, row = (torch.randn(*size, generator=noise) for size in ((num_outputs, 96), (num_outputs,), (1, 96)))
    for biased in (bias, None):
        y = linear(weight, biased)(row.repeat(num_rows, 1))
        assert torch.equal(y, y[:1].expand(num_rows, -1))
        assert torch.allclose(y, F.linear(row, weight, biased), atol=1e-5)


def test_the_packed_product_is_the_plain_one() -> None:
    """The plain product is the reference; they differ by rounding only. float32 is never packed: see HALVES."""
    half = torch.bfloat16
    assert not can_pack(torch.float32)
    if not can_pack(half):
        pytest.skip("oneDNN has no packed product for this CPU")
    noise = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(70, 96, generator=noise).to(half), torch.randn(70, generator=noise).to(half)
    x = torch.randn(9, 96, generator=noise).to(half)
    packed, plain = PackedLinear(weight, bias)(x).float(), PlainLinear(weight, bias)(x).float()
    assert torch.allclose(packed, plain, rtol=2**-7, atol=2**-7 * plain.abs().max().item())


@settings(deadline=None, max_examples=60)
@given(
    num_outputs=st.integers(1, 70),
    num_inputs=st.one_of(st.integers(1, 200), st.sampled_from([576, 1536])),
    num_rows=st.integers(0, 40),
    biased=st.booleans(),
)
def test_a_product_in_tiles_is_the_plain_one_whatever_rows_are_beside(
    num_outputs: int, num_inputs: int, num_rows: int, biased: bool
) -> None:
    """Stands against an odd last input, a tile that is not full, a chunk of rows that ends elsewhere than its results,
    and a row of NaNs that spoils another."""
    if (loaded := compiled_products()) is None:
        pytest.skip("the compiled products were not built here")
    noise = torch.Generator().manual_seed(num_inputs)
    weight, x = (torch.randn(n, num_inputs, generator=noise).bfloat16() for n in (num_outputs, num_rows))
    bias = torch.randn(num_outputs, generator=noise).bfloat16() if biased else None
    product = TiledLinear(loaded, weight, bias)
    y, exact = product(x), F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * num_inputs).all()
    assert torch.equal(y, torch.cat([product(row[None]) for row in x] or [y]))
    assert torch.equal(y, product(torch.cat([x, torch.full_like(x[:1], torch.nan)]))[:num_rows])
