"""`python -m tpspec.measure simulate`: a topology's rounds on paper, plain and speculative, in one process.

A front door of its own: no torchrun, no weights, no card. Must not know how rounds are simulated or costs are made.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpspec.command import Parser
from tpspec.errors import UserError
from tpspec.measure.savings import refuse_plain_topology
from tpspec.measure.script import LISTED, replays_of, scripts_of
from tpspec.measure.simulator import FAN_OUT_ODDS, Simulated, simulate
from tpspec.measure.skips_command import part
from tpspec.measure.time_model import TimeModel, as_recorded, on_cards
from tpspec.measure.timeline import chrome_trace
from tpspec.measure.trace import Recording, Round, made_up, read, unsilenced
from tpspec.roles.door import guarded, positive
from tpspec.topology.cards import parse_gpus
from tpspec.topology.config import PipelineConfig, load
from tpspec.topology.report import table
from tpspec.written import check, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.comm.messages import Drafting
    from tpspec.topology.config import Topology

COMMAND = "python -m tpspec.measure simulate"
MOST_TOKENS = 64
HEADS = ("", "tokens", "rounds", "tokens per round", "tokens/s", "ms per round", "in collectives", "waiting for drafts")


def simulation(arguments: Sequence[str]) -> int:
    return guarded(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    if options.timeline is not None:
        check(options.timeline, "--timeline")
    topology = load(options.topology, options.set)
    refuse_plain_topology(topology)
    recordings = _recordings(options)
    time = _time_model(options, topology, recordings)
    elsewhere = topology.draft.placement.kind != "inline"
    scripts = scripts_of(unsilenced(recordings) if elsewhere else recordings, options.seed)
    ways = {
        way: simulate(
            topology,
            time,
            scripts,
            num_drafts=num_drafts,
            concurrency=options.concurrency,
            fan_out_odds=options.fan_out_odds,
        )
        for way, num_drafts in (("plain", 0), ("speculative", _draft_tokens(options, topology)))
    }
    found = report(ways)
    if options.calibrate:
        found["check"] = checked(topology, recordings)
    if options.timeline is not None:
        drawn = chrome_trace({way: one.timeline for way, one in ways.items()})
        write(options.timeline, json.dumps(drawn), "--timeline")
    text = json.dumps(found) if options.json else "\n".join(_lines(found))
    sys.stdout.write(text + "\n")
    return 0


def report(ways: dict[str, Simulated]) -> dict[str, Any]:
    """The object that `--json` prints. Of the rounds that read no prompt; `seconds` is of all rounds."""
    found: dict[str, Any] = {way: _summary(one.rounds) | {"seconds": one.seconds} for way, one in ways.items()}
    found["speedup"] = found["speculative"]["tokens_per_second"] / found["plain"]["tokens_per_second"]
    stats = ways["speculative"].stats
    return found if stats.elsewhere is None else found | {"elsewhere": _elsewhere(stats.elsewhere, stats.rounds)}


def _elsewhere(drafting: Drafting, num_rounds: int) -> dict[str, Any]:
    return {
        "hits": drafting.hits,
        "misses": drafting.misses,
        "waited_share": drafting.waited_rounds / num_rounds,
        "read": drafting.num_read,
        "dropped": drafting.num_dropped,
    }


def _summary(rounds: Sequence[Round]) -> dict[str, Any]:
    if not rounds:
        raise UserError("every answer ends with its first token: there is nothing to simulate")
    tokens, seconds = sum(one.tokens for one in rounds), sum(one.seconds for one in rounds)
    return {
        "tokens": tokens,
        "rounds": len(rounds),
        "tokens_per_round": tokens / len(rounds),
        "tokens_per_second": tokens / seconds,
        "all_reduces_per_token": sum(one.reduces for one in rounds) / tokens,
        "round_s": seconds / len(rounds),
        "wait_share": sum(one.reduce_s for one in rounds) / seconds,
        "draft_share": sum(one.drafting_s for one in rounds) / seconds,
    }


def checked(topology: Topology, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Costs fitted to the recorded rounds of every other prompt; the rounds of the rest, simulated and as recorded.

    These were serial ones, whatever the topology's policy: else the time of a draft is not in them.
    """
    if len(recordings) < 2:
        raise UserError("--calibrate fits on every other prompt and checks on the rest: the trace should have two")
    topology = topology.model_copy(update={"pipeline": PipelineConfig()})
    time, others = as_recorded(recordings[::2], topology), recordings[1::2]
    found = {}
    for way, num_drafts in (("plain", 0), ("speculative", MOST_TOKENS)):
        simulated = simulate(topology, time, replays_of(others), num_drafts=num_drafts)
        recorded = [one for recording in others for one in getattr(recording, way)]
        found[way] = _compared(_summary(simulated.rounds), _summary(recorded))
    return found


