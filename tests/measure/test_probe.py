"""The link probe: a real world writes a table that the project reads; wrong values and wrong requests are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.slow import slowly
from tpspec.comm.communicator import Communicator, Purpose, sum_in_order
from tpspec.comm.distributed import Place, World
from tpspec.comm.threads import ThreadWorld
from tpspec.errors import UserError, WorldFailure
from tpspec.measure.links_command import SIZES, parse_sizes
from tpspec.measure.probe import EXACT_RANKS, SHIFTS, Figure, _remarks, bus_report, curve, links, message, sweep
from tpspec.topology.link_file import read_links
from tpspec.topology.links import link

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def probe(num_ranks: int, *args: str) -> subprocess.CompletedProcess[str]:
    """The command as a user gives it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*launch, "-m", "tpspec.measure", "links", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("transport", ["auto", *slowly("gloo")])
def test_a_topology_can_name_what_a_world_measured(tmp_path: Path, transport: str) -> None:
    out = tmp_path / "mylink.yaml"
    request = ["--out", str(out), "--sizes", "1024,16384,262144", "--rounds", "20", "--transport", transport]
    ended = probe(2, *request)
    assert ended.returncode == 0, ended.stderr
    assert f"link: {{table: {out}}}" in ended.stdout
    table = link(str(out))
    assert table.num_ranks == 2
    assert [size for size, _ in table.reduce.points] == [1024, 16384, 262144]
    assert table.gather is not None
    assert [size for size, _ in table.gather.points] == [1024, 16384, 262144]
    for measured in (table.reduce, table.gather):
        times = [seconds for _, seconds in measured.points]
        assert all(seconds > 0 for seconds in times)
        assert times[-1] > times[0] / 10  # a busy machine may turn two sizes round, never so far
    # Within a measured range no answer may leave it: the table is what emulation and prediction go by.
    assert 0 < table.seconds(100_000) < 1


def test_a_table_says_where_its_numbers_come_from(tmp_path: Path) -> None:
    """A table without command, date and host cannot be measured again."""
    out = tmp_path / "mylink.yaml"
    ended = probe(2, "--out", str(out), "--sizes", "1024,4096", "--rounds", "3", "--name", "two-ranks")
    assert ended.returncode == 0, ended.stderr
    box = read_links(out).boxes["two-ranks"]
    assert box.source[0].startswith("torchrun --nproc-per-node 2 -m tpspec.measure links --out")
    assert f"{os.cpu_count()} CPUs and 0 cards" in box.source[2]
    assert all(made.kinds == ("measured",) and made.p90_us for made in [*box.all_reduce.values()])


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    ended = probe(2, "--out", str(tmp_path / "nowhere" / "mylink.yaml"), "--rounds", "1000000")
    assert ended.returncode != 0
    assert ended.stderr.count("cannot be written") == 1
    assert "should be a file in a folder that exists" in ended.stderr


@dataclass
class Liar:
    """Two ranks by turns in one process: right but for one call of one size."""

    lies_about: int
    rank: int = 1
    size: int = 2
    calls: int = 0

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        total = sum_in_order([self._other(x), x], torch.empty_like(x))
        if x.nbytes == self.lies_about:
            self.calls += 1
            total[-1] += self.calls == 7
        return total

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        parts = torch.stack([self._other(x), x])
        return parts.flip(0) if x.nbytes * 2 == self.lies_about and x.dtype != torch.float64 else parts

    def _other(self, x: Tensor) -> Tensor:
        """What rank 0 brings: one less everywhere."""
        return x - 1


class Swapped(Liar):
    """Gathers in the wrong order."""

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        return sum_in_order([self._other(x), x], torch.empty_like(x))


def test_one_wrong_value_in_one_call_ends_the_probe_and_names_the_size() -> None:
    """The time of a collective that does not add is worth nothing."""
    with pytest.raises(WorldFailure, match=r"all_reduce of 4096 bytes, rank 1 of 2: 1 wrong values; value 2047 is"):
        sweep(Liar(lies_about=4096), CPU, (1024, 4096), 10)


def test_ranks_gathered_in_the_wrong_order_are_caught() -> None:
    with pytest.raises(WorldFailure, match=r"all_gather of 1024 bytes"):
        sweep(Swapped(lies_about=1024), CPU, (1024, 4096), 10)


def test_the_result_of_the_call_before_is_a_wrong_value() -> None:
    """A shared buffer that is read too early holds the sum of one call ago."""
    one = message(Liar(0), CPU, "all_reduce", 1024)
    with pytest.raises(WorldFailure):
        one.check(one.due(0), one.due(1))


def test_a_result_of_another_shape_is_a_wrong_value() -> None:
    one = message(Liar(0), CPU, "all_gather", 1024)
    with pytest.raises(WorldFailure, match="a result of shape"):
        one.check(one.due(0)[:1], one.due(0))


@pytest.mark.parametrize("num_ranks", [2, 5, 7, EXACT_RANKS, 64])
def test_sums_are_exact_in_whatever_order_they_are_added(num_ranks: int) -> None:
    """bfloat16 holds whole numbers up to 256; beyond, a right sum would be called wrong."""
    one = message(Liar(0, size=num_ranks), CPU, "all_reduce", 1024)
    parts = [one.brought(rank, SHIFTS - 1) for rank in range(num_ranks)]
    backwards = torch.zeros_like(parts[0])
    for part in reversed(parts):
        backwards += part
    assert torch.equal(backwards, one.due(SHIFTS - 1))


