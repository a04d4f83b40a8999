"""What real engines write of models that keep states does not depend on which states were kept when a text came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny
from tests.draft.heads import mtp
from tests.engine.test_reuse_in_a_world import DRAFT, SHARED, Rows, bits_are_the_same, texts_are_the_same
from tests.worlds import serve, topology
from tpspec.comm.messages import Submit
from tpspec.engine.engine import Engine
from tpspec.engine.text_states import OPENING
from tpspec.errors import WorldFailure
from tpspec.request import Request

KEYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"draft": DRAFT},
    "rejection": {"draft": DRAFT, "accept": "rejection"},
    "a head": {"draft": {"source": "mtp", "tokens": 3}},
    "chunks": {"draft": DRAFT, "engine": {"max_rows": 40}},
    "preemptions and evictions": {"draft": DRAFT, "cache": {"tokens": 320}},
    "few states": {"draft": DRAFT, "cache": {"states": 1}},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny("qwen3_5", tmp_path_factory.mktemp("target"), max_position_embeddings=2048)
    mtp.hybrid(folder, tmp_path_factory.mktemp("alone"), "qwen3_5")
    return folder


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_texts_are_the_same_with_kept_states_and_without(target: Path, keys: dict[str, Any]) -> None:
    """Stands against a text that goes on from another's state, from one that had gone on itself, or from rows that were
    not its own; on two ranks, greedily and drawn, with drafts that a copy must not have taken in."""
    texts_are_the_same(target, **keys)


@pytest.mark.parametrize("rows", [8, 16])
def test_deterministic_texts_are_the_same_bit_for_bit_in_bfloat16(target: Path, rows: int) -> None:
    """Stands against rows whose last bits depend on where a chunk began or which state was copied."""
    bits_are_the_same(target, rows)


def test_a_prefix_of_a_thousand_tokens_is_read_once(target: Path) -> None:
    """Stands against reading a system prompt for every request, of those that come together and those that follow: its
    last tokens are, which are not worth a state of their own."""
    requests = [Request(i, (*SHARED, 3 + i, 4, 5), 1) for i in range(5)]
    rows = Rows()
    answer = serve(
        topology(target, cache={"tokens": 4096, "page": 8}),
        messages={1: [Submit(one) for one in requests[:3]], 2: [Submit(requests[3])], 20: [Submit(requests[4])]},
        begin=rows.begin,
    )
    kept = (len(SHARED) + 3 - OPENING) // 8 * 8
    assert rows.count == kept + 5 * (len(SHARED) + 3 - kept)
    assert (answer.stats[-1].prefix_asked, answer.stats[-1].prefix_found) == (5 * 1003, 4 * kept)


def test_every_turn_of_a_chat_is_read_from_the_end_of_the_last(target: Path) -> None:
    """Stands against turns that are read anew, where what was answered comes back and where it does not."""
    page, said = 16, SHARED[500:560]
    first = SHARED[:300]
    second = (*first[:-2], *said, *SHARED[600:700])
    rows = Rows()
    messages = {1: [Submit(Request(0, first, 1))], 30: [Submit(Request(1, second, 1))]}
    serve(topology(target, cache={"page": page}), messages=messages, begin=rows.begin)
    kept = (len(first) - OPENING) // page * page
    assert rows.count == len(first) + len(second) - kept


def copy_another_state(rank: int, engine: Engine) -> None:
    if rank:
        kept = engine.scheduler._states._kept  # type: ignore[attr-defined]
        kept._free.reverse()


def keep_no_state(rank: int, engine: Engine) -> None:
    if rank:
        engine.scheduler._states._keep = lambda *_: []  # type: ignore[attr-defined]


@pytest.mark.parametrize("begin", [copy_another_state, keep_no_state])
def test_a_rank_that_keeps_other_states_stops_the_world(target: Path, begin: Callable[[int, Engine], None]) -> None:
    """Stands against shards that go on from the states of different texts, and go on."""
    with pytest.raises(WorldFailure, match="diverged from the lead in its states"):
        serve(topology(target, 2), [Request(0, SHARED[:200], 8)], begin=begin)
