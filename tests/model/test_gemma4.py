"""What only Gemma 4 has: heads of two sizes, layers that keep nothing, numbers for each layer, two sums in one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import BASE, KINDS, tiny
from tests.model.test_delta_net import tensors
from tests.worlds import serve, topology
from tpspec.comm.communicator import OneRank, Purpose
from tpspec.errors import UserError
from tpspec.measure.skips import Price, search
from tpspec.model.batch import Span
from tpspec.model.loader import Loader, load_whole
from tpspec.model.spec import read_spec
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.topology.rounds import round_bytes
from tpspec.topology.shards import by_heads, split
from tpspec.topology.sizes import weight_bytes
from tpspec.topology.sublayers import Sublayers

CPU = torch.device("cpu")
GEMMA4 = ("gemma4", "gemma4_moe", "gemma4_small")
WARM = Sampling(temperature=0.8, seed=5)
PROMPT = (5, 6, 7, 8) * 6


def config(kind: str, **said: Any) -> dict[str, Any]:
    return BASE | KINDS[kind] | said


@pytest.mark.parametrize("parts", [(1.0,), (1.0, 2.0)], ids=str)
@pytest.mark.parametrize("kind", GEMMA4)
def test_what_is_held_is_what_was_planned(kind: str, parts: tuple[float, ...], tmp_path: Path) -> None:
    """Stands against a matrix of values where there is none, keys of layers that keep nothing, an MLP twice as wide
    that is counted once, and what layers make of their numbers, whole on every rank."""
    folder = tiny(kind, tmp_path)
    shape = ModelShape.of(folder)
    for shard in split(shape, parts):
        decoder = Loader.open(folder, shard, torch.float32, CPU).decoder(OneRank(), 64)
        held = sum(x.nbytes for x in tensors([decoder.layers, decoder.norm, decoder.head, decoder.inputs]))
        attending = [layers for layers in by_heads(shape, shard) if layers.shape.num_made > 1]
        ones = 4 * sum(len(layers.which) * layers.shape.head_dim for layers in attending)  # of norms without a weight
        ones += 4 * shape.num_layers * shape.hidden * (kind == "gemma4_moe")
        assert held - ones == weight_bytes(shape, shard, "float32")


@pytest.mark.parametrize("kind", GEMMA4)
def test_transformers_own_keys_mean_what_published_ones_do(kind: str, tmp_path: Path) -> None:
    """It writes per_layer_config for what is published as global_head_dim. Stands against heads of the usual size where
    a checkpoint was saved anew."""
    folder = tiny(kind, tmp_path)
    assert "per_layer_config" in json.loads((folder / "config.json").read_text())
    assert ModelShape.of(folder) == ModelShape.from_config(config(kind), "here")


def test_what_a_layer_does_not_say_is_the_models() -> None:
    """transformers leaves out what is the same. Stands against heads of 512, and a refusal of its configs."""
    for said in ({}, {"0": {"num_key_value_heads": 3}, "2": {}}):
        heads = ModelShape.from_config(config("gemma4", per_layer_config=said), "here").global_heads
        assert heads is not None
        assert (heads.num_kv, heads.dim) == (3, 16)


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        ("gemma4", {"global_head_dim": 31}, "global_head_dim is 31; should be an even number"),
        ("gemma4", {"num_global_key_value_heads": 4}, "should be a divisor of num_attention_heads"),
        (
            "gemma4",
            {"per_layer_config": {"1": {}}},
            r"per_layer_config is .*; should be of layers 0, 2, which",
        ),
        (
            "gemma4",
            {"per_layer_config": {"0": {"head_dim": 32}, "2": {"head_dim": 16}}},
            r"per_layer_config is .*; should be the same for layers 0, 2: others are not supported",
        ),
        (
            "gemma4",
            {"per_layer_config": {"0": {"sliding_window": 3}, "2": {}}},
            "per_layer_config.0.sliding_window is 3; should be left out: it is not supported",
        ),
        (
            "gemma4_small",
            {"num_kv_shared_layers": 3},
            "num_kv_shared_layers is 3; should be so few that of",
        ),
        ("gemma4_moe", {"num_kv_shared_layers": 1}, "enable_moe_block is True; should be null"),
        ("gemma4_small", {"vocab_size_per_layer_input": 9}, r"is 9; should be at least vocab_size \(263\)"),
        ("gemma4_moe", {"top_k_experts": 9}, r"top_k_experts is 9; should be at most num_experts \(7\)"),
        ("gemma4_moe", {"num_experts": None}, "num_experts is missing"),
    ],
)
def test_what_it_does_not_know_is_refused(kind: str, said: dict[str, Any], why: str) -> None:
    """Stands against a traceback while loading, and layers that compute something else without a word."""
    with pytest.raises(UserError, match=why):
        ModelShape.from_config(config(kind, **said), "here")


def test_attention_to_both_sides_is_refused_and_that_of_images_is_not(tmp_path: Path) -> None:
    """Which published configs name. Stands against models of text that see ahead, computed as if they did not."""
    for said in ("vision", "all"):
        (tmp_path / "config.json").write_text(json.dumps(config("gemma4", use_bidirectional_attention=said)))
        if said == "vision":
            read_spec(tmp_path)
            continue
        with pytest.raises(UserError, match="use_bidirectional_attention is 'all'; should be vision or False"):
            read_spec(tmp_path)


def test_what_layers_that_keep_nothing_have_besides_is_not_read(tmp_path: Path) -> None:
    """Published checkpoints hold keys and values of them, too. Stands against a layer that attends to its own."""
    folder = tiny("gemma4_small", tmp_path)
    before = load_whole(folder, ModelShape.of(folder), torch.float32, CPU, 64)
    held = load_file(folder / "model.safetensors")
    for name in [name for name in held if "layers.1.self_attn.k_" in name or "layers.1.self_attn.v_" in name]:
        held[name.replace("layers.1.", "layers.3.")] = torch.randn_like(held[name])
    save_file(held, folder / "model.new", {"format": "pt"})
    (folder / "model.new").replace(folder / "model.safetensors")
    after = load_whole(folder, ModelShape.of(folder), torch.float32, CPU, 64)
    text = Span(0, 0, PROMPT, ((0, len(PROMPT)),), len(PROMPT))
    assert torch.equal(before.forward([text]), after.forward([text]))


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("kind", "source"),
    [("gemma4", "layer_skip"), ("gemma4", "ngram"), ("gemma4", "model"), ("gemma4_moe", "early_exit"),
     ("gemma4_moe", "lookahead"), ("gemma4_small", "suffix"), ("gemma4_small", "model"),
     ("gemma4_small", "layer_skip"), ("gemma4_small", "early_exit")],
)  # fmt: skip
def test_texts_are_those_of_plain_decoding(kind: str, source: str, sampling: Sampling, tmp_path: Path) -> None:
    """Two ranks, with drafts of the model itself, of its text, and of a small one of its family. Stands against a draft
    that leaves out a sublayer and its scale, and one that writes what others attend to."""
    target, small = tiny(kind, tmp_path / "target"), tiny("gemma4_small", tmp_path / "small", seed=1)
    draft: dict[str, Any] = {"source": source, "tokens": 3}
    if source == "model":
        draft |= {"model": str(small)}
    if source == "layer_skip":
        attention = [3] if kind == "gemma4_small" else [0, 1]
        (target / "layer_skip.json").write_text(json.dumps({"attention": attention, "mlp": [0, 2]}))
    asks = [Request(0, PROMPT, 12, sampling), Request(1, (*PROMPT[:11], 9), 12, sampling)]
    plain = serve(topology(target, 2), asks)
    told = serve(topology(target, 2, draft=draft), asks)
    assert told.stats[-1].drafted > 0
    assert told.texts() == plain.texts()


def test_a_small_model_that_drafts_for_itself_is_always_right(tmp_path: Path) -> None:
    """Stands against a draft model's layers that keep nothing, and attend to what another text keeps."""
    target = tiny("gemma4_small", tmp_path)
    draft = {"source": "model", "model": str(target), "tokens": 3}
    asks = [Request(0, PROMPT, 12), Request(1, (*PROMPT[:11], 9), 12, WARM)]
    told = serve(topology(target, 2, draft=draft), asks).stats[-1]
    assert told.accepted == told.drafted > 9


