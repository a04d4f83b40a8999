"""A model that makes NaN of one token: who meets it ends with an error, and nobody else notices, now or later.

A real checkpoint in which the embedding of one id is NaN: its row, and every row that sees it, is NaN from there on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny
from tests.draft.liar import Liar
from tests.slow import slowly
from tests.worlds import serve, topology
from tpspec.comm.messages import Submit, ToLead
from tpspec.engine.engine import Engine
from tpspec.engine.scheduler import CORRUPT
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.tokens import TokenTree

POISON = 77
GREEDY, WARM, CUT = Sampling(), Sampling(temperature=0.8, seed=7), Sampling(temperature=0.9, top_p=0.8, seed=5)
WORLDS: dict[str, dict[str, Any]] = {
    "match": {},
    "rejection": {"accept": "rejection"},
    "deterministic": {"deterministic": True, "engine": {"fixed_rows": 8}},
    "many fixed rows": {"deterministic": True, "engine": {"fixed_rows": 40}},
}


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with keys and values of every token, and one with states of its texts as well."""
    folder = tiny(request.param, tmp_path_factory.mktemp("target"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompt(length: int) -> tuple[int, ...]:
    source = random.Random(length)
    return tuple(source.choice([i for i in range(3, 263) if i != POISON]) for _ in range(length))


def neighbours(first: int = 1, without: int = POISON) -> list[Request]:
    """They never say the word themselves."""
    samplings = [Sampling(logit_bias={without: -100.0}), *(_without(sampling, without) for sampling in (WARM, CUT))]
    return [Request(first + i, prompt(9 + 25 * i), 14 + 3 * i, sampling) for i, sampling in enumerate(samplings)]


def _without(sampling: Sampling, token: int) -> Sampling:
    return Sampling(sampling.temperature, top_p=sampling.top_p, seed=sampling.seed, logit_bias={token: -100.0})


def in_torch(rank: int, engine: Engine) -> None:
    """Without the compiled steps: torch's attention multiplies what it masks, too."""
    engine.target.decoder._runner.few = None  # type: ignore[attr-defined]


def as_built(rank: int, engine: Engine) -> None: ...


@pytest.mark.parametrize(("begin", "num_ranks"), [(as_built, 2), (in_torch, 1), *slowly((as_built, 1), (in_torch, 2))])
@pytest.mark.parametrize("world", WORLDS)
def test_who_meets_a_nan_ends_and_neighbours_and_successors_do_not_notice(
    target: Path, world: str, num_ranks: int, begin: Callable[[int, Engine], None]
) -> None:
    """Against NaN as a token, against a world that dies of it, and against 0 times the NaN of a page that is masked,
    in the same round or by the next owner. The cache is small: pages are had again and again. Drafts are of a set
    length: by rejection a text depends on how many there are, and `auto` goes by the clock."""
    draft = {"source": "ngram", "tokens": 5}
    made = topology(target, num_ranks, cache={"tokens": 256, "page": 16}, draft=draft, **WORLDS[world])
    sick = [Request(0, (*prompt(30), POISON, 5), 20, WARM), Request(8, (POISON,), 20, GREEDY)]
    expected = serve(made, [*neighbours(1), *neighbours(11)], begin=begin)
    elder, *younger = neighbours(1)
    messages: dict[int, list[ToLead]] = {
        1: [Submit(request) for request in [elder, sick[0], *younger]],
        5: [Submit(request) for request in [sick[1], *neighbours(11)]],
    }
    told = serve(made, messages=messages, begin=begin)
    assert {seq: told.tokens[seq] for seq in expected.tokens} == expected.tokens
    assert {seq: told.finish[seq] for seq in (0, 1, 8, 11)} == {0: "error", 1: "length", 8: "error", 11: "length"}
    assert [delta.error for delta in told.deltas if delta.finish == "error"] == [CORRUPT] * 2
    assert told.tokens[0] == told.tokens[8] == []
    assert (told.stats[-1].corrupted, told.stats[-1].pages_used) == (2, 0)
    assert told.stats[-1].running == 0


@pytest.mark.parametrize("begin", [as_built, in_torch])
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_nan_far_back_in_a_prompt_is_not_forgotten(
    target: Path, dtype: str | None, begin: Callable[[int, Engine], None]
) -> None:
    """Against a cache of 8 bits, whose codes make a number of it: the rows behind are finite then, and wrong."""
    made = topology(target, engine={"max_rows": 16}, cache={"tokens": 256, "page": 16, "dtype": dtype})
    told = serve(made, [Request(0, (*prompt(5), POISON, *prompt(60)), 4), *neighbours()], begin=begin)
    assert told.finish == {0: "error", 1: "length", 2: "length", 3: "length"}
    alone = serve(made, neighbours(), begin=begin)
    assert {seq: told.tokens[seq] for seq in alone.tokens} == alone.tokens


class Poisoner(Liar):
    """Drafts the word in every place, for all."""

    def _lie(self) -> int:
        return POISON


class Bush(Poisoner):
    """Drafts it as a sibling before what may be right, and below that."""

    def propose(self, asks: Any) -> list[TokenTree]:
        return [TokenTree((POISON, 5, POISON, 9), (-1, -1, 1, 1)) for _ in asks]


@pytest.mark.parametrize("begin", [as_built, *slowly(in_torch)])
@pytest.mark.parametrize("drafter", [Poisoner, Bush])
@pytest.mark.parametrize("accept", ["match", "rejection"])
def test_drafts_that_make_nan_cost_speed_only(
    target: Path, accept: str, drafter: type[Liar], begin: Callable[[int, Engine], None]
) -> None:
    """Against a text that ends because of a guess: in torch's attention a rejected row spoils the rows beside it."""
    told = serve(topology(target, 2, accept=accept), neighbours(), drafter=lambda: drafter(263), begin=begin)
    if accept == "match":
        assert told.texts() == serve(topology(target), neighbours()).texts()
    assert set(told.finish.values()) == {"length"}
    assert told.stats[-1].corrupted == 0


@pytest.mark.parametrize("begin", [as_built, in_torch])
@pytest.mark.parametrize("drafter", [None, lambda: Poisoner(263)])
def test_what_was_said_before_is_kept_with_drafts_and_without(
    target: Path, drafter: Callable[[], Liar] | None, begin: Callable[[int, Engine], None]
) -> None:
    """Against tokens of an accepted path that are lost with the row behind it."""
    wanted = Request(0, prompt(9), 10, Sampling(logit_bias={POISON: 100.0}))
    told = serve(topology(target, 2), [wanted], drafter=drafter, begin=begin)
    assert (told.tokens[0], told.finish[0]) == ([POISON], "error")


def test_pages_of_a_corrupt_text_are_read_by_nobody_else(target: Path) -> None:
    """Against a conversation that can never go on, because its beginning is kept with the NaN in it."""
    begun, turn = (*prompt(40), POISON), Sampling(logit_bias={POISON: -100.0})
    messages: dict[int, list[ToLead]] = {
        1: [Submit(Request(0, (*prompt(40), 5), 4, turn))],
        8: [Submit(Request(1, (*begun, *prompt(20)), 4, turn))],  # shares two pages with the one before
        12: [Submit(Request(2, (*begun, *prompt(20)), 4, turn))],
        16: [Submit(Request(3, (*prompt(40), 5), 4, turn))],
    }
    told = serve(topology(target, cache={"tokens": 512, "page": 16}), messages=messages)
    assert told.finish == {0: "length", 1: "error", 2: "error", 3: "length"}
    assert told.tokens[0] == told.tokens[3]
    keeps_states = ModelShape.of(target).delta_net is not None  # such texts begin alone
    assert told.stats[-1].prefix_found == (0 if keeps_states else 32)


@pytest.mark.parametrize("prompt_logprobs", [False, True])
def test_a_corrupt_text_that_asked_for_log_probabilities_alone_ends_alike(target: Path, prompt_logprobs: bool) -> None:
    """Against a gather of no row at all, which ended the world."""
    wanted = Request(0, (POISON, 5), 4, logprobs=2, prompt_logprobs=prompt_logprobs)
    told = serve(topology(target, 2), [wanted])
    assert (told.tokens[0], told.finish[0]) == ([], "error")
