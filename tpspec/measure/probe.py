"""`-m tpspec.measure links`: how long this box's own collectives take, by size, as a table that a topology can name.

Measures through the real communicator with all ranks active, checks every value, keeps the slowest rank's time of each
call. What NVML says of the bus is shown beside it and never used. Must not know models, topologies or emulated links.

Shapes: N ranks, E elements of a message.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from rich.console import Console
from rich.table import Table

from tpspec import written
from tpspec.comm.communicator import Purpose
from tpspec.comm.distributed import SHARING, Place, Transport, World, join_world
from tpspec.comm.replay_time import seconds_in_graph
from tpspec.comm.shared import SharedMemory
from tpspec.errors import UserError, WorldFailure
from tpspec.measure.links_command import checked_sizes, command, parser
from tpspec.roles.door import find_place, guarded
from tpspec.topology.link_file import BoxData, CurveData, LineData, LinksFile, dump_links
from tpspec.topology.links import link

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from tpspec.comm.communicator import Communicator

SHIFTS = 5  # kinds of message, in turn: the result of the call before is a wrong value
EXACT_RANKS = 36  # so many ranks' values add up to no more than 256, which bfloat16 holds exactly
BATCH_BYTES, BATCH = 1 << 22, (2, 20)  # calls in a row before their values are checked
UPPER = 16  # sizes from the largest down to a sixteenth of it say what more bytes cost: 256 KB of 4 MB
MOST_SHOWN = 200  # characters of a path, for what ranks tell each other is short
Verb = Literal["all_reduce", "all_gather"]


def links(arguments: Sequence[str]) -> int:
    """The exit code. Every rank of the world calls it with the same arguments."""
    return guarded(lambda: _run(parser().parse_args(arguments), arguments))


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    place = find_place()
    sizes = checked_sizes(options, place, arguments)
    with join_world(place, _device(place, options.transport)) as world:
        _agree_on_file(world, options.out)
        comm = world.group(range(world.size), transport=options.transport)
        assert comm is not None, "every rank is in the group of all"
        swept = sweep(comm, world.device, sizes, options.rounds)
        algorithm = _algorithm(comm, world.device)
        captured = _captured(comm, world.device, sizes, options.rounds)
    if world.rank == 0:
        box = _box(swept, world, algorithm, _source(arguments, place))
        _report(swept, world, algorithm, LinksFile(boxes={options.name: box}), options.out, captured)
    return 0


def _device(place: Place, transport: Transport) -> torch.device:
    """A card, when there is one for every rank or ranks may share one, and no CPU transport was asked for."""
    cards = torch.cuda.device_count() if transport in ("auto", *SHARING) else 0
    if not cards or (transport == "auto" and cards < place.world_size):
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % cards)


def _agree_on_file(world: World, out: Path | None) -> None:
    """Raises UserError on all ranks, before anything is measured, where the lead could not write the file."""
    fault = _file_fault(out) if world.rank == 0 and out is not None else ""
    if told := world.announce(fault if world.rank == 0 else None):
        raise UserError(told)


def _file_fault(out: Path) -> str:
    why = written.fault(out)
    return f"--out {str(out)[:MOST_SHOWN]}: cannot be written: {why}" if why else ""


# --- measuring ---


@dataclass(frozen=True, slots=True)
class Figure:
    """One size. num_bytes: that each rank brings (all-gather: ends up with). The times: of the slowest rank."""

    num_bytes: int
    median_us: float
    p90_us: float


@dataclass(frozen=True, slots=True)
class Message:
    """One collective with values that every rank can foretell."""

    comm: Communicator
    device: torch.device
    verb: Verb
    num_elements: int

    @property
    def dtype(self) -> torch.dtype:
        """What a model sends, where its sums are exact."""
        return torch.bfloat16 if self.comm.size <= EXACT_RANKS else torch.float32

    @property
    def num_bytes(self) -> int:
        """As a table counts them."""
        copies = self.comm.size if self.verb == "all_gather" else 1
        return self.num_elements * self.dtype.itemsize * copies

    def brought(self, rank: int, shift: int) -> Tensor:
        """[E] by one rank: small whole numbers that differ by place, by turn and by neighbouring ranks."""
        values = (torch.arange(self.num_elements, device=self.device) + shift) % SHIFTS + rank % 4
        return values.to(self.dtype)

    def due(self, shift: int) -> Tensor:
        """[E], or [N, E] of a gather: the one right result."""
        parts = torch.stack([self.brought(rank, shift) for rank in range(self.comm.size)])
        return parts if self.verb == "all_gather" else parts.sum(0, dtype=torch.float32).to(self.dtype)

    def send(self, x_E: Tensor) -> Tensor:
        verb = self.comm.all_gather if self.verb == "all_gather" else self.comm.all_reduce
        return verb(x_E, Purpose.control)

    def check(self, got: Tensor, due: Tensor) -> None:
        """Raises WorldFailure where a value is wrong."""
        if torch.equal(got, due):
            return
        what = f"{self.verb} of {self.num_bytes} bytes, rank {self.comm.rank} of {self.comm.size}"
        if got.shape != due.shape:
            raise WorldFailure(f"{what}: a result of shape {tuple(got.shape)}; should be {tuple(due.shape)}")
        wrong = (got != due).flatten()
        first = int(wrong.nonzero()[0])
        seen, right = got.flatten()[first].item(), due.flatten()[first].item()
        raise WorldFailure(f"{what}: {int(wrong.sum())} wrong values; value {first} is {seen:g}, should be {right:g}")


def message(comm: Communicator, device: torch.device, verb: Verb, num_bytes: int) -> Message:
    """Of num_bytes as a table counts them, rounded down to whole elements for each rank."""
    one = Message(comm, device, verb, 1)
    return Message(comm, device, verb, num_bytes // one.num_bytes or 1)


def sweep(
    comm: Communicator, device: torch.device, sizes: Sequence[int], rounds: int
) -> dict[Verb, tuple[Figure, ...]]:
    """Both collectives, every size; the same figures on every rank. Raises WorldFailure at a wrong value."""
    return {
        verb: tuple(measured(message(comm, device, verb, size), rounds) for size in sizes) for verb in get_args(Verb)
    }


def measured(message: Message, rounds: int) -> Figure:
    brought = [message.brought(message.comm.rank, shift) for shift in range(SHIFTS)]
    due = [message.due(shift) for shift in range(SHIFTS)]
    batch = min(max(BATCH_BYTES // message.num_bytes, BATCH[0]), BATCH[1])
    _batch(message, brought, due, batch)  # warms up
    times: list[float] = []
    while len(times) < rounds:
        times += _batch(message, brought, due, min(batch, rounds - len(times)))
    slowest = _slowest(message.comm, times, message.device)
    p90 = quantiles(slowest, n=10, method="inclusive")[8]
    return Figure(message.num_bytes, median(slowest) * 1e6, p90 * 1e6)


def _batch(message: Message, brought: Sequence[Tensor], due: Sequence[Tensor], num_calls: int) -> list[float]:
    """Seconds of each call on this rank, back to back; the values are checked afterwards, outside the times."""
    xs = [brought[call % SHIFTS].clone() for call in range(num_calls)]
    message.send(brought[-1].clone())  # ranks that checked at different speeds leave this one together
    results, times = (_by_events if message.device.type == "cuda" else _by_clock)(message.send, xs)
    for call, result in enumerate(results):
        message.check(result, due[call % SHIFTS])
    return times


def _by_clock(send: Callable[[Tensor], Tensor], xs: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
    results, times = [], []
    for x in xs:
        begin = perf_counter()
        results.append(send(x))
        times.append(perf_counter() - begin)
    return results, times


def _by_events(send: Callable[[Tensor], Tensor], xs: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
    """On the card's own clock: the host runs ahead, as it does in a model."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(xs) + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    results = []
    for x, mark in zip(xs, marks[1:], strict=True):
        results.append(send(x))
        mark.record()
    torch.cuda.synchronize()
    return results, [begin.elapsed_time(end) / 1000 for begin, end in pairwise(marks)]


