"""The page of `savings` and its tables, from reports made of records written by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from tests.measure.test_stats import BOX, pair
from tpspec.measure.page import BEHIND, LABEL, WIDTH, Context, render
from tpspec.measure.stats import ELSEWHERE, Pair, report
from tpspec.measure.tables import print_tables

CONTEXT = Context("a box", "m", "ngram", 2, 2, 0.8, link="slow", emulate=True, dilation=4.4)
PAIRS = [pair(2.0, 1.0), pair(2.0, 0.5)]


def away(made: Pair) -> Pair:
    """The same, its drafts from elsewhere, 12345 of everything."""
    return replace(made, speculative=replace(made.speculative, elsewhere=dict.fromkeys(ELSEWHERE, 12345)))


def section(page: str, title: str) -> str:
    (found,) = re.findall(rf"<h2>{title}[^<]*</h2>(.*)", page)
    return str(found)


def test_the_page_needs_nothing_else_and_escapes_what_users_named() -> None:
    found = report([pair(2.0, 1.0, "<b>"), pair(2.0, 0.9, "<b>")], BOX)
    page = render(found, replace(CONTEXT, topology="a & b", link="<i>"))
    assert "http" not in page
    assert "<b>" not in page
    assert "link <i>" not in page
    assert "a &amp; b" in page
    assert page.count("<svg") == page.count("</svg>") == 6


def test_an_emulated_link_is_named_and_one_that_is_not_emulated_is_not() -> None:
    """Stands against numbers of a made-up bus that pass for the box's own."""
    found = report(PAIRS, BOX)
    assert "link slow emulated, dilation 4.4" in render(found, CONTEXT)
    assert "slow" not in render(found, replace(CONTEXT, emulate=False))


def test_whatever_is_wide_scrolls_by_itself() -> None:
    """Stands against a table that a narrow window cuts off."""
    page = render(report([away(made) for made in PAIRS], BOX), CONTEXT)
    assert len(re.findall(r"<svg|<table", page)) == len(re.findall(r'<div class="wide"><(?:svg|table)', page)) == 8


def test_the_speed_up_has_its_interval_and_a_line_at_one() -> None:
    """The bar of 2.67 ends within its interval, and the line stands where a bar of 1 would end."""
    found = report(PAIRS, BOX)
    plot = section(render(found, CONTEXT), "Speed-up")
    (mark,) = (float(x) for x in re.findall(r'<line class="mark" x1="([0-9.]+)"', plot))
    ends = re.search(r'class="interval" x1="([0-9.]+)" .*? x2="([0-9.]+)"', plot)
    assert ends is not None
    low, high = ((float(x) - LABEL) / (mark - LABEL) for x in ends.groups())
    (width, *_) = (float(x) for x in re.findall(r'<rect class="measured" [^>]*width="([0-9.]+)"', plot))
    assert width / (mark - LABEL) == pytest.approx(found["speedup"], abs=0.01)
    assert (low, high) == pytest.approx((found["speedup_low"], found["speedup_high"]), abs=0.01)


def test_the_line_of_plain_decoding_is_on_the_page_where_speculation_is_slower() -> None:
    """Stands against a line beyond the right edge, where no bar is as long as 1."""
    found = report([pair(1.0, 2.5), pair(1.0, 3.0)], BOX)
    for side in (found, *found["by_category"].values()):
        side["predicted"]["speedup"] = 0.5
    plot = section(render(found, CONTEXT), "Speed-up")
    (mark,) = (float(x) for x in re.findall(r'<line class="mark" x1="([0-9.]+)"', plot))
    assert mark <= WIDTH - BEHIND


def test_numbers_of_a_plot_have_the_same_decimals() -> None:
    plot = section(render(report(PAIRS, BOX), CONTEXT), "Rounds per token")
    assert re.findall(r">([0-9.]+)</text>", plot) == ["1.00", "0.50"] * 2


def test_parts_without_time_are_not_in_the_legend_and_parts_with_room_say_theirs() -> None:
    made = replace(PAIRS[0].plain, forward_s=1.5)  # of 2 s, 0.5 of them in collectives
    plot = section(render(report([replace(PAIRS[0], plain=made)], BOX), CONTEXT), "Where the time")
    assert "drafting</span>" not in plot
    assert ">100.0</text>" in plot


def test_drafts_from_elsewhere_are_on_the_page_and_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Large counts in a long category, on 80 columns; and nothing of it where ranks draft for themselves."""
    found: dict[str, Any] = report([away(pair(2.0, 1.0, "summarization"))], BOX)
    assert "12345000.0" in section(render(found, CONTEXT), "Drafts from elsewhere")
    print_tables(found)
    out = capsys.readouterr().out
    assert "elsewhere" in out
    assert "…" not in out
    assert "elsewhere" not in render(report(PAIRS, BOX), CONTEXT)


def test_what_a_drafter_costs_its_shard_is_said_where_somebody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    """Stands against a share of nothing, and one that is of all work instead of that in waits."""
    counted = dict.fromkeys(ELSEWHERE, 0.0)
    beside = {"work_s": 4.0, "inside_s": 3.0, "delayed_s": 0.25}
    said = "75% of the drafter's 4.0 s ran inside its shard's collectives; the shard waited 0.25 s for a core"
    for elsewhere, times in ((counted | beside, 1), (counted, 0)):
        made = replace(PAIRS[0], speculative=replace(PAIRS[0].speculative, elsewhere=elsewhere))
        found: dict[str, Any] = report([made], BOX)
        print_tables(found)
        assert unescape(render(found, CONTEXT)).count(said) == times
        assert " ".join(capsys.readouterr().out.split()).count(said) == times
