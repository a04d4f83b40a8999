"""The one file that knows every room: from a topology to an engine on this rank. Constructs, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from tpspec.comm.emulate import Emulated, emulated
from tpspec.comm.ledger import Ledger, counted
from tpspec.draft.ahead import Grown
from tpspec.engine.engine import Engine
from tpspec.engine.hosts import InlineHost
from tpspec.engine.pace import Pace
from tpspec.engine.remote import Elsewhere, RemoteHost
from tpspec.engine.scheduler import Scheduler
from tpspec.model.loader import Loader
from tpspec.model.target import ShardedTarget
from tpspec.roles.build_drafter import DTYPES, build_ahead, lookup, ways_of
from tpspec.roles.fit import shape_of, target_pool
from tpspec.topology.checkpoint import find
from tpspec.topology.shards import split
from tpspec.verify import rule
from tpspec.verify.noise import CounterNoise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from tpspec.cache.pages import PagePool
    from tpspec.comm.communicator import Communicator
    from tpspec.comm.draft_link import DraftLink
    from tpspec.comm.emulate import Emulation
    from tpspec.draft.protocol import Drafter
    from tpspec.engine.hosts import DraftHost
    from tpspec.topology.config import Topology
    from tpspec.topology.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Built:
    """An engine ready for rounds. max_tokens: the longest prompt plus output that it serves.

    emulation: what emulating a link has come to; None where none is emulated.
    """

    engine: Engine
    folder: Path
    max_tokens: int
    emulation: Emulation | None


def build_engine(
    topology: Topology,
    comm: Communicator,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    link: DraftLink | None = None,
) -> Built:
    """This target rank's engine; `comm` joins the target ranks. Raises UserError before reading weights if it can.

    link: of the lead, to a drafter in a process of its own, where the topology wants one.
    """
    folder = find(topology.target.model)
    shape = shape_of(folder)
    noise = CounterNoise()
    ledger = Ledger()
    pool = target_pool(topology)
    fixed_rows = topology.engine.fixed_rows if topology.deterministic else None
    host, gives_odds = _host(topology, shape.vocab, comm.rank, device, link)
    bus = emulated(comm, topology.link)
    target = _target(topology, folder, shape, counted(bus, ledger), device, pool, fixed_rows, progress)
    scheduler = Scheduler(
        pool,
        max_rows=topology.engine.max_rows,
        max_running=topology.serve.max_running,
        fixed_rows=fixed_rows,
        max_positions=shape.max_positions,
    )
    engine = Engine(
        target=target,
        scheduler=scheduler,
        pool=pool,
        rule=rule(topology.accept),
        noise=noise,
        host=host,
        draft_tokens=None if topology.draft.tokens == "auto" else topology.draft.tokens,
        pace=Pace(gives_odds=gives_odds),
        vocab=shape.vocab,
        ledger=ledger,
    )
    emulation = bus.sums if isinstance(bus, Emulated) else None
    return Built(engine, folder, scheduler.capacity_tokens, emulation)


def _target(
    topology: Topology,
    folder: Path,
    shape: ModelShape,
    comm: Communicator,
    device: torch.device,
    pool: PagePool,
    fixed_rows: int | None,
    progress: Callable[[int, int], None] | None,
) -> ShardedTarget:
    """This rank's shard. Weights come last: everything that can be refused without them has been by then."""
    weights = topology.target.fixed_weights
    assert weights is not None, "auto weights are not built yet"
    shards = split(shape, weights)
    shard, num_slots = shards[comm.rank], pool.num_pages * pool.page_size
    loader = Loader.open(folder, shard, DTYPES[topology.target.dtype], device)
    decoder = loader.decoder(comm, num_slots, fixed_rows=fixed_rows, progress=progress)
    return ShardedTarget(decoder, shard.vocab, shape.vocab, width=max(len(shard.vocab) for shard in shards))


def _host(
    topology: Topology, vocab: int, rank: int, device: torch.device, link: DraftLink | None
) -> tuple[DraftHost, bool]:
    """Where this rank's drafts come from, and whether they come with odds."""
    if topology.draft.placement.kind != "inline":
        return (Elsewhere() if rank or link is None else RemoteHost(link, perf_counter, ways_of(topology))), True
    if topology.draft.own_model is not None:
        drafter: Drafter = Grown(build_ahead(topology, device))
    else:
        drafter = lookup(topology, vocab)
    return InlineHost(drafter), drafter.needs.gives_odds
