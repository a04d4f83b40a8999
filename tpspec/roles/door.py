"""What every front door does before its own work: read the topology, join the world, build this rank's engine.

Errors a user can cause become one message on every host and the same exit code on every rank. Knows no text, no HTTP.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shlex
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

import torch

from tpspec.comm.distributed import SHARING, Place, World, join_world
from tpspec.comm.process import keep_to_own_cores, settle
from tpspec.comm.sockets import check_room
from tpspec.comm.watch import Watch
from tpspec.command import ended
from tpspec.errors import UserError, WorldFailure
from tpspec.roles.agree import agreed, ranks_here, settled
from tpspec.roles.fit import check_fits
from tpspec.roles.seat import Seat, seated
from tpspec.topology.config import Topology, automatic, dump, load
from tpspec.written import write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def guarded(run: Callable[[], int]) -> int:
    """Runs a front door; what a user can cause ends as one line on a host's terminal instead of a traceback."""
    return ended(run, _tell)


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
    with (
        join_world(place, device, topology.engine.timeout_s) as world,
        _watch(topology, world) as watch,
        ExitStack() as stack,
    ):
        made = settled(topology, world, fills=fills)
        tells = device.type == "cuda" and world.rank == made.target.ranks[0]
        if tells and fills and topology.cache.tokens == "auto":
            _say(f"cache.tokens: auto is {made.cache.tokens:,} here")
        agreed(world, lambda: check_fits(made, place.rank, device, ranks_here(world)))
        seat = seated(made, world, watch, stack, prepare)
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
        words = [str(options.topology)] if options.topology else []
        words += [word for one in options.set for word in ("--set", one)]
        command = f"torchrun --nproc-per-node {topology.num_ranks} -m {module} {shlex.join(words)}".rstrip()
        needs = f"{topology.name} needs {topology.num_ranks} ranks, this world has {place.world_size}"
        raise UserError(f"{needs}; start it with: {command}")
    if options.save_topology is not None and place.rank == 0:
        write(options.save_topology, dump(topology), "--save-topology")
    return topology


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
