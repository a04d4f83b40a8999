"""What a world agrees on before it loads anything: that nobody has failed, and what a topology leaves to its devices.

Every verb is collective. Must not know what a seat is, or how models are built.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, TypeVar

import torch

from tpspec.comm.communicator import NOTE_BYTES
from tpspec.errors import EXIT_CODES, UserError
from tpspec.roles.memory import free_bytes, memory_suffices, wait_for_memory
from tpspec.roles.room import num_cached, with_tokens
from tpspec.roles.weights import capacity, with_weights
from tpspec.topology.balance import Capacity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpspec.comm.distributed import World
    from tpspec.topology.config import Topology

Result = TypeVar("Result")


def settled(topology: Topology, world: World, *, fills: bool = True) -> Topology:
    """With numbers where it says `auto` for weights and the cache's tokens, as its ranks' devices decide.

    fills: whether that cache may take the memory that is left; else it is as on a CPU.
    """
    if topology.target.fixed_weights is None or (fills and topology.cache.tokens == "auto"):
        agreed(world, lambda: free_bytes(world.device))  # CUDA takes its own before anybody counts what is left
        if world.place.restarts and world.device.type == "cuda":  # as much as before, for requests that come again
            wait_for_memory(world.device)
    weighted = _settle_weights(topology, world)
    return _settle_cache(weighted, world) if fills else with_tokens(weighted, weighted.cache.num_tokens)


def ranks_here(world: World) -> Sequence[int]:
    """Those that share this one's memory: on the CPU that of their host, and on a card those whose numbers on the host
    come to the same one."""
    if world.device.type == "cpu":
        return world.place.ranks_here
    num_cards = torch.cuda.device_count()
    return [rank for local, rank in enumerate(world.place.ranks_here) if local % num_cards == world.device.index]


def agreed(world: World, work: Callable[[], Result]) -> Result:
    """`work` on every rank, nothing of it collective once it may fail. Where it does on one, for want of memory too,
    all ranks fail alike, and the lead can say why."""
    results, fault = list[Result](), ""
    try:
        with memory_suffices():
            results.append(work())
    except UserError as error:
        fault = _short(f"{error.exit_code} {error}", NOTE_BYTES)
    for rank in range(world.size):
        told = world.announce(fault if world.rank == rank else None, lead=rank)
        if told:
            code, _, message = told.partition(" ")
            raise EXIT_CODES[int(code)](message if rank == 0 else f"rank {rank}: {message}")
    return results[0]


def _settle_weights(topology: Topology, world: World) -> Topology:
    """The topology as it is, or with weights that its ranks' devices decide. Collective."""
    if topology.target.fixed_weights is not None:
        return topology
    mine = agreed(world, lambda: capacity(topology, world.rank, world.device, ranks_here(world)))
    line = " ".join(map(str, astuple(mine)))
    told = [world.announce(line if world.rank == rank else None, rank) for rank in topology.target.ranks]
    capacities = [Capacity(*map(float, line.split())) for line in told]
    return agreed(world, lambda: with_weights(topology, capacities))


def _settle_cache(topology: Topology, world: World) -> Topology:
    """The same of the tokens that its cache holds. Collective."""
    if topology.cache.tokens != "auto":
        return topology
    mine = agreed(world, lambda: num_cached(topology, world.device, ranks_here(world)))
    told = [world.announce(str(mine) if world.rank == rank else None, rank) for rank in range(world.size)]
    return with_tokens(topology, min(map(int, told)))


def _short(text: str, num_bytes: int) -> str:
    """Its beginning, if it is too long; never half a character."""
    raw = text.encode()
    return text if len(raw) <= num_bytes else raw[: num_bytes - len(" ...")].decode(errors="ignore") + " ..."
