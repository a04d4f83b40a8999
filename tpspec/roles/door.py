"""What every front door does before its own work: read the topology, join the world, build this rank's engine.

Errors a user can cause become one message on every host and the same exit code on every rank. Knows no text, no HTTP.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

import torch

from tpspec.comm.channel import open_channel
from tpspec.comm.distributed import SHARING, Place, World, join_world
from tpspec.comm.draft_link import LeadDraftLink
from tpspec.comm.gap import go_first, open_gap
from tpspec.comm.messages import News, Stop
from tpspec.comm.process import keep_to_own_cores, num_cores, settle
from tpspec.comm.sockets import check_room
from tpspec.comm.watch import Watch
from tpspec.errors import UserError, WorldFailure
from tpspec.output import output_in_words
from tpspec.roles.agree import agreed, ranks_here, settled
from tpspec.roles.beside import Beside, in_a_thread
from tpspec.roles.build import Built, build_engine
from tpspec.roles.drafter import Orders
from tpspec.roles.fit import check_drafter_fits, check_fits
from tpspec.roles.guard import Guard
from tpspec.roles.memory import memory_lasts
from tpspec.roles.target import Inbox, follow_rounds, lead_rounds
from tpspec.topology.config import Topology, automatic, dump, load, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tpspec.comm.channel import Channel
    from tpspec.comm.emulate import Emulation
    from tpspec.comm.messages import Stats
    from tpspec.engine.engine import Engine, Supply

SPEAKING_S = 10.0  # at most, for a rank that is still importing
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def add_topology_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "topology", nargs="?", type=Path, help="a topology file; without one, every rank becomes a shard of the target"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key: --set draft.tokens=6"
    )
    parser.add_argument("--save-topology", type=Path, metavar="FILE", help="write the topology that is used to a file")


def positive(text: str) -> int:
    """An option that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def guarded(run: Callable[[], int]) -> int:
    """Runs a front door; what a user can cause ends as one line on a host's terminal instead of a traceback."""
    try:
        with output_in_words():
            return run()
    except UserError as error:
        if str(error):  # else a process of ours has said it, or nobody wants to know
            _tell(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _tell(error: UserError) -> None:
    """What all ranks know is said once on every host; what one rank alone knows, by that one."""
    place = Place.from_env(os.environ)
    if isinstance(error, WorldFailure) or place.local_rank == 0:
        _say(f"error: {error}")
    else:
        sleep(SPEAKING_S)  # torchrun ends all ranks as soon as one has ended: first who speaks
        _say(f"error: rank {place.rank}: {error}")


def _say(text: str) -> None:
    sys.stderr.write(f"tpspec: {text}\n")
    sys.stderr.flush()


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


def find_place() -> Place:
    """This process's. Ranks of one host reach each other over loopback, whatever address the host's name stands for."""
    place = Place.from_env(os.environ)
    if place.on_one_host:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, LOOPBACK)
    return place


def warn_of_open_store(place: Place) -> None:
    """torchrun's own, which others can reach; said at the first start of a world that goes on for long."""
    if not place.address or place.meets_in_folder or place.restarts > 0:
        return
    if place.on_one_host:
        cure = "with --rdzv-backend tpspec in place of --standalone, as in ./launch/serve, there is none"
    else:
        cure = "a firewall should let none but this world's hosts reach it"
    _say(f"torchrun's store listens on every address of this machine and trusts whoever comes; {cure}")


