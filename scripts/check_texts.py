#!/usr/bin/env python3
"""Greedy text against transformers.generate, token for token, over a file of prompts (float32).

    torchrun --standalone --nproc-per-node 2 scripts/check_texts.py PROMPTS.jsonl [--tokens 64] [--model smollm2-135m]
             [--source ngram] [--limit N]

Every rank runs the engine, all prompts in one batch; the lead then compares each text with transformers' and prints the
first difference of those that differ. Exit code 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tpspec.comm.channel import open_channel
from tpspec.comm.distributed import Place, join_world
from tpspec.comm.messages import Stats, Stop, Submit, ToLead
from tpspec.published.checkpoint import find
from tpspec.request import Delta, Request
from tpspec.roles.build import build_engine
from tpspec.roles.target import follow_rounds, lead_rounds
from tpspec.text import Text
from tpspec.topology.config import automatic


class Batch:
    """An inbox that submits everything at once and stops when all have ended."""

    def __init__(self, requests: list[Request]) -> None:
        self.left, self.texts = [Submit(request) for request in requests], {request.id: [] for request in requests}
        self.open = set(self.texts)
        self.stats = Stats()

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        messages, self.left = self.left, []
        return messages if messages or self.open else [Stop()]

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        self.stats = stats
        for delta in deltas:
            self.texts[delta.id] += delta.tokens
            self.open -= {delta.id} if delta.finish else set()


def main() -> int:
    options = _parser().parse_args()
    place, cpu = Place.from_env(os.environ), torch.device("cpu")
    model = find(options.model)
    text = Text.load(model)
    prompts = [json.loads(line) for line in options.prompts.read_text().splitlines()][: options.limit]
    encoded = [_encode(text, prompt) for prompt in prompts]
    requests = [Request(i, ids, options.tokens, stop_ids=text.eos_ids) for i, ids in enumerate(encoded)]
    overrides = ["target.dtype=float32", f"draft.source={options.source}", "cache.tokens=32768"]
    topology = automatic(place.world_size, options.model, cuda=False, overrides=overrides)
    with join_world(place, cpu) as world:
        comm, channel = world.group(topology.target.ranks), open_channel(world, topology.target.ranks, 600.0)
        engine = build_engine(topology, comm, cpu).engine
        batch = Batch(requests)
        started = time.perf_counter()
        code = lead_rounds(engine, channel, batch) if place.rank == 0 else follow_rounds(engine, channel)
        channel.close()
    if place.rank:
        return code
    stats = batch.stats
    print(
        f"{stats.tokens} tokens in {stats.rounds} rounds, {time.perf_counter() - started:.0f} s; comparing", flush=True
    )
    return _compare(model, prompts, requests, batch.texts)


def _compare(model: Path, prompts: list[dict[str, str]], requests: list[Request], texts: dict[int, list[int]]) -> int:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    different = 0
    for prompt, request in zip(prompts, requests, strict=True):
        ids = torch.tensor([request.prompt])
        eos = sorted(request.stop_ids)
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_tokens, do_sample=False,
            eos_token_id=eos, pad_token_id=eos[0],
        )[0, len(request.prompt) :].tolist()  # fmt: skip
        if out != texts[request.id]:
            different += 1
            at = next(i for i, (a, b) in enumerate(zip([*out, -1], [*texts[request.id], -1], strict=False)) if a != b)
            print(
                f"{prompt['id']}: differs at token {at} of {len(out)}: {_gap(reference, request, out, at)}", flush=True
            )
    print(f"{len(requests) - different} of {len(requests)} texts are equal")
    return 1 if different else 0


def _gap(reference: torch.nn.Module, request: Request, out: list[int], at: int) -> str:
    """How near to a tie transformers' own logits are where the texts part."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*request.prompt, *out[:at]]])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return f"the two largest logits are {first:.6f} and {second:.6f}"


def _encode(text: Text, prompt: dict[str, str]) -> tuple[int, ...]:
    if prompt.get("kind") == "chat":
        return text.encode_chat([{"role": "user", "content": prompt["prompt"]}])
    return text.encode(prompt["prompt"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--source", default="ngram")
    parser.add_argument("--limit", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
