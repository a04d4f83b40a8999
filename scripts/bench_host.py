#!/usr/bin/env python3
"""What the host does in a round while a card would wait for it, measured without one.

    OMP_NUM_THREADS=1 python scripts/bench_host.py [--model smollm2-135m] [--tokens 1500] [--json FILE]

The lead's own loop over a model, as on a card: rounds of few rows are replays, of recordings that do nothing here, by
tables and embeddings that are written as ever. From the moment a verdict has come to the next replay a card has nothing
to do: that is measured, and what lies between two passes of a draft model, the draw included. What the host does from a
replay to the verdict, a card computes beside: it reports what the last round gave, and launches the draw (which is of
few ids here, or it would fill the host's caches). Rounds of more rows than are recorded are made ready, by the tables
of our kernels and by the masks of torch's steps. CUDA's own calls (a replay's launch, waking up) come on top:
scripts/bench_gpu.py has them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import torch

from tpspec.cache.pages import PagePool
from tpspec.comm.channel import OneRankChannel
from tpspec.comm.communicator import OneRank
from tpspec.comm.messages import Report, Stats, Stop, Submit, ToLead
from tpspec.draft.ahead import Ahead, Grown, Policy
from tpspec.draft.model import ModelDrafter
from tpspec.draft.protocol import Ask
from tpspec.draft.run import ModelRun
from tpspec.model.batch import Span
from tpspec.model.card.many import ManySteps
from tpspec.model.card.steps import CardSteps
from tpspec.model.card.tilings import Tiling
from tpspec.model.graphs import Forward
from tpspec.model.loader import load_whole
from tpspec.model.target import ShardedTarget
from tpspec.model.torch_steps import TorchSteps
from tpspec.published.checkpoint import find
from tpspec.published.shape import ModelShape
from tpspec.request import Delta, Request, Sampling
from tpspec.roles.build import build_engine
from tpspec.roles.target import lead_rounds
from tpspec.staged import Fetched
from tpspec.topology.config import automatic
from tpspec.verify.noise import CounterNoise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.model.decoder import Decoder
    from tpspec.model.delta_net import Made
    from tpspec.model.sight import Heads

CPU, CARD = torch.device("cpu"), (8, 6)  # compute capability
NUM_SLOTS, PAGE = 32768, 16
PROMPT = tuple(range(100, 150))
WARM_UP, NUM_DRAWN = 10, 64  # rounds; ids
MOST_STRAYS = 2  # rounds that read prompts of more rows than a recording has
ROUNDS = {
    "plain": ("none", [Sampling()]),
    "plain, at a temperature": ("none", [Sampling(temperature=0.8, seed=1)]),
    "plain, 8 requests": ("none", [Sampling()] * 8),
    "ngram, 5 tokens": ("ngram", [Sampling()]),
    "ngram, 8 requests": ("ngram", [Sampling()] * 8),
}
DRAFTS = {
    "a token that a model drafts": Sampling(),
    "a token that a model drafts at a temperature": Sampling(temperature=0.8, seed=1),
}
NUM_DRAFTS = 5
CACHED = 32256  # tokens of a text
MANY = {
    f"256 rows of a prompt, behind {CACHED} tokens": [Span(0, CACHED, (5,) * 256, ((0, CACHED + 256),), 1)],
    "16 texts of 16 rows": [Span(text, 1000, (5,) * 16, ((text * 1024, 1016),), 16) for text in range(16)],
}
TIMES = 30  # that each is made ready


class Clocked(OneRank):
    """In place of a card: a recorder whose replays do nothing, a gate, and the wait for a verdict. All note when."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float]] = []
        self._is_open = True

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        made: Forward = work()
        return Forward(made.logits_TV[:, :NUM_DRAWN], made.tapped), self._replay

    def forget(self) -> None: ...

    def wait(self) -> None:
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self.events.append(("replay", perf_counter()))

    def _replay(self) -> None:
        if self._is_open:  # else it has been launched while the card computes what gives the verdict
            self.events.append(("replay", perf_counter()))

    def here(self, coming: Fetched) -> Tensor:
        """In place of a wait for the verdict, which comes at once."""
        self.events.append(("verdict", perf_counter()))
        return coming.place

    def waits(self) -> list[float]:
        """Seconds from a verdict to the next replay, of every round but the first few."""
        strays = self.between("verdict", "verdict")
        assert len(strays) <= MOST_STRAYS, f"{len(strays)} rounds were no replay"
        return self.between("verdict", "replay")[WARM_UP:]

    def between(self, first: str, then: str) -> list[float]:
        """Seconds, where the one follows the other at once."""
        return [end - begin for (a, begin), (b, end) in pairwise(self.events) if (a, b) == (first, then)]


