"""Link tables: what is shipped, how sizes between the points are read, and files that are refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tpspec.errors import UserError
from tpspec.topology.config import LinkConfig, TopologyError, load
from tpspec.topology.link_file import LinksFile, dump_links, read_links
from tpspec.topology.links import SHIPPED, Curve, link, link_for, shipped, straight

EVERY = sorted(f"{box}/{name}" for box, data in shipped().boxes.items() for name in data.all_reduce)
US = pytest.approx
PROBED = """\
boxes:
  here:
    gpu: two CPU processes
    ranks: 2
    source: [probe of 2026-11-20]
    skew_us: {us: 3, kind: measured}
    all_reduce:
      gloo:
        measured_us: {1024: 280, 4096: 290, 16384: 310}
        p90_us: {1024: 900, 4096: 910, 16384: 930}
        line: {alpha_us: 275, gbytes_per_s: 0.5, kind: fitted, how: least squares}
    all_gather:
      gloo:
        measured_us: {1024: 200}
        line: {alpha_us: 190, gbytes_per_s: 1, kind: fitted, how: least squares}
"""


@pytest.fixture
def write(tmp_path: Path):
    def written(text: str) -> Path:
        path = tmp_path / "probe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def us(seconds: float) -> float:
    return seconds * 1e6


@pytest.mark.parametrize("name", EVERY)
def test_every_shipped_table_gives_its_own_points_and_says_where_they_are_from(name: str) -> None:
    """Against a table that is shipped and cannot be used, and numbers whose origin is forgotten."""
    table, (box, algorithm) = link(name), name.split("/")
    for size, time in shipped().boxes[box].all_reduce[algorithm].points_us.items():
        assert us(table.seconds(size)) == US(time)
    assert any(kind in table.provenance for kind in ("measured", "fitted", "estimated"))
    assert "measured" not in table.provenance or "https://" in table.provenance


@pytest.mark.parametrize(
    ("name", "size", "time"),
    [
        ("rtx3090x8_2socket_stock", 8, 54.2),
        ("rtx4090x8_gen4_stock", 8, 41.0),
        ("v100x4_plx_gen3x16_p2p/push1shot", 16384, 7.2),
        ("pro6000x4_gen5x16_1numa/push1shot", 1048576, 95.6),
        ("rtx3090x8_gen4x16_stock", 98304, 80),
        ("pro6000x8_gen5_switches/custom", 16384, 12.3),  # the published "about 12", between two points
    ],
)
def test_known_times_are_the_published_ones(name: str, size: int, time: float) -> None:
    """Against typing errors in the data, and another reading of log-linear: linear time would say 12.9 in the last."""
    assert us(link(name).seconds(size)) == US(time, abs=0.05)


@pytest.mark.parametrize("name", EVERY)
def test_a_curve_has_no_steps_at_its_ends_and_no_time_below_zero(name: str) -> None:
    """Against emulated links that jump where the points end."""
    table, points = link(name), link(name).reduce.points
    for edge in (points[0][0], points[-1][0]):
        assert table.seconds(edge + 1) == US(table.seconds(edge), rel=0.01)
        assert table.seconds(edge - 1) == US(table.seconds(edge), rel=0.01)
    assert us(table.seconds(0)) == US(us(table.reduce.alpha_s))
    assert table.seconds(2**28) > table.seconds(2**20) > 0


@given(st.integers(1, 2**24), st.floats(0.0, 100.0), st.floats(0.01, 50.0))
def test_a_straight_line_is_alpha_and_beta(size: int, alpha_us: float, gbytes_per_s: float) -> None:
    assert us(straight(alpha_us, gbytes_per_s).seconds(size)) == US(alpha_us + size / gbytes_per_s / 1e3)


def test_beyond_the_points_the_line_rules() -> None:
    """Against extrapolating the logarithms, which makes large messages far too cheap or far too dear."""
    curve = Curve(((1000, 10e-6), (2000, 12e-6)), alpha_s=8e-6, bytes_per_s=1e9)
    assert us(curve.seconds(12_000)) == US(22)
    assert us(curve.seconds(500)) == US(9)


def test_an_all_gather_without_a_curve_is_a_message_of_the_gathered_size(write) -> None:
    assert link("pcie4").gather_seconds(16384) == link("pcie4").seconds(16384)
    assert us(link(str(write(PROBED))).gather_seconds(1024)) == US(200)


def test_other_numbers_of_ranks_are_estimated_from_a_table() -> None:
    """Against a box of seven priced as the box of eight, and against losing the skew on the way."""
    table = link("rtx3090x8_gen4x16_stock")
    times = [table.seconds(16384, num_ranks) for num_ranks in (2, 4, 7, 8, 16)]
    assert times == sorted(times)
    assert table.for_ranks(8) is table
    assert us(table.for_ranks(4).skew_s) == US(2)
    assert "estimated for 4 ranks from 8" in table.for_ranks(4).provenance
    assert straight(5).for_ranks(3) == straight(5)


def test_a_slot_means_the_box_of_as_many_cards() -> None:
    assert link_for("pcie4", 4).name == "rtx4090x4_gen4x16_stock/nccl"
    assert link_for("pcie4", 3).provenance.startswith("estimated for 3 ranks from 4")
    assert link_for("pcie4", 12).provenance.startswith("estimated for 12 ranks from 8")
    assert link("pcie4").name == "rtx3090x8_gen4x16_stock/nccl"


@pytest.mark.parametrize("family", sorted(shipped().families))
@pytest.mark.parametrize("size", [0, 8, 1024, 10240, 16384, 70_000, 98304, 2**20, 2**24])
def test_more_cards_on_a_bus_never_take_less_time(family: str, size: int) -> None:
    """Nor more than such a box was measured to. Stands against four cards on pcie4 planned at two thirds of what two
    take, and against their measurement replaced by that of two slower cards: boxes of a family are of other cards."""
    tables = [link_for(family, num_ranks) for num_ranks in range(2, 17)]
    for times in ([table.seconds(size) for table in tables], [table.skew_s for table in tables]):
        assert all(more >= less * (1 - 1e-12) for less, more in pairwise(times))
    for num_ranks, box in shipped().families[family].items():
        assert tables[num_ranks - 2].seconds(size) <= link(box).seconds(size)


def test_a_family_says_which_other_boxes_hold_it() -> None:
    assert link_for("pcie4", 5).provenance.endswith("; never below rtx4090x4_gen4x16_stock/nccl")
    assert "; never above rtx4090x4_gen4x16_stock/nccl" in link_for("pcie4", 2).provenance
    assert "above" not in link_for("pcie4", 8).provenance
    assert "never" not in link_for("pcie3", 8).provenance


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pcie6", "no link table 'pcie6'; did you mean pcie"),
        ("rtx3090x8_2socket_stck", "did you mean rtx3090x8_2socket_stock"),
        ("rtx3090x8_2socket_stock/ncl", "did you mean nccl"),
        ("gone.yaml", "no such file"),
    ],
)
def test_a_link_nobody_knows_is_told_the_nearest(name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        link(name)


def test_a_probes_file_is_a_link(write) -> None:
    """Against a format of its own for what is measured here."""
    path = write(PROBED)
    table = link(str(path))
    assert (us(table.seconds(4096)), us(table.skew_s), table.num_ranks) == (US(290), US(3), 2)
    assert table.provenance == "measured, probe of 2026-11-20"
    write(dump_links(read_links(path)))
    assert link(str(path)) == table


def test_sizes_are_written_as_numbers_and_read_however_they_are_written(write) -> None:
    """Against sizes in quotes, as an earlier probe left them: such files must still be read."""
    text = dump_links(read_links(write(PROBED)))
    assert "\n          1024: 280.0\n          4096: 290.0\n" in text
    assert "'" not in text
    table = link(str(write(text)))
    assert link(str(write(text.replace("1024:", "'1024':")))) == table
    assert [size for size, _ in table.reduce.points] == [1024, 4096, 16384]


def test_the_shipped_file_survives_being_written(write) -> None:
    assert read_links(write(dump_links(shipped()))) == read_links(SHIPPED)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("4096: 290", "512: 290", "512 bytes stand after 1024; sizes should ascend"),
        ("4096: 290", "1024: 290", "is given twice"),
        ("4096: 290", "4096: null", "4096: is None; input should be a valid number"),
        ("4096: 290", "4096: -1", "should be greater than 0"),
        ("4096: 290, 16384", "65536", "has a hole: no point between 1024 and 65536 bytes"),
        ("alpha_us: 275, ", "", "line.alpha_us: is missing"),
        ("alpha_us: 275", "alpha_us: -275", "should be greater than or equal to 0"),
        ("gbytes_per_s: 0.5", "gbytes_per_s: 0", "should be greater than 0"),
        (", how: least squares", "", "is fitted; should say how"),
        ("kind: fitted", "kind: guessed", "input should be 'measured', 'fitted' or 'estimated'"),
        ("measured_us: {1024: 280", "estimated_us: {1024: 280", "should say how"),
        ("    source: [probe of 2026-11-20]\n", "", "should name their source"),
        ("        measured_us: {1024: 280, 4096: 290, 16384: 310}\n", "", "has no points"),
        ("p90_us", "estimated_us", "gives 1024 bytes twice"),
        ("ranks: 2", "rnks: 2", "rnks: unknown key"),
        ("ranks: 2", "ranks: 1", "should be greater than or equal to 2"),
    ],
)
def test_a_table_with_a_hole_is_refused_by_line(write, old: str, new: str, why: str) -> None:
    """Against an emulation that invents what a probe did not measure."""
    assert old in PROBED
    path = write(PROBED.replace(old, new, 1))
    with pytest.raises(TopologyError) as caught:
        link(str(path))
    assert why in str(caught.value)
    assert all(fault.startswith(f"{path}:") for fault in caught.value.faults)


def test_a_family_must_be_of_boxes_that_are_there(write) -> None:
    with pytest.raises(TopologyError, match="family pcie9 names 'here' for 4 ranks"):
        read_links(write(PROBED + "families: {pcie9: {4: here}}\n"))
    two = LinksFile(boxes={"a": shipped().boxes["rtx6000dx8"], "b": shipped().boxes["rtx6000dx8"]})
    with pytest.raises(UserError, match="holds 2 boxes; should hold one"):
        link(str(write(dump_links(two))))


def test_a_topologys_link_is_checked_with_it(tmp_path: Path) -> None:
    """Against a misspelt table found after the weights were read."""
    path = tmp_path / "box.yaml"
    path.write_text("name: x\ntarget: {model: smollm2-135m, ranks: [0, 1]}\nlink: {table: pcie44}\n")
    with pytest.raises(TopologyError, match=r"box.yaml:3: link.table: no link table 'pcie44'; did you mean pcie4"):
        load(path)
    topology = load(path, ["link={table: rtx3090x8_2socket_stock, emulate: true, dilation: 8}"])
    assert topology.link.cost == link("rtx3090x8_2socket_stock")
    with pytest.raises(TopologyError, match=r"link\.emulate: works where the host waits"):
        load(path, ["link={table: pcie4, emulate: true}", "device=cuda"])
    with pytest.raises(TopologyError, match=r"link\.dilation: is 0; should be a number above 0"):
        load(path, ["link={table: pcie4, dilation: 0}"])


def test_a_links_two_numbers_are_a_table() -> None:
    assert LinkConfig().cost is None
    cost = LinkConfig(latency_us=5.0, gbytes_per_s=2.0).cost
    assert cost is not None
    assert us(cost.seconds(2000)) == US(6)
    only = LinkConfig(gbytes_per_s=1.0).cost
    assert only is not None
    assert us(only.seconds(1000)) == US(1)
