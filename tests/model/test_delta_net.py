"""Layers of linear attention, or with a short convolution: what they keep of a text, and that
it goes back to any row that was left behind."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny
from tpspec.comm.communicator import OneRank
from tpspec.errors import UserError
from tpspec.model.batch import Carried, Span
from tpspec.model.decoder import Decoder
from tpspec.model.loader import Loader
from tpspec.published.shape import ModelShape
from tpspec.topology.caches import States, kv_bytes, state_bytes
from tpspec.topology.shards import Shard, split
from tpspec.topology.sizes import weight_bytes

CPU, SLOTS = torch.device("cpu"), 96
IDS = tuple(torch.randint(3, 263, (20,), generator=torch.Generator().manual_seed(0)).tolist())
TREE, PARENTS = (50, 60, 70, 80, 90, 100), (-1, 0, 0, 1, 1, 2, 4)  # beside the root: rows 1 to 6
KINDS = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "nemotron_h",
    "nemotron_h_dense",
    "granite_hybrid",
    "granite_hybrid_dense",
    "falcon_h1",
    "falcon_h1_normed",
    "kimi_linear",
    "olmo_hybrid",
    "lfm2",
    "lfm2_moe",
    "lfm3",
)


def loaded(folder: Path, shard: Shard | None = None) -> Decoder:
    (whole,) = split(ModelShape.of(folder), (1.0,))
    loader = Loader.open(folder, shard or whole, torch.float32, CPU)
    return loader.decoder(OneRank(), SLOTS, num_states=3, num_kept=2, compiled=False)


def logits_of(decoder: Decoder, ids: tuple[int, ...]) -> torch.Tensor:
    """Of the last row, of a text that nothing is kept of."""
    return decoder.forward([Span(9, 0, ids, ((40, len(ids)),), 1)])[0]


@pytest.mark.parametrize("kept", [(), (0,), (0, 1), (0, 1, 4), (0, 1, 4, 6), (0, 2, 5), (0, 1, 3)], ids=str)
@pytest.mark.parametrize(
    "kind", ["qwen3_5", "nemotron_h", "granite_hybrid", "olmo_hybrid", "kimi_linear", "falcon_h1", "lfm2"]
)
def test_a_text_goes_on_behind_any_path_of_a_tree(kind: str, kept: tuple[int, ...], tmp_path: Path) -> None:
    """`kept` rows of a tree, or none of them, when the root itself has to run again. Stands against a convolution that
    sees a row's neighbour and not its parent, and rows before the state that are another forward's."""
    decoder, slot = loaded(tiny(kind, tmp_path)), 2
    rows = (IDS[-1], *TREE)
    decoder.forward([Span(0, 0, IDS[:-1], ((0, 19),), 0, carried=Carried(slot, (), 19))])
    decoder.forward([Span(0, 19, rows, ((0, 26),), 7, PARENTS, carried=Carried(slot, (0,), 1))])
    slots = [19 + row for row in kept]
    decoder.store.move(slots, list(range(19, 19 + len(kept))))  # as an engine moves keys and values
    text = (*IDS[:-1], *(rows[row] for row in kept))
    new = (33, 44) if kept else (IDS[-1], 44)
    size = len(text) + 2
    made = decoder.forward([Span(0, len(text), new, ((0, size),), 2, carried=Carried(slot, kept, 2))])
    assert (made[0] - logits_of(decoder, (*text, new[0]))).abs().max() < 1e-4
    assert (made[1] - logits_of(decoder, (*text, *new))).abs().max() < 1e-4


def test_a_text_of_which_nothing_was_kept_cannot_go_on(tmp_path: Path) -> None:
    """Stands against a caller who forgets states, and is answered from an empty one."""
    with pytest.raises(ValueError, match="sequence 3 has 4 tokens cached, and nothing carried of them"):
        loaded(tiny("qwen3_5", tmp_path)).forward([Span(3, 4, (5,), ((0, 5),), 1)])


@pytest.mark.parametrize("parts", [(1.0,), (1.0, 2.0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_is_what_was_planned(kind: str, parts: tuple[float, ...], tmp_path: Path) -> None:
    """Stands against a cache for layers that have none, and a plan that forgets states or the gate of attention."""
    folder = tiny(kind, tmp_path)
    shape = ModelShape.of(folder)
    for shard in split(shape, parts):
        decoder = loaded(folder, shard)
        held = tensors([decoder.layers, decoder.norm, decoder.head])
        indices = [x for x in held if not x.is_floating_point()]
        # Which key head each value head reads.
        assert len(indices) == (0 if shape.delta_net is None else len(shape.delta_net.layers))
        assert sum(x.nbytes for x in held if x.is_floating_point()) == weight_bytes(shape, shard, "float32")
        assert decoder.states is not None
        kept = [*decoder.states._of.values(), *decoder.states._kept.values()]
        assert sum(x.nbytes for x in tensors(kept)) == state_bytes(shape, shard, "float32", States(3, 2))
        cached = sum(x.nbytes for x in tensors(decoder.store.cells))
        assert cached == kv_bytes(shape, shard, "float32", SLOTS)


def test_experts_of_a_layer_may_be_one_tensor_or_one_each(tmp_path: Path) -> None:
    """As Qwen3.5 is published, in 16 bits and in 8. Stands against rows of gate and up that alternate, as gpt-oss's."""
    folder = tiny("qwen3_5_moe", tmp_path)
    apart = logits_of(loaded(folder), IDS)
    held = load_file(folder / "model.safetensors")
    for layer in range(3):
        at = f"model.layers.{layer}.mlp.experts."
        each = {
            part: [held.pop(f"{at}{one}.{part}_proj.weight") for one in range(7)] for part in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(each["gate"], each["up"], strict=True)]
        held |= {f"{at}gate_up_proj": torch.stack(both), f"{at}down_proj": torch.stack(each["down"])}
    save_file(held, folder / "model.new", {"format": "pt"})
    (folder / "model.new").replace(folder / "model.safetensors")
    assert torch.equal(logits_of(loaded(folder), IDS), apart)


@pytest.mark.parametrize("count", [2, 5])
def test_every_layer_has_one_kind(count: int) -> None:
    """Stands against layers that are guessed, and kinds of layers that there are not."""
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 3, "layer_types": ["linear_attention"] * count}
    with pytest.raises(UserError, match=r"here: layer_types is .*; should be linear_attention or .* each of 3 layers"):
        ModelShape.from_config(config, "here")


def test_a_convolution_with_a_bias_is_refused(tmp_path: Path) -> None:
    """Stands against one that is left out in silence, as no matrix's is."""
    folder = tiny("qwen3_5", tmp_path)
    held, name = load_file(folder / "model.safetensors"), "model.layers.0.linear_attn.conv1d"
    save_file(held | {f"{name}.bias": torch.ones(len(held[f"{name}.weight"]))}, folder / "model.new", {"format": "pt"})
    (folder / "model.new").replace(folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"{name}.bias is not nothing, and the architecture has no such bias"):
        loaded(folder)


def tensors(x: Any) -> list[torch.Tensor]:
    """All that something holds, each once."""
    found: dict[int, torch.Tensor] = {}

    def look(at: Any) -> None:
        if isinstance(at, torch.Tensor):
            found[id(at)] = at
        elif isinstance(at, list | tuple):
            for each in at:
                look(each)
        elif is_dataclass(at):
            for field in fields(at):
                look(getattr(at, field.name))
        elif hasattr(at, "__dict__"):
            for each in vars(at).values():
                look(each)

    look(x)
    return list(found.values())
