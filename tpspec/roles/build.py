"""The one file that knows every room: from a topology to an engine on this rank. Constructs, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.cache.pages import PagePool
from tpspec.comm.communicator import OneRank
from tpspec.comm.emulate import emulated
from tpspec.comm.ledger import Ledger, counted
from tpspec.draft.run import ModelRun
from tpspec.draft.sources import source
from tpspec.engine.engine import Engine
from tpspec.engine.hosts import InlineHost
from tpspec.engine.scheduler import Scheduler
from tpspec.model.architectures import declared
from tpspec.model.loader import Loader
from tpspec.model.target import ShardedTarget
from tpspec.roles.memory import check_memory
from tpspec.roles.tokenizers import check_same_tokenizer
from tpspec.topology.checkpoint import find, read_config
from tpspec.topology.shape import ModelShape
from tpspec.topology.shards import DTYPE_BYTES, kv_bytes_per_token, split, weight_bytes
from tpspec.verify import rule
from tpspec.verify.noise import CounterNoise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tpspec.comm.communicator import Communicator
    from tpspec.topology.config import Topology
    from tpspec.verify.noise import Noise

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}


@dataclass(frozen=True, slots=True)
class Built:
    """An engine ready for rounds. max_tokens: the longest prompt plus output that it serves."""

    engine: Engine
    folder: Path
    max_tokens: int


def build_engine(
    topology: Topology, comm: Communicator, device: torch.device, progress: Callable[[int, int], None] | None = None
) -> Built:
    """This target rank's engine; `comm` joins the target ranks. Raises UserError before reading weights if it can."""
    folder = find(topology.target.model)
    shape = _shape(folder)
    noise = CounterNoise()
    ledger = Ledger()
    pool = _pool(topology)
    fixed_rows = topology.engine.fixed_rows if topology.deterministic else None
    comm = counted(emulated(comm, topology.link, device.type), ledger)
    target = _target(topology, folder, shape, comm, device, pool, fixed_rows, progress)
    scheduler = Scheduler(
        pool, max_rows=topology.engine.max_rows, max_running=topology.serve.max_running, fixed_rows=fixed_rows
    )
    engine = Engine(
        target=target,
        scheduler=scheduler,
        pool=pool,
        rule=rule(topology.accept),
        noise=noise,
        host=_inline_host(topology, folder, shape.vocab, noise, device),
        draft_tokens=_draft_tokens(topology),
        vocab=shape.vocab,
        ledger=ledger,
    )
    return Built(engine, folder, scheduler.capacity_tokens)


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
    needed = weight_bytes(shape, shard, topology.target.dtype)
    needed += num_slots * kv_bytes_per_token(shape, shard, topology.target.dtype)
    check_memory(needed, device, f"shard {comm.rank} of {topology.target.model} with {num_slots} cached tokens")
    loader = Loader.open(folder, shard, DTYPES[topology.target.dtype], device)
    decoder = loader.decoder(comm, num_slots, fixed_rows=fixed_rows, progress=progress)
    return ShardedTarget(decoder, shard.vocab, shape.vocab, width=max(len(shard.vocab) for shard in shards))


def _shape(folder: Path) -> ModelShape:
    """The sizes; an architecture that is not ours is refused first, for its config has other keys."""
    config = read_config(folder)
    declared(config.get("model_type"), str(folder))
    return ModelShape.from_config(config, str(folder))


def _inline_host(topology: Topology, folder: Path, vocab: int, noise: Noise, device: torch.device) -> InlineHost:
    """The drafter on this rank, with a whole model of its own beside the shard if its source needs one.

    folder, vocab: the target's. A smaller head of the draft's is the drafter's own matter.
    """
    run = None
    if (model := topology.draft.own_model) is not None:
        draft_folder = find(model)
        check_same_tokenizer(folder, draft_folder, topology.target.model, model)
        run = _draft_run(topology, draft_folder, _shape(draft_folder), device)
    drafter = source(topology.draft.source).make(noise=noise, accept=topology.accept, vocab=vocab)
    return InlineHost(drafter, run)


def _pool(topology: Topology, more_pages: int = 0) -> PagePool:
    cache = topology.cache
    return PagePool(-(-cache.tokens // cache.page) + more_pages, cache.page)


def _draft_run(topology: Topology, folder: Path, shape: ModelShape, device: torch.device) -> ModelRun:
    dtype = topology.draft.dtype or topology.target.dtype
    (whole,) = split(shape, (1.0,))
    # A page a sequence more than the target has, for the draft that stands beyond the last token the target caches.
    pool = _pool(topology, more_pages=topology.serve.max_running)
    num_slots = pool.num_pages * pool.page_size
    needed = weight_bytes(shape, whole, dtype) + num_slots * kv_bytes_per_token(shape, whole, dtype)
    check_memory(needed, device, f"draft model {topology.draft.model} with {num_slots} cached tokens")
    decoder = Loader.open(folder, whole, DTYPES[dtype], device).decoder(OneRank(), num_slots)
    return ModelRun(decoder, pool, shape.vocab)


def _draft_tokens(topology: Topology) -> int:
    assert topology.draft.tokens != "auto", "auto draft length is not built yet"
    return topology.draft.tokens
