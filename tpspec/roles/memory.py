"""Whether what a rank is to hold fits where it is placed, asked before any weight is read.

Knows bytes and devices, not models.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tpspec.errors import OutOfMemory

MEMINFO = Path("/proc/meminfo")


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
        "too little); use more ranks, a smaller cache.tokens or a smaller model"
    )


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
