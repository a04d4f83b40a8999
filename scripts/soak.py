#!/usr/bin/env python3
"""Many clients for minutes, then four times as many: every text must be what it is alone, and nothing may grow.

    python scripts/soak.py [TOPOLOGY] [--set KEY=VALUE] [--minutes 10] [--clients 64]

Prompts and answers are of mixed lengths, greedy and seeded, some stopped by a string, and one client in ten leaves in
the middle. The first third of the time warms the caches up; after it the memory of every process has to stay. Then
comes the overload, for a fifth of the time: only 429 with Retry-After may be refused, and who is let in waits no longer
than the queue is long. /health is asked ten times a second throughout.

The model runs in float32 unless --set says otherwise: in bfloat16 two tokens may tie, and how many rows a round has
then decides between them (`deterministic: true` settles that too, at the price of padded rounds). Exit code 1 when
anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python adds scripts/ to the path, not the repository

from scripts.serving import ROOT, Answer, Server, complete
from tpspec.topology.config import load

# Asks in a process of its own: hundreds of clients in one interpreter wait for one another, and not for the server.
ASKS = """
import http.client, sys, time
while True:
    time.sleep(float(sys.argv[2]))
    begin = time.perf_counter()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=10)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        connection.close()
        fault = "" if answer.status == 200 else answer.status
    except (OSError, http.client.HTTPException) as error:
        fault = repr(error)
    print(time.perf_counter() - begin, fault, flush=True)
"""
NUM_JOBS, LEAVES = 16, 0.1
HEALTH_S, MOST_HEALTH_S, LOOK_S = 0.1, 0.05, 1.0
WARM_UP, OVERLOAD, TIMES = 1 / 3, 1 / 5, 4
MOST_GROWTH = 0.02  # of a process's memory, between the warm-up and the overload
LEAST_GROWTH = 4 << 20  # less is what allocators do
WORDS = [
    "the",
    "cat",
    "and",
    "hat",
    "sat",
    "on",
    "end",
    "of",
    "other",
    "bus",
    "then",
    "again",
    "slow",
    "theme",
    "thing",
]
Job = dict[str, Any]


def jobs(longest_prompt: int, longest_answer: int) -> list[Job]:
    """Requests, as their JSON. longest_prompt: in words."""
    random = Random(3)
    return [_job(number, random, longest_prompt, longest_answer) for number in range(NUM_JOBS)]


def _job(number: int, random: Random, longest_prompt: int, longest_answer: int) -> Job:
    words = [random.choice(WORDS) for _ in range(random.randint(2, longest_prompt))]
    shared = WORDS[:16] if number % 3 == 0 else []
    job: Job = {"prompt": " ".join([*shared, *words]), "max_tokens": random.randint(1, longest_answer)}
    job |= {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number, "top_p": 0.95}
    return job | ({"stop": [" the", "\n"]} if number % 5 == 0 else {})


@dataclass
class Seen:
    """Of one stretch of time. faults: what should never be, by kind."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    tokens: int = 0
    left: int = 0

    def add(self, answer: Answer, expected: str) -> None:
        self.statuses[answer.status] += 1
        if answer.status == 200:
            self._judge(answer, expected)
        elif answer.status != 429:
            self.faults[f"status {answer.status}: {answer.error}"] += 1
        elif "retry-after" not in answer.headers:
            self.faults["429 without Retry-After"] += 1

    def _judge(self, answer: Answer, expected: str) -> None:
        self.tokens += answer.tokens
        if answer.error is not None:
            self.faults[f"broken off: {answer.error}"] += 1
        elif answer.text != expected:
            self.faults["another text than alone"] += 1
        if answer.times:
            self.ttft_s.append(answer.ttft)


class Clients:
    """num: how many at a time."""

    def __init__(self, server: Server, jobs: Sequence[Job]) -> None:
        self._server, self._jobs = server, jobs
        self._texts: list[str] = []

    async def learn(self) -> None:
        """What every job gives alone."""
        for job in self._jobs:
            answer = await complete(self._server.port, **job)
            if answer.status != 200 or answer.error:
                raise SystemExit(f"a request failed alone: {answer.error}")
            self._texts.append(answer.text)

    async def run(self, num: int, seconds: float) -> Seen:
        """Everybody asks again as soon as he has been answered, until the time is over; then all are answered."""
        seen, begin = Seen(), time.monotonic()
        await asyncio.gather(*(self._ask_on(seen, Random(number), begin + seconds) for number in range(num)))
        seen.seconds = time.monotonic() - begin
        return seen

    async def _ask_on(self, seen: Seen, random: Random, until: float) -> None:
        while time.monotonic() < until:
            number = random.randrange(len(self._jobs))
            patience = random.uniform(0.01, 2.0) if random.random() < LEAVES else None
            try:
                answer = await asyncio.wait_for(complete(self._server.port, **self._jobs[number]), patience)
            except TimeoutError:
                seen.left += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                seen.faults[f"connection: {error!r}"] += 1
            else:
                seen.add(answer, self._texts[number])
                await asyncio.sleep(random.uniform(0.5, 1.0) if answer.status == 429 else 0)


