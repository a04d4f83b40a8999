"""From a topology to a drafter with a model of its own, wherever it runs. Constructs, decides nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from tpspec.comm.messages import Reach
from tpspec.draft.ahead import Ahead, Grown, Policy
from tpspec.draft.cascade import Cascade
from tpspec.draft.protocol import Given, Modelled
from tpspec.draft.shapes import MOST_DEPTH, Shape
from tpspec.draft.sources import make
from tpspec.engine.remote import Way
from tpspec.published.checkpoint import find
from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.published.shape import ModelShape
from tpspec.published.tokenizers import check_same_tokenizer
from tpspec.roles.fit import draft_pool
from tpspec.topology.caches import draft_slots, num_positions
from tpspec.topology.rank_paths import CHOICES, read_choices
from tpspec.verify.noise import CounterNoise

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpspec.cache.pages import PagePool
    from tpspec.draft.protocol import Drafter
    from tpspec.model.decoder import Decoder
    from tpspec.model.target import ShardedTarget
    from tpspec.topology.config import Topology
    from tpspec.topology.sublayers import Sublayers

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
ROWS_AHEAD = 16  # futures that are read at a time
BRANCHES = 4  # children of a node of a tree that are proposed at most


def ways_of(topology: Topology) -> tuple[Way, ...]:
    """How a drafter that runs beside the rounds may draft; of several, the lead finds the best by trial."""
    pipeline = topology.pipeline
    serial, optimistic, alternate = Way(), Way(Reach(ahead=True)), Way(alternates=True)
    fan_out = Way(Reach(ahead=True, width=1 + pipeline.fan_out))
    one = {"serial": serial, "optimistic": optimistic, "fan_out": fan_out, "alternate": alternate}
    return (fan_out, optimistic, alternate) if pipeline.policy == "auto" else (one[pipeline.policy],)


def reaching(policy: Policy, reach: Reach) -> Policy:
    """The policy of a drafter that runs beside the rounds, as far as the lead wants it to go."""
    return replace(policy, ahead=reach.ahead, width=reach.width, max_rows=ROWS_AHEAD)


def branches_of(topology: Topology, *, gives_q: bool) -> int:
    """Children of a node that a draft may have; 1 makes chains.

    A tree of drawn tokens would have to be drawn as one; and of a whole model, or most of one, every row that it reads
    costs.
    """
    cheap = topology.draft.own_model is None and not any(kind.thins for kind in topology.draft.kinds)
    wanted = topology.draft.tree in ("dynamic", "static") or (topology.draft.tree == "auto" and cheap)
    return BRANCHES if wanted and not gives_q else 1


def _shaping(topology: Topology) -> Callable[[int], Shape] | None:
    """What makes the shape of all trees of a source, where odds are not to decide; of so many levels."""
    if topology.draft.tree != "static":
        return None
    choices = topology.draft.options.get(CHOICES)
    return partial(Shape, BRANCHES, () if choices is None else read_choices(str(choices)))


def build_inline(
    topology: Topology,
    device: torch.device,
    shard: Callable[[], Decoder] | None,
    pool: PagePool,
    thinned: Callable[[Sublayers], ShardedTarget] | None = None,
) -> Drafter:
    """The drafter of a target rank that drafts between rounds. shard, pool, thinned: see `Given`."""
    given = _given(topology, device, shard, pool, thinned)
    drafters = [_inline(topology, made) for made in _made(topology, given)]
    merges = topology.draft.tree != "static" and branches_of(topology, gives_q=False) > 1
    return drafters[0] if len(drafters) == 1 else Cascade(drafters, merges=merges)


def build_ahead(topology: Topology, device: torch.device) -> Ahead:
    """The drafter that runs beside the rounds, which measures what its steps take."""
    (made,) = _made(topology, _given(topology, device))
    assert isinstance(made, Modelled), "the rules of a topology ask for a source with a model of its own"
    branches = branches_of(topology, gives_q=made.source.needs.gives_q)
    return Ahead(made.source, made.run, draft_pool(topology), Policy(branches=branches), perf_counter)


def taps_elsewhere(topology: Topology) -> tuple[int, ...]:
    """What a drafter that runs beside the rounds needs of the target: a head is read once here, to say so."""
    if topology.draft.own_model is not None:
        return ()
    given = _given(topology, torch.device("cpu"))
    page = topology.cache.page  # nothing is kept here, where a cache for a card would fill the host
    (made,) = _made(topology, replace(given, num_slots=page, num_positions=page))
    assert isinstance(made, Modelled), "the rules of a topology ask for a source with a model of its own"
    return made.source.needs.taps


def _inline(topology: Topology, made: Drafter | Modelled) -> Drafter:
    if not isinstance(made, Modelled):
        return made
    pool = draft_pool(topology) if made.pool is None else made.pool
    branches = branches_of(topology, gives_q=made.source.needs.gives_q)
    shaping = _shaping(topology)
    shape = None if shaping is None or branches == 1 else shaping(MOST_DEPTH)
    policy = Policy(branches=branches if shape is None else shape.branches, shape=shape)
    return Grown(Ahead(made.source, made.run, pool, policy, borrows=made.pool is not None))


def _made(topology: Topology, given: Given) -> list[Drafter | Modelled]:
    """Of each source, in order."""
    return [make(name, given, topology.draft.options) for name in topology.draft.sources]


def _given(
    topology: Topology,
    device: torch.device,
    shard: Callable[[], Decoder] | None = None,
    pool: PagePool | None = None,
    thinned: Callable[[Sublayers], ShardedTarget] | None = None,
) -> Given:
    target_folder, draft = find(topology.target.model), topology.draft
    named = draft.own_model or draft.head
    folder = None if named is None else find(named, head=draft.own_model is None)
    if folder is not None and draft.own_model is not None:
        check_same_tokenizer(target_folder, folder, topology.target.model, draft.own_model)
    target, num_slots = ModelShape.of(target_folder), draft_slots(topology)
    return Given(
        noise=CounterNoise(),
        accept=topology.accept,
        vocab=target.vocab,
        target=target_folder,
        folder=folder,
        dtype=DTYPES[draft.dtype or topology.target.dtype],
        quantize=draft.quantize,
        device=device,
        num_slots=num_slots,
        num_positions=num_positions(target, num_slots),
        num_states=topology.serve.max_running,
        shard=shard,
        pool=pool,
        thinned=thinned,
        branches=branches_of(topology, gives_q=False),
        shape=_shaping(topology),
    )
