"""The box at hand, by what the driver's own command says: which cards are visible, and what slots they sit in.

Asks nvidia-smi, so that nothing here needs torch or a package of NVIDIA's. Must not plan; what it says of a bus is a
slot's name, never a measurement.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.topology.cards import card

if TYPE_CHECKING:
    from tpspec.topology.cards import Card

NVIDIA_SMI = "nvidia-smi"
BY_HAND = "say what the box holds instead, for example --gpus 8x3090 --link pcie4"
PROBE = "torchrun --nproc-per-node {} -m tpspec.measure links --out link.yaml"
FIELDS = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
TIMEOUT_S = 60  # without persistence mode the driver wakes every card first
SLOTS = range(3, 6)  # pcie3, pcie4 and pcie5 are families of links.yaml
FULL_WIDTH = 16


@dataclass(frozen=True, slots=True)
class Box:
    """cards: as nvidia-smi numbers them. slot: a family of links.yaml, or None where the driver does not say."""

    cards: tuple[Card, ...]
    slot: str | None

    @property
    def link(self) -> str:
        """The slot, for want of a measurement. Raises UserError where not even that is known."""
        if self.slot is None:
            raise UserError(
                f"{NVIDIA_SMI} does not say how these cards are linked; measure it and name it: {self.probe}"
            )
        return self.slot

    @property
    def probe(self) -> str:
        """The command that measures the link, and the option that names the result."""
        return f"{PROBE.format(len(self.cards))}, then --link link.yaml"


def box_here(visible: str | None, nvidia_smi: str = NVIDIA_SMI) -> Box:
    """visible: CUDA_VISIBLE_DEVICES, None where it is not set. Raises UserError where there is no card we know."""
    if visible is not None and visible.strip() in ("", "-1"):
        raise UserError(f"no card is visible: CUDA_VISIBLE_DEVICES is {visible!r}; {BY_HAND}")
    rows = [_cells(line) for line in _answer(nvidia_smi, visible).splitlines() if line.strip()]
    if not rows:
        raise UserError(f"no card is visible: {NVIDIA_SMI} lists none; {BY_HAND}")
    return Box(tuple(_card(name, memory) for name, memory, _, _ in rows), _slot([row[2:] for row in rows]))


def _answer(nvidia_smi: str, visible: str | None) -> str:
    chosen = [] if visible is None else [f"--id={visible}"]
    command = [nvidia_smi, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader", *chosen]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except OSError as error:
        raise UserError(f"no card is visible: {nvidia_smi}: {error.strerror}; {BY_HAND}") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{nvidia_smi} has not answered for {TIMEOUT_S} s; {BY_HAND}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().partition("\n")[0].rstrip(".")
        raise UserError(f"no card is visible: {NVIDIA_SMI} says: {said}; {BY_HAND}")
    return done.stdout


def _cells(line: str) -> list[str]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(FIELDS):
        raise UserError(f"{NVIDIA_SMI} answered {line!r}, not {', '.join(FIELDS)}; {BY_HAND}")
    return cells


def _card(name: str, memory: str) -> Card:
    """The card of that name, with the memory that this one has."""
    mebibytes = re.fullmatch(r"(\d+) MiB", memory)
    if mebibytes is None:
        raise UserError(f"{NVIDIA_SMI} gives {memory!r} as the memory of {name}; {BY_HAND}")
    try:
        known = card(re.sub(r"-\d+GB$", "", name))
    except UserError as error:
        raise UserError(f"{NVIDIA_SMI}: {error} ({BY_HAND})") from error
    return known.model_copy(update={"gbytes": int(mebibytes[1]) / 1024})


def _slot(buses: list[list[str]]) -> str | None:
    """The family for the slowest of the slots: half the lanes are a generation less."""
    if not all(cell.isdecimal() and int(cell) > 0 for bus in buses for cell in bus):
        return None
    generations = (int(generation) + log2(int(width) / FULL_WIDTH) for generation, width in buses)
    return f"pcie{min(max(int(min(generations)), SLOTS[0]), SLOTS[-1])}"
