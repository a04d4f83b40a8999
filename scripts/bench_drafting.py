#!/usr/bin/env python3
"""Ways of drafting elsewhere, one after the other in one world: tokens per second of each, against plain decoding.

    torchrun --standalone --nproc-per-node 3 scripts/bench_drafting.py TOPOLOGY [--set KEY=VALUE] --prompts FILE
             [--tokens 48] [--concurrency 1] [--temperature 0.8]
             [--ways plain,away,serial,serial:3,optimistic,optimistic:3,fan_out,alternate]

`serial:3` asks for three tokens; without a number as many as pay. `away` is `serial` while the drafter's process is
stopped. Every batch of prompts runs every way, so that a drift of the machine favours none, and texts are compared with
those of the first way (bfloat16 may part at a tie). The clock runs from the moment every prompt of a batch has been
read. EOS is ignored. Works with an inline drafter too (plain and serial).

`own` is the lead's time outside collectives: with `placement: {gaps: LEAD}`, serial:3 against fan_out:3 is what a busy
drafter costs its shard. `gaps` is the part of the drafter's work that ran inside its shard's collectives. Where both
serial:K and optimistic:K ran, the last line says what K tokens drafted ahead of time should give by serial's times.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tpspec.comm.messages import Reach, Stats, Stop, Submit, ToLead
from tpspec.engine.engine import Engine
from tpspec.engine.remote import RemoteHost, Way
from tpspec.prompts import read_prompts
from tpspec.request import Delta, Request, Sampling
from tpspec.roles.door import add_topology_options, guarded, open_seat
from tpspec.text import Text

AWAY = "away"


@dataclass
class Sum:
    """Of one way, over its batches."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    waited_rounds: int = 0
    waited_s: float = 0.0
    timeouts: int = 0
    work_s: float = 0.0
    inside_s: float = 0.0
    delayed_s: float = 0.0
    own_s: float = 0.0
    drafted: int = 0
    rates: list[float] = field(default_factory=list)

    def add(self, before: Stats, after: Stats) -> None:
        self.rounds += after.rounds - before.rounds
        self.drafted += after.drafted - before.drafted
        self.own_s += own_s(after) - own_s(before)
        if after.elsewhere is None or before.elsewhere is None:
            return
        for key in OF_DRAFTING:
            more = getattr(after.elsewhere, key) - getattr(before.elsewhere, key)
            setattr(self, key, getattr(self, key) + more)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


OF_DRAFTING = ("hits", "misses", "waited_rounds", "waited_s", "timeouts", "work_s", "inside_s", "delayed_s")


def own_s(stats: Stats) -> float:
    """The lead's, in forwards and verdicts, without collectives."""
    return stats.forward_s - sum(tally.seconds for tally in stats.collectives.values())


def drafters() -> list[psutil.Process]:
    """Of this world: beside its ranks, under torchrun."""
    family = psutil.Process(os.getppid()).children(recursive=True)
    return [process for process in family if "tpspec.roles.drafter" in process.cmdline()]


def way_of(name: str, fan_out: int) -> Way:
    return {
        "fan_out": Way(Reach(ahead=True, width=1 + fan_out)),
        "optimistic": Way(Reach(ahead=True)),
        "alternate": Way(alternates=True),
    }.get(name, Way())


