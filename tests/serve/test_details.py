"""What requests may know of their tokens, over HTTP from real ranks: the same with drafts and without, streamed or not.

A tiny checkpoint whose words are bytes and whose text is noise, so characters fall apart at every turn.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import tiny
from tests.draft.liar import Liar
from tests.slow import slowly
from tests.worlds import CPU, topology
from tpspec.comm.channel import thread_channels
from tpspec.comm.communicator import Communicator
from tpspec.comm.link import FrontendLink
from tpspec.comm.messages import Ready, Report, Stats, Stop, ToLead
from tpspec.comm.threads import ThreadWorld
from tpspec.engine.hosts import InlineHost
from tpspec.request import Delta
from tpspec.roles.build import build_engine
from tpspec.roles.target import follow_rounds, lead_rounds
from tpspec.text import Text

MODEL = "tiny/noise"
CACHE = 512
PROMPT = "the cat and the hat, the cat and the hat, naïve 日本"
HELLO = [{"role": "user", "content": "the cat and the hat"}]
WORLDS = {"ngram": 1, "model": 2, "liar": 3}  # ranks of each; the model is the target itself, so never wrong


class Ranks(threading.Thread):
    """Real ranks behind the HTTP process; the inbox of their lead."""

    def __init__(self, endpoint: str, model: Path, source: str) -> None:
        super().__init__(daemon=True)
        self.endpoint, self.source, self.leave = endpoint, source, threading.Event()
        named = "none" if source == "liar" else source
        keys: dict[str, Any] = {"engine": {"max_rows": 24}, "cache": {"tokens": CACHE, "page": 16}}
        draft = {"source": named, "tokens": 5, "model": str(model) if source == "model" else None}
        self.made = topology(model, WORLDS[source], draft=draft, **keys)

    def run(self) -> None:
        self.link = FrontendLink(self.endpoint)
        self.link.send(Ready(CACHE, WORLDS[self.source], 4))
        channels = thread_channels(WORLDS[self.source])

        def rank(comm: Communicator) -> None:
            engine = build_engine(self.made, comm, CPU).engine
            if self.source == "liar":
                engine.host, engine.draft_tokens = InlineHost(Liar(300)), 5
            if comm.rank == 0:
                lead_rounds(engine, channels[0], self)
            else:
                follow_rounds(engine, channels[comm.rank])

        ThreadWorld(len(channels)).run(rank)
        self.link.close()

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        return [Stop()] if self.leave.is_set() else self.link.poll(0.05 if wait else 0.0)

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        self.link.send(Report(deltas, stats))


class Server:
    def __init__(self, model: Path, source: str) -> None:
        command = [sys.executable, "-m", "tpspec.serve.http", "--model-folder", str(model), "--port", "0"]
        self.process = subprocess.Popen([*command, "--model-name", MODEL], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        place = json.loads(self.process.stdout.readline())
        self.client = httpx.Client(base_url=place["url"], timeout=60)
        self.ranks = Ranks(place["endpoint"], model, source)
        self.ranks.start()
        while self.client.get("/ready").status_code != 200:
            self.ranks.join(0.05)

    def ask(self, kind: str, fields: dict[str, Any], *, stream: bool) -> dict[str, Any]:
        """The answer; a stream's chunks put together."""
        if not stream:
            response = self.client.post(f"/v1/{kind}", json=fields)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer
        with self.client.stream("POST", f"/v1/{kind}", json=fields | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return assembled([json.loads(line) for line in lines])

    def close(self) -> None:
        self.ranks.leave.set()
        self.ranks.join(20)
        self.client.close()
        self.process.terminate()
        self.process.communicate(timeout=20)


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            if "delta" in part:
                part["message"] = part.pop("delta")
            if part["index"] not in choices:
                choices[part["index"]] = part
            else:
                add(choices[part["index"]], part)
    around = {key: value for key, value in chunks[0].items() if key == "prompt_token_ids"}
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    return {"choices": [choices[index] for index in sorted(choices)], **around}


def add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    choice["finish_reason"] = part["finish_reason"]
    if "message" in part:
        assert "role" not in part["message"]
        choice["message"]["content"] += part["message"]["content"]
    else:
        choice["text"] += part["text"]
    if "token_ids" in part:
        choice["token_ids"] += part["token_ids"]
        assert "prompt_token_ids" not in part
    for key, values in (part["logprobs"] or {}).items():
        if values is not None:
            choice["logprobs"][key] += values


def same(mine: Any, other: Any) -> None:
    """Texts and ids alike, numbers to 1e-4; what a stream does not repeat is left out."""
    if isinstance(mine, dict):
        for key in set(mine) - {"id", "created", "object", "usage", "metrics", "refusal"}:
            same(mine[key], other[key])
    elif isinstance(mine, list):
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            same(one, two)
    else:
        assert mine == (pytest.approx(other, abs=1e-4) if isinstance(other, float) else other)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=WORLDS)
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(model, request.param)
    yield server
    server.close()