def test_layers_that_stay_have_what_they_read(tmp_path: Path) -> None:
    """Stands against layers that attend to what nobody has written, and a search that tries to do without that."""
    target = tiny("gemma4_small", tmp_path)
    shape = ModelShape.of(target)
    assert shape.sharing is not None
    (target / "layer_skip.json").write_text(json.dumps({"attention": [shape.sharing.kept_by[0]], "mlp": []}))
    with pytest.raises(UserError, match=r"attention of layer \d is left out, and layer \d reads what that keeps"):
        serve(topology(target, draft={"source": "layer_skip", "tokens": 2}), [Request(0, PROMPT, 3)])
    tried: set[int] = set()
    for found in search(Price(shape, 0.5), lambda left_out: 0.5, tries=2):
        tried |= found.left_out.attention
    assert tried == set(range(shape.num_layers)) - set(shape.sharing.kept_by)


@pytest.mark.parametrize("left_out", [{1, 3}, {2}, {2, 3}], ids=str)
@torch.inference_mode()
def test_a_layer_left_out_leaves_nothing(left_out: set[int], tmp_path: Path) -> None:
    """Of its attention, its MLP and what it makes of a token's numbers; its scale stays. Stands against drafts that
    leave a model early, and go on through a third of each layer behind."""
    target = tiny("gemma4_small", tmp_path / "whole")
    shape = ModelShape.of(target)
    held = load_file(target / "model.safetensors")
    for name, tensor in held.items():
        if re.search(rf"layers\.[{''.join(map(str, left_out))}]\.post_.*norm", name):
            held[name] = torch.zeros_like(tensor)  # of what is added, so that nothing is
    other = shutil.copytree(target, tmp_path / "other")
    save_file(held, other / "model.safetensors", {"format": "pt"})
    text = Span(0, 0, PROMPT, ((0, len(PROMPT)),), len(PROMPT))
    whole = load_whole(target, shape, torch.float32, CPU, 64)
    thin = whole.thinned(Sublayers(frozenset(left_out), frozenset(left_out)), OneRank())
    wanted = load_whole(other, shape, torch.float32, CPU, 64).forward([text]).clone()
    assert (thin.forward([text]) - wanted).abs().max() < 1e-5


