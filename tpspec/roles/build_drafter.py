"""From a topology to a drafter with a model of its own, wherever it runs. Constructs, decides nothing."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from tpspec.comm.communicator import OneRank
from tpspec.comm.messages import Reach
from tpspec.draft.ahead import Ahead, Policy
from tpspec.draft.protocol import Extender
from tpspec.draft.run import ModelRun
from tpspec.draft.sources import source
from tpspec.engine.remote import Way
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
ROWS_AHEAD = 16  # futures that are read at a time


def ways_of(topology: Topology) -> tuple[Way, ...]:
    """How a drafter in a process of its own may draft; of several, the lead finds the best by trial."""
    pipeline = topology.pipeline
    serial, optimistic, alternate = Way(), Way(Reach(ahead=True)), Way(alternates=True)
    fan_out = Way(Reach(ahead=True, width=1 + pipeline.fan_out))
    one = {"serial": serial, "optimistic": optimistic, "fan_out": fan_out, "alternate": alternate}
    return (fan_out, optimistic, alternate) if pipeline.policy == "auto" else (one[pipeline.policy],)


def policy_for(reach: Reach) -> Policy:
    return Policy(reach.ahead, reach.width, ROWS_AHEAD)


def lookup(topology: Topology, vocab: int) -> Drafter:
    """A drafter without a model. vocab: the target's."""
    made = source(topology.draft.source).make(noise=CounterNoise(), accept=topology.accept, vocab=vocab)
    assert not isinstance(made, Extender), "a source with a model of its own has one, by the rules of a topology"
    return made


def build_ahead(topology: Topology, device: torch.device, policy: Policy | None = None) -> Ahead:
    """The drafter. Beside a shard it goes by the prices it is told; elsewhere it takes the time itself.

    policy: until it is told another; None: serial.
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
    return Ahead(made, run, pool, policy or Policy(), clock)
