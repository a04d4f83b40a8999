"""A drafter in a thread of a shard's process: it answers, begins anew when it fails, says what is wrong and ends."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from tests.checkpoints import tiny
from tests.worlds import drafting_beside, serve, topology
from tpspec.comm.draft_link import LeadDraftLink
from tpspec.comm.messages import Drafts, Outcome, Outcomes, Stop
from tpspec.errors import UserError
from tpspec.request import Request, Sampling
from tpspec.roles.beside import SWITCH, TURN_S, in_a_thread
from tpspec.topology.config import Topology

SOON_S = 20.0
TEXT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    """Of switches between threads, which others of this process go on with."""
    kept = sys.getswitchinterval()
    yield
    sys.setswitchinterval(kept)


def drafting(target: Path, draft: Path | None = None) -> Topology:
    section = {"source": "model", "model": str(draft or target), "tokens": 3, "placement": {"gaps": 0}}
    return topology(target, draft=section)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "drafter"]


def draft_of(link: LeadDraftLink) -> tuple[int, ...]:
    """Of the text, which is asked about until somebody answers: a drafter that is new may not have heard of it."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        link.send(Outcomes((Outcome(0, 0, TEXT, len(TEXT), 3, Sampling()),)))
        for said in link.receive(0.2):
            assert isinstance(said, Drafts)
            if said.drafts:
                return said.drafts[0].tree.tokens
    raise AssertionError("it does not answer")


def test_texts_are_those_of_plain_decoding(model: Path) -> None:
    """Of one rank, in whose process both read the same model. Stands against what two threads share by mistake."""
    asks = [Request(i, (5, 6, 7, 8, 9 + i) * 4, 40, Sampling(temperature=0.8 * (i % 2), seed=i)) for i in range(4)]
    made = drafting(model)
    with drafting_beside(made) as (link, _):
        told = serve(made, asks, link=link)
    assert told.texts() == serve(topology(model), asks).texts()
    assert told.stats[-1].accepted > 0


def test_one_that_fails_begins_anew(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stands against a drafter that is gone for good after a message that it cannot read, and a rank whose thread waits
    for Python as long as usual, five milliseconds."""
    with drafting_beside(drafting(model)) as (link, _):
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
        before = draft_of(link)
        assert len(before) == 3
        link._socket.send(b"nonsense", zmq.DONTWAIT)
        deadline = time.monotonic() + SOON_S
        while "it is started again in 0 s" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert draft_of(link) == before
        assert threads() == ["drafter"]
    assert threads() == []


@pytest.mark.parametrize("told", [True, False])
def test_it_ends_with_the_shard_whoever_says_so(model: Path, told: bool) -> None:
    """Stands against a thread that is still in a forward when Python ends; and, where the lead is on another rank,
    against one that waits for a word from there."""
    with drafting_beside(drafting(model)) as (link, kept):
        if told:
            link.send(Stop())
        started = time.monotonic()
        kept.close()
        assert time.monotonic() - started < 2.0
        assert threads() == []


def test_one_that_cannot_start_says_why(model: Path, tmp_path: Path) -> None:
    """Stands against a rank that waits for it for ever, or goes on without."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    for draft, why in ((tmp_path / "nowhere", "no model"), (broken, "model.safetensors")):
        with pytest.raises(UserError, match=why), drafting_beside(drafting(model, draft)):
            pass
    card = torch.device("cuda", 77)
    with pytest.raises(UserError, match="the drafter cannot start"), drafting_beside(drafting(model), card):
        pass
    assert threads() == []


def test_on_a_card_a_drafter_in_gaps_is_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes would take turns there. Stands against a misspelt word that is taken for the other."""
    monkeypatch.delenv(SWITCH, raising=False)
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert [in_a_thread(device) for device in (cuda, cpu)] == [True, False]
    for word, due in {"process": False, "thread": True, "": True}.items():
        monkeypatch.setenv(SWITCH, word)
        assert in_a_thread(cuda) is due
    monkeypatch.setenv(SWITCH, "Process")
    with pytest.raises(UserError, match="TPSPEC_GAPS=Process: should be thread or process"):
        in_a_thread(cuda)
