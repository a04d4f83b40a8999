"""A rank's place at the table: its ways to the others and to a drafter, its engine, and what it does there.

Collective, as its errors are: what one rank cannot, ends for all alike. Must not know options, text or HTTP.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tpspec.comm.channel import open_channel
from tpspec.comm.draft_link import LeadDraftLink
from tpspec.comm.gap import PROCESS, THREAD, go_first, in_a_thread, open_gap
from tpspec.comm.messages import News, Stop
from tpspec.comm.process import num_cores
from tpspec.errors import UserError, WorldFailure
from tpspec.roles.agree import agreed, ranks_here
from tpspec.roles.beside import Beside
from tpspec.roles.build import Built, build_engine
from tpspec.roles.drafter import Orders
from tpspec.roles.fit import check_drafter_fits
from tpspec.roles.guard import Guard
from tpspec.roles.memory import memory_lasts
from tpspec.roles.target import Inbox, follow_rounds, lead_rounds
from tpspec.topology.config import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    from tpspec.comm.channel import Channel
    from tpspec.comm.communicator import Communicator
    from tpspec.comm.distributed import World
    from tpspec.comm.emulate import Emulation
    from tpspec.comm.messages import Stats
    from tpspec.comm.watch import Watch
    from tpspec.engine.engine import Engine, Supply
    from tpspec.topology.config import Topology

NOT_YET = "not yet"  # what the rank of a drafter's thread says while that begins


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank's place at the table, ready for rounds. built: None at a rank that holds no shard.

    link: the lead's, to a drafter that runs beside the rounds; guard: of that one, at the rank where it runs. watch:
    over the other ranks, while there are rounds.
    """

    topology: Topology
    world: World
    watch: Watch
    channel: Channel | None
    built: Built | None
    link: LeadDraftLink | None
    guard: Guard | Beside | None

    @property
    def leads(self) -> bool:
        return self.world.rank == self.topology.target.ranks[0]

    @property
    def folder(self) -> Path:
        return self._shard[0].folder

    @property
    def max_tokens(self) -> int:
        """The longest prompt plus output that is served."""
        return self._shard[0].max_tokens

    @property
    def max_running(self) -> int:
        """Requests that it works on at a time."""
        return self.engine.scheduler.max_running

    @property
    def engine(self) -> Engine:
        return self._shard[0].engine

    @property
    def own(self) -> Supply | None:
        """Where the topology's drafts come from; None without a shard."""
        return None if self.built is None else self.built.own

    @property
    def emulation(self) -> Emulation | None:
        return self._shard[0].emulation

    @property
    def holds_shard(self) -> bool:
        return self.built is not None

    def stats(self) -> Stats:
        return self.engine.stats()

    def supply(self, topology: Topology) -> Supply | None:
        """Drafts as `topology` wants them beside this target; None without a shard. Collective, and so are its errors.

        To be drawn from by the engine, or not.
        """
        rank, device, built = self.world.rank, self.world.device, self.built
        sharing = ranks_here(self.world)
        agreed(self.world, lambda: check_drafter_fits(topology, rank, device, sharing))
        made = agreed(self.world, lambda: None if built is None else built.supply(topology))
        self.prepare(made)
        return made

    def prepare(self, supply: Supply | None) -> None:
        """For its first rounds. Collective, so a rank that fails here ends the world instead of agreeing on it."""
        if supply is not None:
            with memory_lasts(self.world.rank):
                supply.prepare()

    def lead(self, inbox: Inbox) -> int:
        built, channel = self._shard
        with memory_lasts(self.world.rank):
            return lead_rounds(built.engine, channel, inbox)

    def follow(self) -> int:
        if self.built is None:
            assert isinstance(self.guard, Guard)
            self.watch.stop()  # it leaves after the lead, whoever else is gone
            return self.guard.watch()
        built, channel = self._shard
        with memory_lasts(self.world.rank):
            return follow_rounds(built.engine, channel)

    @property
    def _shard(self) -> tuple[Built, Channel]:
        assert self.built is not None
        assert self.channel is not None
        return self.built, self.channel

    def dismiss(self, error: UserError) -> None:
        """What the lead cannot go on with ends the others too, in its place and without a word of theirs."""
        if self.leads and self.channel is not None and not isinstance(error, WorldFailure):
            with suppress(WorldFailure):
                self.channel.share(News(round=0, stop=error.exit_code))

    def close(self) -> None:
        """The drafter is told to end, and whoever guards it waits for that."""
        if self.link is not None:
            self.link.send(Stop())
        if self.guard is not None:
            self.guard.close()
        if self.built is not None:
            self.built.close()
        if self.link is not None:
            self.link.close()
        if self.channel is not None:
            self.channel.close()


