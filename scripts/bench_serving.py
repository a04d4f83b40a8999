#!/usr/bin/env python3
"""What serving costs and what batching gives, through the real server, in one run: numbers, and ratios of them.

    python scripts/bench_serving.py [TOPOLOGY] [--set KEY=VALUE] [--streams 8] [--tokens 96] [--only batching,...]

batching   tokens per second of one stream, and of several at once, by turns
prefix     rows read for several prompts that begin with the same 1,000 tokens, and the time to the first token
overhead   seconds a round at batch 1, plain decoding: clients of the server against `tpspec.generate`, by turns

Clients run on this machine, too. End-of-text is ignored, so that every stream has as many tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python adds scripts/ to the path, not the repository

from scripts.serving import ROOT, Answer, Server, complete, environment, round_seconds, torchrun
from tpspec.topology.config import load

TURNS = 6  # what a machine does beside comes and goes in tens of seconds
PLAIN = ["draft.source=none", "draft.model=null", "draft.quantize=null"]
SHARED, FIRST_ID = 1000, 300
TOPICS = ["the sea", "a lighthouse", "trains", "a garden", "winter", "a clock", "bread", "the moon", "maps", "rivers"]
PROMPTS = [f"Write a long story about {topic}. Once upon a time" for topic in TOPICS]


@dataclass
class Bench:
    topology: str
    num_ranks: int
    overrides: list[str]
    streams: int
    tokens: int

    @property
    def _fields(self) -> dict[str, Any]:
        return {"max_tokens": self.tokens, "ignore_eos": True, "temperature": 0.0}

    def serving(self) -> Server:
        return Server(self.topology, self.num_ranks, self.overrides)

    def batching(self, server: Server) -> None:
        one, many = [list[float]() for _ in range(2)]
        for turn in range(TURNS):
            asyncio.run(self._rate(server, [PROMPTS[turn]]))  # what turns up late, turns up here
            one.append(asyncio.run(self._rate(server, [PROMPTS[turn]])))
            many.append(asyncio.run(self._rate(server, [PROMPTS[n % len(PROMPTS)] for n in range(self.streams)])))
        ratio = median(b / a for a, b in zip(one, many, strict=True))
        print(
            f"batching: {median(one):.1f} tokens/s alone, {median(many):.1f} with {self.streams} streams: {ratio:.2f}x"
        )

    async def _rate(self, server: Server, prompts: Sequence[str]) -> float:
        """Tokens a second, from the first request to the last token."""
        answers = await asyncio.gather(*(complete(server.port, prompt=prompt, **self._fields) for prompt in prompts))
        _check(answers)
        begin, end = min(answer.asked for answer in answers), max(answer.times[-1] for answer in answers)
        return sum(answer.tokens for answer in answers) / (end - begin)

    def prefix(self, server: Server) -> None:
        shared = list(range(FIRST_ID, FIRST_ID + SHARED))
        prompts = [[*shared, 1000 + n, 1001, 1002] for n in range(self.streams)]
        before = _read(server)
        first = asyncio.run(complete(server.port, prompt=prompts[0], max_tokens=8))
        second = asyncio.run(complete(server.port, prompt=prompts[1], max_tokens=8))
        asyncio.run(_all(server, prompts[2:]))
        rows = _read(server) - before
        print(
            f"prefix: {rows:.0f} of {sum(map(len, prompts))} prompt tokens read; first token after "
            f"{first.ttft:.2f} s, of who comes second {second.ttft:.2f} s: {first.ttft / second.ttft:.1f}x"
        )

    def overhead(self) -> None:
        ours, theirs, cpu_s = list[float](), list[float](), list[float]()
        with Server(self.topology, self.num_ranks, [*self.overrides, *PLAIN]) as server:
            for _ in range(TURNS):
                theirs += self._generated()
                begin = _cpu_s(server)
                ours += [round_seconds(server.port, prompt=prompt, **self._fields) for prompt in PROMPTS]
                cpu_s.append((_cpu_s(server) - begin) / (len(PROMPTS) * self.tokens))
        print(
            f"overhead: {_fast_ms(ours):.2f} ms a round, {_fast_ms(theirs):.2f} of generate: "
            f"{_fast_ms(ours) / _fast_ms(theirs) - 1:+.1%}; processor time of the HTTP process "
            f"{1000 * mean(cpu_s):.2f} ms"
        )

    def _generated(self) -> list[float]:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[: len(PROMPTS) // 2])
            file.flush()
            sets = [word for override in (*self.overrides, *PLAIN) for word in ("--set", override)]
            words = ["--prompts", file.name, "--json", "--ignore-eos", "--max-tokens", str(self.tokens)]
            command = torchrun(self.num_ranks, "-m", "tpspec.generate", self.topology, *sets, *words)
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        return [1 / json.loads(line)["tokens_per_second"] for line in done.stdout.splitlines() if line.startswith("{")]


async def _all(server: Server, prompts: Sequence[list[int]]) -> None:
    _check(await asyncio.gather(*(complete(server.port, prompt=prompt, max_tokens=8) for prompt in prompts)))


def _check(answers: Sequence[Answer]) -> None:
    if faults := [answer.error or f"status {answer.status}" for answer in answers if answer.error or not answer.times]:
        raise SystemExit(f"a request failed: {faults[0]}")


def _cpu_s(server: Server) -> float:
    """Of the HTTP process, since it was started."""
    return sum(server.processes()["frontend"].cpu_times()[:2])


def _fast_ms(seconds: Sequence[float]) -> float:
    """Milliseconds, of the fastest quarter: whatever else runs here makes rounds slower, never faster."""
    return 1000 * mean(sorted(seconds)[: max(1, len(seconds) // 4)])


def _read(server: Server) -> float:
    """Prompt tokens that were read, of all that came."""
    return server.metric("vllm:prefix_cache_queries_total") - server.metric("vllm:prefix_cache_hits_total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology", nargs="?", default=str(ROOT / "topologies/cpu-2-eagle.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--only", default="batching,prefix,overhead")
    options = parser.parse_args()
    ranks = load(options.topology, options.set).num_ranks
    bench, wanted = (
        Bench(options.topology, ranks, options.set, options.streams, options.tokens),
        options.only.split(","),
    )
    if {"batching", "prefix"} & set(wanted):
        with bench.serving() as server:
            for part in (bench.batching, bench.prefix):
                if part.__name__ in wanted:
                    part(server)
    if "overhead" in wanted:
        bench.overhead()


if __name__ == "__main__":
    main()
