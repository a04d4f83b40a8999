"""The page of `savings`: one HTML file that needs nothing else, with plots drawn here as SVG.

Knows the report's keys (stats.py) and how a bar is drawn; must not know an engine or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from tpspec.measure.stats import COMPARED, predictions

WIDTH, LABEL, BAR, GAP, BEHIND = 720, 120, 16, 10, 50  # BEHIND: a bar, for its value
FITS, SEEN = 34, 2  # a segment that is as long can hold its number; can be seen
SPEED, SPECULATIVE_SPEED, SPEEDUP, TOKENS = COMPARED
SOURCE_HEADS = ("", "tokens per round", "drafts per round", "collectives per token", "tokens/s", "speed", "same text")
HEADS = ("", "tokens", "tokens per round", "tokens/s plain", "tokens/s speculative", "speed-up", "same text")
# Columns of drafts from elsewhere: the key, by how much, decimals.
COUNTS = {
    "hits": ("hits", 1, 0),
    "misses": ("misses", 1, 0),
    "late": ("late", 1, 0),
    "rounds waited": ("waited_rounds", 1, 0),
    "ms waited": ("waited_s", 1e3, 1),
    "tokens read": ("num_read", 1, 0),
    "tokens dropped": ("num_dropped", 1, 0),
    "messages": ("messages", 1, 0),
    "kB": ("bytes", 1e-3, 1),
}
STYLE = """
:root { color-scheme: light dark; --plain: #9aa0a8; --speculative: #2f6fde; --predicted: #c78a1b; --measured: #2f6fde;
  --compute: #1f8463; --collectives: #d1495b; --drafting: #8b5fbf; --rest: #767d88; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin-top: 2em; }
.wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 560px; height: auto; } svg text { font-size: 12px; fill: currentColor; }
svg text.in { fill: #fff; text-anchor: middle; } svg line { stroke: currentColor; } svg .mark { stroke-dasharray: 3 3; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .2em .6em; text-align: right; }
td { white-space: nowrap; } td:first-child, th:first-child { text-align: left; padding-left: 0; }
tr + tr { border-top: 1px solid #8884; }
.key { margin-bottom: .5em; } .key span { margin-right: 1em; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
""" + "".join(
    f".{name} {{ fill: var(--{name}); background: var(--{name}); }}\n"
    for name in ["plain", "speculative", "predicted", "measured", "compute", "collectives", "drafting", "rest"]
)


class Bar(NamedTuple):
    """name: what it stands for, and its colour's class. low and high: the interval of the value, if it has one."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None


Group = tuple[str, Sequence[Bar]]


@dataclass(frozen=True, slots=True)
class Context:
    """What was run, for the head of the page."""

    topology: str
    model: str
    source: str
    num_ranks: int
    num_prompts: int
    temperature: float
    link: str
    emulate: bool
    dilation: float


def render(report: dict[str, Any], context: Context) -> str:
    sides = {"all prompts": report} | report["by_category"]
    body = [
        f"<h1>{escape(_headline(report))}</h1>",
        f"<p>{escape(_what_ran(context))}</p>",
        _section("Speed-up, with the 95% interval of what was measured", _bars(_predicted(sides, SPEEDUP), 2, mark=1)),
        _section("Tokens per round", _bars(_predicted(sides, TOKENS), 2, mark=1)),
        _section(_rounds_title(report), _bars(_rounds_per_token(sides), 2)),
        _section("Where the time of a token goes (milliseconds)", _stacks(_where_time_goes(report), 1)),
        *(_section(what.capitalize(), _bars(_predicted(sides, what), 1)) for what in (SPEED, SPECULATIVE_SPEED)),
        _section("Numbers", _table(HEADS, [_row(name, side) for name, side in sides.items()])),
    ]
    if report["speculative"]["elsewhere"] is not None:
        body.append(_section("Drafts from elsewhere", _elsewhere(sides)))
    return _document("savings", body)


def render_sources(report: dict[str, Any], context: Context) -> str:
    """The page of `savings --sources`; each source's speed is that of its median prompt, beside plain decoding's."""
    sources = report["sources"]
    body = [
        "<h1>Draft sources side by side</h1>",
        f"<p>{escape(_what_ran(context))}</p>",
        _section("Speed beside plain decoding: median prompt and middle half", _bars(_ratios(sources), 2, mark=1)),
        _section("Tokens per round", _bars(_of_sources(sources, lambda one: one["tokens_per_round"]), 2, mark=1)),
        _section(
            "Collectives per token",
            _bars(_of_sources(sources, lambda one: one["collectives_per_token"]["total"]), 1),
        ),
        _section("Where the time of a token goes (milliseconds)", _stacks([*map(_source_time, sources)], 1)),
        _section("Numbers", _table(SOURCE_HEADS, [*map(_source_row, sources)])),
        _section("Speed of the median prompt, by category", _speed_by_category(sources)),
        *(f"<p>{escape(one['source'])}: not measured: {escape(one['reason'])}</p>" for one in report["left_out"]),
    ]
    return _document("draft sources", body)


def spread(side: dict[str, Any]) -> str:
    """The speed-up with its interval, as people read it."""
    if side["speedup"] is None:
        return "-"
    if side["speedup_low"] is None:
        return f"{side['speedup']:.2f}x"
    return f"{side['speedup']:.2f}x ({side['speedup_low']:.2f} to {side['speedup_high']:.2f})"


def counts(elsewhere: dict[str, float]) -> list[str]:
    """The cells of COUNTS."""
    return [_number(elsewhere[key] * factor, decimals) for key, factor, decimals in COUNTS.values()]


def beside(elsewhere: dict[str, float] | None) -> str:
    """What a drafter beside a shard costs it, in a sentence; nothing where nobody can tell."""
    if elsewhere is None or not elsewhere["work_s"]:
        return ""
    work_s = elsewhere["work_s"]
    return (
        f"{elsewhere['inside_s'] / work_s:.0%} of the drafter's {work_s:.1f} s ran inside its shard's collectives; "
        f"the shard waited {elsewhere['delayed_s']:.2f} s for a core"
    )


def _document(title: str, body: Sequence[str]) -> str:
    head = f"<meta charset=utf-8><title>tpspec: {title}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n{chr(10).join(body)}\n</body></html>\n"


def _headline(report: dict[str, Any]) -> str:
    texts = "identical texts" if report["identical"] else "texts that differ"
    return f"Speculation: {spread(report)} the speed of plain decoding, {texts}"


def _what_ran(context: Context) -> str:
    drawn = f" at temperature {context.temperature:g}" if context.temperature else ""
    link = f", link {context.link} emulated, dilation {context.dilation:g}" if context.emulate else ""
    return (
        f"{context.topology}: {context.model} over {context.num_ranks} ranks{link}, drafts from {context.source}. "
        f"{context.num_prompts} prompts{drawn}, each decoded every way in one run; counted from the first token on."
    )


def _rounds_title(report: dict[str, Any]) -> str:
    plain = report["plain"]
    per_round = plain["collectives_per_token"]["total"] * plain["tokens"] / plain["rounds"]
    return f"Rounds per token (a round is {per_round:.0f} collectives)"


def _rounds_per_token(sides: dict[str, Any]) -> list[Group]:
    def rounds(way: dict[str, Any]) -> float | None:
        return way["rounds"] / way["tokens"] if way["tokens"] else None

    return [(name, [Bar(way, rounds(side[way])) for way in ("plain", "speculative")]) for name, side in sides.items()]


def _where_time_goes(report: dict[str, Any]) -> list[Group]:
    return [
        (way, [Bar(part, s and s * 1000) for part, s in report[way]["time_per_token"].items()])
        for way in ("plain", "speculative")
    ]


def _predicted(sides: dict[str, Any], what: str) -> list[Group]:
    return [
        (name, [Bar("predicted", guess), Bar("measured", found, *_interval(side, what))])
        for name, side in sides.items()
        for about, guess, found in predictions(side)
        if about == what
    ]


def _interval(side: dict[str, Any], what: str) -> tuple[float | None, float | None]:
    return (side["speedup_low"], side["speedup_high"]) if what == SPEEDUP else (None, None)


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>{content}"


def _bars(groups: Sequence[Group], decimals: int, mark: float | None = None) -> str:
    """Groups of bars, each from the same zero, its value behind it. mark: plain decoding, a line across all."""
    longest = max((mark or 0.0, *(bar.high or bar.value or 0.0 for _, bars in groups for bar in bars)))
    drawn, y = [], 0.0
    for label, bars in groups:
        drawn.append(_text(0, y + len(bars) * BAR / 2 + 3, label))
        for bar in bars:
            drawn.append(_bar(y, bar, longest, _number(bar.value, decimals)))
            y += BAR
        y += GAP
    if mark is not None:
        x = LABEL + _length(mark, longest)
        drawn.append(_line(x, 0, x, y - GAP, "mark"))
    note = "dashed: plain decoding" if mark is not None else ""
    return _key(dict.fromkeys(bar.name for _, bars in groups for bar in bars), note) + _svg(drawn, y)


def _bar(y: float, bar: Bar, longest: float, value: str) -> str:
    end = LABEL + _length(bar.high or bar.value, longest)
    drawn = _rect(LABEL, y, _length(bar.value, longest), BAR - 2, f"{bar.name}: {value}", bar.name)
    if bar.low is not None:
        low, middle = LABEL + _length(bar.low, longest), y + BAR / 2 - 1
        ends = (_line(x, middle - 4, x, middle + 4) for x in (low, end))
        drawn += _line(low, middle, end, middle, "interval") + "".join(ends)
    return drawn + _text(end + 6, y + BAR - 5, value)


def _stacks(groups: Sequence[Group], decimals: int) -> str:
    """One bar for each group, its parts behind one another, the sum at its end."""
    longest = max((sum(bar.value or 0.0 for bar in bars) for _, bars in groups), default=0.0)
    drawn, y = list[str](), 0.0
    for label, bars in groups:
        middle = y + 0.75 * BAR + 4
        drawn.append(_text(0, middle, label))
        x: float = LABEL
        for name, value, *_ in bars:
            length, number = _length(value, longest), _number(value, decimals)
            drawn.append(_rect(x, y, length, 1.5 * BAR, f"{name}: {number}", name))
            if length >= FITS:
                drawn.append(_text(x + length / 2, middle, number, "in"))
            x += length
        drawn.append(_text(x + 6, middle, _number(sum(bar.value or 0.0 for bar in bars), decimals)))
        y += 1.5 * BAR + GAP
    names = dict.fromkeys(name for _, bars in groups for name, *_ in bars)
    seen = {name for _, bars in groups for name, value, *_ in bars if _length(value, longest) >= SEEN}
    return _key(name for name in names if name in seen) + _svg(drawn, y)


def _length(value: float | None, longest: float) -> float:
    return (value or 0.0) / longest * (WIDTH - LABEL - BEHIND) if longest else 0.0


def _rect(x: float, y: float, width: float, height: float, title: str, name: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{name}" {place}><title>{escape(title)}</title></rect>'


def _text(x: float, y: float, text: str, name: str = "") -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, name: str = "") -> str:
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _svg(drawn: Sequence[str], height: float) -> str:
    plot = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(drawn)}</svg>'
    return f'<div class="wide">{plot}</div>'


def _key(names: Iterable[str], note: str = "") -> str:
    return f'<div class="key">{"".join(f"<span><i class={name}></i>{name}</span>" for name in names)}{note}</div>'


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _row(name: str, side: dict[str, Any]) -> tuple[str, ...]:
    plain, speculative = side["plain"], side["speculative"]
    return (
        name,
        str(speculative["tokens"]),
        _number(speculative["tokens_per_round"], 2),
        _number(plain["tokens_per_second"], 1),
        _number(speculative["tokens_per_second"], 1),
        spread(side),
        "yes" if side["identical"] else "no",
    )


def _ratios(sources: Sequence[dict[str, Any]]) -> list[Group]:
    ratios = [(one["source"], one["ratio"]) for one in sources]
    return [(name, [Bar("measured", ratio["median"], ratio["low"], ratio["high"])]) for name, ratio in ratios]


def _of_sources(sources: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]) -> list[Group]:
    return [(one["source"], [Bar("measured", value(one))]) for one in sources]


def _source_time(one: dict[str, Any]) -> Group:
    return one["source"], [Bar(part, s and s * 1000) for part, s in one["time_per_token"].items()]


def _source_row(one: dict[str, Any]) -> tuple[str, ...]:
    ratio = one["ratio"]
    return (
        one["source"],
        _number(one["tokens_per_round"], 2),
        _number(one["drafts_per_round"], 2),
        _number(one["collectives_per_token"]["total"], 1),
        _number(one["tokens_per_second"], 1),
        f"{_number(ratio['median'], 2)}x ({_number(ratio['low'], 2)} to {_number(ratio['high'], 2)})",
        "yes" if one["identical"] else "no",
    )


def _speed_by_category(sources: Sequence[dict[str, Any]]) -> str:
    categories = list(sources[0]["by_category"])
    rows = [(one["source"], *(one["by_category"][name]["ratio"]["median"] for name in categories)) for one in sources]
    return _table(("", *categories), [(name, *(_number(ratio, 2) for ratio in ratios)) for name, *ratios in rows])


def _elsewhere(sides: dict[str, Any]) -> str:
    rows = [(name, *counts(side["speculative"]["elsewhere"])) for name, side in sides.items()]
    said = beside(sides["all prompts"]["speculative"]["elsewhere"])
    return _table(("", *COUNTS), rows) + (f"<p>{escape(said)}</p>" if said else "")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_cells("th", heads), *(_cells("td", row) for row in rows)]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _cells(tag: str, values: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(value)}</{tag}>' for value in values)}</tr>"
