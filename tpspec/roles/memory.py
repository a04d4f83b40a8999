"""Whether what a rank is to hold fits where it is placed, asked before any weight is read; and what if it did not.

Knows bytes and devices, not models.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

import torch

from tpspec.errors import OutOfMemory, UserError, WorldFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MEMINFO = Path("/proc/meminfo")
LOOK_S, STEADY_LOOKS, MOST_WAIT_S = 0.25, 4, 10.0


def check_memory(needed: int, device: torch.device, what: str, beside: int = 0) -> None:
    """OutOfMemory, saying by how much, when `needed` bytes are not free on the device; unknown counts as enough.

    beside: bytes that the rest of this world is about to take there.
    """
    free = free_bytes(device)
    if free is None or needed + beside <= free:
        return
    rest = f" beside {_gib(beside)} of the rest of this world" if beside else ""
    raise OutOfMemory(
        f"{what} needs {_gib(needed)} on {device}{rest}, {_gib(free)} are free ({_gib(needed + beside - free)} "
        "too little); use more ranks, a smaller cache.tokens, engine.max_rows or model"
    )


@contextmanager
def memory_suffices() -> Iterator[None]:
    """Around loading, which can need more than `check_memory` knew of. Nobody waits for this rank meanwhile."""
    cure = "use more ranks, a smaller cache.tokens or a smaller model"
    with _no_memory_is(lambda said: OutOfMemory(f"loading ran out of memory ({said}); {cure}")):
        yield


@contextmanager
def memory_lasts(rank: int) -> Iterator[None]:
    """Around rounds. One that finds no memory on some rank ends the world, by name; torchrun starts it again.

    The others are in a collective that this rank will never join, so to shed a request together instead would take a
    word from everybody before each of them.
    """
    cure = "use a smaller cache.tokens or engine.max_rows"
    with _no_memory_is(lambda said: WorldFailure(f"rank {rank} is out of memory ({said}); {cure}")):
        yield


@contextmanager
def _no_memory_is(fault: Callable[[str], UserError]) -> Iterator[None]:
    """fault: what to raise, of the first line that was said."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        if isinstance(error, RuntimeError) and "out of memory" not in said and "allocate memory" not in said:
            raise
        raise fault(said) from error


def wait_for_memory(device: torch.device) -> None:
    """While those who ran here before give back what they held, as far as that shows."""
    free, until, looks = free_bytes(device) or 0, monotonic() + MOST_WAIT_S, 0
    while looks < STEADY_LOOKS and monotonic() < until:
        sleep(LOOK_S)
        before, free = free, free_bytes(device) or 0
        looks = 0 if free > before else looks + 1


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not MEMINFO.exists():
        return None
    for line in MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None