def _compared(simulated: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    return {
        "round_s": simulated["round_s"],
        "recorded_round_s": recorded["round_s"],
        "ratio": simulated["round_s"] / recorded["round_s"],
        "wait_share": simulated["wait_share"],
        "recorded_wait_share": recorded["wait_share"],
        "rounds": simulated["rounds"],
        "recorded_rounds": recorded["rounds"],
    }


def _lines(found: dict[str, Any]) -> list[str]:
    lines = ["simulated; shares of the time of rounds that read no prompt"]
    lines += table([HEADS, *(_row(way, found[way]) for way in ("plain", "speculative"))])
    lines.append(f"speed-up {found['speedup']:.2f}x")
    if "elsewhere" in found:
        lines.append(_elsewhere_line(found["elsewhere"]))
    return lines + [_check_line(way, one) for way, one in found.get("check", {}).items()]


def _row(way: str, side: dict[str, Any]) -> tuple[str, ...]:
    return (
        way,
        str(side["tokens"]),
        str(side["rounds"]),
        f"{side['tokens_per_round']:.2f}",
        f"{side['tokens_per_second']:.1f}",
        f"{side['round_s'] * 1e3:.2f}",
        f"{side['wait_share']:.0%}",
        f"{side['draft_share']:.0%}",
    )


def _elsewhere_line(one: dict[str, Any]) -> str:
    return (
        f"drafts from elsewhere: {one['hits']} ready when asked for, {one['misses']} not; the target waited in "
        f"{one['waited_share']:.0%} of rounds; {one['read']} draft tokens read, {one['dropped']} of them dropped"
    )


def _check_line(way: str, one: dict[str, Any]) -> str:
    return (
        f"check, {way}: fitted to every other prompt, the others' rounds take {one['round_s'] * 1e3:.2f} ms simulated, "
        f"{one['recorded_round_s'] * 1e3:.2f} recorded ({one['ratio']:.2f}x)"
    )


def _recordings(options: argparse.Namespace) -> list[Recording]:
    if options.trace is not None:
        return read(options.trace)
    if not 0 <= options.acceptance <= 1:
        raise UserError(f"--acceptance {options.acceptance}: should be between 0 and 1")
    return made_up(options.acceptance, options.seed)


def _time_model(options: argparse.Namespace, topology: Topology, recordings: Sequence[Recording]) -> TimeModel:
    if options.calibrate:
        return as_recorded(recordings, topology)
    return on_cards(topology, parse_gpus(options.gpus), options.context)


def _draft_tokens(options: argparse.Namespace, topology: Topology) -> int | None:
    """None: as many as pay."""
    tokens = options.tokens or topology.draft.tokens
    return None if tokens == "auto" else tokens


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=COMMAND, description="Simulates a topology's rounds, plain and speculative; starts nothing.")
    parser.add_argument("topology", type=Path, help="a topology file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    guesses = parser.add_mutually_exclusive_group(required=True)
    guesses.add_argument("--trace", type=Path, metavar="FILE", help="what savings --trace FILE recorded")
    guesses.add_argument("--acceptance", type=float, metavar="A", help="or made-up guesses, right with probability A")
    costs = parser.add_mutually_exclusive_group(required=True)
    costs.add_argument("--gpus", action="append", metavar="NxCARD", help="the ranks' cards, in order: 8x3090")
    costs.add_argument(
        "--calibrate", action="store_true", help="costs as in the trace's rounds (serial ones), and a check"
    )
    parser.add_argument("--tokens", type=_draft_length, metavar="K", help="draft length, or auto (the topology's)")
    parser.add_argument(
        "--fan-out-odds",
        type=part,
        default=FAN_OUT_ODDS,
        metavar="P",
        help=f"that one of {LISTED} alternatives to a wrong guess is right ({FAN_OUT_ODDS})",
    )
    parser.add_argument("--concurrency", type=positive, default=1, metavar="N", help="requests at a time (1)")
    parser.add_argument("--context", type=positive, default=4096, help="tokens read in every step on cards (4096)")
    parser.add_argument("--seed", type=int, default=0, help="of guesses that are drawn (0)")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write a Chrome trace, for Perfetto")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


def _draft_length(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or not 1 <= int(text) <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text} is neither auto nor a number from 1 to {MOST_TOKENS}")
    return int(text)
