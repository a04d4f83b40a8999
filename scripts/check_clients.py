#!/usr/bin/env python3
"""Clients that others wrote, as they are, against a server of ours: what each said, in a line.

    python scripts/check_clients.py [openai lm-eval aiperf guidellm evalscope] [--venvs DIR] [--set KEY=VALUE]

Each lives in a virtual environment of its own in DIR, made when it is first wanted: about a gigabyte each, but for
openai, which is here. pip may take no other torch than the one that is here. The server runs the demo model on two
processes, in float32, since lm-eval's numbers are held against those that it gets from transformers itself: the same
texts, and log-probabilities within 1e-3. Exit code 1 when a client failed, or was told something else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python adds scripts/ to the path, not the repository

from scripts.serving import ROOT, Server, environment
from tpspec.published.checkpoint import cache_root, find
from tpspec.topology.config import load

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
MOST_S = 900
CLOSE = 1e-3
CHOICES = [
    ("The capital of France is", ["Paris", "London", "a kind of cheese", "Rome"], 0),
    ("Water freezes at", ["zero degrees Celsius", "fifty degrees Celsius", "the seaside", "noon"], 0),
    ("A spider has", ["two legs", "six legs", "eight legs", "no legs"], 2),
    ("The opposite of hot is", ["warm", "cold", "red", "loud"], 1),
    ("Bees make", ["honey", "milk", "steel", "bread"], 0),
    ("The sun rises in the", ["west", "east", "fridge", "evening"], 1),
]
BEGINNINGS = [
    "Once upon a time there was a",
    "The three primary colours are",
    "To boil an egg, first",
    "def add(a, b):",
]
TASKS: dict[str, dict[str, Any]] = {
    "ours_choices": {
        "output_type": "multiple_choice",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}],
    },
    "ours_text": {
        "output_type": "generate_until",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


class Wrong(Exception):
    """A client failed, or was told something else than it should have been."""


@dataclass
class Bench:
    """What a check needs. folder: of the served model. work: an empty folder for this check alone."""

    server: Server
    model: str
    folder: Path
    venv: Path
    work: Path

    def run(self, *words: object, **variables: str) -> str:
        """A program of the client's environment; what it printed."""
        command = [str(self.venv / "bin" / str(words[0])), *map(str, words[1:])]
        env = environment() | {"PYTHONPATH": "", "HF_HOME": str(self.work / "hf")} | variables
        done = subprocess.run(command, cwd=self.work, env=env, capture_output=True, text=True, timeout=MOST_S)
        if done.returncode:
            raise Wrong(f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout + done.stderr


def openai(bench: Bench) -> str:
    """The SDK of this environment."""
    from openai import NotFoundError, OpenAI

    with OpenAI(base_url=f"{bench.server.url}/v1", api_key="none", max_retries=0) as client:
        names = [model.id for model in client.models.list()]
        ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Name a colour."}], "temperature": 0}
        chat = client.chat.completions.create(model=bench.model, max_completion_tokens=24, **ask)
        parts = client.chat.completions.create(model=bench.model, max_completion_tokens=24, stream=True, **ask)
        streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        rated = client.completions.create(
            model=bench.model, prompt="The sea is", max_tokens=4, logprobs=2, temperature=0
        )
        try:
            client.completions.create(model="another", prompt="a")
            raise Wrong("a model that is not served was found")
        except NotFoundError:
            pass
    whole, odds = chat.choices[0].message.content, rated.choices[0].logprobs
    if names != [bench.model] or streamed != whole or odds is None or len(odds.token_logprobs or ()) != 4:
        raise Wrong(f"models {names}, streamed {streamed!r}, whole {whole!r}, log-probabilities {odds}")
    return f"{version('openai')}: models, chat, stream (the same {len(streamed)} characters), log-probabilities, 404"


def lm_eval(bench: Bench) -> str:
    _write_tasks(bench.work)
    served = (
        f"model={bench.model},base_url={bench.server.url}/v1/completions,tokenizer={bench.folder},"
        "tokenizer_backend=huggingface,num_concurrent=4"
    )
    ours = _evaluate(bench, "local-completions", served)
    theirs = _evaluate(bench, "hf", f"pretrained={bench.folder},dtype=float32", "--device", "cpu")
    texts = [(a, b) for a, b in zip(ours["ours_text"], theirs["ours_text"], strict=True) if a != b]
    odds = [(a, b) for a, b in zip(ours["ours_choices"], theirs["ours_choices"], strict=True)]
    apart = max(abs(float(a[0]) - float(b[0])) for a, b in odds)
    if texts or apart > CLOSE or any(a[1] != b[1] for a, b in odds):
        raise Wrong(f"{len(texts)} texts differ ({texts[:1]}), log-probabilities by up to {apart:.1e}")
    return (
        f"{len(odds)} log-likelihoods within {apart:.1e} of transformers', the same choices greedy, "
        f"{len(ours['ours_text'])} texts equal"
    )


def _write_tasks(folder: Path) -> None:
    rows: dict[str, list[dict[str, Any]]] = {
        "ours_choices": [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in CHOICES],
        "ours_text": [{"question": q, "answer": ""} for q in BEGINNINGS],
    }
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        said = {"task": name, "doc_to_text": "{{question}}"} | where | task
        (folder / f"{name}.yaml").write_text(json.dumps(said))  # YAML holds JSON


def _evaluate(bench: Bench, model: str, arguments: str, *words: str) -> dict[str, list[Any]]:
    """What a model answered, by task: of each request (log-probability, is greedy), or its text."""
    out = bench.work / model
    tasks = ("--include_path", bench.work, "--tasks", ",".join(TASKS), "--log_samples", "--output_path", out)
    bench.run("lm_eval", "--model", model, "--model_args", arguments, *tasks, *words, **OFFLINE)
    answers: dict[str, list[Any]] = {}
    for name in TASKS:
        (path,) = out.glob(f"*/samples_{name}_*.jsonl")
        samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))
        answers[name] = [answer[0] for sample in samples for answer in sample["resps"]]
    return answers