def test_every_rank_counts_the_slowest_and_sizes_are_whole_elements() -> None:
    def swept(comm: Communicator) -> dict[str, tuple[Figure, ...]]:
        return {**sweep(comm, CPU, (1024, 4096), 5)}

    found = ThreadWorld(3).run(swept)
    assert found[0] == found[1] == found[2]
    assert [figure.num_bytes for figure in found[0]["all_reduce"]] == [1024, 4096]
    assert [figure.num_bytes for figure in found[0]["all_gather"]] == [1020, 4092]
    assert all(figure.p90_us >= figure.median_us for figure in found[0]["all_reduce"])


def test_a_line_continues_the_points_and_survives_noise() -> None:
    """A larger message that was faster once made a negative bandwidth."""
    line = curve([Figure(1000, 10.0, 11.0), Figure(2000, 11.0, 12.0), Figure(4000, 13.0, 14.0)]).line
    assert (line.alpha_us, line.gbytes_per_s) == (9.0, 1.0)
    noisy = curve([Figure(1000, 10.0, 11.0), Figure(2000, 8.0, 12.0)]).line
    assert (noisy.alpha_us, noisy.gbytes_per_s) == (10.0, 0.25)
    assert "from nothing" in (noisy.how or "")


def slope_us(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Microseconds of a byte beyond the points."""
    figures = [Figure(size, time, time) for size, time in zip(sizes, times, strict=True)]
    return 1 / (curve(figures).line.gbytes_per_s * 1000)


@pytest.mark.parametrize("sizes", [SIZES, (*SIZES[:-1], SIZES[-1] - 64, SIZES[-1])], ids=["doubling", "two close"])
@given(seed=st.integers(0, 2**32), alpha_us=st.floats(1, 100), us_per_byte=st.floats(1e-4, 2e-3))
def test_noise_does_not_turn_the_slope(sizes: tuple[int, ...], seed: int, alpha_us: float, us_per_byte: float) -> None:
    """Against the slope through the two largest sizes: 64 bytes apart, 5% of noise made it a thousand times too steep.

    Noise of 5% left the slope within 22% in 200,000 trials, a quarter of them in the worst corner.
    """
    random = Random(seed)
    times = [(alpha_us + size * us_per_byte) * min(1.1, max(0.9, random.gauss(1, 0.05))) for size in sizes]
    assert slope_us(sizes, times) == pytest.approx(us_per_byte, rel=0.35)


@given(disturbed=st.integers(len(SIZES) - 5, len(SIZES) - 1), factor=st.floats(0.5, 5))
def test_one_disturbed_size_does_not_turn_the_slope(disturbed: int, factor: float) -> None:
    """Against a fit that follows the one size during which the machine did something else."""
    times = [50 + size * 2e-4 for size in SIZES]
    times[disturbed] *= factor
    assert slope_us(SIZES, times) == pytest.approx(2e-4, rel=0.15)


def test_a_world_of_one_is_told_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert links(["--rounds", "20"]) == 2
    command = "torchrun --nproc-per-node 2 -m tpspec.measure links --rounds 20\n"
    told = capsys.readouterr().err
    assert told.endswith(f"nothing to measure; start it with: {command}")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (["--out", "mylink.txt"], "should end in .yaml"),
        (["--rounds", "1"], "should be at least 2"),
        (["--name", "a/b"], "--name 'a/b': should be a letter"),
        (["--sizes", "1024"], "at least two"),
        (["--sizes", "1024,1kb"], "'1kb' should be a multiple of 64 bytes"),
        (["--sizes", "1024,65536"], "no size between 1024 and 65536"),
        (["--sizes", ""], "'' should be a multiple"),
        (["--rounds", "many"], "--rounds: invalid int value: 'many'"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(
    request_: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert links(request_) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_sizes_are_sorted_and_each_is_measured_once() -> None:
    assert parse_sizes("4096, 1024,4096") == (1024, 4096)
    assert parse_sizes(",".join(map(str, SIZES))) == SIZES
    assert all(high <= 16 * low for low, high in pairwise(SIZES))
    with pytest.raises(UserError, match="-64"):
        parse_sizes("-64,64")


class NvmlError(Exception):
    pass


def fake_nvml(**changes: object) -> SimpleNamespace:
    """Two cards below the host bridge, idle, as pynvml answers."""
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda card: 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda card: 4,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda card: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda card: 16,
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 30,
        "nvmlDeviceGetP2PStatus": lambda one, other, index: 1,
        "NVML_P2P_CAPS_INDEX_READ": 0,
        "NVML_P2P_STATUS_OK": 0,
        "NVMLError": NvmlError,
    }
    return SimpleNamespace(**(answers | changes))


def test_what_nvml_says_is_marked_as_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())  # type: ignore[arg-type]
    assert bus_report(["GPU-a", "GPU-b"]) == [
        "Reported by NVML, not measured:",
        "  card 0: PCIe gen1 x8 now, gen4 x16 at most",
        "  card 1: PCIe gen1 x8 now, gen4 x16 at most",
        "  cards 0 and 1: meet at the host bridge, no P2P (status 1)",
    ]


def test_ranks_that_share_a_card_are_told_of_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a probe of three ranks on one card that looks for a second when everything has been measured."""

    def properties(card: int) -> SimpleNamespace:
        assert card == 0, "no such card"
        return SimpleNamespace(uuid="a")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())  # type: ignore[arg-type]
    lines = _remarks(World(Place(world_size=3), torch.device("cuda"), 1.0), ["captured"])
    assert lines[1:] == ["captured", *bus_report(["GPU-a"])]


def test_an_absent_or_failing_nvml_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert bus_report(["GPU-a"]) == [
        "NVML: nvidia-ml-py is not installed (pip install nvidia-ml-py), so nothing is reported of the bus."
    ]

    def fail() -> None:
        raise NvmlError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlInit=fail))  # type: ignore[arg-type]
    assert bus_report(["GPU-a"]) == ["NVML: Driver Not Loaded, so nothing is reported of the bus."]
