"""Published quantized checkpoints (GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes): read over uneven shards, against
the weights that their codes stand for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import tiny
from tests.model import published
from tests.model.published import Format, publish, publish_mxfp4
from tests.model.test_quantized import EPS, compiled, held, noise, parts_of
from tests.slow import slowly
from tests.worlds import serve, topology
from tpspec.comm.communicator import OneRank
from tpspec.comm.threads import ThreadWorld
from tpspec.errors import UserError
from tpspec.model.batch import Span
from tpspec.model.linear import Scaled, Scattered, Stacked
from tpspec.model.loader import Loader, load_whole
from tpspec.model.products import compiled_products, multiplies_pairs
from tpspec.model.quantized import TABLES, DequantizedLinear, Quantized, Ready, scales_of
from tpspec.model.stored import StoredMatrices
from tpspec.model.weights import Checkpoint
from tpspec.published.formats import Scheme, Table
from tpspec.published.groups import Grid
from tpspec.published.places import Place, all_of
from tpspec.published.quantizers import stored_as
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.topology.cards import card
from tpspec.topology.config import load
from tpspec.topology.layout import Wish
from tpspec.topology.plan import plan, widths
from tpspec.topology.planned import topology_of
from tpspec.topology.report import describe
from tpspec.topology.shards import split
from tpspec.topology.sizes import weight_bytes

CPU = torch.device("cpu")
FORMATS: dict[str, Format] = {
    "gptq": published.gptq(),
    "gptq of other zero points": published.gptq(sym=False),
    "gptq v2 of other zero points": published.gptq(sym=False, v2=True),
    "gptq in the order of activations": published.gptq(desc_act=True),
    "gptq of a scale for a row": published.gptq(group=-1),
    "gptq of 8 bits": published.gptq(bits=8, sym=False),
    "gptq of 2 bits": published.gptq(bits=2, sym=False),
    "gptq of 3 bits": published.gptq(bits=3),
    "gptq of 3 bits and other zero points": published.gptq(bits=3, sym=False),
    "gptq v2 of 3 bits in the order of activations": published.gptq(bits=3, sym=False, v2=True, desc_act=True),
    "gptq of small groups": published.gptq(group=8, sym=False),
    "gptq with the head": published.gptq(lm_head=True),
    "awq": published.awq(),
    "awq of a scale for a row": published.awq(group=-1),
    "autoround": published.autoround(),
    "autoround of other zero points": published.autoround("auto_round:gptqmodel", sym=False),
    "autoround of 8 bits": published.autoround(bits=8, sym=False),
    "autoround of 2 bits": published.autoround(bits=2),
    "autoround of 3 bits": published.autoround("auto_round:gptqmodel", bits=3, sym=False),
    "autoround as awq": published.autoround("auto_round:auto_awq"),
    "packed": published.pack_quantized(),
    "packed with zero points": published.pack_quantized(sym=False, dtype=torch.float16),
    "packed in the order of activations": published.pack_quantized(actorder="group", group=16),
    "packed of 8 bits": published.pack_quantized(bits=8, group=-1, sym=False),
    "packed of 2 bits": published.pack_quantized(bits=2, sym=False),
    "packed of 3 bits": published.pack_quantized(bits=3, sym=False),
    "packed of 5 bits": published.pack_quantized(bits=5),
    "packed of 6 bits": published.pack_quantized(bits=6, group=-1, sym=False),
    "packed of 7 bits in the order of activations": published.pack_quantized(bits=7, sym=False, actorder="group"),
    "spaced, of 3 bits": published.pack_quantized(bits=3, spaced=True),
    "spaced, of 5 bits": published.pack_quantized(bits=5, sym=False, spaced=True),
    "spaced, of 6 bits": published.pack_quantized(bits=6, sym=False, spaced=True),
    "spaced, of 7 bits": published.pack_quantized(bits=7, group=8, sym=False, spaced=True),
    "int8": published.int_quantized(),
    "int8 with zero points": published.int_quantized(sym=False),
    "float8 for a matrix": published.float_quantized("tensor"),
    "float8 for a row": published.float_quantized("channel"),
    "float8 in blocks": published.float_quantized("block"),
    "fp8": published.fp8(),
    "fp8 in blocks of few columns": published.fp8((16, 24)),
    "fp8 with static scales": published.fp8(None),
    "fp8 of fbgemm": published.fbgemm(),
    "fp8 of modelopt": published.modelopt(),
    "nvfp4": published.nvfp4(),
    "nvfp4 of modelopt": published.nvfp4(by_modelopt=True),
    "packed mxfp4": published.packed_mxfp4(),
    "bitsandbytes nf4": published.bitsandbytes(),
    "bitsandbytes fp4": published.bitsandbytes("fp4", nested=False),
    "llm int8": published.llm_int8(),
}
MIXTURES = (
    "mixtral",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "minimax_m2",
    "nemotron_h",
    "cohere2_moe",
    "kolibri1",
    "mimo",
    "sarvam_moe",
    "llama4",
    "step3p5",
    "lfm2_moe",
)
LIKE_OTHERS = ("glm4_moe", "deepseek_v2", "cohere2_moe", "kolibri1", "sarvam_moe")  # by how experts are stored
OF_EXPERTS = ("gptq of 3 bits", "gptq in the order of activations", "awq", "packed", "fp8", "nvfp4")
IN_PARTS = ("phi3", "glm4", "granite_hybrid", "falcon_h1", "lfm2", "qwen3_5_moe")
RENAMED = ("exaone", "phi", "starcoder2")  # whose matrices have other names than most
WIDER = {"intermediate_size": 104}  # words of 88 do not tell in which of two ways codes of 3 bits lie there
WIDE = {"hidden_size": 192, "head_dim": 32, "intermediate_size": 256}  # of whole blocks of 64
EVERY, STATIC = pytest.mark.parametrize("name", list(FORMATS)), "fp8 with static scales"
SHUFFLED = [name for name in FORMATS if "order" in name]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (quantized folder, plain folder), each written once."""
    kinds = (
        "llama", "qwen2", "qwen3_5_moe", "glm4", "phi3", "granite_hybrid", "falcon_h1", "lfm2", *RENAMED, *MIXTURES
    )  # fmt: skip
    sizes: dict[str, dict[str, int]] = {"llama": WIDER, "wide": WIDE}
    plain = {
        kind: tiny("llama" if kind == "wide" else kind, tmp_path_factory.mktemp(kind), **sizes.get(kind, {}))
        for kind in ("wide", *kinds)
    }
    _unstack(plain["step3p5"])
    _unstack_llama4(plain["llama4"])

    @cache
    def write(name: str, kind: str = "") -> tuple[Path, Path]:
        form = FORMATS[name]
        kind = kind or ("wide" if form.config.get("load_in_4bit") else "llama")
        form = Format(form.config, form.write, ("lm_head",) if form.config.get("lm_head") else ())
        return publish(plain[kind], tmp_path_factory.mktemp("written"), form)

    return write


