#!/usr/bin/env python3
"""What a card makes of single-stream decoding, in one run, as ratios. Needs a CUDA card; no weights, no network.

    python scripts/bench_gpu.py [--model meta-llama/Llama-3.1-8B-Instruct] [--only decode quantized] [--within 570]

The model is a random checkpoint of a known shape (tpspec/published/models.yaml), written to --to (a temporary folder;
16 GB for the 8B) and loaded as any other. It repeats what it reads, so that a draft of another is right. Every section
runs in a process of its own, one after the other, and is told of as soon as it ends:

  decode        plain rounds of one stream: tokens/s; weight and cache bytes of a round over its time, against the
                card's own copy bandwidth; a round's time on the host beside the card's, and what the host does in it;
                waits of the host a round; rounds of 2 to 64 rows against rounds of one; rounds at a temperature against
                greedy ones; where kernels begin before the one in front has ended, rounds of such against rounds of
                kernels in turn; which kernels take the time: from the end of the one before to its own, between which
                two it stands; and memory: what a start asks for, and what is taken
  mixture       the same of a mixture of experts (some of its layers), whose rounds read what their rows are sent to:
                beside each row count, what it reads if every expert is as likely as any other
  prompts       rounds of many rows, of a prompt behind few tokens and behind many, and of many texts that verify
                drafts: rows/s, and a round's time against one of torch's steps; of those texts, which are a replay,
                against one that is launched, too
  products      the matrices of a layer, and the head: time of 1, 6, 16 and 64 rows against torch's, and the bytes of
                one over its time, against the copy bandwidth; the same with codes of 8 and 4 bits, of NF4, NVFP4 and
                FP8, against 16; nothing of them is in a cache. And a sum through peer memory with the norm behind it,
                by one kernel against two, of a rank alone: all of it but the link
  quantized     tokens/s with target.quantize int8 and int4, and rounds of six rows against rounds of one
  waiting       how late the host learns that a card is done, by how long it has waited: two numbers from the card by
                torch, by way of pinned memory and an event, as a round fetches its verdict, and by asking that event
                again and again
  transformers  tokens/s of transformers.generate, static cache, compiled
  shared        two ranks on this card (link.transport: host): texts equal to one rank's, of a model of the draft's
                shape that says anything
  gaps          a draft model in the gaps of the card, whose collectives take an emulated link's time (card_link.py):
                how much of the time of the steps that its verified drafts took a round does not take longer than one
                with n-gram drafts, which are right, too, take no time, and are about as many (told)

Beside them stands which tiles products are made in, and which a gate is part of (tpspec/model/card/tiles.py), and by
how much they are faster for that.

On a machine without a card `--device cpu --model smollm2-135m` tries the script, not the card.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from kernel_times import kernel_times
from random_checkpoint import anything, at, write
from serving import ROOT, end, torchrun

sys.path.insert(0, str(ROOT))  # python adds scripts/ to the path, not the repository

MODEL, DRAFT = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"  # shapes of models.yaml
PROMPT, TOKENS, WARM_UP = 200, 256, 16
ROWS = (1, 2, 4, 6, 8, 12, 16, 32, 64)
DRAFTS, SHARED_TOKENS = 4, 32
MIXTURE_LAYERS = 4  # 6 GB of Qwen3-30B-A3B
COPY_BYTES = 1 << 30
COPIES, WAITS = (1, 2, 4, 8, 16), 15  # of so many bytes, which a host waits for; how often each
MANY_ROWS, MANY_TEXTS, BEHIND = 256, 32, (0, 1024, 8192)  # of rounds that read prompts; tokens that are cached
NEVER_CACHED = 1 << 28  # bytes of matrices that are read in turn
PRODUCT_ROWS = (1, 6, 16, 64)
TABLED = {"NF4": ("nf4", 64), "NVFP4": ("e2m1", 16), "FP8": ("e4m3", 128)}  # and inputs that share a scale
SLOW = "collectives go through gloo"
GAPS_LINK = "rtx3090x8_2socket_stock"
SAYS = "bench_gpu: "
HOST_PARTS = (
    "host, us: before its forward is asked for",
    "host, us: the draw and the next forward are launched",
    "host, us: until the verdict has come",
    "host, us: the next forward is told its rows",
    "host, us: the verdict is judged",
    "host, us: behind it",
)
GOALS = {
    "share of the copy bandwidth": "0.85",
    "host beside the card, us a round": "150",
    "6 rows to 1": "1.10",
    "int4 to bfloat16": "2.2",
    "bfloat16 to transformers": "1.5",
    "drafting hidden in waits": "0.70",
}


def main() -> None:
    options = _parser().parse_args()
    if options.worker:
        tell_of_tiles()
        write_models(options.worker, options)
        print(json.dumps(WORKERS[options.worker](options)))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench_gpu: no CUDA card is here (--device cpu --model smollm2-135m tries the script alone)")
    with tempfile.TemporaryDirectory() as temporary:
        if {"shared", "gaps"} & set(options.only):
            build(Path(temporary))
        folder, results, begun = options.to or Path(temporary), {}, time.monotonic()
        for name in options.only:
            limit = min(options.limit, options.within - (time.monotonic() - begun))
            results[name] = section(name, options, folder, limit)
            # After each: what is measured stays, however the rest ends.
            print(json.dumps({name: results[name]}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    show(results, options)


def tell_of_tiles() -> None:
    """Of those that products are made in: what a start says only to who asks for it."""
    handler, log = logging.StreamHandler(), logging.getLogger("tpspec.model.card.tiles")
    handler.setFormatter(logging.Formatter(f"{SAYS}%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def write_models(name: str, options: argparse.Namespace) -> None:
    """What a section loads, unless it is there."""
    if name == "mixture":
        write(options.mixture, at(options.mixture, options.to), repeats=True, num_hidden_layers=MIXTURE_LAYERS)
    elif name == "shared":
        write(options.draft, anything(options.draft, options.to), repeats=False)
    elif name != "waiting":
        write(options.model, at(options.model, options.to), repeats=True)
    if name == "gaps":
        write(options.draft, at(options.draft, options.to), repeats=True)
    forget()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def section(name: str, options: argparse.Namespace, folder: Path, limit: float) -> dict[str, Any]:
    """What a process of its own found in so many seconds; what went wrong, where it failed."""
    if limit <= 0:
        return {"failed": ["no time was left for it (--within)"]}
    command = [sys.executable, __file__, "--worker", name, "--to", str(folder), "--device", options.device]
    command += ["--model", options.model, "--draft", options.draft, "--mixture", options.mixture]
    command += ["--tokens", str(options.tokens)]
    print(f"{name} ...", file=sys.stderr, flush=True)
    worker = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = worker.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": [f"it took longer than {limit:.0f} s (--limit, --within)"]}
    finally:
        end(worker)
    if worker.returncode:
        return {"failed": errors.strip().splitlines()[-12:]}
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    said = list(dict.fromkeys(line for line in errors.splitlines() if line.startswith(SAYS)))
    return found | ({"said": said} if said else {})


def build(temporary: Path) -> None:
    """The C libraries, where they are not built for this python: without them ranks of one card meet through gloo."""
    from tpspec import native
    from tpspec.comm.shared import LIBRARY

    if native.library(LIBRARY) is not None:
        return
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "-q"]
    command += ["build_ext", "--inplace", "--build-temp", str(temporary), "--build-lib", str(temporary)]
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    importlib.invalidate_caches()
    if native.library(LIBRARY) is None:
        print(f"{SAYS}the C libraries could not be built: {told.stderr.strip()[-1000:]}", file=sys.stderr)


def decode(options: argparse.Namespace) -> dict[str, Any]:
    engine = open_engine(options).engine
    warm_s = decoded(engine, options.tokens, temperature=0.8)
    taken = memory(options) if options.device == "cuda" else {}  # before anything is measured beside the model
    found, _ = plain_rounds(engine, options)
    found |= {"a round at temperature 0.8 to 0": found["tokens/s"] * warm_s}
    found |= {"waits of the host a round": waits(engine) if options.device == "cuda" else None} | taken
    if options.device == "cuda":
        found |= host_parts(engine, options.tokens)
        forward, again = rounds_of(engine.target.decoder, 1, PROMPT + options.tokens // 2)
        forward()
        found |= kernel_times(again)
    del engine
    forget()
    return found | overlapped(options, 1 / found["tokens/s"])


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """What a start asks for; what tensors have taken at most, and what of the card is taken besides."""
    from tpspec.topology.report import memories

    (asked,) = memories(topology_of(options))
    free, total = torch.cuda.mem_get_info()
    return {
        "GiB asked for": asked.total(on_card=True) / 2**30,
        "of it for rounds": asked.rounds / 2**30,
        "GiB allocated at most": torch.cuda.max_memory_allocated() / 2**30,
        "GiB that the allocator keeps besides": (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / 2**30,
        "GiB of CUDA, kernels and graphs": (total - free - torch.cuda.memory_reserved()) / 2**30,
    }


def overlapped(options: argparse.Namespace, round_s: float) -> dict[str, Any]:
    """Such a round against one whose kernels wait for each other's end; nothing where they always do."""
    if options.device != "cuda":
        return {}
    from tpspec.model.card import overlap as card_overlap

    if not card_overlap.overlap(torch.device(options.device))["overlaps"]:
        return {}
    with patch.object(card_overlap, "OVERLAP_FROM", (99, 0)):
        in_turn_s = decoded(open_engine(options).engine, options.tokens)
    return {"a round of kernels that overlap to one in turn": round_s / in_turn_s}