class Batches:
    """An inbox: each batch of prompts, each way."""

    def __init__(
        self, engine: Engine, prompts: list[tuple[int, ...]], options: argparse.Namespace, fan_out: int
    ) -> None:
        self.engine, self.options, self.fan_out = engine, options, fan_out
        size, ways = options.concurrency, options.ways.split(",")
        batches = [prompts[i : i + size] for i in range(0, len(prompts) - size + 1, size)]
        self.turns = [(None, batches[0], way) for way in ways]  # to warm up
        self.turns += [(i, batch, way) for i, batch in enumerate(batches) for way in ways]
        self.sums = {way: Sum() for way in ways}
        self.texts: dict[tuple[int, str], list[list[int]]] = {}
        self.next_id, self.open, self.waiting = 0, {}, set()
        self.begun_at, self.before, self.stats = 0.0, Stats(), Stats()
        self.turn = None

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        if self.open:
            return []
        if self.turn is not None:
            self.close()
            for process in drafters() if self.turn[2] == AWAY else ():
                process.send_signal(signal.SIGCONT)
        if not self.turns:
            return [Stop()]
        self.turn = self.turns.pop(0)
        _, batch, name = self.turn
        kind, _, length = name.partition(":")
        for process in drafters() if name == AWAY else ():
            process.send_signal(signal.SIGSTOP)
        if isinstance(self.engine.host, RemoteHost):
            self.engine.host.go(way_of(kind, self.fan_out))
        drafts = 0 if kind == "plain" else int(length) if length else None
        sampling = [Sampling(temperature=self.options.temperature, seed=i) for i in range(len(batch))]
        requests = [
            Request(self.next_id + i, ids, self.options.tokens, sampling[i], num_drafts=drafts)
            for i, ids in enumerate(batch)
        ]
        self.next_id += len(batch)
        self.open = {request.id: [] for request in requests}
        self.waiting, self.done = set(self.open), []
        return [Submit(request) for request in requests]

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        began = not self.waiting
        for delta in deltas:
            self.open[delta.id] += delta.tokens
            if began:
                self.counted += len(delta.tokens)
            self.waiting.discard(delta.id)
            if delta.finish:
                self.done.append((delta.id, self.open.pop(delta.id)))
        if not began and not self.waiting:
            self.begun_at, self.before, self.counted = time.perf_counter(), stats, 0
        self.ended_at, self.stats = time.perf_counter(), stats

    def close(self) -> None:
        index, _, name = self.turn
        if index is None:
            return
        found, seconds = self.sums[name], self.ended_at - self.begun_at
        found.tokens += self.counted
        found.seconds += seconds
        found.rates.append(self.counted / seconds)
        found.add(self.before, self.stats)
        self.texts[index, name] = [text for _, text in sorted(self.done)]


def overlapped(serial: Sum, length: int) -> float:
    """Tokens a second when the next `length` tokens are drafted meanwhile, for the case that all are accepted.

    h max(V, D (length + 1) / length) + (1 - h) (V + D) seconds a round, in which serial drafting takes V to verify and
    D to draft: ahead the drafter has to guess the token after the last too. h: all are accepted and that guess right.
    """
    tokens, draft_s = serial.tokens / serial.rounds, serial.waited_s / serial.rounds
    verify_s = serial.seconds / serial.rounds - draft_s
    low, high = 0.0, 1.0  # acceptance: tokens = 1 + a + ... + a ** length
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(length + 1)) < tokens else (low, middle)
    hit = low ** (length + 1)
    ahead_s = max(verify_s, draft_s * (length + 1) / length)
    return tokens / (hit * ahead_s + (1 - hit) * (verify_s + draft_s))


def show(batches: Batches) -> int:
    plain = next(iter(batches.sums))
    print(
        f"{'way':>12} {'tokens/s':>9} {'x ' + plain:>8} {'tokens/round':>13} {'drafted':>8} {'ms/round':>9} "
        f"{'own':>6} {'waited':>7} {'hits':>6} {'gaps':>6}"
    )
    for name, found in batches.sums.items():
        answers = found.hits + found.misses
        print(
            f"{name:>12} {found.rate:9.2f} {found.rate / batches.sums[plain].rate:8.2f} "
            f"{found.tokens / found.rounds:13.2f} {found.drafted / found.rounds:8.2f} "
            f"{found.seconds / found.rounds * 1e3:9.1f} {found.own_s / found.rounds * 1e3:6.1f} "
            f"{found.waited_rounds / found.rounds:7.0%} {found.hits / answers if answers else 0:6.0%} "
            f"{found.inside_s / found.work_s if found.work_s else 0:6.0%}"
            f"  ({found.waited_s / found.rounds * 1e3:.1f} ms/round, {found.timeouts} timeouts, "
            f"{found.delayed_s / found.rounds * 1e3:.1f} ms/round without a core)"
        )
    for name, found in batches.sums.items():
        kind, _, length = name.partition(":")
        if kind == "optimistic" and f"serial:{length}" in batches.sums:
            should = overlapped(batches.sums[f"serial:{length}"], int(length))
            print(f"{name}: {found.rate:.2f} tokens/s; by the formula {should:.2f} ({found.rate / should:.2f}x)")
    differ = [key for key, texts in batches.texts.items() if texts != batches.texts[key[0], plain]]
    print(f"texts: {'identical' if not differ else f'{len(differ)} batches differ: {differ}'}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_topology_options(parser)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ways", default="plain,serial,serial:3,optimistic,fan_out")
    options = parser.parse_args()

    def run() -> int:
        with open_seat(options, "scripts/bench_drafting.py") as seat:
            if not seat.leads:
                return seat.follow()
            text = Text.load(seat.folder)
            prompts = [prompt.encode(text) for prompt in read_prompts(options.prompts)]
            batches = Batches(seat.engine, prompts, options, seat.topology.pipeline.fan_out)
            code = seat.lead(batches)
            return code or show(batches)

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