@pytest.fixture(scope="module")
def text(model: Path) -> Text:
    return Text.load(model)


@pytest.fixture(scope="module")
def after(model: Path) -> Callable[[list[int]], torch.Tensor]:
    """Log-probabilities of the token after each position of a text, [T, V] in float64."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    return torch.no_grad()(lambda ids: reference(torch.tensor([ids])).logits[0].log_softmax(1))


ENDS = [*range(84, 110)]  # so many ids that a text ends soon, and amid a round
COMPLETIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "own logprobs alone": {"logprobs": 0, "n": 2},
    "echo": {"echo": True, "prompt": [PROMPT, "the hat"]},
    "echo of ids": {"echo": True, "prompt": [70, 71, 200, 72]},
    "echo and logprobs": {"echo": True, "logprobs": 2, "prompt": [PROMPT, "t"]},
    "echo alone": {"echo": True, "max_tokens": 0},
    "a prompt rated": {"echo": True, "max_tokens": 0, "logprobs": 20},
    "min_tokens": {"min_tokens": 11, "stop_token_ids": ENDS},
    "min_tokens before stop strings": {"min_tokens": 7, "stop": ["e", ">", "\ufffd"]},
    "a stop string shown": {"stop": [">", "rr"], "include_stop_str_in_output": True, "logprobs": 1},
    "a stop string": {"stop": [">", "rr"], "logprobs": 1, "return_token_ids": True},
    "a stop token shown": {"stop_token_ids": ENDS, "include_stop_str_in_output": True, "logprobs": 1},
    "a stop token": {"stop_token_ids": ENDS, "logprobs": 1},
    "ids": {"return_token_ids": True, "prompt": ["the hat", "the cat"], "echo": True},
    "penalties": {"logprobs": 1, "frequency_penalty": 1.5, "logit_bias": {"90": 4}, "top_k": 50, "min_tokens": 3},
}
CHATS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 4},
    "own logprobs alone": {"logprobs": True, "n": 2},
    "ids": {"return_token_ids": True, "min_tokens": 5, "stop_token_ids": ENDS},
}
ASKED = [("completions", {"prompt": PROMPT} | fields) for fields in COMPLETIONS.values()]
ASKED += [("chat/completions", {"messages": HELLO} | fields) for fields in CHATS.values()]
NAMES = [*COMPLETIONS, *(f"chat: {name}" for name in CHATS)]


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    """Answers without drafts, by what was asked; of the first world that was asked, for all others to agree with."""
    return {}


@pytest.mark.parametrize("temperature", [0.8, *slowly(0.0)])
@pytest.mark.parametrize(("kind", "fields"), ASKED, ids=NAMES)
def test_drafts_streams_and_ranks_change_nothing(
    server: Server, plain: dict[str, dict[str, Any]], kind: str, fields: dict[str, Any], temperature: float
) -> None:
    """Stands against details of rejected drafts, of tokens beyond a stop, and of chunks that were merged or split."""
    fields = {"max_tokens": 20, "temperature": temperature, "seed": 11} | fields
    key = json.dumps(fields)
    if key not in plain:
        plain[key] = server.ask(kind, fields | {"num_drafts": 0}, stream=False)
        same(server.ask(kind, fields | {"num_drafts": 0}, stream=True), plain[key])
    same(server.ask(kind, fields, stream=False), plain[key])
    same(server.ask(kind, fields, stream=True), plain[key])


def test_the_request_of_lm_eval_is_answered_as_it_reads_it(
    server: Server, after: Callable[[list[int]], torch.Tensor]
) -> None:
    """Body and reading as in its local-completions: likelihoods of continuations, and whether they are greedy."""
    source = random.Random(2)
    contexts = [[source.randrange(3, 263) for _ in range(length)] for length in (30, 5, 1)]
    prompts = [[*context, *(source.randrange(3, 263) for _ in range(7))] for context in contexts]
    for _ in range(4):  # and one whose continuation is what the model would say
        prompts[1] = [*prompts[1], int(after(prompts[1])[-1].argmax())]
    contexts[1] = prompts[1][:-4]
    body = {"model": MODEL, "prompt": prompts, "temperature": 0.0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = server.ask("completions", body | {"echo": True}, stream=False)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for prompt, context, choice in zip(prompts, contexts, choices, strict=True):
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert len(found["token_logprobs"]) == len(prompt) + 1
        tokens, top = (found[key][len(context) : -1] for key in ("token_logprobs", "top_logprobs"))
        expected_TV = after(prompt)[len(context) - 1 : -1]
        expected_T = expected_TV.gather(1, torch.tensor([prompt[len(context) :]]).T).squeeze(1)
        assert sum(tokens) == pytest.approx(float(expected_T.sum()), abs=1e-3)
        assert all(one == max(words.values()) for one, words in zip(tokens, top, strict=True)) == bool(
            expected_TV.argmax(1).tolist() == prompt[len(context) :]
        )
    assert sum(len(c["logprobs"]["tokens"]) for c in choices) == answer["usage"]["prompt_tokens"] + 3


def test_usage_tells_what_of_the_prompts_was_not_read_again(server: Server) -> None:
    """Against a bill for tokens that the cache held, and against counting them once for each of n choices."""
    known, new = [[base + n % 7 for n in range(40)] for base in (200, 220)]
    body = {"model": MODEL, "prompt": known, "max_tokens": 3}
    details = [server.ask("completions", body, stream=False)["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details == [{"cached_tokens": 0}, {"cached_tokens": 32}]  # two pages; the rest fills none
    usage = server.ask("completions", body | {"prompt": [known, new], "n": 2}, stream=False)["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (80, {"cached_tokens": 32})


def test_completions_rate_what_they_show(
    server: Server, text: Text, after: Callable[[list[int]], torch.Tensor]
) -> None:
    """Stands against offsets that drift where characters fall apart, and scores of what sampling made of the logits."""
    fields = {"prompt": PROMPT, "temperature": 0.8, "seed": 3, "frequency_penalty": 1.0, "max_tokens": 25}
    extra = {"echo": True, "logprobs": 20, "return_token_ids": True}
    choice = server.ask("completions", fields | extra, stream=False)["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    found = choice["logprobs"]
    expected_TV = after(ids)
    assert tuple(choice["prompt_token_ids"]) == text.encode(PROMPT)
    assert len(choice["token_ids"]) == 25
    assert choice["text"].startswith(PROMPT)
    for i, own in enumerate(found["token_logprobs"][1:], start=1):
        assert own == pytest.approx(float(expected_TV[i - 1, ids[i]]), abs=1e-4)
        assert 20 <= len(found["top_logprobs"][i]) <= 21
        assert max(found["top_logprobs"][i].values()) == pytest.approx(float(expected_TV[i - 1].max()), abs=1e-4)
        assert found["top_logprobs"][i][found["tokens"][i]] == own
    assert found["text_offset"] == sorted(found["text_offset"])
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            # what stood half finished before it comes out with it
            assert choice["text"][offset:].lstrip("\ufffd").startswith(token)


def test_chats_rate_what_they_say_and_spell_it_in_bytes(server: Server) -> None:
    """Stands against the bytes of the replacement character, which join to nothing."""
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0) as client:
        choice = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_completion_tokens=40, logprobs=True, top_logprobs=2, temperature=0.0,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        ).choices[0]  # fmt: skip
        said = client.completions.create(model=MODEL, prompt="the", max_tokens=2, logprobs=2).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 40
    spelled = b"".join(bytes(one.bytes or []) for one in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content
    for one in choice.logprobs.content:
        assert len(one.top_logprobs) == 2
        assert one.logprob == one.top_logprobs[0].logprob  # greedy
    assert said.logprobs is not None
    assert len(said.logprobs.tokens or []) == 2


def test_minimum_and_stop_are_kept(server: Server, text: Text) -> None:
    fields = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 40, "return_token_ids": True}
    ends = {"stop_token_ids": ENDS}
    first = server.ask("completions", fields | ends, stream=False)["choices"][0]
    later = server.ask("completions", fields | ends | {"min_tokens": 12}, stream=False)["choices"][0]
    assert len(first["token_ids"]) <= 12 < len(later["token_ids"])
    assert not set(ENDS) & set(later["token_ids"][:12])
    assert later["token_ids"][-1] in ENDS
    assert text.decode(later["token_ids"][:-1], skip_special=True) == later["text"]
    shown = server.ask("completions", fields | ends | {"include_stop_str_in_output": True}, stream=False)["choices"][0]
    assert text.decode(shown["token_ids"], skip_special=True) == shown["text"] != first["text"]


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"top_logprobs": 2}, "top_logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"min_tokens": 17}, "min_tokens"),
        ("completions", {"min_tokens": 2, "stop_token_ids": [*range(263)]}, "min_tokens"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"logprobs": 1}, "logprobs"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"echo": True}, "echo"),
    ],
)
def test_what_cannot_be_is_refused(server: Server, kind: str, fields: dict[str, Any], param: str) -> None:
    asked = {"prompt": "a"} if kind == "completions" else {"messages": HELLO}
    response = server.client.post(f"/v1/{kind}", json=asked | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
