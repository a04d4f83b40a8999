"""Every sampling parameter, with drafts and without, streamed and whole, one choice or two: the same text each time.

The class of faults in which one legal field meets speculation: an engine that dies, or a text that changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.checkpoints import tiny
from tests.world.test_serving import Server

PROMPT = "the cat and the hat, the end of the cat and the hat, the end of"
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "all that truncate": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -1.5},
    "logit_bias": {"logit_bias": {"101": 5.0, "7": -100.0}},
    "min_tokens": {"min_tokens": 12, "logit_bias": {"2": 4.0}},
    "stop": {"stop": ["a", "e "]},
    "stop that is shown": {"stop": ["t"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [*range(60, 110)], "min_tokens": 3},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"2": 3.0}},
    "special tokens": {"skip_special_tokens": False, "logit_bias": {"1": 4.0}},
    "logprobs": {"logprobs": 5},
    "echo": {"echo": True, "logprobs": 2},
    "max_tokens": {"max_tokens": 1},
    "everything": {"top_k": 50, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 3, "stop": ["zz"]},
}
TEMPERATURES = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}]
PLAIN = {"num_drafts": 0}
WAYS: list[dict[str, Any]] = [
    {"n": 2},
    {"n": 2, "stream": True},
    {"stream": True},
    {"num_drafts": 7, "stream": True},
    {**PLAIN, "n": 2, "stream": True},
]


@dataclass
class Choice:
    """What a client has of one choice when all of it has come."""

    text: str = ""
    finish: str | None = None
    ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)

    def add(self, part: dict[str, Any]) -> None:
        self.text += part["text"]
        self.finish = part["finish_reason"] or self.finish
        self.ids += part["token_ids"]
        told = part["logprobs"] or {"tokens": [], "token_logprobs": []}
        self.tokens += told["tokens"]
        self.logprobs += told["token_logprobs"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("parameters")
    model = tiny("smollm2", folder / "model", num_hidden_layers=2)
    target = {"model": str(model), "ranks": [0, 1], "dtype": "float32", "weights": [2, 1]}
    made = {"name": "a test", "target": target, "draft": {"source": "ngram", "tokens": 4}, "device": "cpu"}
    (folder / "topology.yaml").write_text(json.dumps(made | {"cache": {"tokens": 4096}}))
    server = Server(folder / "topology.yaml")
    yield server.ready()
    server.launcher.terminate()
    server.has_ended(20)
    server.kill()


def ask(server: Server, **fields: Any) -> list[Choice]:
    body = {"prompt": PROMPT, "max_tokens": 20, "return_token_ids": True} | fields
    choices = [Choice() for _ in range(body.get("n", 1))]
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        parts = [json.loads(line) for line in lines[:-1]]
        assert lines[-1] == "[DONE]"
    else:
        parts = [response.json()]
    for part in parts:
        for choice in part["choices"]:
            choices[choice["index"]].add(choice)
    return choices


@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["cold", "warm"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_text_does_not_depend_on_how_it_is_made_or_sent(
    server: Server, setting: str, temperature: dict[str, Any]
) -> None:
    """Against penalties that count rejected drafts, bias that misses rows of a draft, stops beyond which drafts were
    accepted, and log-probabilities of rows that a tree has moved (to 1e-4)."""
    fields = SETTINGS[setting] | temperature
    plain = ask(server, **fields, **PLAIN, n=2)
    with ThreadPoolExecutor(len(WAYS)) as pool:
        found = list(pool.map(lambda way: ask(server, **fields, **way), WAYS))
    for way, choices in zip(WAYS, found, strict=True):
        for one, other in zip(choices, plain, strict=False):
            said = one.text, one.finish, one.ids, one.tokens
            assert said == (other.text, other.finish, other.ids, other.tokens), way
            assert [p is None for p in one.logprobs] == [p is None for p in other.logprobs]
            assert [p for p in one.logprobs if p] == pytest.approx([p for p in other.logprobs if p], abs=1e-4)


def test_drafts_were_accepted_meanwhile(server: Server) -> None:
    """Against a comparison of plain decoding with itself."""
    ask(server, temperature=0.0, max_tokens=40, ignore_eos=True)
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
