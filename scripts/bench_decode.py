#!/usr/bin/env python3
"""Single-stream decoding and reading of the demo model against transformers, in one run, as ratios.

    python scripts/bench_decode.py [--pairs 3] [--tokens 96] [--json FILE]

Four comparisons, each at the same dtype (bfloat16) and the same threads on both sides:
  one rank, two threads       tpspec against transformers.generate, plain and with prompt lookup
  two ranks, a thread each    tpspec on 5 + 4 heads against transformers' tensor parallelism, which refuses 9 heads: it
                              gets a copy padded to 12 heads with zeros, which computes the same
  prompts                     reading 512 and 2,048 tokens, in chunks as the engine does, alternating
  rows of a round             rounds that verify 2 to 8 rows against a round of one, alternating
Processes run in turn, A B A B, never two at a time; a figure is the median over the pairs, with the smallest and the
largest. transformers' side gets what it can: its own prompt lookup, the sdpa attention, no gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tpspec.model.decoder import Decoder

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2-135m"
PROMPTS = [
    "Once upon a time, in a village by the sea, there lived",
    "def quicksort(values):\n    if len(values) < 2:\n        return values\n",
    "The first ten elements of the periodic table are hydrogen, helium,",
]
ROWS = (1, 2, 4, 6, 8)
READ = (512, 2048)  # tokens of a prompt
CHUNK = 256  # engine.max_rows by default


def main() -> None:
    options = _parser().parse_args()
    if options.worker:
        WORKERS[options.worker](options)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = compare(options, Path(folder))
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def compare(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of every run by comparison and side; for rows, milliseconds by row count."""
    padded = folder / "padded"
    pad_heads(find_model(), padded)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    sides = {
        "one rank, 2 threads": {
            "tpspec": lambda: ours(folder, options.tokens, 1, 2, "none"),
            "tpspec ngram": lambda: ours(folder, options.tokens, 1, 2, "ngram"),
            "transformers": lambda: theirs(find_model(), options.tokens, 1, 2),
            "transformers lookup": lambda: theirs(find_model(), options.tokens, 1, 2, "--lookup"),
        },
        "two ranks, 1 thread each": {
            "tpspec": lambda: ours(folder, options.tokens, 2, 1, "none"),
            "tpspec ngram": lambda: ours(folder, options.tokens, 2, 1, "ngram"),
            "transformers": lambda: theirs(padded, options.tokens, 2, 1),
        },
    }
    results: dict[str, dict[str, list[float]]] = {name: {side: [] for side in runs} for name, runs in sides.items()}
    for pair in range(options.pairs):
        for name, runs in sides.items():
            for side, run in runs.items():
                results[name][side].append(run())
                print(f"{pair + 1}/{options.pairs} {name}: {side} {results[name][side][-1]:.1f} tokens/s", flush=True)
    for num_tokens in READ:
        name = f"a prompt of {num_tokens} tokens, 2 threads"
        print(name, flush=True)
        results[name] = json.loads(worker("read", 2, [str(find_model()), "--tokens", str(num_tokens)]))
    for threads in (1, 2):
        print(f"rows of a round, {threads} threads", flush=True)
        milliseconds = json.loads(worker("rows", threads, [str(find_model())]))
        results[f"rows of a round, {threads} threads"] = milliseconds
    return results