def _unstack(folder: Path) -> None:
    """As tools that quantize Step's experts, each a module of its own, write them."""
    made = {}
    for name, x in load_file(folder / "model.safetensors").items():
        at, _, rest = name.partition(".moe.")
        if x.dim() == 3 and rest:
            made |= {f"{at}.moe.experts.{index}.{rest}": one.clone() for index, one in enumerate(x)}
        elif not name.startswith("vi"):  # which sees
            made[name] = x
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def _unstack_llama4(folder: Path) -> None:
    """As tools that quantize write Llama 4's experts: the same, and by rows of outputs."""
    made = {}
    for name, x in load_file(folder / "model.safetensors").items():
        at, _, rest = name.partition(".experts.")
        for index, one in enumerate(x.transpose(1, 2).contiguous() if rest else ()):
            each = zip(("gate_proj", "up_proj"), one.chunk(2), strict=True) if "gate" in rest else [(rest, one)]
            made |= {f"{at}.experts.{index}.{kind}.weight": part.clone() for kind, part in each}
        made |= {} if rest else {name: x}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def logits(
    folder: Path, weights: tuple[int, ...], dtype: torch.dtype = torch.float32, *, replicates: bool = False
) -> torch.Tensor:
    ids = tuple(range(3, 33))
    span, shards = Span(0, 0, ids, ((0, len(ids)),), len(ids)), split(ModelShape.of(folder), weights)

    def rank(comm: Any) -> torch.Tensor:
        loader = Loader.open(folder, shards[comm.rank], dtype, CPU, replicates=replicates)
        return loader.decoder(comm, 64).forward([span])

    return torch.cat(ThreadWorld(len(weights)).run(rank), -1)


@EVERY
def test_logits_are_those_of_the_weights_that_the_codes_stand_for(written: Any, name: str) -> None:
    """Stands against zero points one off, AWQ's order of nibbles, columns whose group is another's (desc_act), and
    slices that begin within a word, a group or a block."""
    quantized, meant = written(name)
    assert (logits(quantized, (3, 1, 2)) - logits(meant, (1,))).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["awq", "gptq in the order of activations"])
def test_biases_and_tied_embeddings_stay_as_they_are(written: Any, name: str) -> None:
    """Stands against a tied head that is looked for among the codes, and biases of parts that could not be fused."""
    quantized, meant = written(name, "qwen2")
    assert (logits(quantized, (3, 1, 2)) - logits(meant, (1,))).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *product(["gptq", "awq"], IN_PARTS),
        *product(["gptq of 3 bits", STATIC], ["phi3", "qwen3_5_moe"]),
        *slowly(*product(["gptq of 3 bits", STATIC], IN_PARTS[1:-1])),
    ],
)
def test_matrices_that_are_stored_as_one_are_cut_into_their_parts(written: Any, name: str, kind: str) -> None:
    """Stands against keys taken for queries, ups for gates, and heads of codes that are put in no other order; gates of
    heads among queries, of which they are another product; and Granite's experts, which are plain in one tensor, taken
    for what the MLP beside them is."""
    quantized, meant = written(name, kind)
    assert (logits(quantized, (3, 1, 2)) - logits(meant, (1,))).abs().max() < 1e-4
    shape = ModelShape.of(quantized)
    for shard in split(shape, (3, 1, 2)):
        decoder = Loader.open(quantized, shard, torch.bfloat16, CPU).decoder(OneRank(), 8)
        assert sum(map(_held, parts_of(decoder))) == weight_bytes(shape, shard, "bfloat16")


def test_slices_of_one_matrix_lie_in_one_order_of_its_columns(written: Any) -> None:
    """Stands against a plan that counts, for each of queries, keys and values of one matrix, a table of its own, and
    rows filled up to a whole tile."""
    quantized, _ = written("gptq in the order of activations", "phi3")
    shape = ModelShape.of(quantized)
    shards = split(shape, (3, 1, 2))
    decoders = [Loader.open(quantized, shard, torch.bfloat16, CPU).decoder(OneRank(), 8) for shard in shards]
    taken = [sum(map(_held, parts_of(decoder))) for decoder in decoders]
    planned = [weight_bytes(shape, shard, "bfloat16") for shard in shards]
    assert taken[1] == planned[1]
    assert all(held <= counted < 1.15 * held for held, counted in zip(taken, planned, strict=True))


@pytest.mark.parametrize("kind", RENAMED)
@pytest.mark.parametrize("name", ["gptq", "awq", "packed"])
def test_matrices_of_other_names_are_codes_too(written: Any, name: str, kind: str) -> None:
    """Stands against those that no list of ours names, and that are looked for as plain weights."""
    quantized, meant = written(name, kind)
    assert (logits(quantized, (3, 1, 2)) - logits(meant, (1,))).abs().max() < 1e-4
    shape = ModelShape.of(quantized)
    (whole,) = split(shape, (1,))
    decoder = Loader.open(quantized, whole, torch.bfloat16, CPU).decoder(OneRank(), 8)
    assert sum(map(_held, parts_of(decoder))) == weight_bytes(shape, whole, "bfloat16")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("gptq", kind) for kind in MIXTURES if kind not in LIKE_OTHERS),
        *((name, kind) for name in OF_EXPERTS for kind in ("mixtral", "deepseek_v3")),
        *slowly(*(("gptq", kind) for kind in LIKE_OTHERS)),
        *slowly(*product(OF_EXPERTS, [kind for kind in MIXTURES if kind not in ("mixtral", "deepseek_v3")])),
    ],
)
def test_experts_are_stored_as_other_matrices_are(written: Any, name: str, kind: str) -> None:
    """Stands against codes of an expert taken for a plain weight because of its name (w1), and a router, which nobody
    quantizes, looked for among the codes; and against matrices of latents that are taken for plain."""
    quantized, meant = written(name, kind)
    assert (logits(quantized, (3, 1, 2)) - logits(meant, (1,))).abs().max() < 1e-4
    shape = ModelShape.of(quantized)
    (whole,) = split(shape, (1,))
    decoder = Loader.open(quantized, whole, torch.bfloat16, CPU).decoder(OneRank(), 8)
    taken, planned = sum(map(_held, parts_of(decoder))), weight_bytes(shape, whole, "bfloat16")
    assert taken == planned or (name in SHUFFLED and 0.7 * planned < taken < planned)


