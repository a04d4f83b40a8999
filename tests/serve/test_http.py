"""What clients of OpenAI's API see, over real sockets: text, chunks, usage, refusals, and what the engine is told."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tpspec.grammar import NOTHING_ALLOWED

ANSWER = "The bus is slow, naïve 日本 and 👩‍🚀 fly on; the end."
MODEL = "tiny/talker"
HELLO = [{"role": "user", "content": "hello"}]


def _until(condition, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def _text(chunks: list[dict]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("per_round", [1, 2, 5, 200])
@pytest.mark.parametrize("max_tokens", [1, 30, 31, 32, 33, 200])
def test_a_stream_is_the_whole_text_in_pieces(front, per_round: int, max_tokens: int) -> None:
    """Bytes that wait at the end were lost in streams; max_tokens 30 to 33 cut inside a character of several tokens."""
    front.engine.per_round = per_round
    whole = front.complete(max_tokens=max_tokens)
    chunks = front.stream(prompt="the bus", max_tokens=max_tokens)
    assert _text(chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    if max_tokens == 200:
        assert (_text(chunks), whole["choices"][0]["finish_reason"]) == (ANSWER, "stop")
    else:
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == max_tokens


def test_each_round_is_one_chunk(front) -> None:
    """Benchmarks read accepted tokens per round off the chunks, so none is merged or split."""
    front.engine.per_round, front.engine.round_s = 4, 0.005
    num_tokens = front.complete()["usage"]["completion_tokens"]
    assert len(front.stream(prompt="the bus")) == -(-(num_tokens - 1) // 4)


@pytest.mark.parametrize("per_round", [1, 3, 7, 200])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("slow", "The bus is "),
        (["end", "ïve 日"], "The bus is slow, na"),
        ("本 and 👩", "The bus is slow, naïve 日"),
        (["slow, naX", "fly"], "The bus is slow, naïve 日本 and 👩‍🚀 "),
        ("The", ""),
        ("the end.", "The bus is slow, naïve 日本 and 👩‍🚀 fly on; "),
        ("nowhere", ANSWER),
    ],
)
def test_a_stop_string_cuts_across_tokens(front, stop, expected: str, per_round: int) -> None:
    """Nothing of a stop string may leave before it is known not to be one, and the engine must be told to end."""
    front.engine.per_round = per_round
    whole = front.complete(stop=stop)["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (expected, "stop")
    assert _text(front.stream(prompt="the bus", stop=stop)) == expected


def test_a_stop_string_ends_the_engine_s_work_and_later_tokens_are_not_counted(front) -> None:
    front.engine.per_round = 5
    usage = front.complete(stop="slow")["usage"]
    used = len(front.engine.tokenizer.encode("The bus is slow").ids)
    assert usage["completion_tokens"] == used
    assert usage["speculation"]["accepted"] < used
    _until(lambda: front.engine.requests[-1].id in front.engine.cancelled)


def test_the_token_that_ends_a_text_is_not_shown(front) -> None:
    comma = front.engine.tokenizer.encode(",").ids[0]
    answer = front.complete(stop_token_ids=[comma])
    assert answer["choices"][0] == {"index": 0, "text": "The bus is slow", "logprobs": None, "finish_reason": "stop"}
    assert front.engine.requests[-1].stop_ids == {0, 2, comma}
    front.complete(ignore_eos=True, max_tokens=3)
    assert front.engine.requests[-1].stop_ids == frozenset()


def test_every_sampling_field_reaches_the_engine(front) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1}
    fields |= {"presence_penalty": 0.2, "frequency_penalty": -0.3, "seed": 11}
    front.complete(**fields, logit_bias={"5": -100}, num_drafts=2, max_completion_tokens=4, max_tokens=9)
    request = front.engine.requests[-1]
    assert {name: getattr(request.sampling, name) for name in fields} == fields
    assert (request.sampling.logit_bias, request.num_drafts, request.max_tokens) == ({5: -100.0}, 2, 4)
    front.complete(top_k=-1, max_tokens=None, cache_salt=None)
    assert front.engine.requests[-1].salt == ""
    front.complete(top_k=-1, max_tokens=None, cache_salt="k")
    assert front.engine.requests[-1].salt == "k"
    assert (front.engine.requests[-1].sampling.top_k, front.engine.requests[-1].max_tokens) == (0, 16)


def test_what_is_all_but_cold_is_argmax(front) -> None:
    """Logits divided by the smallest of numbers are not finite; a request of schemathesis ended the world by it."""
    for temperature, sent in ((5e-324, 0.0), (1e-7, 0.0), (1e-6, 1e-6), (0, 0.0)):
        front.complete(temperature=temperature)
        assert front.engine.requests[-1].sampling.temperature == sent


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [("the", [["the"]]), (["the", "bus"], [["the"], ["bus"]]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_a_prompt_comes_in_four_forms(front, prompt, sent) -> None:
    before = len(front.engine.requests)
    answer = front.complete(prompt=prompt, max_tokens=2)
    expected = [front.engine.tokenizer.encode(p[0]).ids if isinstance(p[0], str) else p for p in sent]
    assert [list(request.prompt) for request in front.engine.requests[before:]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(sent)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_n_choices_have_seeds_that_follow_and_share_one_prompt(front) -> None:
    front.engine.answer = lambda request: front.engine.tokenizer.encode("abcdef"[: request.sampling.seed]).ids
    answer = front.complete(n=3, seed=2, prompt=[5, 6])
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "abc", "abcd"]
    assert answer["usage"]["prompt_tokens"] == 2
    chunks = front.stream(prompt=[5, 6], n=3, seed=2)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["ab", "abc", "abcd"]


def test_without_a_seed_every_request_has_its_own(front) -> None:
    before = len(front.engine.requests)
    front.complete(prompt=["a", "a"], max_tokens=1)
    assert len({request.sampling.seed for request in front.engine.requests[before:]}) == 2


def test_a_chat_goes_through_the_template_of_the_model(front) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    answer = front.post("chat/completions", messages=messages, max_tokens=200).json()
    prompt = front.engine.tokenizer.decode(front.engine.requests[-1].prompt, skip_special_tokens=False)
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhel\nlo<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == expected
    assert answer["choices"][0]["message"]["content"] == ANSWER


def test_a_chat_without_a_limit_may_use_the_rest_of_the_cache(front) -> None:
    front.post("chat/completions", messages=HELLO)
    request = front.engine.requests[-1]
    assert request.max_tokens == 256 - len(request.prompt)


def test_usage_can_come_with_every_chunk(front) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = front.stream(prompt=[5, 6], stream_options=options)
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == chunks[-1]["usage"]["completion_tokens"]
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)
    speculation = chunks[-1]["usage"]["speculation"]
    assert speculation["rounds"] == len(chunks) - 1
    assert 0 < speculation["accepted"] <= speculation["drafted"]


def test_the_sdk_of_openai_works(front) -> None:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    with client:
        assert client.models.retrieve(MODEL).id == client.models.list().data[0].id == MODEL
        completion = client.completions.create(model=MODEL, prompt="the bus", max_tokens=200)
        assert completion.choices[0].text == ANSWER
        chat = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=200, seed=1)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (ANSWER, "stop")
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == ANSWER
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert (chunks[-1].choices, chunks[-1].usage) == ([], chat.usage)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        front.engine.error = "logits are not finite"
        with pytest.raises(openai.InternalServerError, match="not finite"):
            client.completions.create(model=MODEL, prompt="a")
        with pytest.raises(openai.APIError, match="not finite"):
            list(client.completions.create(model=MODEL, prompt="a", stream=True))


def test_a_grammar_that_cannot_be_followed_is_its_requests_fault(front) -> None:
    """Though it compiles, and was found out on the way. Stands against a fault of the server's."""
    front.engine.error = NOTHING_ALLOWED
    response = front.post(prompt="a", guided_regex="([a-z]{1,500}){1,500}")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, "invalid_grammar", "invalid_request_error")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_client_that_leaves_is_told_to_the_engine(front, stream: bool, state: str) -> None:
    """FastAPI lets a handler that does not stream run on after its client has left."""
    front.engine.places = 0 if state == "waiting" else 64
    front.engine.round_s = 0.05
    front.engine.answer = lambda _: [5] * 250
    before = len(front.engine.requests)
    body = {"prompt": "a", "max_tokens": 250, "stream": stream}
    with (
        suppress(httpx.ReadTimeout),
        httpx.Client(base_url=front.url, timeout=0.5) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        next(response.iter_lines())  # a stream that runs has a first line; the others have none for a long time
    _until(lambda: len(front.engine.requests) > before)
    _until(lambda: front.engine.requests[-1].id in front.engine.cancelled, 2)


def test_a_full_queue_says_when_to_come_back(front) -> None:
    """--max-queued is 4 here. The SDK waits as long as Retry-After says, and succeeds."""
    front.engine.places = 0
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(front.complete, max_tokens=2) for _ in range(4)]
        _until(lambda: front.client.get("/health").json()["queued"] == 4)
        refused = front.post(prompt="a")
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        refusals = 'vllm:admission_rejections_total{model_name="tiny/talker",reason="queue_full"}'
        assert refusals in front.client.get("/metrics").text
        assert front.client.get("/ready").status_code == 503
        assert front.client.get("/health").status_code == 200
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none") as client:
            patient = pool.submit(client.completions.create, model=MODEL, prompt="a", max_tokens=1)
            front.engine.places = 64
            assert patient.result().usage.completion_tokens == 1
        assert all(answer.result()["usage"]["completion_tokens"] == 2 for answer in waiting)


