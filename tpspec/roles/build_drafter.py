"""From a topology to a drafter with a model of its own, wherever it runs. Constructs, decides nothing."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from tpspec.comm.communicator import OneRank
from tpspec.draft.ahead import Ahead, Policy
from tpspec.draft.protocol import Extender
from tpspec.draft.run import ModelRun
from tpspec.draft.sources import source
from tpspec.model.loader import Loader
from tpspec.roles.fit import draft_pool, shape_of
from tpspec.roles.tokenizers import check_same_tokenizer
from tpspec.topology.checkpoint import find
from tpspec.topology.shards import DTYPE_BYTES, split
from tpspec.verify.noise import CounterNoise

if TYPE_CHECKING:
    from tpspec.draft.protocol import Drafter
    from tpspec.topology.config import Topology

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
ROWS_AHEAD = 8  # futures that are read at a time


def policy_of(topology: Topology) -> Policy:
    """How far a drafter in a process of its own goes before it is asked."""
    pipeline = topology.pipeline
    if topology.draft.placement.kind == "inline" or pipeline.policy in ("serial", "alternate"):
        return Policy()
    if pipeline.policy == "optimistic":
        return Policy(ahead=True, max_rows=ROWS_AHEAD)
    return Policy(ahead=True, width=1 + pipeline.fan_out, max_rows=ROWS_AHEAD)


def lookup(topology: Topology, vocab: int) -> Drafter:
    """A drafter without a model. vocab: the target's."""
    made = source(topology.draft.source).make(noise=CounterNoise(), accept=topology.accept, vocab=vocab)
    assert not isinstance(made, Extender), "a source with a model of its own has one, by the rules of a topology"
    return made


def build_ahead(topology: Topology, device: torch.device, policy: Policy | None = None) -> Ahead:
    """The drafter. Beside a shard it is serial, and goes by the prices it is told; elsewhere it takes the time itself.

    policy: another than the topology's.
    """
    model = topology.draft.own_model
    assert model is not None, "the rules of a topology ask for it"
    target_folder, folder = find(topology.target.model), find(model)
    check_same_tokenizer(target_folder, folder, topology.target.model, model)
    shape, vocab = shape_of(folder), shape_of(target_folder).vocab
    made = source(topology.draft.source).make(noise=CounterNoise(), accept=topology.accept, vocab=vocab)
    assert isinstance(made, Extender)
    (whole,) = split(shape, (1.0,))
    pool = draft_pool(topology)
    dtype = DTYPES[topology.draft.dtype or topology.target.dtype]
    decoder = Loader.open(folder, whole, dtype, device).decoder(OneRank(), pool.num_pages * pool.page_size)
    run = ModelRun(decoder, shape.vocab, shape.max_positions)
    clock = None if topology.draft.placement.kind == "inline" else perf_counter
    return Ahead(made, run, pool, policy or policy_of(topology), clock)