@pytest.mark.parametrize("name", ["gptq", "gptq in the order of activations", "awq", "float8 in blocks", "nvfp4"])
def test_heads_of_other_ranks_are_read_out_of_codes_too(written: Any, name: str) -> None:
    """Where a norm is over all of them: stands against rows before and behind a rank's own that begin within a word, a
    block or a group, and against another size than is planned."""
    quantized, meant = written(name, "minimax_m2")
    assert (logits(quantized, (3, 1, 2), replicates=True) - logits(meant, (1,))).abs().max() < 1e-4
    shape = replace(ModelShape.of(quantized), replicates_norm=True)
    for shard in split(shape, (3, 1, 2)):
        decoder = Loader.open(quantized, shard, torch.bfloat16, CPU, replicates=True).decoder(OneRank(), 8)
        taken, planned = sum(map(_held, parts_of(decoder))), weight_bytes(shape, shard, "bfloat16")
        assert taken == planned or (name in SHUFFLED and 0.7 * planned < taken < planned)


@pytest.mark.parametrize("name", ["gptq", "fp8 with static scales"])
def test_a_stack_of_experts_that_is_plain_is_planned_so(name: str, tmp_path: Path) -> None:
    """Many tools know modules alone, and leave such as it is. Stands against a plan that looks for the names of experts
    that stand apart, finds them on no list, and counts a quarter of what is held."""
    plain, form = tiny("step3p5", tmp_path / "plain"), FORMATS[name]
    save_file(
        {name: x for name, x in load_file(plain / "model.safetensors").items() if not name.startswith("vi")},
        plain / "model.safetensors",
    )

    def write(weight: Any, numbers: Any) -> Any:
        return (
            form.write(weight, numbers) if weight.ndim < 3 else ({"weight": torch.from_numpy(weight).float()}, weight)
        )

    quantized, meant = publish(plain, tmp_path, Format(form.config, write))
    assert (logits(quantized, (3, 1, 2)) - logits(meant, (1,))).abs().max() < 1e-4
    shape = ModelShape.of(quantized)
    for shard in split(shape, (3, 1, 2)):
        decoder = Loader.open(quantized, shard, torch.bfloat16, CPU).decoder(OneRank(), 8)
        assert sum(map(_held, parts_of(decoder))) == weight_bytes(shape, shard, "bfloat16")


@pytest.fixture(scope="module")
def of_floats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    plain = tiny("gpt_oss", tmp_path_factory.mktemp("gpt_oss"), intermediate_size=160)
    return publish_mxfp4(plain, tmp_path_factory.mktemp("mxfp4"))


@pytest.mark.parametrize("weights", [(1,), (2, 3), (3, 1, 2)], ids=str)
def test_experts_in_mxfp4_are_what_their_codes_stand_for(of_floats: Any, weights: tuple[int, ...]) -> None:
    """As gpt-oss is published. Stands against nibbles in another order, gates taken for ups, which alternate, and
    blocks of a neighbour's channels."""
    quantized, meant = of_floats
    assert (logits(quantized, weights) - logits(meant, (1,))).abs().max() < 1e-4
    shape = ModelShape.of(quantized)
    for shard in split(shape, weights):
        decoder = Loader.open(quantized, shard, torch.bfloat16, CPU).decoder(OneRank(), 8)
        assert sum(map(_held, parts_of(decoder))) == weight_bytes(shape, shard, "bfloat16")


def test_codes_of_mxfp4_mean_what_transformers_makes_of_them(of_floats: Any) -> None:
    """Stands against a writer and a reader of ours that agree with each other alone."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, plain = (load_file(folder / "model.safetensors") for folder in of_floats)
    name = "model.layers.1.mlp.experts.down_proj"
    theirs = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.float32)
    assert torch.equal(theirs, plain[name])


def test_experts_in_one_tensor_are_read_in_mxfp4_alone(of_floats: Any) -> None:
    """Stands against tensors that are called missing, which would send people to fetch the model again."""
    with pytest.raises(UserError, match=r"quant_method is 'mxfp4'; should be another for qwen3_moe"):
        stored_as({"model_type": "qwen3_moe", "quantization_config": published.MXFP4}, "here")
    for said in (FORMATS["gptq"].config, FORMATS["fp8 with static scales"].config):
        with pytest.raises(UserError, match=r"quant_method is '\w+'; should be mxfp4, or one that leaves the experts"):
            stored_as({"model_type": "gpt_oss", "quantization_config": said}, "here")
    awq = FORMATS["awq"].config | {"modules_to_not_convert": ["mlp.experts"]}
    assert stored_as({"model_type": "gpt_oss", "quantization_config": awq}, "here")
    matrices, whole = StoredMatrices(Checkpoint(of_floats[0])), range(100)
    with pytest.raises(UserError, match=r"down_proj have 100 inputs; should be whole groups of 32"):
        matrices.small(Scheme("mxfp4", 4, 32), Place("experts.down_proj", 100, 100, whole, whole, expert=(0, 5)))


@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "fp8"])
def test_experts_that_are_one_tensor_in_16_bits_may_be_stored_each_alone(written: Any, name: str) -> None:
    """As Qwen3.5's are published in 8 bits, which were refused."""
    quantized, meant = written(name, "qwen3_5_moe")
    assert (logits(quantized, (3, 1, 2)) - logits(meant, (1,))).abs().max() < 1e-4