def test_sums_of_an_mlp_and_of_experts_are_one_collective(tmp_path: Path) -> None:
    """Two all-reduces in each layer, as everywhere, of which one is twice as long. Stands against a third, and against
    norms of what one rank made of its part."""
    target = tiny("gemma4_moe", tmp_path)
    shape = ModelShape.of(target)
    told = serve(topology(target, 2), [Request(0, PROMPT, 5)])
    stats = told.stats[-1]
    sums = {purpose: stats.collectives[purpose] for purpose in (Purpose.attention, Purpose.mlp)}
    assert {one.count for one in sums.values()} == {3 * stats.rounds}
    rows = len(PROMPT) + 4
    assert {str(purpose): one.bytes for purpose, one in sums.items()} == {
        purpose: num for purpose, num in round_bytes(shape, 2, rows, 4).items() if purpose != "pick"
    }


@pytest.mark.parametrize("kind", GEMMA4)
def test_a_texts_bits_do_not_depend_on_others(kind: str, tmp_path: Path) -> None:
    """`deterministic`, in 16 bits. Stands against a norm, cap or product that rounds otherwise among more rows."""
    target = tiny(kind, tmp_path, dtype=torch.bfloat16)
    asks = [Request(i, PROMPT[i:], 8, WARM) for i in range(3)]
    keys: dict[str, Any] = {"target": {"dtype": "bfloat16"}, "deterministic": True}
    together = serve(topology(target, 2, draft={"source": "ngram", "tokens": 2}, **keys), asks).texts()
    assert together == [text for one in asks for text in serve(topology(target, 2, **keys), [one]).texts()]
