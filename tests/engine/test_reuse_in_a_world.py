"""What real engines write does not depend on what was cached when a text came."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
        request = Request(i, prompt_of(i), 24, SAMPLINGS[i // 2 % 2], logprobs=logprobs)
        messages.setdefault(round, []).append(Submit(request))
    return messages


def prompt_of(seq: int) -> tuple[int, ...]:
    return SHARED[: 200 - 7 * seq] + SHARED[:30] * (seq % 2)


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
    return world(model, [rows.begin], prefix=prefix, logprobs=logprobs, **keys), rows.count


def world(
    model: Path,
    begins: Sequence[Callable[[int, Engine], None]],
    *,
    prefix: bool,
    logprobs: int | None = None,
    **keys: Any,
) -> Told:
    def begin(rank: int, engine: Engine) -> None:
        for one in begins:
            one(rank, engine)

    cache = {"tokens": 2048, "page": 16, "prefix": prefix} | keys.get("cache", {})
    made = topology(model, 2, **keys | {"cache": cache})
    return serve(made, messages=turns(logprobs), begin=begin, watch=nothing_is_left)


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
    texts_are_the_same(target, **keys)


def texts_are_the_same(target: Path, **keys: Any) -> None:
    """With the cache and without; and it is of use."""
    with_cache, few = told(target, prefix=True, **keys)
    without, many = told(target, prefix=False, **keys)
    assert with_cache.tokens == without.tokens
    assert with_cache.stats[-1].prefix_found > 0
    assert without.stats[-1].prefix_asked == 0
    assert few < many


@pytest.mark.parametrize("rows", [8, 16])
def test_deterministic_texts_are_the_same_bit_for_bit_in_bfloat16(target: Path, rows: int) -> None:
    """Stands against rows whose last bits depend on where a chunk began: what was cached would decide a tie."""
    bits_are_the_same(target, rows)


def bits_are_the_same(target: Path, rows: int) -> None:
    """Of deterministic texts, in bfloat16."""
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


class Heard:
    """What the drafter of one rank is told of the target's layers, by text and position."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Tensor]] = {}

    def begin(self, rank: int, engine: Engine) -> None:
        if rank:
            return
        tell = engine.host.tell

        def heard(verdicts: Any, taps: Any) -> None:
            for seq, rows_NW in taps.before.items():
                self.rows[seq] = [*rows_NW.clone()]
            for seq, (start, rows_NW) in taps.rows.items():
                known = self.rows.setdefault(seq, [])
                assert start <= len(known), "a hole in what a head goes on from"
                known[start:] = rows_NW.clone()
            tell(verdicts, taps)

        engine.host.tell = heard  # type: ignore[method-assign]


CACHES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "chunks": {"engine": {"max_rows": 40}},
    "preemptions and evictions": {"cache": {"tokens": 320}},
}


@pytest.mark.parametrize("keys", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("source", ["eagle", "mtp", "medusa"])
def test_a_head_is_told_the_same_of_a_text_whoever_has_read_it(
    target: Path, tmp_path: Path, source: str, keys: dict[str, Any]
) -> None:
    """Stands against heads that are silent in every turn of a chat but the first, or go on from the rows of another
    text, of a rejected draft or of a place where such a row stood."""
    draft = draft_section(source, target, tmp_path) | {"tokens": 3}
    with_cache, few, known = heard(target, prefix=True, draft=draft, **keys)
    without, many, truth = heard(target, prefix=False, draft=draft, **keys)
    assert with_cache.stats[-1].prefix_found > 0
    assert few < many
    assert with_cache.tokens == without.tokens == told(target, prefix=False)[0].tokens
    for seq, rows in truth.items():
        length = len(with_cache.tokens[seq]) + len(prompt_of(seq)) - 1  # what follows the last token nobody has read
        assert torch.allclose(torch.stack(known[seq][:length]), torch.stack(rows[:length]), atol=1e-4)


def heard(target: Path, *, prefix: bool, **keys: Any) -> tuple[Told, int, dict[int, list[Tensor]]]:
    rows, ears = Rows(), Heard()
    answer = world(target, [rows.begin, ears.begin], prefix=prefix, **keys)
    return answer, rows.count, ears.rows


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