def test_experts_in_one_piece_that_are_said_to_be_in_codes_are_refused(written: Any, tmp_path: Path) -> None:
    """Stands against codes that nobody wrote, of a tensor that is there as it is."""
    folder = shutil.copytree(written("awq", "qwen3_5_moe")[0], tmp_path / "one")
    held = load_file(folder / "model.safetensors")
    held["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(7, 80, 48)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"gate_up_proj holds all experts of a layer, which config.json says are quant"):
        logits(folder, (1,))


def test_experts_in_one_piece_that_are_plain_beside_floats_of_8_bits_have_to_be_listed(
    written: Any, tmp_path: Path
) -> None:
    """Stands against scales that are called missing, which would send people to fetch the model again."""
    quantized, meant = publish(tiny("granite_moe_windows", tmp_path / "plain"), tmp_path, FORMATS[STATIC])
    with pytest.raises(UserError, match=r"experts.gate_up_proj holds all experts of a layer, which config.json says"):
        logits(quantized, (1,))
    path = quantized / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["block_sparse_moe.experts"]
    path.write_text(json.dumps(config))
    assert (logits(quantized, (3, 1, 2)) - logits(meant, (1,))).abs().max() < 1e-4


def test_a_router_in_codes_is_refused(tmp_path: Path) -> None:
    """Some tools quantize it as well: `tensor gate.weight is missing` would send people to fetch the model again."""
    folder = tiny("mixtral", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.gate"
    tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"router {name} is quantized \(qweight\); should be a plain weight"):
        logits(folder, (1,))


def test_a_router_with_a_bias_is_refused(tmp_path: Path) -> None:
    """Stands against rows sent to other experts than its publisher's model sends them to, without a word."""
    folder, name = tiny("qwen3_moe", tmp_path), "model.layers.1.mlp.gate"
    tensors = load_file(folder / "model.safetensors")
    for bias in (torch.zeros(7), torch.eye(7)[0]):
        save_file(tensors | {f"{name}.bias": bias}, folder / "model.safetensors")
        if not bias.any():
            logits(folder, (1,))
    with pytest.raises(UserError, match=rf"{name}.bias is not nothing, and the architecture has no such bias"):
        logits(folder, (1,))


@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_granites_experts_in_codes_are_refused(written: Any, name: str, tmp_path: Path) -> None:
    """In one tensor. Stands against a layout that nobody has published, read as if somebody had."""
    folder = shutil.copytree(written(name, "granite_hybrid")[0], tmp_path / "codes")
    held, at = load_file(folder / "model.safetensors"), "model.layers.0.block_sparse_moe.input_linear"
    held[f"{at}.weight"] = held[f"{at}.weight"].to(torch.float8_e4m3fn)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{at}.weight is float8_e4m3fn, and read as plain numbers"):
        logits(folder, (1,))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_in_one_piece_are_refused(kind: str, tmp_path: Path) -> None:
    """Stands against `tensor experts.0.gate_proj.weight is missing`, which would send people to fetch the model
    again."""
    folder = tiny(kind, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(folder, save_original_format=False)
    with pytest.raises(
        UserError, match=r"model.layers.0.mlp.experts.gate_up_proj holds all experts of a layer; should"
    ):
        logits(folder, (1,))


@settings(deadline=None, max_examples=120)
@given(name=st.sampled_from(list(FORMATS)), data=st.data())
def test_any_slice_is_the_slice_of_the_whole(written: Any, name: str, data: st.DataObject) -> None:
    """Stands against words trimmed at one end only, and scales counted from the slice instead of the matrix."""
    quantized, meant = written(name)
    module = f"model.layers.1.{data.draw(st.sampled_from(['self_attn.k_proj', 'mlp.down_proj']))}"
    whole = load_file(meant / "model.safetensors")[module + ".weight"]
    rows, columns = (_part(data, size) for size in whole.shape)
    stored = ModelShape.of(quantized).stored
    assert stored is not None
    scheme = stored.scheme_of(module)
    assert scheme is not None
    read, place = StoredMatrices(Checkpoint(quantized)), Place(module, *whole.shape, rows, columns)
    expected = whole[rows.start : rows.stop, columns.start : columns.stop]
    assert torch.allclose(read.plain(scheme, place, torch.float32), expected, atol=1e-6)
    if scheme.is_small:
        part = read.small(scheme, place)
        product: Any = DequantizedLinear(part.matrix, None)
        if part.places_I is not None:
            product = Scattered(product, part.places_I, part.matrix.grid.width)
        assert torch.allclose(product(torch.eye(len(columns))).T, expected, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.config.get("sym") is False])
def test_zero_points_may_be_the_first_code_or_the_last(name: str, tmp_path: Path) -> None:
    """Stands against one of 0, stored one too low, that borrows from its neighbour where it did not, or does not where
    it did; and against words of which only some are looked at."""
    folder, module = tiny("llama", tmp_path / "plain"), "model.layers.1.self_attn.k_proj"
    tensors = load_file(folder / "model.safetensors")
    weight = tensors[f"{module}.weight"].abs()
    weight[1::3] *= -1
    save_file(tensors | {f"{module}.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    quantized, meant = publish(folder, tmp_path, FORMATS[name])
    stored, expected = ModelShape.of(quantized).stored, load_file(meant / "model.safetensors")[f"{module}.weight"]
    assert stored is not None
    scheme, matrices = stored.scheme_of(module), StoredMatrices(Checkpoint(quantized))
    assert scheme is not None
    for rows in (range(len(weight)), range(3, 11), range(10, 22), range(21, 30)):
        place = Place(module, *weight.shape, rows, range(weight.shape[1]))
        read = matrices.plain(scheme, place, torch.float32)
        assert torch.allclose(read, expected[rows.start : rows.stop], atol=1e-6)


def test_words_in_which_codes_may_lie_in_two_ways_are_refused(tmp_path: Path) -> None:
    """Stands against a guess. Versions of compressed-tensors differ, and sizes that both pack alike are few and small:
    down_proj has 88 inputs here."""
    for spaced in (False, True):
        folder = tiny("llama", tmp_path / f"plain {spaced}")
        quantized, _ = publish(folder, tmp_path / str(spaced), published.pack_quantized(bits=3, spaced=spaced))
        with pytest.raises(UserError, match=r"down_proj.weight_packed has 9 words for 88 codes of 3 bits, which may"):
            logits(quantized, (1,))


def _part(data: st.DataObject, size: int) -> range:
    start = data.draw(st.integers(0, size - 1))
    return range(start, data.draw(st.integers(start + 1, size)))


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from([8, 4]),
    has_zeros=st.booleans(),
    is_wide=st.booleans(),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 4), st.integers(1, 14)),
    group=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(list(EPS)),
)
def test_the_compiled_product_takes_what_others_quantized(
    bits: int, has_zeros: bool, is_wide: bool, sizes: tuple[int, int, int], group: int, dtype: torch.dtype
) -> None:
    """Stands against scales read in another width, zeros that only four bits have, and a code of -128."""
    num_outputs, num_groups, num_rows = sizes
    low, high, kind = (-128, 128, torch.int8) if bits == 8 else (0, 16, torch.uint8)
    numbers = torch.Generator().manual_seed(0)
    codes = torch.randint(low, high, (num_outputs, num_groups * group), generator=numbers).to(kind)
    scales, zeros = (noise(num_outputs, num_groups, seed=seed) for seed in (1, 2))
    scales, zeros = (one if is_wide else one.bfloat16() for one in (scales, zeros))
    made = Ready(Quantized(codes, scales, zeros if has_zeros else None), Grid(group, 0, num_groups * group))
    x = noise(num_rows, num_groups * group, seed=3).to(dtype)
    y, expected = compiled(made, None)(x), DequantizedLinear(made, None)(x)
    summed = (x.float().abs() @ made.made.weights().abs().T).max()
    assert (y - expected).abs().max() <= EPS[dtype] * expected.abs().max() + 1e-6 * summed


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 4), st.integers(1, 14)),
    group=st.sampled_from([16, 32, 64]),
    table=st.sampled_from(["e4m3", *TABLES]),
    dtype=st.sampled_from(list(EPS)),
    has_gains=st.booleans(),
    biased=st.booleans(),
)
def test_the_compiled_product_takes_codes_of_a_table(
    sizes: tuple[int, int, int], group: int, table: Table, dtype: torch.dtype, has_gains: bool, biased: bool
) -> None:
    """Stands against a table in another order, a sign that is lost, a half of a table that is taken for the other's
    mirror, exponents read as scales, floats of 8 bits whose least are nothing or twice as large, and biases that are
    multiplied by gains."""
    num_outputs, num_groups, num_rows = sizes
    numbers = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (num_outputs, num_groups * group), generator=numbers).to(torch.uint8)
    if table == "e4m3":
        exponents = torch.randint(-9, 8, (num_groups * group,), generator=numbers)
        floats = noise(num_outputs, num_groups * group) * 2.0**exponents
        codes = floats.to(torch.float8_e4m3fn).view(torch.int8)
    scales = torch.randint(118, 130, (num_outputs, num_groups), generator=numbers).to(torch.uint8)
    scales, gains, bias = scales if table == "e2m1" else scales.float() / 128, None, None
    if table == "e2m1" and has_gains:
        scales = torch.randint(0, 127, (num_outputs, num_groups), generator=numbers).to(torch.uint8)
        gains = torch.rand(num_outputs, generator=numbers) * 1e-3
    if biased:
        bias = noise(num_outputs, seed=4).to(dtype)
    made = Ready(Quantized(codes, scales, None, table, gains), Grid(group, 0, num_groups * group))
    x = noise(num_rows, num_groups * group, seed=3).to(dtype)
    y, weights = compiled(made, bias)(x), made.made.weights()
    loaded = compiled_products()
    if table in TABLES and dtype == torch.bfloat16 and loaded is not None and multiplies_pairs(loaded):
        scaled = scales_of(scales, gains).repeat_interleave(group, 1)  # of what the table has in bfloat16
        weights = torch.tensor(TABLES[table]).bfloat16().float()[codes.int()] * scaled
    expected = F.linear(x.float(), weights, None if bias is None else bias.float()).to(dtype)
    summed = (x.float().abs() @ weights.abs().T).max()
    assert (y - expected).abs().max() <= EPS[dtype] * expected.abs().max() + 1e-6 * summed