class Watch(threading.Thread):
    """Has /health asked, and looks at the processes."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server, self._over = server, threading.Event()
        self.health_s: list[float] = []
        self.bad: Counter[str] = Counter()
        self.memory: dict[str, list[tuple[float, int]]] = {}
        self.files: dict[str, list[int]] = {}

    def run(self) -> None:
        processes, command = self._server.processes(), [sys.executable, "-c", ASKS, str(self._server.port)]
        with subprocess.Popen([*command, str(HEALTH_S)], stdout=subprocess.PIPE, text=True) as asks:
            reader = threading.Thread(target=self._hear, args=(asks.stdout,))
            reader.start()
            while not self._over.wait(LOOK_S):
                self._look(processes)
            asks.terminate()
            reader.join()

    def stop(self) -> None:
        self._over.set()
        self.join()

    def grown(self, since: float, until: float) -> dict[str, tuple[int, int]]:
        """Of each process, its memory in the first quarter of that time, and in the last."""
        found = {}
        for name, samples in self.memory.items():
            sizes = [size for at, size in samples if since <= at <= until]
            quarter = max(1, len(sizes) // 4)
            found[name] = int(median(sizes[:quarter])), int(median(sizes[-quarter:]))
        return found

    def _hear(self, lines: Iterable[str]) -> None:
        for line in lines:
            seconds, _, fault = line.strip().partition(" ")
            self.health_s.append(float(seconds))
            if fault:
                self.bad[f"/health: {fault}"] += 1

    def _look(self, processes: dict[str, psutil.Process]) -> None:
        for name, process in processes.items():
            try:
                size, files = process.memory_info().rss, process.num_fds()
            except psutil.Error:
                self.bad[f"{name} is gone"] += 1
                continue
            self.memory.setdefault(name, []).append((time.monotonic(), size))
            self.files.setdefault(name, []).append(files)


@dataclass
class Soak:
    """What was seen, and the faults in it.

    flat: from when to when nothing may grow. limit: of the queue; places: sequences that run at a time.
    """

    steady: Seen
    overload: Seen
    watch: Watch
    flat: tuple[float, float]
    limit: int
    places: int
    pages_left: float

    def faults(self, most_health_s: float = MOST_HEALTH_S, least_growth: int = LEAST_GROWTH) -> list[str]:
        found = [f"{count} x {what}" for seen in (self.steady, self.overload) for what, count in seen.faults.items()]
        found += [f"{count} x {what}" for what, count in self.watch.bad.items()]
        if self.steady.statuses[429]:
            found.append(f"{self.steady.statuses[429]} x 429 before the overload")
        if not self.overload.statuses[429]:
            found.append("nobody was refused under overload")
        if p99(self.overload.ttft_s) > self.longest_wait_s:
            found.append(f"first tokens after {p99(self.overload.ttft_s):.1f} s, more than {self.longest_wait_s:.1f} s")
        if p99(self.watch.health_s) > most_health_s:
            found.append(f"/health took {1000 * p99(self.watch.health_s):.0f} ms")
        if self.pages_left:
            found.append(f"{self.pages_left:.1%} of the pages are owned by nobody who is there")
        for name, (before, after) in self.watch.grown(*self.flat).items():
            if after - before > max(least_growth, MOST_GROWTH * before):
                found.append(f"{name} has grown by {(after - before) >> 20} MiB")
        return found

    @property
    def longest_wait_s(self) -> float:
        """For everybody who may stand before one who is let in, at the pace at which they were served; and a half."""
        return 1.5 * (self.limit + self.places) * self.overload.seconds / max(1, self.overload.statuses[200])

    def lines(self) -> list[str]:
        grown = self.watch.grown(*self.flat)
        sizes = "; ".join(f"{name} {before >> 20} -> {after >> 20}" for name, (before, after) in grown.items())
        files = "; ".join(f"{name} {min(counts)}-{max(counts)}" for name, counts in self.watch.files.items())
        health = self.watch.health_s
        return [
            f"steady    {_line(self.steady)}",
            f"overload  {_line(self.overload)}; the queue allows {self.longest_wait_s:.1f} s",
            f"/health   {len(health)} times: median {1000 * median(health):.1f} ms, p99 {1000 * p99(health):.1f}, "
            f"most {1000 * max(health):.1f}",
            f"memory    MiB after the warm-up -> before the overload: {sizes}",
            f"files     open: {files}",
        ]


def p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[-1] if len(values) > 1 else max(values, default=0.0)


def _line(seen: Seen) -> str:
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(seen.statuses.items()))
    first = f"first token median {median(seen.ttft_s or [0]):.2f} s, p99 {p99(seen.ttft_s):.2f} s"
    return f"{seen.seconds:.0f} s: {statuses}, {seen.left} left; {seen.tokens / seen.seconds:.1f} tokens/s; {first}"


def soak(server: Server, jobs: Sequence[Job], *, seconds: float, clients: int, limit: int, places: int) -> Soak:
    crowd, watch = Clients(server, jobs), Watch(server)
    asyncio.run(crowd.learn())
    watch.start()
    warm_at = time.monotonic() + WARM_UP * seconds
    steady = asyncio.run(crowd.run(clients, (1 - OVERLOAD) * seconds))
    flat = warm_at, time.monotonic()
    overload = asyncio.run(crowd.run(TIMES * clients, OVERLOAD * seconds))
    watch.stop()
    until(lambda: not server.metric("vllm:num_requests_running"), 10)
    return Soak(steady, overload, watch, flat, limit, places, server.metric("vllm:kv_cache_usage_perc"))


def room_for(clients: int) -> int:
    """A queue for all of them, not for so many more: who leaves and asks again may count twice for a moment."""
    return clients + clients // 4


def until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology", nargs="?", default=str(ROOT / "topologies/cpu-2-eagle.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    overrides = ["target.dtype=float32", f"serve.max_queued={room_for(options.clients)}", *options.set]
    topology = load(options.topology, overrides)
    with Server(options.topology, topology.num_ranks, overrides) as server:
        found = soak(
            server,
            jobs(longest_prompt=300, longest_answer=64),
            seconds=60 * options.minutes,
            clients=options.clients,
            limit=topology.serve.max_queued,
            places=topology.serve.max_running,
        )
    print(*found.lines(), sep="\n")
    faults = found.faults()
    print(*(f"FAULT: {fault}" for fault in faults) if faults else ("no fault",), sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
