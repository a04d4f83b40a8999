"""What rounds of every kind of model take of our kernels, as they ask for them, compiled for a card that is not here.
Run by test_card_kernels.py, in a process without Triton's interpreter. argv: a folder for checkpoints, compute
capability, kinds of models (none: all). Tells a line a kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from card_link import CardOnALink

from tests.checkpoints import KINDS, tiny
from tests.compiling_card import compiling_card
from tests.model import published
from tests.rounds import tree_and_chain
from tpspec.comm.communicator import Communicator, OneRank
from tpspec.model.loader import Loader
from tpspec.published.shape import ModelShape
from tpspec.topology.links import straight
from tpspec.topology.shards import split
from tpspec.verify.largest import largest
from tpspec.verify.noise import CounterNoise


def rounds(folder: Path, quantize: str | None = None, comm: Communicator | None = None, num_shards: int = 1) -> None:
    """Of the first of so many."""
    shard = split(ModelShape.of(folder), (1.0,) * num_shards)[0]
    loader = Loader.open(folder, shard, torch.bfloat16, torch.device("cuda"), quantize)
    tree_and_chain(loader.decoder(comm or OneRank(), 512, num_states=2), seed=0)


major, minor = map(int, sys.argv[2].split("."))
folders = {kind: tiny(kind, Path(sys.argv[1], kind)) for kind in sys.argv[3:] or KINDS}
with compiling_card((major, minor)) as names:
    for folder in folders.values():
        rounds(folder)
    rounds(folders["granite_hybrid"], num_shards=2)
    rounds(folders["llama"], "int8")
    wide = tiny("llama", Path(sys.argv[1], "wide"), hidden_size=128, num_attention_heads=8, head_dim=16)
    for folder in (folders["llama"], wide):  # groups of 32 and of 128
        rounds(folder, "int4")
    wider = tiny("llama", Path(sys.argv[1], "wider"), hidden_size=192, head_dim=32, intermediate_size=256)
    for name, form in published.of_tables().items():
        rounds(published.publish(wider, Path(sys.argv[1], name), form)[0])
    rounds(folders["llama"], comm=CardOnALink(straight(30.0)))
    CounterNoise().prepare(torch.device("cuda"))
    ready = len(names)
    for num_rows in (1, 2, 4, 8):
        largest(torch.zeros(num_rows, 70, device="cuda", dtype=torch.bfloat16))
    assert len(names) == ready, "the first rounds of four would wait for a compiler"
    sys.stdout.writelines(f"{name}\n" for name in names)