@EVERY
def test_a_shard_takes_what_the_plan_says(written: Any, name: str) -> None:
    """Stands against a plan that counts codes as bfloat16, or forgets scales, zero points or the head. Where a table
    says what belongs together, only the most that it can come to is known before."""
    quantized, _ = written(name)
    shape = ModelShape.of(quantized)
    for shard in split(shape, (3, 1, 2)):
        decoder = Loader.open(quantized, shard, torch.bfloat16, CPU).decoder(OneRank(), 8)
        taken, planned = sum(map(_held, parts_of(decoder))), weight_bytes(shape, shard, "bfloat16")
        assert taken == planned or (name in SHUFFLED and 0.7 * planned < taken < planned)


def _held(part: Any) -> int:
    if isinstance(part, Stacked):
        return sum(map(_held, part._products))
    return held(part) + (_held(part._product) if isinstance(part, Scattered | Scaled) else 0)


def test_check_prints_the_memory_of_a_quantized_checkpoint(written: Any, tmp_path: Path) -> None:
    """Stands against a check that promises a card four times too large, or lets codes be quantized once more."""
    quantized, meant = written("gptq")
    sizes = []
    for folder in (quantized, meant):
        file = tmp_path / "topology.yaml"
        file.write_text(f"name: a\ntarget: {{model: {folder}, ranks: [0, 1]}}\n")
        (row,) = [line for line in describe(load(file)) if line.startswith("1 ")]
        sizes.append(float(row.split("MiB")[0].split()[-1]))
    assert sizes[0] < 0.6 * sizes[1]  # heads are plain in both
    with pytest.raises(UserError, match="GPTQ checkpoint with weights of 4 bits already; leave quantize out"):
        describe(load(file, [f"target.model={quantized}", "target.quantize=int4"]))
    with pytest.raises(UserError, match="leave quantize out"):
        load_whole(quantized, ModelShape.of(quantized), torch.float32, CPU, 8, "int8")