def aiperf(bench: Bench) -> str:
    words = ["--model", bench.model, "--url", bench.server.url, "--endpoint-type", "chat", "--streaming"]
    words += ["--tokenizer", str(bench.folder), "--concurrency", "4", "--request-count", "16", "--ui-type", "none"]
    words += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "24"]
    printed = bench.run("aiperf", "profile", *words)
    return _found(
        printed,
        {
            "requests": r"Request Count[^\d]*(16)\b",
            "TTFT ms": r"Time to First Token[^\d]*([\d.,]+)",
            "acceptance length": r"Acceptance Length[^\d]*([\d.,]+)",
        },
    )


def guidellm(bench: Bench) -> str:
    report = bench.work / "report.json"
    words = ["--backend", f"kind=openai_http,target={bench.server.url},model={bench.model}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={bench.folder}", "--profile", "kind=concurrent,streams=4"]
    words += ["--constraint", "kind=max_requests,count=16", "--disable-console-interactive"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=24", "--output", f"kind=json,path={report}"]
    bench.run("guidellm", "run", *words, HF_HUB_OFFLINE="1")
    (one,) = json.loads(report.read_text())["benchmarks"]
    totals = one["metrics"]["request_totals"]
    if totals["errored"] or not totals["successful"]:
        raise Wrong(f"requests: {totals}")
    return f"requests {', '.join(f'{kind} {count}' for kind, count in totals.items())}"


def evalscope(bench: Bench) -> str:
    words = ["--url", f"{bench.server.url}/v1/chat/completions", "--api", "openai", "--model", bench.model]
    words += ["--tokenizer-path", str(bench.folder), "--dataset", "random", "--min-prompt-length", "32"]
    words += ["--max-prompt-length", "64", "--max-tokens", "24", "--min-tokens", "24", "--parallel", "2"]
    words += ["--number", "8", "--stream", "--extra-args", '{"ignore_eos": true}']
    return _found(
        bench.run("evalscope", "perf", *words),
        {"succeeded": r"Success[^\d]*([\d.,]+)", "failed": r"Failed[^\d]*([\d.,]+)"},
    )


def _found(printed: str, patterns: dict[str, str]) -> str:
    """Numbers of a printed report. Raises Wrong where one is missing: the client saw something else."""
    found = {name: re.search(pattern, printed) for name, pattern in patterns.items()}
    if missing := [name for name, match in found.items() if match is None]:
        raise Wrong(f"its report holds no {', '.join(missing)}\n{printed[-3000:]}")
    return ", ".join(f"{name} {match[1]}" for name, match in found.items() if match)


CHECKS: dict[str, tuple[Sequence[str], Callable[[Bench], str]]] = {
    "openai": ((), openai),
    "lm-eval": (("lm-eval[api,hf]==0.4.13",), lm_eval),
    "aiperf": (("aiperf==0.13.0",), aiperf),
    "guidellm": (("guidellm==0.8.1",), guidellm),
    "evalscope": (("evalscope[perf]==1.14.1",), evalscope),
}


def make_venv(venv: Path, requirements: Sequence[str]) -> None:
    if not requirements or (venv / "made").exists():
        return
    venv.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    same = venv / "constraint.txt"
    same.write_text(f"torch=={version('torch')}\n")
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--constraint", str(same)]
    subprocess.run([*pip, *requirements], check=True, env={**os.environ, "PYTHONPATH": ""})
    (venv / "made").touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CHECKS)} (default: all)")
    parser.add_argument("--venvs", type=Path, default=cache_root() / "clients", metavar="DIR")
    parser.add_argument("--topology", default=str(ROOT / "topologies/cpu-2-eagle.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    wanted = options.clients or list(CHECKS)
    if unknown := set(wanted) - set(CHECKS):
        parser.error(f"no such client: {', '.join(sorted(unknown))} (there are {', '.join(CHECKS)})")
    for name in wanted:
        make_venv(options.venvs / name, CHECKS[name][0])
    overrides = ["target.dtype=float32", *options.set]
    topology = load(options.topology, overrides)
    failed = False
    with Server(options.topology, topology.num_ranks, overrides) as server:
        for name in wanted:
            with tempfile.TemporaryDirectory() as work:
                model = topology.target.model
                bench = Bench(server, model, find(model), options.venvs.absolute() / name, Path(work))
                try:
                    print(f"{name}: {CHECKS[name][1](bench)}", flush=True)
                except Wrong as error:
                    failed = True
                    print(f"{name}: FAILED: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