def prompts(options: argparse.Namespace) -> dict[str, Any]:
    from tpspec.model.batch import Carried, Span
    from tpspec.published.shape import ModelShape

    most = ModelShape.of(at(options.model, options.to)).max_positions or max(BEHIND) + MANY_ROWS
    behind = [start for start in BEHIND if start + MANY_ROWS <= most]
    num_slots, each = max(behind) + MANY_ROWS, MANY_ROWS // MANY_TEXTS
    texts = {"draft.source": "ngram", "draft.tokens": each - 1, "serve.max_running": MANY_TEXTS}
    decoder = open_engine(options, **{"cache.tokens": num_slots}, **texts).engine.target.decoder
    runner, tokens = decoder._runner, tuple(range(5, 5 + MANY_ROWS))
    found = {"FlashInfer attends": runner.many is not None and runner.many._flash is not None}
    num_states = 1 if decoder.states is None else decoder.states.num_states

    def span(text: int, first: int, start: int, num_rows: int) -> Span:
        state = Carried(text % num_states, (0,) if start else (), num_rows)  # which some may share: nobody reads them
        num_logits = 1 if num_rows == MANY_ROWS else num_rows  # a prompt's last row, or what verifies drafts
        return Span(text, start, tokens[:num_rows], ((first, start + num_rows),), num_logits, carried=state)

    works = {f"{MANY_ROWS} rows behind {start}": [span(0, 0, start, MANY_ROWS)] for start in behind}
    room = num_slots // MANY_TEXTS
    works[f"{MANY_TEXTS} texts of {each} rows"] = [
        span(text, text * room, room - each, each) for text in range(MANY_TEXTS)
    ]
    for name, spans in works.items():
        ways = {0: partial(decoder.forward, spans)}
        if runner.many is not None:
            ways[1] = partial(by_torch, decoder, spans)
        if runner.graphs(spans, MANY_ROWS) is not None:
            ways[2] = partial(launched, decoder, spans)
        seconds = in_turns(ways, turns=5, calls=4)
        found[f"{name}, rows/s"] = MANY_ROWS / seconds[0]
        found |= {f"{name}, to torch's steps": seconds[0] / seconds[1]} if len(seconds) > 1 else {}
        found |= {f"{name}, recorded to launched": seconds[0] / seconds[2]} if len(seconds) > 2 else {}
    return found