@pytest.mark.parametrize(("name", "bits", "held"), [("gptq of 3 bits", 3, 4), ("packed of 6 bits", 6, 8)])
def test_who_has_codes_of_other_bits_is_told_what_holds_them(
    written: Any, tmp_path: Path, name: str, bits: int, held: int
) -> None:
    """Stands against memory that is more than the files have, without a word."""
    quantized, _ = written(name)
    file = tmp_path / "topology.yaml"
    file.write_text(f"name: a\ntarget: {{model: {quantized}, ranks: [0, 1]}}\n")
    assert f"codes of {bits} bits are held in {held}, and weights above are what that takes" in describe(load(file))
    with pytest.raises(UserError, match=f"with weights of {bits} bits, held in {held}, already; leave quantize out"):
        describe(load(file, ["target.quantize=int4"]))


@pytest.mark.parametrize(("name", "bits"), [("gptq", 4), ("gptq of 3 bits", 4), ("packed of 5 bits", 8)])
def test_a_plan_holds_a_quantized_checkpoint_as_it_is(written: Any, name: str, bits: int) -> None:
    """Stands against a plan that shrinks codes to other bits, or writes a topology that would be refused."""
    wish = Wish((card("3090"), card("3090")), "pcie4", str(written(name)[0]), "ngram")
    best = plan(wish).plans
    assert {one.layout.bits for one in best} == {bits}
    assert topology_of(wish, best[0]).target.quantize is None


def test_a_plan_may_round_floats_of_8_bits(written: Any) -> None:
    """Stands against one that says int8 of what is held in 8 bits as it is, or that fits no small card because codes
    are left as they are."""
    shape = ModelShape.of(written("fp8")[0])
    assert widths(shape) == {8: None, 4: "int4"}
    assert widths(ModelShape.of(written("nvfp4")[0])) == {4: None}
    (whole,) = split(shape, (1,))
    sizes = [weight_bytes(shape, whole, "bfloat16", quantize) for quantize in (None, "int8", "int4")]
    assert sizes[2] < sizes[1] < 1.1 * sizes[0]


def test_floats_of_8_bits_can_be_quantized_like_plain_weights(written: Any) -> None:
    """Where the topology asks for it. Stands against its being ignored."""
    quantized, meant = written("fp8")
    made, plain = (
        load_whole(folder, ModelShape.of(folder), torch.float32, CPU, 8, "int8") for folder in (quantized, meant)
    )
    span = Span(0, 0, (5, 6, 7), ((0, 3),), 3)
    assert (made.forward([span]) - plain.forward([span])).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["llama", "granite_hybrid"])
def test_floats_of_8_bits_take_what_is_planned_where_they_are_rounded(written: Any, tmp_path: Path, kind: str) -> None:
    """Stands against a product for each part of a matrix where some of them were plain before, and rates, which are not
    rounded, counted as if they were plain."""
    quantized, meant = (load_file(folder / "model.safetensors") for folder in written(STATIC, kind))

    def mix(config: dict[str, Any], tensors: Any) -> None:
        for name in [name for name in quantized if "v_proj." in name]:
            del tensors[name]
        tensors |= {name: x for name, x in meant.items() if "v_proj." in name}

    folder = changed(written(STATIC, kind)[0], tmp_path, mix)
    shape = ModelShape.of(folder)
    for shard in split(shape, (3, 1, 2)):
        decoder = Loader.open(folder, shard, torch.bfloat16, CPU, "int8").decoder(OneRank(), 8)
        assert sum(map(_held, parts_of(decoder))) == weight_bytes(shape, shard, "bfloat16", "int8")


@pytest.mark.parametrize("name", ["gptq in the order of activations", "awq"])
def test_texts_depend_on_neither_drafts_nor_ranks(written: Any, name: str) -> None:
    """The law, with a published checkpoint as target and as draft, in float32."""
    quantized, _ = written(name)
    asks = [Request(i, (5, 6, 7, 8) * 3 + (i,), 20, Sampling(temperature=0.8 * i, seed=i)) for i in range(2)]
    plain = serve(topology(quantized), asks).texts()
    draft = {"source": "model", "model": str(written("packed")[0]), "tokens": 3}
    told = serve(topology(quantized, 3, target={"weights": (3.0, 1.0, 2.0)}, draft=draft), asks)
    assert told.texts() == plain
    assert told.stats[-1].accepted > 0


def changed(folder: Path, tmp_path: Path, change: Any) -> Path:
    made = tmp_path / "changed"
    made.mkdir()
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config["quantization_config"], tensors)
    save_file(tensors, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(config))
    return made


AT = "model.layers.0.mlp.down_proj."
BY_ACTIVATION = "gptq in the order of activations"


def _put(suffix: str, values: Any) -> Any:
    """A change of one tensor, or of what is made of it."""
    return lambda c, t: t.update({AT + suffix: values(t[AT + suffix]) if callable(values) else values})


STATE = "weight.quant_state.bitsandbytes__nf4"


def _say(**changes: Any) -> Any:
    """A change of what bitsandbytes says of a matrix."""

    def change(state: torch.Tensor) -> torch.Tensor:
        said = json.loads(bytes(state.tolist())) | changes
        return torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)

    return _put(STATE, change)


