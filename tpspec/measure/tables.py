"""The tables of `savings` for a terminal of 80 columns. Knows the report's keys (stats.py); must not know an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpspec.measure.page import COUNTS, beside, counts, spread
from tpspec.measure.stats import predictions


def print_tables(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print("plain > speculative, counted from the first token on")
    console.print(_by_category(found))
    console.print(_by_purpose(found))
    console.print(_predicted(found))
    if found["speculative"]["elsewhere"] is not None:
        console.print(_elsewhere(found))
    console.print(*_closing(found), sep="\n")


def print_sources(found: dict[str, Any]) -> None:
    """The table of `savings --sources`."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print("counted from the first token on; speed beside plain decoding: the median prompt and the middle half")
    console.print(_by_source(found))
    if (emulation := found.get("emulation")) is not None:
        console.print(_floor(emulation))
    for one in found["left_out"]:
        console.print(f"{one['source']}: not measured: {one['reason']}", markup=False)


def _by_source(found: dict[str, Any]) -> Any:
    columns = ("tokens\nper\nround", "drafts\nper\nround", "collectives\nper token", "tokens\nper second")
    table = _table(("", *columns, "speed", "25%-75%", "same"))
    for one in found["sources"]:
        ratio = one["ratio"]
        table.add_row(
            one["source"],
            _number(one["tokens_per_round"]),
            _number(one["drafts_per_round"]),
            _number(one["collectives_per_token"]["total"], "{:.1f}"),
            _number(one["tokens_per_second"], "{:.1f}"),
            _number(ratio["median"]),
            f"{_number(ratio['low'])}-{_number(ratio['high'])}",
            "yes" if one["identical"] else "NO",
        )
    return table


def _closing(found: dict[str, Any]) -> list[str]:
    plain, speculative = found["plain"], found["speculative"]
    acceptance = ", ".join(f"{share:.0%}" for share in speculative["acceptance"])
    emulation, gap = found.get("emulation"), beside(speculative["elsewhere"])
    return [
        *([gap] if gap else []),
        *([_floor(emulation)] if emulation is not None else []),
        f"share of the time in collectives: {_change(plain['wait_share'], speculative['wait_share'], '{:.0%}')}",
        f"milliseconds: to the first token {_change(plain['ttft'] * 1e3, speculative['ttft'] * 1e3)}, "
        f"between tokens {_change(plain['itl'] * 1e3, speculative['itl'] * 1e3)}",
        f"acceptance by position, where all before it were accepted: {acceptance or '-'}",
        f"speed-up: {spread(found)}; texts {'identical' if found['identical'] else 'DIFFER'}",
    ]


def _floor(emulation: dict[str, float]) -> str:
    late, floor = emulation["late_share"], emulation["floor_us"]
    return f"emulated collectives took {late:.1%} longer than the link would: {floor:.0f} us each, this machine's floor"


def _by_category(found: dict[str, Any]) -> Any:
    columns = ("tokens", "tokens\nper\nround", "collectives\nper token", "tokens\nper second", "speed", "95%", "same")
    table = _table(("", *columns))
    for name, side in {**found["by_category"], "all": found}.items():
        plain, speculative = side["plain"], side["speculative"]
        interval = (side["speedup_low"], side["speedup_high"])
        table.add_row(
            name,
            str(speculative["tokens"]),
            _number(speculative["tokens_per_round"]),
            _change(plain["collectives_per_token"]["total"], speculative["collectives_per_token"]["total"]),
            _change(plain["tokens_per_second"], speculative["tokens_per_second"]),
            _number(side["speedup"]),
            "-".join(f"{bound:.2f}" for bound in interval) if None not in interval else "-",
            "yes" if side["identical"] else "NO",
        )
    return table


def _by_purpose(found: dict[str, Any]) -> Any:
    table = _table(("per token", "collectives", "bytes", "microseconds"))
    plain, speculative = found["plain"], found["speculative"]
    for purpose in speculative["collectives_per_token"]:
        table.add_row(
            purpose,
            *(
                _change(_times(plain[key].get(purpose), factor), _times(speculative[key][purpose], factor))
                for key, factor in (("collectives_per_token", 1), ("bytes_per_token", 1), ("seconds_per_token", 1e6))
            ),
        )
    return table


def _predicted(found: dict[str, Any]) -> Any:
    table = _table(("", "predicted", "measured", "ratio"))
    for name, predicted, measured in predictions(found):
        ratio = predicted / measured if predicted and measured else None
        table.add_row(name, _number(predicted), _number(measured), _number(ratio))
    return table


def _elsewhere(found: dict[str, Any]) -> Any:
    table = _table(("drafts from\nelsewhere", *(head.replace(" ", "\n") for head in COUNTS)))
    for name, side in {**found["by_category"], "all": found}.items():
        table.add_row(name, *counts(side["speculative"]["elsewhere"]))
    return table


def _table(columns: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        # Where all is wider than a terminal, names go over lines, and numbers are not cut.
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
    return table


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _change(before: float | None, after: float | None, form: str = "{:.1f}") -> str:
    return f"{_number(before, form)} > {_number(after, form)}"


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)