def by_torch(decoder: Any, spans: list[Any]) -> None:
    with patch.object(decoder._runner, "steps", return_value=decoder._runner._torchs):
        launched(decoder, spans)


def launched(decoder: Any, spans: list[Any]) -> None:
    with patch.object(decoder._runner, "graphs", return_value=None):
        decoder.forward(spans)


def mixture(options: argparse.Namespace) -> dict[str, Any]:
    options.model = options.mixture
    found, read = plain_rounds(open_engine(options).engine, options)
    return found | {f"read by {num_rows} rows to 1": read(num_rows) / read(1) for num_rows in ROWS}


def plain_rounds(engine: Any, options: argparse.Namespace) -> tuple[dict[str, Any], Callable[[int], float]]:
    """What they take, and the bytes that one of so many rows reads, in the middle of the text."""
    from tpspec.published.shape import ModelShape
    from tpspec.topology.caches import kv_bytes_read
    from tpspec.topology.shards import split
    from tpspec.topology.sizes import expert_bytes, weight_bytes

    shape, middle = ModelShape.of(at(options.model, options.to)), PROMPT + options.tokens // 2
    (whole,) = split(shape, (1.0,))
    held = weight_bytes(shape, whole, "bfloat16") + kv_bytes_read(shape, whole, "bfloat16", middle)
    of_experts = expert_bytes(shape, whole, "bfloat16")
    round_s, decoder = decoded(engine, options.tokens), engine.target.decoder

    def read(num_rows: int) -> float:
        return held - (of_experts * (1 - shape.experts.share_read(num_rows)) if shape.experts else 0)

    forward_s = forwards_s(decoder, ROWS, middle)
    copied = copy_bytes_per_s(torch.device(options.device))
    found = {
        "tokens/s": 1 / round_s,
        "GB a round": read(1) / 1e9,
        "copy GB/s": copied / 1e9,
        "share of the copy bandwidth": read(1) / round_s / copied,
        "host beside the card, us a round": 1e6 * (round_s - forward_s[1]),
        **{f"{num_rows} rows to 1": seconds / forward_s[1] for num_rows, seconds in forward_s.items()},
    }
    return found, read


