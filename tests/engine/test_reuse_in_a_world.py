"""What real engines write does not depend on what was cached when a text came."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny
from tests.draft.kits import draft_section
from tests.worlds import Told, serve, topology
from tpspec.comm.messages import Submit, ToLead
from tpspec.engine.engine import Engine
from tpspec.errors import WorldFailure
from tpspec.request import Logprob, Request, Sampling

SHARED = tuple(random.Random(1).randrange(3, 263) for _ in range(1000))
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=7)]
DRAFT = {"source": "ngram"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=4, max_position_embeddings=2048)


def turns(logprobs: int | None) -> dict[int, list[ToLead]]:
    """Texts that begin alike: two come together, others while one runs, and the last ones when all have ended."""
    messages: dict[int, list[ToLead]] = {}
    for i, round in enumerate([1, 1, 9, 13, 60, 61]):
        prompt = SHARED[: 200 - 7 * i] + SHARED[:30] * (i % 2)
        request = Request(i, prompt, 24, SAMPLINGS[i // 2 % 2], logprobs=logprobs)
        messages.setdefault(round, []).append(Submit(request))
    return messages


class Rows:
    """Counts the rows of one rank's forwards."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self, rank: int, engine: Engine) -> None:
        if rank:
            return
        logits = engine.target.logits

        def counted(spans: Any) -> Any:
            self.count += sum(len(span.tokens) for span in spans)
            return logits(spans)

        engine.target.logits = counted  # type: ignore[method-assign]


def told(model: Path, *, prefix: bool, logprobs: int | None = None, **keys: Any) -> tuple[Told, int]:
    rows = Rows()
    cache = {"tokens": 2048, "page": 16, "prefix": prefix} | keys.pop("cache", {})
    made = topology(model, 2, cache=cache, **keys)
    return serve(made, messages=turns(logprobs), begin=rows.begin, watch=nothing_is_left), rows.count


def nothing_is_left(engine: Engine) -> None:
    engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="plain"),
        pytest.param({"draft": DRAFT}, id="ngram"),
        pytest.param({"draft": DRAFT, "accept": "rejection"}, id="rejection"),
        pytest.param({"draft": {"source": "early_exit", "tokens": 3}}, id="a draft in the same cache"),
        pytest.param({"draft": {"source": "lookahead"}}, id="rows beside the draft"),
        pytest.param({"draft": DRAFT, "engine": {"max_rows": 40}}, id="chunks"),
        pytest.param({"draft": DRAFT, "cache": {"tokens": 320}}, id="preemptions and evictions"),
    ],
)
def test_texts_are_the_same_with_the_cache_and_without(target: Path, keys: dict[str, Any]) -> None:
    """Stands against keys of another beginning, of rejected drafts, or at other positions; on two ranks, greedily and
    drawn, with drafts that lie on pages which were shared."""
    with_cache, few = told(target, prefix=True, **keys)
    without, many = told(target, prefix=False, **keys)
    assert with_cache.tokens == without.tokens
    assert with_cache.stats[-1].prefix_found > 0
    assert without.stats[-1].prefix_asked == 0
    assert few < many


@pytest.mark.parametrize("rows", [8, 16])
def test_deterministic_texts_are_the_same_bit_for_bit_in_bfloat16(target: Path, rows: int) -> None:
    """Stands against rows whose last bits depend on where a chunk began: what was cached would decide a tie."""
    keys = {"deterministic": True, "target": {"dtype": "bfloat16"}, "engine": {"fixed_rows": rows}, "draft": DRAFT}
    with_cache, _ = told(target, prefix=True, logprobs=3, **keys)
    without, _ = told(target, prefix=False, logprobs=3, **keys)
    assert with_cache.tokens == without.tokens
    assert odds(with_cache) == odds(without)
    assert with_cache.stats[-1].prefix_found > 0


def odds(told: Told) -> dict[int, list[Logprob]]:
    """Of every request, token by token."""
    return {
        request: [odd for delta in told.deltas if delta.id == request for odd in delta.logprobs]
        for request in told.tokens
    }


def test_a_prefix_of_a_thousand_tokens_is_read_once(target: Path) -> None:
    """Stands against reading a system prompt for every request, of those that come together and those that follow."""
    requests = [Request(i, (*SHARED, 3 + i, 4, 5), 1) for i in range(5)]
    rows = Rows()
    made = topology(target, cache={"tokens": 4096, "page": 8})
    answer = serve(
        made,
        messages={1: [Submit(one) for one in requests[:3]], 2: [Submit(requests[3])], 20: [Submit(requests[4])]},
        begin=rows.begin,
    )
    assert rows.count == len(SHARED) + 5 * 3
    assert (answer.stats[-1].prefix_asked, answer.stats[-1].prefix_found) == (5 * 1003, 4 * 1000)


@pytest.mark.parametrize("placement", ["inline", {"gaps": 1}])
@pytest.mark.parametrize("source", ["eagle", "mtp", "medusa"])
def test_what_a_head_has_to_see_is_never_left_out(
    target: Path, tmp_path: Path, source: str, placement: str | dict[str, int]
) -> None:
    """Stands against heads that are silent in every turn of a chat but the first, and against a lead that knows what
    its drafter needs beside ranks that do not."""
    if source == "medusa" and placement != "inline":
        pytest.skip("runs beside every shard only")
    draft = draft_section(source, target, tmp_path) | {"placement": placement}
    answer, _ = told(target, prefix=True, draft=draft)
    assert answer.stats[-1].prefix_asked == 0
    assert answer.tokens == told(target, prefix=False)[0].tokens


def forget_what_was_kept(rank: int, engine: Engine) -> None:
    if rank == 1:
        engine.scheduler.reuse.is_on = False


def believe_in_another_page(rank: int, engine: Engine) -> None:
    if rank == 1:
        engine.scheduler.reuse.digest = 1


@pytest.mark.parametrize("begin", [forget_what_was_kept, believe_in_another_page])
def test_a_rank_that_keeps_other_pages_stops_the_world(target: Path, begin: Callable[[int, Engine], None]) -> None:
    """Stands against ranks that find out when they read a prompt from different places, in collectives of different
    shapes."""
    with pytest.raises(WorldFailure, match=r"diverged from the lead in its kept .*before round 2"):
        serve(topology(target, 2), [Request(0, SHARED[:40], 8)], begin=begin)
