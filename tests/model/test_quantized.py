"""Weights of 8 and 4 bits: what is computed with them, what a slice of them is, and what they take."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.checkpoints import tiny
from tests.slow import slowly
from tests.worlds import serve, topology
from tpspec.comm.communicator import OneRank
from tpspec.comm.threads import ThreadWorld
from tpspec.model.batch import Span
from tpspec.model.experts import Mixture, Shared
from tpspec.model.latent import LatentQkv
from tpspec.model.layers import ConvLayer, Layer, LinearLayer
from tpspec.model.linear import Capped, Chained, Stacked
from tpspec.model.loader import Loader, load_whole
from tpspec.model.norm import Norm
from tpspec.model.products import CompiledLinear, TiledLinear, compiled_products
from tpspec.model.quantized import DequantizedLinear, Rounded, quantize
from tpspec.model.short_values import Filled
from tpspec.published import checkpoint
from tpspec.published.checkpoint import find
from tpspec.published.groups import TILE, grid_of
from tpspec.published.shape import ModelShape, shape_of
from tpspec.request import Request, Sampling
from tpspec.topology.shards import split
from tpspec.topology.sizes import weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpspec.model.quantized import Matrix
    from tpspec.published.groups import Bits

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", ["int8", "int4"])
BITS = st.sampled_from([8, 4])
EPS = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # of the largest result


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def slices(draw: st.DrawFn) -> tuple[int, range]:
    """The inputs of a whole matrix, and those that a shard holds."""
    size = draw(st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 576, 1536])))
    start = draw(st.integers(0, size - 1))
    return size, range(start, draw(st.integers(start + 1, size)))


def compiled(matrix: Matrix, bias: torch.Tensor | None) -> CompiledLinear:
    if (loaded := compiled_products()) is None:
        pytest.skip("the compiled products were not built here")
    return CompiledLinear(loaded, matrix, bias)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("damage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("make", [DequantizedLinear, compiled])
def test_a_weight_that_is_no_number_stays_none(bits: Bits, damage: float, make: Callable[..., Any]) -> None:
    """Stands against a spoilt checkpoint whose texts look plausible: codes know no NaN, and a scale of 1 hides it."""
    weight, x = noise(8, 256), noise(1, 256, seed=1)
    weight[3, 200] = damage
    out = make(Rounded(weight, bits, grid_of(range(256), 256)[0]), None)(x)
    assert (~out.isfinite()).nonzero().tolist() == [[0, 3]]


@settings(deadline=None)
@given(
    bits=BITS, num_outputs=st.integers(1, 70), num_inputs=st.integers(1, 200), scale=st.sampled_from([1e-3, 1.0, 50.0])
)
def test_a_weight_is_off_by_at_most_half_a_step(bits: Any, num_outputs: int, num_inputs: int, scale: float) -> None:
    """Stands against a zero point off by one, codes that are cut off, and equal weights, whose steps are nothing."""
    weight = noise(num_outputs, num_inputs) * scale
    weight[0] = scale
    grid, _ = grid_of(range(num_inputs), num_inputs)
    made = quantize(weight, bits, grid.group)
    off = (made.weights()[:, :num_inputs] - weight).abs()
    steps = made.scales_OG.float().repeat_interleave(grid.group, 1)[:, :num_inputs]
    rounding = 2**-8 * weight.abs().max()  # of scales and zeros to bfloat16
    assert (off <= 0.5 * steps + rounding).all()
    assert off[0].max() <= 2**-8 * scale


@settings(deadline=None, max_examples=60)
@given(
    bits=BITS,
    cut=slices(),
    num_outputs=st.integers(1, 70),
    num_rows=st.integers(1, 30),
    dtype=st.sampled_from(list(EPS)),
    biased=st.booleans(),
)
def test_the_compiled_product_is_the_dequantized_one(
    bits: Any, cut: tuple[int, range], num_outputs: int, num_rows: int, dtype: torch.dtype, biased: bool
) -> None:
    """Stands against a tile, a group or a chunk of rows that ends elsewhere in C than in torch; and a row whose bits
    depend on the rows beside it."""
    size, columns = cut
    grid, read = grid_of(columns, size)
    weight = noise(num_outputs, size)[:, read.start : read.stop].to(dtype)
    bias = noise(num_outputs, seed=1).to(dtype) if biased else None
    x = noise(num_rows, len(columns), seed=2).to(dtype)
    matrix = Rounded(weight, bits, grid)
    product = compiled(matrix, bias)
    y, expected = product(x), DequantizedLinear(matrix, bias)(x)
    assert y.dtype == dtype
    assert (y - expected).abs().max() <= EPS[dtype] * expected.abs().max() + 1e-5
    assert torch.equal(y, torch.cat([product(row[None]) for row in x]))


@settings(deadline=None, max_examples=60)
@given(bits=BITS, size=st.integers(3, 300), data=st.data())
def test_slices_of_a_quantized_matrix_sum_to_the_whole(bits: Any, size: int, data: st.DataObject) -> None:
    """Stands against scales that a shard takes from its own columns only: texts would depend on the number of ranks."""
    cuts = sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=4)))
    weight, x = noise(20, size), noise(3, size, seed=1)
    (grid, _), total = grid_of(range(size), size), torch.zeros(3, 20)
    for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
        part, read = grid_of(range(start, stop), size)
        total += DequantizedLinear(Rounded(weight[:, read.start : read.stop], bits, part), None)(x[:, start:stop])
    whole = DequantizedLinear(Rounded(weight, bits, grid), None)(x)
    assert (total - whole).abs().max() < 1e-5 * whole.abs().max() + 1e-5


@pytest.fixture(
    scope="module",
    params=[
        "smollm2",
        "seed_oss",
        "arcee",
        "axk1",
        "gpt_oss",
        "glm4_moe_lite",
        "cohere2_moe",
        "falcon_h1",
        "flint",
        "granite_hybrid",
        "hunyuan_moe",
        "kimi_linear",
        "llama4",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mimo",
        "muse_glimmer",
        "olmo_hybrid",
        "phi",
        "sarvam_moe",
        "starcoder2",
        "step3p5",
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {} if request.param in ("axk1", "mimo") else {"head_dim": 16}
    return tiny(request.param, tmp_path_factory.mktemp("tiny"), **sizes)


@KINDS
def test_sharded_logits_equal_those_of_one_rank(folder: Path, kind: Any) -> None:
    """Stands against a slice that rounds its weights otherwise than the whole, and a bias quantized or added twice:
    what is left is the order of sums."""
    shape = ModelShape.from_config(checkpoint.read_config(folder), str(folder))
    ids = tuple(range(3, 33))
    span = Span(0, 0, ids, ((0, len(ids)),), len(ids))
    shards = split(shape, (3, 1, 2))

    def rank(comm: Any) -> torch.Tensor:
        return Loader.open(folder, shards[comm.rank], torch.float32, CPU, kind).decoder(comm, 64).forward([span])

    sharded = torch.cat(ThreadWorld(3).run(rank), -1)
    whole, plain = (load_whole(folder, shape, torch.float32, CPU, 64, each).forward([span]) for each in (kind, None))
    assert (sharded - whole).abs().max() < 1e-4
    assert (whole - plain).abs().max() > 1e-3, "nothing was quantized"


@pytest.mark.parametrize(("kind", "num_ranks"), [("int4", 3), *slowly(("int8", 2))])
def test_texts_depend_on_neither_drafts_nor_ranks(folder: Path, kind: str, num_ranks: int) -> None:
    """The law, with small weights in float32: draft and target each quantized their own way."""
    asks = [Request(i, (5, 6, 7, 8) * 3 + (i,), 24, Sampling(temperature=0.8 * i, seed=i)) for i in range(3)]
    target = {"quantize": kind}
    plain = serve(topology(folder, target=target), asks).texts()
    draft = {"source": "model", "model": str(folder), "quantize": "int4", "tokens": 3}
    told = serve(topology(folder, num_ranks, target=target, draft=draft), asks)
    assert told.texts() == plain
    assert told.stats[-1].accepted > 0


def held(part: Any) -> int:
    """Bytes of the tensors of a norm or a product. A plan is of cards: what fills a bfloat16 matrix up to whole pairs
    and tiles, on a CPU, is not counted, and is less than a tile."""
    fields = [getattr(part, name) for name in getattr(part, "__slots__", None) or vars(part)]
    fields += getattr(part, "kept", ())
    size = sum(one.numel() * one.element_size() for one in fields if isinstance(one, torch.Tensor))
    if not isinstance(part, TiledLinear):
        return size
    num_outputs, num_inputs = part._weight.num_outputs, part._weight.num_inputs
    filling = 2 * (-(-num_outputs // TILE) * TILE * (num_inputs + num_inputs % 2) - num_outputs * num_inputs)
    assert filling < 2 * (TILE * (num_inputs + 1) + num_outputs)
    return size - filling


def parts_of(decoder: Any) -> list[Any]:
    """The norms and products of a decoder, the routers of mixtures, what gates an MLP beside one, and the layers, for
    their sinks. Norms without a weight are not planned."""
    parts = [decoder.norm, decoder.head._product if isinstance(decoder.head, Capped) else decoder.head]
    for layer in decoder.layers:
        norms = ("attention_norm", "q_norm", "k_norm", "joint_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
        own = {id(norm): norm for name in norms if (norm := getattr(layer, name, None)) is not None}.values()
        parts += [norm for norm in own if not (isinstance(norm, Norm) and bool((norm.weight == 1).all()))]
        if isinstance(layer, Layer):
            parts += [layer, *_around(layer.qkv, layer.o)]
            parts += [] if layer.beside is None else _mixing(layer.beside.mixer)
            if layer.gate is not None:
                parts.append(layer.gate.product)
            if layer.indexer is not None:
                parts += [layer.indexer, layer.indexer.queries, layer.indexer.norm]
            if layer.joint_norm is not None and layer.joint_norm.others is not None:
                parts.append(layer.joint_norm.others.product)
        if isinstance(layer, LinearLayer):
            parts += _mixing(layer.mixer)
        if isinstance(layer, ConvLayer):
            conv = layer.mixer
            parts += [SimpleNamespace(kernel=conv.kernel, biases=conv.biases_M), conv.made, conv.out]
        mlps = [layer.mlp.mixture, layer.mlp.shared] if isinstance(layer.mlp, Shared) else [layer.mlp]
        parts += [layer.mlp] if isinstance(layer.mlp, Shared) else []
        mixtures = [mlp for mlp in mlps if isinstance(mlp, Mixture)]
        experts = [expert for mixture in mixtures for expert in mixture.experts]
        parts += [part for mixture in mixtures for part in (mixture.router, *(mixture._around or ()))]
        parts += [part for mlp in mlps + experts if mlp and mlp not in mixtures for part in (mlp.gate_up, mlp.down)]
    return parts


def _mixing(mixer: Any) -> list[Any]:
    tensors = {field.name: getattr(mixer, field.name) for field in fields(mixer) if field.name != "key_of"}
    products = [one for part in (mixer.mixed, mixer.rates, mixer.gate) for one in _single(part)]
    norms = [] if mixer.norm is None else [mixer.norm]
    return [SimpleNamespace(**tensors), *products, mixer.out, *norms]


def _single(product: Any) -> list[Any]:
    """Those that a product is made of."""
    if isinstance(product, Stacked):
        return [one for each in product._products for one in _single(each)]
    return [product._first, product._second] if isinstance(product, Chained) else [product]


def _around(qkv: Any, o: Any) -> list[Any]:
    if isinstance(qkv, Filled):
        return [qkv.made, o.out]
    if not isinstance(qkv, LatentQkv):
        return [qkv, o]
    reduced = [] if qkv.reduced is None else [qkv.reduced.norm, qkv.reduced.queries]
    return [qkv, qkv.down, qkv.norm, *reduced, o, o.out]


@KINDS
def test_a_shard_takes_what_the_plan_says(folder: Path, kind: Any) -> None:
    """Stands against a plan that forgets scales, groups that reach into a neighbour's columns, or tiles that are
    filled up: it would promise a card that is too small."""
    shape = ModelShape.from_config(checkpoint.read_config(folder), str(folder))
    for shard in split(shape, (3, 1, 2)):
        decoder = Loader.open(folder, shard, torch.bfloat16, CPU, kind).decoder(OneRank(), 8)
        assert sum(map(held, parts_of(decoder))) == weight_bytes(shape, shard, "bfloat16", kind)


LOAD = """
import sys
from pathlib import Path
import torch
from tpspec.comm.communicator import OneRank
from tpspec.model.spec import read_spec
from tpspec.model.loader import Loader
from tpspec.model.quantized import quantize
from tpspec.published.shape import shape_of
from tpspec.topology.shards import split

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

read_spec(Path(sys.argv[1]))
quantize(torch.ones(32, 32), 4, 32)
before = peak()
shard = split(shape_of("smollm2-135m"), (1, 1))[0]
loader = Loader.open(Path(sys.argv[1]), shard, torch.bfloat16, torch.device("cpu"), sys.argv[2])
decoder = loader.decoder(OneRank(), 256)
print(peak() - before)
"""


@pytest.mark.real
@pytest.mark.parametrize("kind", ["int4", *slowly("int8")])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_a_rank_peaks_at_its_small_weights_and_one_slice(kind: str) -> None:
    """Stands against a matrix that is widened to float32 in one piece, and plain weights kept beside the small ones."""
    shape = shape_of("smollm2-135m")
    shard = split(shape, (1, 1))[0]
    own = weight_bytes(shape, shard, "bfloat16", kind) + 2 * 30 * len(shard.kv_heads) * 64 * 2 * 256
    largest_slice, floor = len(shard.vocab) * shape.hidden * 2, 40 * 2**20
    run = subprocess.run([sys.executable, "-c", LOAD, str(find("smollm2-135m")), kind], capture_output=True, text=True,
                         check=True, timeout=120)  # fmt: skip
    assert json.loads(run.stdout) < own + largest_slice + floor