def _captured(comm: Communicator, device: torch.device, sizes: Sequence[int], rounds: int) -> list[str]:
    """A line for each size, of all-reduces inside a CUDA graph; nothing where the host takes part."""
    if device.type != "cuda" or not comm.is_queued:
        return []
    messages = [message(comm, device, "all_reduce", size) for size in sizes]
    times = [seconds_in_graph(one.send, one.brought(comm.rank, 0), rounds) for one in messages]
    slowest = _slowest(comm, times, device)
    return [f"  {one.num_bytes:,} bytes: {time * 1e6:.1f}" for one, time in zip(messages, slowest, strict=True)]


def _slowest(comm: Communicator, times: Sequence[float], device: torch.device) -> list[float]:
    """Of each call, the longest time that a rank saw."""
    every_NR = comm.all_gather(torch.tensor(times, dtype=torch.float64, device=device), Purpose.control)
    slowest: list[float] = every_NR.amax(0).tolist()
    return slowest


# --- the table ---


def _algorithm(comm: Communicator, device: torch.device) -> str:
    if device.type == "cuda":
        return {"ThroughHost": "host", "PeerMemory": "peer"}.get(type(comm).__name__, "nccl")
    return "shared" if isinstance(comm, SharedMemory) else "gloo"


def _source(arguments: Sequence[str], place: Place) -> tuple[str, ...]:
    host = f"a host of {os.cpu_count()} CPUs and {torch.cuda.device_count()} cards, torch {torch.__version__}"
    return command(place.world_size, arguments), f"{datetime.now(UTC):%Y-%m-%d}", host