def show(results: dict[str, dict[str, list[float]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    for name, sides in results.items():
        base_name, base = next(
            (side, values) for side, values in sides.items() if side in ("transformers", str(ROWS[0]))
        )
        unit = "ms" if name.startswith("rows") else "tokens/s"
        table = Table("", f"median {unit}", "min", "max", f"ratio to {base_name}", title=name, title_justify="left")
        for side, values in sides.items():
            ratios = [value / other for value, other in zip(values, base, strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            figures = (statistics.median(values), min(values), max(values))
            table.add_row(side, *(f"{figure:.1f}" for figure in figures), spread)
        Console(width=110).print(table)


def ours(folder: Path, tokens: int, num_ranks: int, threads: int, source: str) -> float:
    """Tokens per second after the first token, over the prompts, as `tpspec.generate --json` says."""
    keys = {"target.dtype": "bfloat16", "draft.source": source, "draft.tokens": 5, "device": "cpu"}
    overrides = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    command = ["-m", "tpspec.generate", *overrides, "--prompts", str(folder / "prompts.jsonl")]
    lines = launch([*command, "--json", "--ignore-eos", "--max-tokens", str(tokens)], num_ranks, threads)
    reports = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    seconds = sum((report["tokens"] - 1) / report["tokens_per_second"] for report in reports[1:])  # the first warms up
    return sum(report["tokens"] - 1 for report in reports[1:]) / seconds


def theirs(model: Path, tokens: int, num_ranks: int, threads: int, *extra: str) -> float:
    arguments = [str(Path(__file__).resolve()), "--worker", "transformers", str(model), "--tokens", str(tokens), *extra]
    return float(launch(arguments, num_ranks, threads).split()[-1])


def launch(arguments: list[str], num_ranks: int, threads: int) -> str:
    prefix = [] if num_ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return run([*prefix, *arguments], threads)


def worker(name: str, threads: int, arguments: list[str]) -> str:
    return run([str(Path(__file__).resolve()), "--worker", name, *arguments], threads)


def run(arguments: list[str], threads: int) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def find_model() -> Path:
    from tpspec.published.checkpoint import find

    return find(MODEL)


def pad_heads(source: Path, folder: Path, heads: int = 12, kv_heads: int = 4, head_dim: int = 64) -> None:
    """A copy with more heads, all zero: the same function, in a number of heads that two ranks divide."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    sizes = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    for name, weight in weights.items():
        kind = name.split(".")[-2]
        if kind in sizes:
            weights[name] = torch.nn.functional.pad(weight, (0, 0, 0, sizes[kind] - weight.shape[0]))
        elif kind == "o_proj":
            weights[name] = torch.nn.functional.pad(weight, (0, heads * head_dim - weight.shape[1]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    (folder / "config.json").write_text(json.dumps(config))


def decode_with_transformers(options: argparse.Namespace) -> None:
    """Prints tokens per second after the first token, over the prompts, the first of which warms up."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    plan = {"tp_plan": "auto"} if distributed else {}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, **plan).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lookup = {"prompt_lookup_num_tokens": 5} if options.lookup else {}
    seconds = tokens = 0.0
    for number, prompt in enumerate(PROMPTS):
        inputs = tokenizer(prompt, return_tensors="pt")
        common = {"do_sample": False, "pad_token_id": 2, **lookup}
        started = time.perf_counter()
        model.generate(**inputs, max_new_tokens=1, min_new_tokens=1, **common)
        first = time.perf_counter() - started
        started = time.perf_counter()
        model.generate(**inputs, max_new_tokens=options.tokens, min_new_tokens=options.tokens, **common)
        if number:
            seconds += time.perf_counter() - started - first
            tokens += options.tokens - 1
    if int(os.environ.get("RANK", "0")) == 0:
        print(tokens / seconds)


def whole_decoder(options: argparse.Namespace, num_slots: int) -> Decoder:
    from tpspec.comm.communicator import OneRank
    from tpspec.model.loader import Loader
    from tpspec.published.shape import shape_of
    from tpspec.topology.shards import split

    (whole,) = split(shape_of(MODEL), (1.0,))
    return Loader.open(options.model, whole, torch.bfloat16, torch.device("cpu")).decoder(OneRank(), num_slots)


@torch.inference_mode()
def time_reading(options: argparse.Namespace) -> None:
    """Prints tokens per second of both sides, in turn, over a prompt of --tokens."""
    from transformers import AutoModelForCausalLM

    from tpspec.model.batch import Span

    decoder = whole_decoder(options, options.tokens)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    ids = torch.randint(3, 40_000, (options.tokens,), generator=torch.Generator().manual_seed(0)).tolist()

    def read() -> None:
        for first in range(0, len(ids), CHUNK):
            some = tuple(ids[first : first + CHUNK])
            decoder.forward([Span(0, first, some, ((0, first + len(some)),), int(first + CHUNK >= len(ids)))])

    sides = {"tpspec": read, "transformers": lambda: model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)}
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(6):
        for side, run_once in sides.items():
            started = time.perf_counter()
            run_once()
            if turn:
                speeds[side].append(options.tokens / (time.perf_counter() - started))
    print(json.dumps(speeds))


def time_rows(options: argparse.Namespace) -> None:
    """Prints milliseconds of rounds of each row count behind 200 cached tokens, taken in turn."""
    from tpspec.model.batch import Span

    decoder = whole_decoder(options, 512)
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for turn in range(60):
        for rows in ROWS:
            span = Span(0, 200, tuple(range(5, 5 + rows)), ((0, 200 + rows),), rows)
            started = time.perf_counter()
            decoder.forward([span])
            if turn >= 10:
                seconds[rows].append(time.perf_counter() - started)
    print(json.dumps({str(rows): [1e3 * second for second in times] for rows, times in seconds.items()}))


WORKERS = {"transformers": decode_with_transformers, "read": time_reading, "rows": time_rows}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=tuple(WORKERS), help=argparse.SUPPRESS)
    parser.add_argument("--lookup", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens for each prompt")
    parser.add_argument("--json", type=Path, help="write every figure to a file")
    return parser


if __name__ == "__main__":
    main()