def forwards_s(decoder: Any, counts: Sequence[int], start: int) -> dict[int, float]:
    """Of so many rows, behind so many tokens: a card's own time, of replays with nothing of the host's between them,
    of what was put there last."""
    both = {num_rows: rounds_of(decoder, num_rows, start) for num_rows in counts}
    return in_turns(
        {num_rows: again for num_rows, (_, again) in both.items()},
        begin={num_rows: forward for num_rows, (forward, _) in both.items()},
    )


def rounds_of(decoder: Any, num_rows: int, start: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A forward of so many rows, behind so many tokens; and what does it again on a card, without the host's part."""
    from tpspec.model.batch import Carried, Span

    tokens, runs, carried = tuple(range(5, 5 + num_rows)), ((0, start + num_rows),), Carried(0, (0,), 1)
    span = Span(0, start, tokens, runs, num_rows, carried=carried)
    graphs = decoder._runner.graphs([span], num_rows)
    forward = partial(decoder.forward, [span])
    return forward, forward if graphs is None else partial(graphs.replay, num_rows)


def products(options: argparse.Namespace) -> dict[str, Any]:
    from tpspec.model.linear import PlainLinear, linear, quantized_linear, rounded_linear
    from tpspec.published.shape import ModelShape

    shape, found = ModelShape.of(at(options.model, options.to)), {}
    copied = copy_bytes_per_s(torch.device(options.device))
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {"qkv": (heads + 2 * kv_heads, shape.hidden), "o": (shape.hidden, heads),
             "gate_up": (2 * shape.intermediate, shape.hidden), "down": (shape.hidden, shape.intermediate),
             "head": (shape.vocab, shape.hidden)}  # fmt: skip
    for name, size in sizes.items():
        weights = [torch.randn(size, device=options.device).bfloat16()]
        weights += [weights[0].clone() for _ in range(NEVER_CACHED // weights[0].nbytes)]
        for num_rows in PRODUCT_ROWS:
            x = torch.randn(num_rows, size[1], device=options.device).bfloat16()
            own_s, torchs_s = (product_s([make(weight) for weight in weights], x) for make in (linear, PlainLinear))
            found[f"{name}, rows: {num_rows}, to torch's"] = own_s / torchs_s
            if num_rows == 1:
                found[f"{name}, share of the copy bandwidth"] = weights[0].nbytes / own_s / copied
            for bits in (8, 4):
                coded = [rounded_linear(weight, None, bits) for weight in weights * (16 // bits)]
                found[f"{name}, rows: {num_rows}, {bits} bits to 16"] = product_s(coded, x) / own_s
            for kind, (table, group) in TABLED.items():
                matrix = tabled(size, table, group, x.device)
                copies = 1 + NEVER_CACHED // matrix.made.codes_OW.nbytes
                coded = [quantized_linear(matrix, None, x.device) for _ in range(copies)]
                found[f"{name}, rows: {num_rows}, {kind} to 16"] = product_s(coded, x) / own_s
        del weights
        forget()
    if options.device == "cuda":
        for num_rows in PRODUCT_ROWS[:2]:
            found[f"a sum and its norm, rows: {num_rows}, one kernel to two"] = joined_to_apart(num_rows, shape.hidden)
    return found


def tabled(size: tuple[int, int], table: str, group: int, device: torch.device) -> Any:
    """A matrix whose codes stand for what that table has: of no weight, for times alone."""
    from tpspec.model.quantized import Quantized, Ready
    from tpspec.published.groups import Grid

    num_outputs, num_inputs = size
    grid, kind, gains = Grid(group, 0, num_inputs), torch.int8 if table == "e4m3" else torch.uint8, None
    codes = torch.randint(0, 16, (num_outputs, grid.width), dtype=kind, device=device)
    scales = torch.rand(num_outputs, grid.num_groups, device=device)
    if table == "e2m1":
        scales = scales.to(torch.float8_e4m3fn).view(torch.uint8)
        gains = torch.ones(num_outputs, device=device)
    return Ready(Quantized(codes, scales, None, table, gains), grid)


def joined_to_apart(num_rows: int, hidden: int) -> float:
    """Of the times."""
    from tpspec.cache.store import Kept, KVStore
    from tpspec.comm.communicator import OneRank, Purpose
    from tpspec.comm.peer import PeerMemory, memory_bytes
    from tpspec.comm.replay_time import seconds_in_graph
    from tpspec.model.card.steps import card_steps
    from tpspec.model.norm import Norm
    from tpspec.model.sight import Heads, Shape, Sight
    from tpspec.model.steps import AddNorm

    device, size = torch.device("cuda", 0), (num_rows, hidden)
    memory = torch.zeros(memory_bytes(1), dtype=torch.uint8, device=device)
    peers = PeerMemory(OneRank(), [memory.data_ptr()], device)
    shape = Shape(frozenset({Sight(Heads((0,), 64), None)}), torch.bfloat16, device, 1.0, "silu")
    steps = card_steps(shape, (), KVStore({0: Kept(1, 64)}, 64, torch.bfloat16, device))
    assert steps is not None
    x, norm = torch.zeros(size, device=device).bfloat16(), Norm(torch.ones(hidden, device=device), 1e-5)
    then, part = AddNorm(steps, x, norm, None), torch.randn(size, device=device).bfloat16()
    joined_s = seconds_in_graph(lambda part: peers.all_reduce_then(part, Purpose.mlp, then)[1], part, 20)
    apart_s = seconds_in_graph(lambda part: then(peers.all_reduce(part, Purpose.mlp))[1], part, 20)
    return joined_s / apart_s


def product_s(products: list[Any], x: torch.Tensor) -> float:
    """Of one, the median; on a card inside a graph, where no launch stands between them."""
    from tpspec.comm.replay_time import seconds_in_graph

    turn = cycle(products)
    if x.is_cuda:
        return seconds_in_graph(lambda x: next(turn)(x), x, 20)
    return in_turns({0: lambda: next(turn)(x)})[0]


def quantized(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for kind in ("bfloat16", "int8", "int4"):
        engine = open_engine(options, **({} if kind == "bfloat16" else {"target.quantize": kind})).engine
        found[f"{kind} tokens/s"] = 1 / decoded(engine, options.tokens)
        if kind != "bfloat16":
            found[f"{kind} to bfloat16"] = found[f"{kind} tokens/s"] / found["bfloat16 tokens/s"]
            seconds = forwards_s(engine.target.decoder, (1, 6), options.tokens)
            found[f"{kind}, 6 rows to 1"] = seconds[6] / seconds[1]
        del engine
        forget()
    return found


def waiting(options: argparse.Namespace) -> dict[str, Any]:
    if options.device != "cuda":
        return {}
    number = torch.zeros(2, dtype=torch.int32, device="cuda")
    here, told = torch.zeros(2, dtype=torch.int32, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pinned() -> None:
        here.copy_(number, non_blocking=True)
        told.record()

    def by_event() -> None:
        pinned()
        told.synchronize()

    def asking() -> None:
        pinned()
        while not told.query():
            pass

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target, found = torch.empty_like(source), {}
    for copies in COPIES:
        work = partial(times, copies, partial(target.copy_, source))
        for name, way in {"by torch": number.cpu, "by an event": by_event, "by asking": asking}.items():
            late_s, card_s = (
                statistics.median(each) for each in zip(*(late(work, way) for _ in range(WAITS)), strict=True)
            )
            found[f"{name}, behind {1e3 * card_s:.1f} ms, us late"] = 1e6 * late_s
    return found


def times(count: int, work: Callable[[], object]) -> None:
    for _ in range(count):
        work()


def late(work: Callable[[], object], way: Callable[[], object]) -> tuple[float, float]:
    """Seconds that a host waits for work longer than the card takes for it, which come second. Both begin at once."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]
    synchronize()
    started = time.perf_counter()
    begin.record()
    work()
    end.record()
    way()
    waited_s = time.perf_counter() - started
    synchronize()
    card_s = begin.elapsed_time(end) / 1e3
    return waited_s - card_s, card_s


def transformers(options: argparse.Namespace) -> dict[str, Any]:
    theirs = 1 / generating_s(options)
    forget()
    ours = 1 / decoded(open_engine(options).engine, options.tokens)
    return {"tokens/s": theirs, "bfloat16 tokens/s": ours, "bfloat16 to transformers": ours / theirs}


def generating_s(options: argparse.Namespace) -> float:
    """Of transformers, a token: what a text takes longer than one of a quarter of its tokens, each the median of three
    once it has compiled. The prompt, and what is set up for a text, are in neither."""
    from transformers import AutoModelForCausalLM

    torch.set_float32_matmul_precision("high")
    model = AutoModelForCausalLM.from_pretrained(at(options.model, options.to), dtype=torch.bfloat16)
    model = model.to(options.device).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt()], device=options.device)
    words: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    if options.device == "cuda":
        words["cache_implementation"] = "static"  # transformers then compiles the forward itself
    counts, medians = (options.tokens // 4, options.tokens), []
    model.generate(ids, max_new_tokens=options.tokens, **words)  # its cache stays as long: nothing compiles anew
    for num_tokens in counts:
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            made = model.generate(ids, max_new_tokens=num_tokens, **words)
            synchronize()
            seconds.append(time.perf_counter() - started)
            assert made.shape[1] == PROMPT + num_tokens
        medians.append(statistics.median(seconds[2:]))
    return (medians[1] - medians[0]) / (counts[1] - counts[0])


def shared(options: argparse.Namespace) -> dict[str, Any]:
    """float32 and few tokens: what is shown is that the texts are equal."""
    model = {"target.model": anything(options.draft, options.to), "target.dtype": "float32", "draft.source": "ngram"}
    words = [*sets(model), "--prompt", "a b c", "--max-tokens", str(SHARED_TOKENS), "--ignore-eos", "--json"]
    texts = {}
    for num_ranks in (1, 2):
        ranks = f"target.ranks={list(range(num_ranks))}"
        lines = launch(options, num_ranks, ["--set", ranks, *words])
        texts[num_ranks] = json.loads(lines[-1])["ids"]
        assert len(texts[num_ranks]) == SHARED_TOKENS
    return {"texts are equal": texts[1] == texts[2], "different tokens": len(set(texts[1]))}


def gaps(options: argparse.Namespace) -> dict[str, Any]:
    from tpspec.published.shape import ModelShape
    from tpspec.topology.links import link
    from tpspec.topology.rounds import reduces

    sources = gaps_sources(options)
    plain, free, told = (answered(options, **draft) for draft in sources)
    shape, cost = ModelShape.of(at(options.model, options.to)), link(GAPS_LINK)
    waits_s = sum(reduces(shape).values()) * (cost.seconds(2 * shape.hidden) + cost.skew_s)
    drafting_s = told.drafts * draft_step_s(topology_of(options, **sources[-1]), torch.device(options.device))
    return {
        "plain round, ms": 1e3 * plain.round_s,
        "of which it waits for the link, ms": 1e3 * waits_s,
        "round with n-gram drafts, ms": 1e3 * free.round_s,
        "round with drafts, ms": 1e3 * told.round_s,
        "n-gram drafts of a round": free.drafts,
        "drafts of a round": told.drafts,
        "drafting alone, ms": 1e3 * drafting_s,
        "drafting hidden in waits": 1 - max(0.0, told.round_s - free.round_s) / drafting_s if drafting_s else None,
    }


def gaps_sources(options: argparse.Namespace) -> tuple[dict[str, Any], ...]:
    """Of drafts: none, n-grams, and a model in the gaps."""
    model = {"draft.source": "model", "draft.model": at(options.draft, options.to), "draft.tokens": DRAFTS}
    beside = model | {"draft.placement": "{gaps: 0}", "pipeline.policy": "fan_out"}
    return {"draft.source": "none"}, {"draft.source": "ngram", "draft.tokens": DRAFTS}, beside


class Answered(NamedTuple):
    """Of a round, in the mean: seconds, and drafts."""

    round_s: float
    drafts: float


def answered(options: argparse.Namespace, **keys: Any) -> Answered:
    """Of a card of many (card_link.py), a request's rounds behind the one that reads its prompt. Of two requests the
    second counts: after the first there is nothing left to be set up."""
    from card_link import CardOnALink

    from tpspec.comm.channel import OneRankChannel
    from tpspec.comm.draft_link import LeadDraftLink
    from tpspec.comm.gap import go_first
    from tpspec.roles.beside import Beside
    from tpspec.roles.build import build_engine
    from tpspec.roles.drafter import Orders
    from tpspec.roles.target import lead_rounds
    from tpspec.topology.config import to_json

    topology = topology_of(options, **keys, **{"link.table": GAPS_LINK})
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    assert topology.link.cost is not None
    with ExitStack() as stack:
        link = None
        if topology.draft.placement.kind == "gaps":
            link = LeadDraftLink()
            stack.callback(link.close)
            drafter = Beside(Orders(to_json(topology), link.endpoint, os.getpid(), str(device), is_filler=False))
            stack.callback(drafter.close)
            drafter.wait_until_ready()
        go_first(device)
        comm = CardOnALink(topology.link.cost)
        built = build_engine(topology, comm, device, link=link, launches=link is None)
        built.own.prepare()
        for _ in range(2):
            told = Asking(prompt(), options.tokens)
            lead_rounds(built.engine, OneRankChannel(), told)
        built.close()
    del built
    forget()
    (begun, before), (ended, after) = told.heard[0], told.heard[-1]
    num_rounds = after.rounds - before.rounds
    return Answered((ended - begun) / num_rounds, (after.drafted - before.drafted) / num_rounds)


class Asking:
    """A lead's other side: one request. heard: when, and the counters then, from its first token on."""

    def __init__(self, prompt: tuple[int, ...], num_tokens: int) -> None:
        from tpspec.request import Request, Sampling

        self._requests, self._is_over = [Request(0, prompt, num_tokens, Sampling())], False
        self.heard: list[tuple[float, Any]] = []

    def receive(self, *, wait: bool) -> Sequence[Any]:
        from tpspec.comm.messages import Stop, Submit

        asked, self._requests = self._requests, []
        return [Stop()] if self._is_over else [Submit(request) for request in asked]

    def report(self, deltas: Sequence[Any], stats: Any) -> None:
        if any(delta.tokens for delta in deltas):
            self.heard.append((time.perf_counter(), stats))
        self._is_over |= any(delta.finish is not None for delta in deltas)


def draft_step_s(topology: Any, device: torch.device) -> float:
    """Of a drafter that has the card for itself: seconds a token of its chains, of which all are right."""
    from tpspec.draft.ahead import Grown
    from tpspec.draft.protocol import Ask
    from tpspec.request import Sampling
    from tpspec.roles.build_drafter import build_ahead

    drafter, text, took = Grown(build_ahead(topology, device)), list(prompt()), list[float]()
    for _ in range(WARM_UP):
        begun = time.perf_counter()
        (tree,) = drafter.propose([Ask(0, text, PROMPT, DRAFTS, Sampling())])
        took.append((time.perf_counter() - begun) / len(tree))
        text += [*tree.tokens, tree.tokens[-1]]
    return statistics.median(took[1:])


def launch(options: argparse.Namespace, num_ranks: int, words: list[str]) -> list[str]:
    """Lines of JSON of `tpspec.generate` over ranks that share the card."""
    keys = {"target.model": at(options.model, options.to), "device": options.device, "link.transport": "host",
            "engine.timeout_s": 600, "cache.tokens": 2048}  # fmt: skip  # a first start compiles
    command = torchrun(num_ranks, "-m", "tpspec.generate", *sets(keys), *words)
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if ended.returncode:
        sys.exit(ended.stderr[-3000:])
    if SLOW in ended.stderr:
        print(f"{SAYS}{SLOW}, since tpspec.comm._shared is not built for this python", file=sys.stderr)
    return [line for line in ended.stdout.splitlines() if line.startswith("{")]


def sets(keys: dict[str, Any]) -> list[str]:
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def open_engine(options: argparse.Namespace, **keys: Any) -> Any:
    from tpspec.comm.communicator import OneRank
    from tpspec.roles.build import build_engine

    built = build_engine(topology_of(options, **keys), OneRank(), torch.device(options.device))
    built.own.prepare()
    return built


def topology_of(options: argparse.Namespace, **keys: Any) -> Any:
    from tpspec.topology.config import automatic

    keys = {"draft.source": "none", "target.dtype": "bfloat16", "cache.tokens": 2048} | keys
    overrides = [f"{key}={value}" for key, value in keys.items()]
    return automatic(1, str(at(options.model, options.to)), cuda=options.device == "cuda", overrides=overrides)


def prompt() -> tuple[int, ...]:
    return tuple(torch.randint(5, 40000, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist())


def decoded(engine: Any, num_tokens: int, *, temperature: float = 0.0) -> float:
    """Seconds of a plain round, the median of those after the first few."""
    return statistics.median(list(rounds(engine, WARM_UP + num_tokens, temperature))[WARM_UP:])


def waits(engine: Any, num_rounds: int = 50) -> float:
    """How often the host waits for the card in a plain round: for what it fetches, and as torch sees it."""
    from tpspec.staged import Fetched

    heard, turns = list[float](), rounds(engine, WARM_UP + num_rounds + 1)
    for _ in range(WARM_UP):
        next(turns)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        with patch.object(Fetched, "here", marked(Fetched.here, heard)):
            for _ in range(num_rounds):
                next(turns)
        torch.cuda.set_sync_debug_mode("default")
    for _ in turns:  # or the request would run on
        pass
    return (len(heard) + sum("called a synchronizing CUDA operation" in str(one.message) for one in told)) / num_rounds


def host_parts(engine: Any, num_tokens: int) -> dict[str, float]:
    """What the host does in a plain round of replays, whose next one is launched before its verdict: in us, medians.
    The card waits for it from the verdict until the next forward has been told its rows, and computes beside the rest;
    for the verdict the host waits, most of the time."""
    from tpspec.model.graphs import Graphs
    from tpspec.staged import Fetched

    marks, found = list[float](), list[list[float]]()
    with (
        patch.object(engine.target, "logits", marked(engine.target.logits, marks)),
        patch.object(Graphs, "launch", marked(Graphs.launch, marks)),
        patch.object(Fetched, "here", marked(Fetched.here, marks)),
        patch.object(Graphs, "_put", marked(Graphs._put, marks)),
        patch.object(engine.rule, "judge", marked(engine.rule.judge, marks)),
    ):
        for took_s in rounds(engine, WARM_UP + num_tokens):
            ended = time.perf_counter()
            if len(marks) == len(HOST_PARTS) - 1:
                found.append([after - before for before, after in pairwise([ended - took_s, *marks, ended])])
            marks.clear()
    return {
        name: 1e6 * statistics.median(took_s) for name, took_s in zip(HOST_PARTS, zip(*found, strict=True), strict=True)
    }


def marked(work: Callable[..., Any], marks: list[float]) -> Callable[..., Any]:
    """Notes when it has been done."""

    def marking(*given: Any) -> Any:
        made = work(*given)
        marks.append(time.perf_counter())
        return made

    return marking


def rounds(engine: Any, num_tokens: int, temperature: float = 0.0) -> Iterator[float]:
    """One request of so many tokens; seconds of each of its rounds, as they end."""
    from tpspec.comm.messages import News
    from tpspec.request import Request, Sampling

    asked = Request(0, prompt(), num_tokens, Sampling(temperature=temperature))
    engine.hear(News(round=1, requests=(asked,)))
    for round in count(2):
        if engine.is_idle:
            return
        started = time.perf_counter()
        engine.hear(News(round=round))
        engine.step()
        yield time.perf_counter() - started


def in_turns(
    works: dict[int, Callable[[], object]],
    turns: int = 15,
    calls: int = 10,
    begin: Mapping[int, Callable[[], object]] | None = None,
) -> dict[int, float]:
    """Median seconds of each, taken in turn: many calls a time, so that on a card the host runs ahead of it. begin:
    what each needs before its calls, untimed."""
    seconds: dict[int, list[float]] = {name: [] for name in works}
    for turn in range(turns + 1):
        for name, work in works.items():
            if begin:
                begin[name]()
            synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                work()
            synchronize()
            if turn:
                seconds[name].append((time.perf_counter() - started) / calls)
    return {name: statistics.median(times) for name, times in seconds.items()}


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = in_turns({0: lambda: target.copy_(source)})[0]
    return 2 * COPY_BYTES / seconds


def forget() -> None:
    """What nobody holds any more leaves the card."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def show(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    on = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU"
    table = Table("", "", "measured", "goal", title=f"{options.model}, bfloat16, on {on}", title_justify="left")
    for name, found in results.items():
        for what, value in found.items():
            shown = (
                "\n".join(value) if isinstance(value, list) else f"{value:.3g}" if isinstance(value, float) else value
            )
            table.add_row(name, what, str(shown), GOALS.get(what, "") if name != "mixture" else "")
    Console(width=140).print(table)


WORKERS = {
    "decode": decode,
    "prompts": prompts,
    "mixture": mixture,
    "products": products,
    "quantized": quantized,
    "waiting": waiting,
    "transformers": transformers,
    "shared": shared,
    "gaps": gaps,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a shape of models.yaml")
    parser.add_argument("--draft", default=DRAFT, help="likewise, for gaps")
    parser.add_argument("--mixture", default="Qwen/Qwen3-30B-A3B", help="likewise, for mixture")
    parser.add_argument("--only", nargs="+", choices=list(WORKERS), default=list(WORKERS), help="of the sections")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where checkpoints are written and kept")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="decoded, each time")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--limit", type=float, default=400.0, help="seconds that a section may take, its model's writing too"
    )
    parser.add_argument("--within", type=float, default=math.inf, help="seconds that all of them may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--worker", choices=list(WORKERS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
