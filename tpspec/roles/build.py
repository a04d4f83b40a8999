"""The one file that knows every room: from a topology to an engine on this rank. Constructs, decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.cache.pages import PagePool
from tpspec.comm.communicator import OneRank
from tpspec.comm.ledger import Ledger, counted
from tpspec.draft.run import ModelRun
from tpspec.draft.sources import source
from tpspec.engine.engine import Engine
from tpspec.engine.hosts import InlineHost
from tpspec.engine.scheduler import Scheduler
from tpspec.model.loader import Loader
from tpspec.model.target import ShardedTarget
from tpspec.roles.memory import check_memory
from tpspec.roles.tokenizers import check_same_tokenizer
from tpspec.topology.checkpoint import find
from tpspec.topology.shape import ModelShape
from tpspec.topology.shards import DTYPE_BYTES, kv_bytes_per_token, split, weight_bytes
from tpspec.verify import rule
from tpspec.verify.noise import CounterNoise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tpspec.comm.communicator import Communicator
    from tpspec.topology.config import Topology
    from tpspec.topology.shards import Shard

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
Progress = "Callable[[int, int], None]"


@dataclass(frozen=True, slots=True)
class Built:
    """An engine ready for rounds. max_tokens: the longest prompt plus output that it serves."""

    engine: Engine
    folder: Path
    max_tokens: int


def build_engine(
    topology: Topology, comm: Communicator, device: torch.device, progress: Progress | None = None
) -> Built:
    """This target rank's engine; `comm` joins the target ranks. Raises UserError before reading weights if it can."""
    folder = find(topology.target.model)
    noise = CounterNoise()
    ledger = Ledger()
    pool = PagePool(-(-topology.cache.tokens // topology.cache.page), topology.cache.page)
    fixed_rows = topology.engine.fixed_rows if topology.deterministic else None
    target = _target(topology, folder, counted(comm, ledger), device, pool, fixed_rows, progress)
    scheduler = Scheduler(
        pool, max_rows=topology.engine.max_rows, max_running=topology.serve.max_running, fixed_rows=fixed_rows
    )
    engine = Engine(
        target=target,
        scheduler=scheduler,
        pool=pool,
        rule=rule(topology.accept),
        noise=noise,
        host=_inline_host(topology, folder, noise, device),
        draft_tokens=_draft_tokens(topology),
        ledger=ledger,
    )
    return Built(engine, folder, scheduler.capacity_tokens)
