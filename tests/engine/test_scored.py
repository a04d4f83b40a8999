"""Log-probabilities of texts and prompts: a float64 model says the same, whoever drafts and however many ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import tiny
from tests.counts.test_collectives import Noted
from tests.draft.liar import Liar
from tests.engine.test_rounds import Bushy
from tests.worlds import Told, serve, topology
from tpspec.comm.communicator import Purpose
from tpspec.draft.protocol import Drafter
from tpspec.engine.engine import Engine
from tpspec.request import Logprob, Request, Sampling

VOCAB = 263
WARM = Sampling(temperature=0.8, seed=7, frequency_penalty=0.4, logit_bias={9: 2.0})
SOURCES = ["none", "ngram", "liar", "bushy"]
MAX_ROWS = 24  # the longest prompts take several chunks


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def reference(target: Path) -> Callable[[list[int]], torch.Tensor]:
    """Of a text the log-probabilities of the token after each of its positions, [T, V] in float64."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)

    @torch.no_grad()
    def after(text: list[int]) -> torch.Tensor:
        return model(torch.tensor([text])).logits[0].log_softmax(1)

    return after


def requests(sampling: Sampling, **fields: Any) -> list[Request]:
    """The second asks for nothing, and the third for less than the first."""
    source = random.Random(5)
    phrase = [source.randrange(3, VOCAB) for _ in range(9)]
    prompts = [tuple(phrase * (1 + 2 * i) + [source.randrange(3, VOCAB) for _ in range(i)]) for i in range(3)]
    made = [Request(i, prompt, 12 + 5 * i, sampling) for i, prompt in enumerate(prompts)]
    wanted = [{"logprobs": 5}, {}, {"logprobs": 2}]
    return [
        msgspec.structs.replace(request, **(asked | fields if asked else {}))
        for request, asked in zip(made, wanted, strict=True)
    ]


def told_by(target: Path, made: list[Request], source: str, num_ranks: int = 1, **keys: Any) -> Told:
    """bushy: trees that hold the right text among nonsense, so that what is accepted are not their first nodes."""
    texts = told_by(target, made, "none").tokens if source == "bushy" else {}
    makers: dict[str, Callable[[], Drafter]] = {"liar": lambda: Liar(300), "bushy": lambda: Bushy(texts)}
    drafter, named = makers.get(source), "none" if source in makers else source
    keys = {"engine": {"max_rows": MAX_ROWS}} | keys
    return serve(topology(target, num_ranks, draft={"source": named, "tokens": 5}, **keys), made, drafter=drafter)


def of(told: Told, request: int, field: str) -> list[Logprob]:
    return [one for delta in told.deltas if delta.id == request for one in getattr(delta, field)]


def check(found: list[Logprob], tokens: list[int], expected_TV: torch.Tensor, num_top: int) -> None:
    assert len(found) == len(tokens) == len(expected_TV)
    for one, token, row_V in zip(found, tokens, expected_TV, strict=True):
        assert one.own == pytest.approx(float(row_V[token]), abs=1e-4)
        values, ids = row_V.topk(num_top)
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert {token for token, _ in one.top} == set(ids.tolist())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "warm"])
def test_every_token_is_told_as_a_float64_model_rates_it(
    target: Path, reference: Callable, sampling: Sampling, source: str, num_ranks: int
) -> None:
    """Stands against rows of rejected drafts, scores after processors, masses of one shard, another request's rows."""
    made = requests(sampling)
    told = told_by(target, made, source, num_ranks)
    assert told.texts() == told_by(target, requests(sampling, logprobs=None), "none").texts()
    for request in made:
        text = [*request.prompt, *told.tokens[request.id]]
        expected_TV = reference(text)[len(request.prompt) - 1 : -1]
        assert not of(told, request.id, "prompt_logprobs")
        if request.logprobs is None:
            assert not of(told, request.id, "logprobs")
        else:
            check(of(told, request.id, "logprobs"), told.tokens[request.id], expected_TV, request.logprobs)


