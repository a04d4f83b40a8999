"""The page of `savings`: one HTML file that needs nothing else, with plots drawn here as SVG.

Knows the report's keys (stats.py) and how a bar is drawn; must not know an engine or a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Bar = tuple[str, float | None]  # what it stands for (and its colour's class), its value
Group = tuple[str, Sequence[Bar]]

WIDTH, LABEL, BAR, GAP = 720, 150, 16, 10
STYLE = """
:root { color-scheme: light dark; --plain: #9aa0a8; --speculative: #2f6fde; --predicted: #c78a1b; --measured: #2f6fde;
  --compute: #2a9d76; --collectives: #d1495b; --drafting: #8b5fbf; --rest: #b8bdc6; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin-top: 2em; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .2em .6em; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr { border-top: 1px solid #8884; }
.key i { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
""" + "".join(
    f".{name} {{ fill: var(--{name}); background: var(--{name}); }}\n"
    for name in ["plain", "speculative", "predicted", "measured", "compute", "collectives", "drafting", "rest"]
)


@dataclass(frozen=True, slots=True)
class Context:
    """What was run, for the head of the page."""

    topology: str
    model: str
    source: str
    num_ranks: int
    num_prompts: int


def render(report: dict[str, Any], context: Context) -> str:
    sides = {"all prompts": report} | report["by_category"]
    body = [
        f"<h1>{escape(_headline(report))}</h1>",
        f"<p>{escape(_what_ran(context))}</p>",
        _section("Tokens per round", _bars(_both_ways(sides, "tokens_per_round"))),
        _section("Collectives per token", _bars(_both_ways(sides, "collectives_per_token"))),
        _section("Rounds per token", _bars(_rounds_per_token(sides))),
        _section("Where the time of a token goes (milliseconds)", _stacks(_where_time_goes(report))),
        _section("Tokens per round, predicted and measured", _bars(_predicted(sides))),
        f"<h2>Numbers</h2>{_table(sides)}",
    ]
    head = f"<meta charset=utf-8><title>tpspec: savings</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n{chr(10).join(body)}\n</body></html>\n"


def spread(side: dict[str, Any]) -> str:
    """The speed-up with its interval, as people read it."""
    if side["speedup"] is None:
        return "-"
    if side["speedup_low"] is None:
        return f"{side['speedup']:.2f}x"
    return f"{side['speedup']:.2f}x ({side['speedup_low']:.2f} to {side['speedup_high']:.2f})"


def _headline(report: dict[str, Any]) -> str:
    texts = "identical texts" if report["identical"] else "texts that differ"
    return f"Speculation: {spread(report)} the speed of plain decoding, {texts}"


def _what_ran(context: Context) -> str:
    return (
        f"{context.topology}: {context.model} over {context.num_ranks} ranks, drafts from {context.source}. "
        f"{context.num_prompts} prompts, each decoded both ways in one run; counted from the first token on."
    )


def _both_ways(sides: dict[str, Any], key: str) -> list[Group]:
    return [(name, [(way, _total(side[way][key])) for way in ("plain", "speculative")]) for name, side in sides.items()]


def _rounds_per_token(sides: dict[str, Any]) -> list[Group]:
    def rounds(way: dict[str, Any]) -> float | None:
        return way["rounds"] / way["tokens"] if way["tokens"] else None

    return [(name, [(way, rounds(side[way])) for way in ("plain", "speculative")]) for name, side in sides.items()]


def _where_time_goes(report: dict[str, Any]) -> list[Group]:
    return [
        (way, [(part, s and s * 1000) for part, s in report[way]["time_per_token"].items()])
        for way in ("plain", "speculative")
    ]


def _predicted(sides: dict[str, Any]) -> list[Group]:
    return [
        (
            name,
            [
                ("predicted", side["predicted"]["tokens_per_round"]),
                ("measured", side["speculative"]["tokens_per_round"]),
            ],
        )
        for name, side in sides.items()
    ]


def _total(value: Any) -> float | None:
    number: float | None = value["total"] if isinstance(value, dict) else value
    return number


def _section(title: str, plot: str) -> str:
    return f"<h2>{escape(title)}</h2>{plot}"


def _bars(groups: Sequence[Group]) -> str:
    """Groups of bars, each from the same zero, its value behind it."""
    longest = max((value or 0.0 for _, bars in groups for _, value in bars), default=0.0)
    drawn, y = [], 0.0
    for label, bars in groups:
        drawn.append(_text(0, y + len(bars) * BAR / 2 + 4, label))
        for name, value in bars:
            drawn.append(_bar(LABEL, y, _length(value, longest), name, _number(value)))
            y += BAR
        y += GAP
    return _key(groups) + _svg(drawn, y)


def _stacks(groups: Sequence[Group]) -> str:
    """One bar for each group, its parts behind one another, the sum at its end."""
    longest = max((sum(value or 0.0 for _, value in bars) for _, bars in groups), default=0.0)
    drawn, y = [], 0.0
    for label, bars in groups:
        drawn.append(_text(0, y + BAR, label))
        x: float = LABEL
        for name, value in bars:
            drawn.append(_rect(x, y, _length(value, longest), 1.5 * BAR, f"{name}: {_number(value)}", name))
            x += _length(value, longest)
        drawn.append(_text(x + 6, y + BAR, _number(sum(value or 0.0 for _, value in bars))))
        y += 1.5 * BAR + GAP
    return _key(groups) + _svg(drawn, y)


def _bar(x: float, y: float, length: float, name: str, value: str) -> str:
    return _rect(x, y, length, BAR - 2, f"{name}: {value}", name) + _text(x + length + 6, y + BAR - 4, value)


def _length(value: float | None, longest: float) -> float:
    return (value or 0.0) / longest * (WIDTH - LABEL - 70) if longest else 0.0


def _rect(x: float, y: float, width: float, height: float, title: str, name: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{name}" {place}><title>{escape(title)}</title></rect>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(drawn: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(drawn)}</svg>'


def _key(groups: Sequence[Group]) -> str:
    names = dict.fromkeys(name for _, bars in groups for name, _ in bars)
    return f'<div class="key">{"".join(f"<span><i class={name}></i>{name}</span>" for name in names)}</div>'


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _table(sides: dict[str, Any]) -> str:
    head = ("", "tokens", "tokens per round", "tokens/s plain", "tokens/s speculative", "speed-up", "same text")
    rows = [_cells("th", head), *(_cells("td", _row(name, side)) for name, side in sides.items())]
    return f"<table>{''.join(rows)}</table>"


def _row(name: str, side: dict[str, Any]) -> tuple[str, ...]:
    plain, speculative = side["plain"], side["speculative"]
    return (
        name,
        str(speculative["tokens"]),
        _number(speculative["tokens_per_round"]),
        _number(plain["tokens_per_second"]),
        _number(speculative["tokens_per_second"]),
        spread(side),
        "yes" if side["identical"] else "no",
    )


def _cells(tag: str, values: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(value)}</{tag}>' for value in values)}</tr>"