WRONG: dict[str, tuple[str, Any, str]] = {
    "a missing tensor": ("gptq", lambda c, t: t.pop(AT + "scales"), "down_proj.scales is missing"),
    "no codes": ("packed", lambda c, t: t.pop(AT + "weight_packed"), "down_proj.weight_packed is missing"),
    "a shape": ("awq", _put("qzeros", torch.zeros(1, 12, dtype=torch.int32)), "qzeros has shape"),
    "a type": ("awq", _put("qweight", torch.Tensor.long), "qweight is of int64, not int32"),
    "another tensor": ("gptq", _put("lora_A", torch.zeros(1)), "down_proj.lora_A is none that"),
    "a weight beside": ("packed", _put("weight", torch.zeros(1)), "down_proj.weight is none that"),
    "a bias": ("gptq", _put("bias", torch.ones(96)), "down_proj.bias is not nothing"),
    "the other format": ("gptq", lambda c, t: c.update(checkpoint_format="gptq_v2"), "checkpoint_format or sym may be"),
    "a table": ("gptq", _put("g_idx", lambda g: g.flip(0)), "g_idx is not in order"),
    "groups": (BY_ACTIVATION, _put("g_idx", lambda g: g + 1), "g_idx names groups that do not exist"),
    "sizes": ("packed", _put("weight_shape", torch.tensor([96, 96])), "weight_shape says"),
    "zero points": ("int8", _put("weight_zero_point", torch.zeros(96, 1)), "weight_zero_point is none that"),
    "scales": ("fp8 with static scales", _put("weight_scale", torch.ones(2)), "should be one number"),
    "no scale of all": ("nvfp4", lambda c, t: t.pop(AT + "weight_global_scale"),
                        "weight_scale_2 is needed, and neither is"),
    "scales of groups": ("nvfp4 of modelopt", _put("weight_scale", torch.Tensor.float),
                         "weight_scale is of float32, not float8_e4m3fn"),
    "scales below 0": ("nvfp4 of modelopt", _put("weight_scale", lambda s: (-s.float()).to(s.dtype)),
                       "weight_scale has numbers below 0, or that are none"),
    "floats that are none": ("fp8 with static scales", _put("weight", lambda w: (w.float() * torch.nan).to(w.dtype)),
                             "down_proj has floats of 8 bits that are no numbers"),
    "blocks": ("bitsandbytes nf4", _say(blocksize=128), "bitsandbytes__nf4: blocksize is 128; should be 64"),
    "rows of blocks": ("bitsandbytes nf4", _say(shape=[1, 1]), r"nf4: shape is \[1, 1\]; should be \[192, 256\], as"),
    "an offset": ("bitsandbytes nf4", _say(nested_offset=None), "nested_offset is missing; should be a number"),
    "no state": ("bitsandbytes nf4", lambda c, t: t.pop(AT + STATE), "bitsandbytes__nf4 is missing"),
    "a state": ("bitsandbytes nf4", _put(STATE, torch.tensor([123], dtype=torch.uint8)), "nf4 is no JSON in bytes"),
    "a state in numbers": ("bitsandbytes nf4", _put(STATE, torch.Tensor.float), "nf4 is of float32, not uint8"),
    "a table of blocks": ("bitsandbytes nf4", _put("weight.quant_map", torch.zeros(16)), "other numbers than nf4"),
    "halves of blocks": ("bitsandbytes fp4", _put("weight.absmax", torch.Tensor.half), "of float16, not float32"),
    "bytes of blocks": ("bitsandbytes fp4", _put("weight", lambda w: w.view(torch.int8)), "of int8, not uint8"),
    "tiles": ("llm int8", _put("weight_format", torch.tensor(1).byte()), "weight_format is 1; should be 0"),
    "scales that are none": ("gptq", _put("scales", lambda s: s * torch.nan), "scales that are no numbers"),
    "exponents of nothing": ("packed mxfp4", _put("weight_scale", lambda e: e | 255), "scales that are no numbers"),
    "exponents": ("packed mxfp4", _put("weight_scale", lambda e: e.view(torch.int8)), "is of int8, not uint8"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WRONG))
def test_a_tensor_that_is_not_as_it_should_is_named(written: Any, tmp_path: Path, case: str) -> None:
    """Stands against a checkpoint of another layout, read as numbers that mean nothing."""
    name, change, message = WRONG[case]
    folder = changed(written(name)[0], tmp_path, change)
    with pytest.raises(UserError, match=message):
        load_whole(folder, ModelShape.of(folder), torch.float32, CPU, 8)


def test_a_matrix_of_zeros_is_read(written: Any, tmp_path: Path) -> None:
    """Deeper models are made of others by layers that add nothing at first. Stands against a mean of 0, which nested
    scales then have, refused as no number."""

    def clear(config: dict[str, Any], tensors: Any) -> None:
        _say(nested_offset=0.0)(config, tensors)
        _put("weight.nested_absmax", torch.zeros_like)(config, tensors)

    folder, module = changed(written("bitsandbytes nf4")[0], tmp_path, clear), AT.rstrip(".")
    read = StoredMatrices(Checkpoint(folder)).plain(
        Scheme("nf4", 4, 64), all_of(module, 192, 256).parts[0], torch.float32
    )
    assert not read.any()


def test_rows_that_end_within_a_block_are_refused(written: Any) -> None:
    """Stands against scales of a neighbour: bitsandbytes cuts a whole matrix into blocks, wherever rows end."""
    matrices, whole = StoredMatrices(Checkpoint(written("bitsandbytes nf4")[0])), range(100)
    with pytest.raises(UserError, match=r"down_proj, in nf4, has 100 inputs; should be whole blocks of 64"):
        matrices.small(Scheme("nf4", 4, 64), Place(AT.rstrip("."), 192, 100, whole, whole))


def test_biases_of_nothings_are_no_biases(written: Any, tmp_path: Path) -> None:
    """Some tools write one beside every matrix. Stands against refusing those."""
    folder = changed(written("gptq")[0], tmp_path, lambda c, t: t.update({AT + "bias": torch.zeros(96)}))
    load_whole(folder, ModelShape.of(folder), torch.float32, CPU, 8)


