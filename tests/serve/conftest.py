"""A tokenizer made on the spot, an engine that says what a test wrote, and the real HTTP process between them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.serve.written_calls import FORMS, add_marks
from tpspec.comm.link import FrontendLink
from tpspec.comm.messages import Cancel, Ready, Report, Stats, Stop, Submit, Tally
from tpspec.request import Delta, Request
from tpspec.serve.reasoning import HARMONY, TAGS

MODEL = "tiny/talker"
CACHE_TOKENS = 256
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and loop.first %}"
    "{{ raise_exception('the user speaks first') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TEMPLATE = (  # Qwen's, without its prose; newlines that follow a block are dropped
    "{% if tools %}<|im_start|>tools{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\n' }}call them as <tool_call>...</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ speaker | default('assistant') }}{{ '\n' }}{% endif %}"
)
THINK_TEMPLATE = (  # Qwen's, with the thoughts of earlier turns; `thinks` begins them, as R1's does
    "{% if tools %}<|im_start|>tools{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    '{{ \'\ncall them as <tool_call>{"name": ..., "arguments": ...}</tool_call>\' }}<|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n<think>\n' if thinks else '\n' }}{% endif %}"
)
HARMONY_TEMPLATE = (  # of gpt-oss, without its prose
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception('both content and thinking') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% for call in m.tool_calls %}<|start|>assistant to=functions.{{ call.function.name }}"
    "<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GEMMA_TEMPLATE = (  # Gemma 4's, without declarations of tools: calls and what came of them are one turn of the model's
    "{% macro said(value) %}{% if value is string %}{{ '<|\"|>' + value + '<|\"|>' }}{% else %}{{ value }}{% endif %}"
    "{% endmacro %}{% for m in messages %}{% if m.role != 'tool' %}"
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if m.reasoning_content %}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}"
    "{% for call in m.tool_calls %}{{ '<|tool_call>call:' + call.function.name + '{' }}"
    "{% for key, value in call.function.arguments | dictsort %}{{ key }}:{{ said(value) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}}<tool_call|>{% endfor %}"
    "{{ m.content }}{% if not m.tool_calls %}<turn|>{{ '\n' }}{% endif %}"
    "{% else %}<|tool_response>{{ m.content }}<tool_response|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model{{ '\n' }}{% endif %}"
)
GEMMA_MARKS = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
ANSWER = "The bus is slow, naïve 日本 and 👩‍🚀 fly on; the end."


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE of a few English words: characters outside ASCII fall apart into bytes, one token each."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the bus is slow and the end of the bus is the end"] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 320, "eos_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


def reasoning_folder(
    model_folder: Path, folder: Path, template: str, marks: Sequence[str] = (*TAGS, "<tool_call>", "</tool_call>")
) -> Path:
    """As model_folder, with the marks by which the answers of `template` come apart; as published models have them."""
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if template == HARMONY_TEMPLATE:
        tokenizer.add_special_tokens([*HARMONY])
        ends = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*ends, 0]}))
    else:
        tokenizer.add_tokens([AddedToken(mark, special=template == GEMMA_TEMPLATE) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Engine(threading.Thread):
    """Stands where the lead stands. Each round gives every running request its next tokens of `answer(request)`."""

    def __init__(self, endpoint: str, tokenizer: Tokenizer) -> None:
        super().__init__(daemon=True)
        self.endpoint, self.tokenizer, self.cache_tokens = endpoint, tokenizer, CACHE_TOKENS
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.rounds = 0
        self.stopped = threading.Event()
        self.leave = threading.Event()
        self.reset()

    def reset(self) -> None:
        self.answer: Callable[[Request], list[int]] = lambda _: self.tokenizer.encode(ANSWER).ids
        self.per_round, self.round_s, self.places = 3, 0.0, 64
        self.error: str | None = None

    def run(self) -> None:
        link = FrontendLink(self.endpoint)
        link.send(Ready(cache_tokens=self.cache_tokens, num_ranks=2, max_running=self.places))
        rounds, tokens = 0, 0
        waiting: list[Request] = []
        running: dict[int, tuple[Request, list[int], int]] = {}
        while not self.leave.is_set():
            for message in link.poll(0.002):
                if isinstance(message, Submit):
                    self.requests.append(message.request)
                    waiting.append(message.request)
                elif isinstance(message, Cancel):
                    self.cancelled.append(message.id)
                    running.pop(message.id, None)
                    waiting = [request for request in waiting if request.id != message.id]
                elif isinstance(message, Stop):
                    self.stopped.set()
            while waiting and len(running) < self.places:
                request = waiting.pop(0)
                running[request.id] = (request, self.answer(request), 0)
            if not running:
                continue
            time.sleep(self.round_s)
            deltas = [self.delta(*state) for state in running.values()]
            for delta in deltas:
                request, answer, at = running[delta.id]
                running[delta.id] = (request, answer, at + self.per_round)
                if delta.finish:
                    del running[delta.id]
            self.rounds = rounds + 1
            rounds, tokens = rounds + 1, tokens + sum(len(delta.tokens) for delta in deltas)
            stats = Stats(
                rounds=rounds,
                tokens=tokens,
                running=len(running),
                waiting=len(waiting),
                pages_used=1,
                pages_total=4,
                collectives={"attention": Tally(rounds * 30, rounds * 1000, rounds * 0.5)},
            )
            link.send(Report(deltas, stats))
        link.close()

    def delta(self, request: Request, answer: list[int], at: int) -> Delta:
        if self.error:
            return Delta(request.id, (), "error", error=self.error)
        end = min(at + self.per_round, request.max_tokens)
        tokens = answer[at:end]
        finish = None
        if len(tokens) < end - at or end >= len(answer):
            tokens, finish = [*tokens, 2], "stop"
        if finish is None and end == request.max_tokens:
            finish = "length"
        if request.stop_ids and (stops := [i for i, token in enumerate(tokens) if token in request.stop_ids]):
            tokens, finish = tokens[: stops[0] + 1], "stop"
        accepted = (1,) * (len(tokens) - 1)
        drafted = (1,) * max(self.per_round - 1, len(accepted))
        return Delta(request.id, tuple(tokens), finish, drafted, accepted)


def command_line(model_folder: Path, *options: str) -> list[str]:
    fixed = ["--model-folder", str(model_folder), "--model-name", MODEL, "--port", "0"]
    return [sys.executable, "-m", "tpspec.serve.http", *fixed, *options]


class Front:
    """A running HTTP process and the engine behind it."""

    def __init__(self, model_folder: Path, tokenizer: Tokenizer, *options: str) -> None:
        self.process = subprocess.Popen(
            command_line(model_folder, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        place = json.loads(self.process.stdout.readline())
        self.url = place["url"]
        self.engine = Engine(place["endpoint"], tokenizer)
        self.client = httpx.Client(base_url=self.url, timeout=20)

    def start_engine(self) -> None:
        self.engine.start()
        wait_until(lambda: self.client.get("/ready").status_code == 200)

    def post(self, kind: str = "completions", **fields: object) -> httpx.Response:
        return self.client.post(f"/v1/{kind}", json=fields)

    def complete(self, **fields: object) -> dict:
        response = self.post(**({"prompt": "the bus", "max_tokens": 200} | fields))
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, kind: str = "completions", **fields: object) -> list[dict]:
        fields = {"max_tokens": 200, "stream": True} | fields
        with self.client.stream("POST", f"/v1/{kind}", json=fields) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def close(self) -> str:
        """Stops everything; what the process wrote to stderr."""
        self.engine.leave.set()
        self.client.close()
        self.process.terminate()  # not killed: it has a folder to remove
        return self.process.communicate(timeout=20)[1]


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


StartFront = Callable[..., Front]


@pytest.fixture(scope="session")
def make_engine(tokenizer: Tokenizer) -> Callable[[str], Engine]:
    return lambda endpoint: Engine(endpoint, tokenizer)


@pytest.fixture(scope="session")
def start_front(model_folder: Path, tokenizer: Tokenizer) -> Iterator[StartFront]:
    fronts: list[Front] = []

    def start(*options: str) -> Front:
        fronts.append(Front(model_folder, tokenizer, *options))
        return fronts[-1]

    yield start
    for front in fronts:
        front.close()


@pytest.fixture(scope="session")
def shared_front(start_front: StartFront) -> Front:
    front = start_front("--max-queued", "4")
    front.start_engine()
    return front


@pytest.fixture(scope="session")
def tool_front(model_folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A server whose model knows tools, with room for them."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("tools"), dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TOOL_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    front = Front(folder, tokenizer)
    front.engine.cache_tokens = 4096
    front.start_engine()
    yield front
    front.close()


@pytest.fixture
def front(shared_front: Front) -> Iterator[Front]:
    """The shared server, with an engine that answers ANSWER at once, and nothing in flight before or after."""
    shared_front.engine.reset()
    yield shared_front
    shared_front.engine.reset()
    wait_until(lambda: shared_front.client.get("/health").json()["in_flight"] == 0)


@pytest.fixture
def client(server: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def say(front: Front, text: str) -> None:
    front.engine.answer = lambda _: front.engine.tokenizer.encode(text).ids


def prompt_of(front: Front) -> str:
    return front.engine.tokenizer.decode(front.engine.requests[-1].prompt, skip_special_tokens=False)


@pytest.fixture(scope="module", params=["letters", "tokens", "special tokens"])
def vocabulary(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the marks are letters like others, tokens of their own (Qwen, GLM), or special ones (Mistral)."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    if request.param != "letters":
        add_marks(tokenizer, FORMS.values(), special=request.param == "special tokens")
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