def _box(swept: dict[Verb, tuple[Figure, ...]], world: World, algorithm: str, source: tuple[str, ...]) -> BoxData:
    on_card = world.device.type == "cuda"
    return BoxData(
        gpu=torch.cuda.get_device_name(world.device) if on_card else "none: ranks on the CPU",
        ranks=world.size,
        fabric=None if on_card else {"shared": "memory of one host", "gloo": "gloo over TCP"}[algorithm],
        source=source,
        all_reduce={algorithm: curve(swept["all_reduce"])},
        all_gather={algorithm: curve(swept["all_gather"])},
    )


def curve(figures: Sequence[Figure]) -> CurveData:
    """The figures as the file has them, with the line that holds below and above them."""
    return CurveData(
        measured_us={figure.num_bytes: round(figure.median_us, 2) for figure in figures},
        p90_us={figure.num_bytes: round(figure.p90_us, 2) for figure in figures},
        line=_line(figures),
        mode="eager",
        note="median over calls of the slowest rank's time, back to back; every value was checked",
    )


def _line(figures: Sequence[Figure]) -> LineData:
    low, after = figures[:2]
    grown = max(0.0, after.median_us - low.median_us)
    alpha_us = low.median_us - grown * low.num_bytes / (after.num_bytes - low.num_bytes)
    us_per_byte, slope = _slope(figures)
    gbytes_per_s = max(round(1 / us_per_byte / 1000, 4), 0.0001)
    how = f"alpha through the two smallest sizes, {slope}"
    return LineData(alpha_us=round(max(0.0, alpha_us), 2), gbytes_per_s=gbytes_per_s, kind="fitted", how=how)


def _slope(figures: Sequence[Figure]) -> tuple[float, str]:
    """Microseconds a byte costs beyond the largest size, and how that was found. Estimator: Theil and Sen.

    The median over pairs, so that neither two sizes close together nor one that something else disturbed decides it:
    5% of noise become 3% of the slope in the median, 5% with one time doubled besides (256 KB to 4 MB, simulated).
    """
    last = figures[-1]
    upper = [figure for figure in figures[:-2] if figure.num_bytes * UPPER >= last.num_bytes] + [*figures[-2:]]
    slope = median(
        (larger.median_us - smaller.median_us) / (larger.num_bytes - smaller.num_bytes)
        for smaller, larger in combinations(upper, 2)
    )
    if slope <= 0:  # noise: the larger messages were the faster ones
        return last.median_us / last.num_bytes, "slope from nothing to the largest size"
    return slope, f"slope the median over pairs of the {len(upper)} largest sizes"