def test_many_at_once_get_each_their_own_text(front) -> None:
    words = [chr(ord("a") + i % 26) * (1 + i // 3) for i in range(48)]
    front.engine.per_round = 1
    front.engine.answer = lambda request: list(request.prompt)

    def ask(word: str) -> str:
        while True:
            response = front.post(prompt=word, max_tokens=200)
            if response.status_code != 429:
                return response.json()["choices"][0]["text"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, words)) == words


def test_a_reader_who_lags_gets_everything_and_holds_up_nobody(front) -> None:
    """Deltas that wait for a reader are merged, so that memory is bounded and no text is lost."""
    front.engine.per_round = 1
    body = {"prompt": "a", "max_tokens": 200, "stream": True}
    with httpx.Client(base_url=front.url) as client, client.stream("POST", "/v1/completions", json=body) as response:
        for _ in range(3):
            assert front.complete()["choices"][0]["text"] == ANSWER
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert _text([json.loads(line) for line in lines[:-1]]) == ANSWER


def test_metrics_are_what_prometheus_reads(front) -> None:
    front.engine.per_round = 4
    front.complete(max_tokens=9)
    page = front.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    values = {s.name: s.value for family in text_string_to_metric_families(page.text) for s in family.samples}
    for name in (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
        *("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"),
        *("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
        *("vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_bucket"),
        *("vllm:e2e_request_latency_seconds_sum", "vllm:request_success_total"),
        *("tpspec:rounds_total", "tpspec:tokens_total", "tpspec:collectives_total"),
        *("tpspec:collective_bytes_total", "tpspec:collective_seconds_total"),
        *("tpspec:forward_seconds_total", "tpspec:drafting_seconds_total"),
    ):
        assert name in values, name
    assert not any(name.startswith("tpspec:draft_") for name in values)  # no drafter in a process of its own
    assert values["tpspec:collectives_total"] == 30 * values["tpspec:rounds_total"]
    assert values["vllm:spec_decode_num_accepted_tokens_total"] <= values["vllm:spec_decode_num_draft_tokens_total"]
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny/talker"}' in page.text
    assert 'inter_token_latency_seconds_bucket{le="0.001",model_name="tiny/talker"}' in page.text


def test_the_model_says_how_much_it_can_read(front) -> None:
    card = front.client.get(f"/v1/models/{MODEL}").json()
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)
    assert front.client.get("/v1/models").json()["data"] == [card]
    health = front.client.get("/health").json()
    assert (health["status"], health["ranks"]) == ("ready", 2)