class _Ways(NamedTuple):
    """From this rank to the others, and to a drafter; see `Seat`."""

    comm: Communicator | None
    channel: Channel | None
    link: LeadDraftLink | None
    guard: Guard | Beside | None


def seated(
    topology: Topology,
    world: World,
    watch: Watch,
    stack: ExitStack,
    prepare: Callable[[Topology, Watch], None] = lambda *_: None,
) -> Seat:
    """Where rounds may be prepared. Collective, and so are its errors. stack: of what ends where there is no seat."""
    ways = agreed(world, lambda: _open_ways(topology, world, watch, stack, prepare))
    launches = not _has_thread(topology, world, ways.guard)
    return agreed(world, lambda: _take_seat(topology, world, watch, ways, launches=launches))


def _open_ways(
    topology: Topology, world: World, watch: Watch, stack: ExitStack, prepare: Callable[[Topology, Watch], None]
) -> _Ways:
    """Collective calls first: see `agreed`."""
    placement = topology.draft.placement
    if placement.kind == "gaps" and placement.rank == world.rank:
        go_first(world.device)
    comm = world.group(topology.target.ranks, ordered=topology.deterministic, transport=topology.link.transport)
    channel = open_channel(world, topology.target.ranks, topology.engine.timeout_s)
    link, guard = _open_drafting(topology, world, world.device)
    if guard is not None:
        stack.callback(guard.close)
    if world.rank == topology.target.ranks[0]:
        prepare(topology, watch)
    return _Ways(comm, channel, link, guard)


def _has_thread(topology: Topology, world: World, guard: Guard | Beside | None) -> bool:
    """Whether the drafter is a thread of a rank; if so it has begun: it and the shards do not compile, record and try
    at one time. Collective: its rank says from time to time that it is not late."""
    placement = topology.draft.placement
    if placement.kind != "gaps" or placement.rank is None:
        return False
    said = NOT_YET
    while said == NOT_YET:
        word = None
        if world.rank == placement.rank:
            word = PROCESS
            if isinstance(guard, Beside):
                word = THREAD if guard.has_begun(topology.engine.timeout_s / 4) else NOT_YET
        said = world.announce(word, placement.rank)
    return said == THREAD


def _take_seat(topology: Topology, world: World, watch: Watch, ways: _Ways, *, launches: bool) -> Seat:
    """Nothing of it is collective."""
    comm, channel, link, guard = ways
    if isinstance(guard, Beside):
        guard.wait_until_ready()  # it is, or says what is wrong before weights are read
    built = None
    if comm is not None:
        with loading_bar(topology.target.model, shown=comm.rank == 0 and sys.stderr.isatty()) as progress:
            beside = guard.beside if isinstance(guard, Guard) else lambda comm: comm
            built = build_engine(topology, comm, world.device, progress, link, beside, launches=launches)
    if isinstance(guard, Guard):
        guard.wait_until_ready()
        if built is not None:
            guard.watch_beside()
    return Seat(topology, world, watch, channel, built, link, guard)


def _open_drafting(
    topology: Topology, world: World, device: torch.device
) -> tuple[LeadDraftLink | None, Guard | Beside | None]:
    """A drafter that runs beside the rounds: the lead's link to it, and at the drafter's rank its guard. Collective."""
    placement, lead = topology.draft.placement, topology.target.ranks[0]
    if placement.rank is None:
        return None, None
    link = LeadDraftLink() if world.rank == lead else None
    where = world.announce(f"{os.getpid()} {link.endpoint}" if link is not None else None, lead)
    if world.rank != placement.rank:
        return link, None
    pid, _, endpoint = where.partition(" ")
    crowded = device.type == "cpu" and num_cores() < topology.num_ranks
    gaps = placement.kind == "gaps"
    if gaps and in_a_thread(device):
        return link, Beside(Orders(to_json(topology), endpoint, int(pid), str(device), is_filler=False))
    gap = open_gap() if gaps and device.type == "cpu" else None
    orders = Orders(to_json(topology), endpoint, int(pid), str(device), gaps or crowded, gap.path if gap else "")
    return link, Guard(orders, gap)


@contextmanager
def loading_bar(model: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """What to call with (layers read, layers)."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(f"loading {model}")
        yield lambda done, total: bar.update(task, completed=done, total=total)