def write_table(out: Path, table: LinksFile) -> None:
    """Written once the project's own reader has read it back. Raises UserError where it cannot be."""
    written.write(out, dump_links(table), "--out")
    link(str(out))


def _report(
    swept: dict[Verb, tuple[Figure, ...]],
    world: World,
    algorithm: str,
    table: LinksFile,
    out: Path | None,
    captured: Sequence[str],
) -> None:
    Console().print(terminal_table(swept, f"{algorithm}, {world.size} ranks: microseconds of the slowest rank"))
    for line in _remarks(world, captured):
        sys.stdout.write(line + "\n")
    if out is None:
        sys.stdout.write(f"\nThe link table (keep it with --out FILE.yaml):\n\n{dump_links(table)}")
        return
    write_table(out, table)
    sys.stdout.write(
        f"wrote {out}; a topology names it so: link: {{table: {out if out.is_absolute() else f'./{out}'}}}\n"
    )


def terminal_table(swept: dict[Verb, tuple[Figure, ...]], title: str) -> Table:
    made = Table(title=title)
    for heading in ("all_reduce: bytes", "median", "p90", "GB/s", "all_gather: bytes", "median", "p90"):
        made.add_column(heading, justify="right")
    for reduce, gather in zip(swept["all_reduce"], swept["all_gather"], strict=True):
        speed = f"{reduce.num_bytes / reduce.median_us / 1000:.2f}"
        made.add_row(*_cells(reduce), speed, *_cells(gather))
    return made


def _cells(figure: Figure) -> tuple[str, str, str]:
    return f"{figure.num_bytes:,}", f"{figure.median_us:.1f}", f"{figure.p90_us:.1f}"


# --- what the driver says ---


def _remarks(world: World, captured: Sequence[str]) -> list[str]:
    if world.device.type != "cuda":
        return []
    cards = range(min(world.size, torch.cuda.device_count()))  # ranks may share one
    uuids = [f"GPU-{torch.cuda.get_device_properties(card).uuid}" for card in cards]
    return ["All-reduce inside a CUDA graph, microseconds (the times above are eager):", *captured, *bus_report(uuids)]


def bus_report(uuids: Sequence[str]) -> list[str]:
    """What NVML says of these cards' bus. An idle card lowers its link, so nothing here is used."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return ["NVML: nvidia-ml-py is not installed (pip install nvidia-ml-py), so nothing is reported of the bus."]
    try:
        nvml.nvmlInit()
        cards = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        lines = [*_card_lines(nvml, cards), *_pair_lines(nvml, cards)]
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return [f"NVML: {error}, so nothing is reported of the bus."]
    return ["Reported by NVML, not measured:", *(f"  {line}" for line in lines)]


def _card_lines(nvml: Any, cards: Sequence[Any]) -> Iterator[str]:
    for number, card in enumerate(cards):
        now = f"gen{nvml.nvmlDeviceGetCurrPcieLinkGeneration(card)} x{nvml.nvmlDeviceGetCurrPcieLinkWidth(card)}"
        most = f"gen{nvml.nvmlDeviceGetMaxPcieLinkGeneration(card)} x{nvml.nvmlDeviceGetMaxPcieLinkWidth(card)}"
        yield f"card {number}: PCIe {now} now, {most} at most"


def _pair_lines(nvml: Any, cards: Sequence[Any]) -> Iterator[str]:
    meets = {0: "on the board", 10: "at one switch", 20: "over switches", 30: "at the host bridge"}
    meets |= {40: "in the NUMA node", 50: "across sockets"}
    for (one, first), (other, second) in combinations(enumerate(cards), 2):
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
        status = nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_READ)
        peer = "P2P" if status == nvml.NVML_P2P_STATUS_OK else f"no P2P (status {status})"
        yield f"cards {one} and {other}: meet {meets.get(level, f'at level {level}')}, {peer}"