class Steps(CardSteps):
    """Without kernels: what they compute is of no matter here."""

    def add_norm(self, x_TD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return x_TD, x_TD

    def attention(self, layer: Any, qkv_TX: Tensor, round: int) -> Tensor:
        heads = layer.sight.heads
        return qkv_TX[:, : heads.num * heads.dim]

    def linear_attention(self, layer: Any, made: Made, *_: Any) -> Tensor:
        return made.gate_TX

    def gate(self, gate_up_TC: Tensor, *_: Any) -> Tensor:
        return gate_up_TC.chunk(2, -1)[0]

    def weighed(self, attended_TX: Tensor, *_: Any) -> Tensor:
        return attended_TX


class Asking:
    """The lead's other side. Encodes what it is told, and reads no answer."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests, self._left, self._encoder = list(requests), len(requests), msgspec.msgpack.Encoder()

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        asked, self._requests = self._requests, []
        return [Submit(request) for request in asked] if asked or self._left else [Stop()]

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        self._encoder.encode(Report(deltas, stats))
        self._left -= sum(delta.finish is not None for delta in deltas)


def rounds(model: str, source: str, samplings: Sequence[Sampling], num_tokens: int) -> list[float]:
    """Seconds that a card would wait in each."""
    keys = {"draft.source": source, "draft.tokens": NUM_DRAFTS, "target.dtype": "bfloat16", "cache.tokens": NUM_SLOTS}
    topology = automatic(1, model, cuda=False, overrides=[f"{key}={value}" for key, value in keys.items()])
    engine = build_engine(topology, OneRank(), CPU).engine
    assert isinstance(engine.target, ShardedTarget)
    clocked, engine.target.launches = as_on_a_card(engine.target.decoder), True
    asked = [Request(i, PROMPT, num_tokens, sampling) for i, sampling in enumerate(samplings)]
    with patch.object(Fetched, "here", lambda coming: clocked.here(coming)):
        lead_rounds(engine, OneRankChannel(), Asking(asked))
    return clocked.waits()


def drafts(model: str, sampling: Sampling, num_tokens: int) -> list[float]:
    """Seconds from one pass of a draft model to the next, in chains of which everything is accepted."""
    folder = find(model)
    shape = ModelShape.of(folder)
    decoder = load_whole(folder, shape, torch.bfloat16, CPU, NUM_SLOTS)
    clocked, source = as_on_a_card(decoder), ModelDrafter(CounterNoise(), "coupled", shape.vocab)
    run = ModelRun(decoder, shape.vocab, None)
    drafter, text = Grown(Ahead(source, run, PagePool(NUM_SLOTS // PAGE, PAGE), Policy())), list(PROMPT)
    while len(text) < num_tokens:
        (tree,) = drafter.propose([Ask(0, text, len(PROMPT), NUM_DRAFTS, sampling)])
        text += [*tree.tokens, text[0]]
        clocked.events.append(("told", perf_counter()))
    return clocked.between("replay", "replay")


def ready(decoder: Decoder) -> dict[str, list[float]]:
    """Seconds in which rounds of many rows are made ready, by whom."""
    tilings = cut(decoder, Tiling.of_many)
    given, store, states, found = (decoder.shape, decoder.ropes), decoder.store, decoder.states, {}
    ours, torchs = ManySteps(*given, store, tilings, 1, states), TorchSteps(*given, store, None, states=states)
    for case, spans in MANY.items():
        num_rows = sum(len(span.tokens) for span in spans)
        for name, steps in {case: ours, f"{case}, by torch's steps": torchs}.items():
            found[name] = list[float]()
            for _ in range(TIMES):
                begun = perf_counter()
                steps.begin(spans, num_rows)
                found[name].append(perf_counter() - begun)
    return found


def cut(decoder: Decoder, by: Callable[[int, int, tuple[int, int]], Tiling | None]) -> dict[Heads, Tiling]:
    """As for a card, in 16 bits."""
    return {heads: tiling for heads in decoder.shape.heads if (tiling := by(heads.dim, 2, CARD)) is not None}


def as_on_a_card(decoder: Decoder) -> Clocked:
    clocked, shape = Clocked(), decoder.shape
    tilings = cut(decoder, Tiling.of)
    decoder.comm = clocked
    decoder.record(Steps(shape, decoder.ropes, decoder.store, tilings, decoder.states), clocked, clocked)
    return clocked


def quartiles(times: list[float]) -> list[float]:
    """In microseconds; of a few they are no times that were never seen."""
    return [1e6 * quartile for quartile in statistics.quantiles(times, n=4, method="inclusive")]


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1500, help="of each request")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    waits = {case: rounds(options.model, *kind, options.tokens) for case, kind in ROUNDS.items()}
    folder = find(options.model)
    shape = ModelShape.of(folder)
    if shape.delta_net is None:  # one that keeps states does not draft, and has those of each text
        waits |= {case: drafts(options.model, sampling, options.tokens) for case, sampling in DRAFTS.items()}
        waits |= ready(load_whole(folder, shape, torch.bfloat16, CPU, NUM_SLOTS))
    found = {case: quartiles(times) for case, times in waits.items()}
    table = Table("", "the host, microseconds", "first to third quartile")
    for case, (first, median, third) in found.items():
        table.add_row(case, f"{median:.0f}", f"{first:.0f} to {third:.0f}")
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