def _group(**weights: Any) -> dict[str, Any]:
    return {
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32} | weights}
        }
    }


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "another tool's": ({"quant_method": "hqq"}, "quant_method is 'hqq'; should be one of auto-round, intel/auto-round"),
    "bitsandbytes of no bits": ({"quant_method": "bitsandbytes"}, "load_in_4bit is missing; should be True"),
    "bitsandbytes in words": (published.bitsandbytes().config | {"bnb_4bit_quant_storage": "bfloat16"},
                              "bnb_4bit_quant_storage is 'bfloat16'; should be uint8"),
    "bitsandbytes' other type": (published.bitsandbytes().config | {"bnb_4bit_quant_type": "int4"},
                                 "bnb_4bit_quant_type is 'int4'; should be nf4 or fp4"),
    "bitsandbytes beside halves": (published.llm_int8().config | {"llm_int8_has_fp16_weight": True},
                                   "llm_int8_has_fp16_weight is True; should be False"),
    "no method": ({"bits": 4}, "quantization_config.quant_method is missing"),
    "5 bits": ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "bits is 5; should be 2 or 3 or 4 or 8"),
    "planes": ({"quant_method": "gptq", "bits": 3, "group_size": 128, "checkpoint_format": "gptq_p"},
               "checkpoint_format is 'gptq_p'; should be gptq or gptq_v2"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "is 'marlin'"),
    "dynamic": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"x": {"bits": 1}}},
                "dynamic.x.bits is 1; should be 2 or 3 or 4 or 8"),
    "a pattern": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:(": {}}}, "is no pattern"),
    "dynamic awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "dynamic": {"x": {"bits": 8}}},
                    "dynamic.x.bits is 8; should be 4"),
    "no targets": ({"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "channel"}}}}, "targets is missing"),
    "no weights": ({"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "config_groups": {"a": {"targets": ["Linear"]}}}, "at least one group with weights"),
    "no blocks": ({"quant_method": "compressed-tensors", "format": "float-quantized",
                   **_group(type="float", num_bits=8, strategy="block")}, "block_structure is missing"),
    "no group": ({"quant_method": "gptq", "bits": 4}, "group_size is missing"),
    "autoround's 5 bits": (published.autoround().config | {"bits": 5}, "bits is 5; should be 2 or 3 or 4 or 8"),
    "autoround's floats": (published.autoround(data_type="mx_fp").config, "data_type is 'mx_fp'; should be int"),
    "autoround's layout": (published.autoround(packing_format="auto_round:mlx").config,
                           "packing_format is 'auto_round:mlx'; should be auto_round:auto_gptq or"),
    "autoround's activations": (published.autoround(act_bits=8).config, "act_bits is 8; should be 16 or more"),
    "autoround's rotation": (published.autoround(rotation_config={"a": 1}).config, "rotation_config is {'a': 1}"),
    "autoround's awq of 8 bits": (published.autoround("auto_round:awq").config | {"extra_config": {"x": {"bits": 8}}},
                                  "extra_config.x.bits is 8; should be 4"),
    "autoround's blocks": (published.autoround(block_name_to_quantize=[1]).config, "block_name_to_quantize is \\[1\\]"),
    "autoround's pattern": (published.autoround(extra_config={"(": {"bits": 8}}).config, "is no pattern"),
    "gemv": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version is 'gemv'"),
    "2:4": ({"quant_method": "compressed-tensors", "format": "marlin-24", **_group()}, "format is 'marlin-24'"),
    "sparse": ({"quant_method": "compressed-tensors", "format": "pack-quantized", **_group(),
                "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
    "rotated": ({"quant_method": "compressed-tensors", "format": "pack-quantized", **_group(),
                 "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "fp4 of other groups": ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                             **_group(type="float", group_size=32)}, "weights.group_size is 32; should be 16"),
    "1 bit": ({"quant_method": "compressed-tensors", "format": "pack-quantized", **_group(num_bits=1)},
              "config_groups.a.weights.num_bits is 1; should be 2 or 3 or 4 or 5 or 6 or 7 or 8"),
    "9 bits": ({"quant_method": "compressed-tensors", "format": "pack-quantized", **_group(num_bits=9)},
               "config_groups.a.weights.num_bits is 9; should be 2 or 3 or"),
    "bytes of 6 bits": ({"quant_method": "compressed-tensors", "format": "int-quantized", **_group(num_bits=6)},
                        "config_groups.a.weights.num_bits is 6; should be 4 or 8"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
    "fp4 of scaled activations": ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ'"),
    "blocks": ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is \\[128\\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(UNSUPPORTED))
def test_what_is_not_supported_is_refused_by_name(case: str) -> None:
    """Stands against a config that is taken for the nearest one that is known."""
    config, message = UNSUPPORTED[case]
    with pytest.raises(UserError, match=message):
        stored_as({"quantization_config": config}, "config.json")


def test_lists_of_modules_are_kept_to() -> None:
    """Stands against a module that is quantized, or plain, though a list says otherwise."""
    made = stored_as({"quantization_config": published.compressed(
        "pack-quantized", {"num_bits": 4, "strategy": "channel"},
        ignore=("lm_head", "re:.*layers\\.0\\..*", "model.layers.1.mlp.up_proj"))}, "here")  # fmt: skip
    names = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"]
    assert made is not None
    assert [made.scheme_of(name) is None for name in names] == [True, True, True, False]
    only = {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_in_block_to_quantize": [["mlp.up_proj"]]}
    some = stored_as({"quantization_config": only}, "here")
    assert some is not None
    assert [some.scheme_of(f"model.layers.0.{name}") is None for name in ("mlp.up_proj", "mlp.down_proj")] == [
        False,
        True,
    ]
    for skipped, plain in ((None, [True, False, False]), (["model.layers.0.mlp"], [False, True, False])):
        config = published.bitsandbytes().config | {"llm_int8_skip_modules": skipped}
        blocks = stored_as({"quantization_config": config}, "here")
        assert blocks is not None
        names = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"]
        assert [blocks.scheme_of(name) is None for name in names] == plain


def test_the_writer_packs_as_documented() -> None:
    """The writer's own anchor: AutoAWQ's docstring order, and the first nibble lowest. Of 3 bits the value at 10 has
    two in the first word, that at 21 one in the second; the rest of theirs are the lowest of the next."""
    values = np.arange(8)[None]
    assert published.packed(values, 4).view(np.uint32).item() == 0x76543210
    assert published.packed(values, 4, (0, 2, 4, 6, 1, 3, 5, 7)).view(np.uint32).item() == 0x75316420
    three = np.zeros((1, 32), int)
    three[0, [10, 21]] = 0b101, 0b011
    assert published.streamed(three, 3).view(np.uint32).tolist() == [[1 << 30, 1 | 1 << 31, 1]]
    assert published.streamed(values, 4).view(np.uint32).item() == 0x76543210
    assert published.packed(three, 3).view(np.uint32).tolist() == [[0, 0b101, 0b011 << 3, 0]]