@contextmanager
def open_seat(
    options: argparse.Namespace,
    module: str,
    prepare: Callable[[Topology, Watch], None] = lambda *_: None,
    *,
    fills: bool = True,
) -> Iterator[Seat]:
    """Everything up to the first round. prepare: the lead's own early work, done before any weight is read.

    It is handed the watch over the other ranks, which tells whether one is gone. fills: whether the cache may take the
    memory that is left, since no other drafts will be supplied.
    """
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a crash in somebody's kernel says where it was called
    place = find_place()
    topology = read_topology(options, place, module)
    device = pick_device(topology, place)
    check_room()
    if topology.draft.placement.kind == "gaps" and device.type == "cpu":
        keep_to_own_cores(place.local_rank, place.local_size)  # the drafter too: the gaps of one shard, no other's time
    with join_world(place, device, topology.engine.timeout_s) as world, _watch(topology, world) as watch:
        made = settled(topology, world, fills=fills)
        tells = device.type == "cuda" and world.rank == made.target.ranks[0]
        if tells and fills and topology.cache.tokens == "auto":
            _say(f"cache.tokens: auto is {made.cache.tokens:,} here")
        agreed(world, lambda: check_fits(made, place.rank, device, ranks_here(world)))
        seat = agreed(world, lambda: _take_seat(made, world, watch, prepare))
        try:
            if tells:
                _say("preparing rounds, for which kernels are compiled where this machine has not done so before")
            seat.prepare(seat.own)
            settle()
            yield seat
        except UserError as error:
            seat.dismiss(error)
            raise
        finally:
            watch.stop()
            seat.close()


def _watch(topology: Topology, world: World) -> Watch:
    """Over the other ranks of this host, and of those over the shards for freezing too. Collective."""
    pids = [int(world.announce(str(os.getpid()) if world.rank == rank else None, rank)) for rank in range(world.size)]
    peers = {rank: pids[rank] for rank in world.place.ranks_here if rank != world.rank}
    return Watch(peers, topology.target.ranks, topology.engine.hang_s)


def read_topology(options: argparse.Namespace, place: Place, module: str) -> Topology:
    """The topology asked for, checked against the world that torchrun started."""
    if options.topology is not None:
        topology = load(options.topology, options.set)
    else:
        topology = automatic(place.world_size, cuda=torch.cuda.is_available(), overrides=options.set)
        if place.rank == 0:
            _say(f"no topology file; this one was made:\n{dump(topology)}")
    if topology.num_ranks != place.world_size:
        file = options.topology or ""
        command = f"torchrun --nproc-per-node {topology.num_ranks} -m {module} {file}".rstrip()
        needs = f"{topology.name} needs {topology.num_ranks} ranks, this world has {place.world_size}"
        raise UserError(f"{needs}; start it with: {command}")
    if options.save_topology is not None and place.rank == 0:
        _save(topology, options.save_topology)
    return topology


def _save(topology: Topology, path: Path) -> None:
    try:
        path.write_text(dump(topology), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--save-topology {path}: cannot be written: {error.strerror}") from error


def pick_device(topology: Topology, place: Place) -> torch.device:
    """The card of this rank, or the CPU. `auto` takes cards when there is one for every rank of this host."""
    num_cards = torch.cuda.device_count() if topology.device != "cpu" else 0
    can_share = topology.link.transport in SHARING
    num_places = place.local_size if num_cards and can_share else num_cards
    if topology.device == "cuda" and num_places < place.local_size:
        raise UserError(
            f"device: cuda needs a card for each of the {place.local_size} ranks of this host, and {num_cards} are "
            "here; with link.transport: host (or peer) ranks may share one"
        )
    if topology.device == "cpu" or (topology.device == "auto" and num_places < topology.num_ranks):
        return torch.device("cpu")
    if topology.link.emulate and topology.link.transport != "host":
        raise UserError(
            "link.emulate: works where the host waits, and these ranks are on cards; should stand beside device: cpu "
            "or link.transport: host"
        )
    return torch.device("cuda", place.local_rank % num_cards)


def _take_seat(topology: Topology, world: World, watch: Watch, prepare: Callable[[Topology, Watch], None]) -> Seat:
    """Collective calls first: see `agreed`."""
    device, placement = world.device, topology.draft.placement
    if placement.kind == "gaps" and placement.rank == world.rank:
        go_first(device)
    comm = world.group(topology.target.ranks, ordered=topology.deterministic, transport=topology.link.transport)
    channel = open_channel(world, topology.target.ranks, topology.engine.timeout_s)
    link, guard = _open_drafting(topology, world, device)
    if world.rank == topology.target.ranks[0]:
        prepare(topology, watch)
    built = None
    if comm is not None:
        with loading_bar(topology.target.model, shown=comm.rank == 0 and sys.stderr.isatty()) as progress:
            beside = guard.beside if guard is not None else lambda comm: comm
            built = build_engine(topology, comm, device, progress, link, beside)
    if guard is not None:
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