@pytest.mark.parametrize(("source", "num_ranks"), [("none", 1), ("ngram", 2), ("liar", 3), ("bushy", 2)])
@pytest.mark.parametrize("max_tokens", [0, 1, 14])
def test_a_prompt_is_rated_chunk_by_chunk(
    target: Path, reference: Callable, max_tokens: int, source: str, num_ranks: int
) -> None:
    """Stands against rows lost or told twice where chunks meet, and a last row that is both prompt's and text's."""
    made = requests(Sampling(), prompt_logprobs=True, max_tokens=max_tokens)
    told = told_by(target, made, source, num_ranks)
    for request in made:
        if request.logprobs is None:
            continue
        text = [*request.prompt, *told.tokens[request.id]]
        assert told.finish[request.id] == "length"
        assert len(told.tokens[request.id]) == max_tokens
        found = of(told, request.id, "prompt_logprobs")
        check(found, text[1 : len(request.prompt)], reference(text)[: len(request.prompt) - 1], request.logprobs)
        assert len(of(told, request.id, "logprobs")) == max_tokens
    assert max(len(delta.prompt_logprobs) for delta in told.deltas) <= MAX_ROWS
    plain = [msgspec.structs.replace(request, logprobs=None, prompt_logprobs=False) for request in made]
    assert told.texts() == told_by(target, plain, "none").texts()


def test_a_prompt_that_has_to_be_read_again_is_told_once(target: Path, reference: Callable) -> None:
    """Stands against a preempted text whose prompt is rated anew, and one whose rest is never rated."""
    source = random.Random(1)
    made = [
        Request(i, tuple(source.randrange(3, VOCAB) for _ in range(30)), 30, logprobs=1, prompt_logprobs=True)
        for i in range(3)
    ]
    told = told_by(target, made, "ngram", cache={"tokens": 128, "page": 16})
    assert told.stats[-1].preemptions > 0
    for request in made:
        text = [*request.prompt, *told.tokens[request.id]]
        expected_TV = reference(text)[:-1]
        check(of(told, request.id, "prompt_logprobs"), text[1:30], expected_TV[:29], 1)
        check(of(told, request.id, "logprobs"), text[30:], expected_TV[29:], 1)


def test_one_token_is_a_prompt_and_a_request_for_nothing_ends_at_once(target: Path) -> None:
    made = [Request(0, (5,), 0, logprobs=3, prompt_logprobs=True), Request(1, (5, 6), 0)]
    told = told_by(target, made, "ngram")
    assert told.finish == {0: "length", 1: "length"}
    assert told.texts() == [[], []]
    assert not of(told, 0, "prompt_logprobs")


@pytest.mark.parametrize("wants", [None, "text", "prompt"])
def test_who_asks_pays_one_gather_in_the_rounds_that_tell(target: Path, wants: str | None) -> None:
    """Stands against a gather in every round, in none, for each request, or under another purpose."""
    fields = {None: {"logprobs": None}, "text": {}, "prompt": {"prompt_logprobs": True}}[wants]
    notes: list[Noted] = []

    def note(rank: int, engine: Engine) -> None:
        engine.target = Noted(engine.target, engine)
        if rank == 0:
            notes.append(engine.target)

    made = topology(target, 2, draft={"source": "ngram", "tokens": 5}, engine={"max_rows": MAX_ROWS})
    told = serve(made, requests(Sampling(), **fields), begin=note)
    rounds = notes[0].rounds()
    assert all(r.counts[Purpose.attention] == r.counts[Purpose.mlp] == 3 for r in rounds)
    assert {r.counts.get(Purpose.pick, 0) for r in rounds} <= {0, 1}
    gathers = [r.counts.get(Purpose.logits, 0) for r in rounds]
    assert set(gathers) <= {0, 1}
    rows = [r.bytes.get(Purpose.logits, 0) for r in rounds]
    each = 4 + 5 * 8 + 4 + 8 if wants else 0  # own, the five likeliest, and a mass
    told_rows = sum(len(delta.logprobs) + len(delta.prompt_logprobs) for delta in told.deltas)
    if wants is None:
        assert sum(gathers) == told_rows == 0
    else:
        assert told_rows * (each - 3 * 8) <= sum(rows)
        assert sum(rows) <= (told_rows + 10) * each


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_does_not_end_before_it_may(target: Path, source: str, temperature: float, rule: str) -> None:
    """Stands against a minimum counted from the root, which a draft could pass by."""
    plain = requests(Sampling(temperature=temperature, seed=7))
    first = told_by(target, plain, "none").texts()
    stops = frozenset(token for text in first for token in text[:6])
    held = Sampling(temperature=temperature, seed=7, min_tokens=9, withheld=stops)
    made = [msgspec.structs.replace(request, sampling=held, stop_ids=stops) for request in plain]
    told = told_by(target, made, source, 2, accept=rule)
    for text in told.texts():
        assert len(text) > 9
        assert not stops & set(text[:9])
    assert any(finish == "stop" for finish in told.finish.values()) or temperature > 0
    if rule == "match" or temperature == 0:
        assert told.texts() == told_by(target, made, "none").texts()
