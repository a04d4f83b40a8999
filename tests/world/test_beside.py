"""A drafter in a thread of a shard's process: it answers, begins anew when it fails, says what is wrong and ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import zmq

from tests.checkpoints import tiny
from tests.worlds import drafting_beside, once_it_drafts, serve, topology
from tpspec.comm.draft_link import LeadDraftLink
from tpspec.comm.gap import SWITCH, in_a_thread
from tpspec.comm.messages import Drafts, Outcome, Outcomes, Stop
from tpspec.errors import OutOfMemory, UserError
from tpspec.request import Request, Sampling
from tpspec.roles.beside import TURN_S, Beside
from tpspec.roles.drafter import Orders
from tpspec.topology.config import Topology, to_json

pytestmark = pytest.mark.alone

SOON_S = 20.0
TEXT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("model"))


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
        told = serve(made, asks, link=link, begin=once_it_drafts)
    assert told.texts() == serve(topology(model), asks).texts()
    assert told.stats[-1].accepted > 0


def test_one_that_fails_begins_anew(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At once, and then after a pause, in which it can be ended. Stands against a drafter that is gone for good after a
    message that it cannot read, or fails again and again; and a rank whose thread waits for Python as long as usual,
    five milliseconds."""
    usual = sys.getswitchinterval()
    with drafting_beside(drafting(model)) as (link, kept):
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
        before = draft_of(link)
        assert len(before) == 3
        for pause in (0, 1):
            link._socket.send(b"nonsense", zmq.DONTWAIT)
            deadline = time.monotonic() + SOON_S
            while f"it is started again in {pause} s" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            if not pause:
                assert draft_of(link) == before
                assert threads() == ["drafter"]
        started = time.monotonic()
        kept.close()
        assert time.monotonic() - started < 0.8
    assert threads() == []
    assert sys.getswitchinterval() == usual


def test_it_ends_with_the_lead(model: Path) -> None:
    """Also while there is something to read: of a long text, here. Stands against a thread that goes on in a process
    that ends."""
    with subprocess.Popen(["true"]) as gone:
        pass
    orders = Orders(to_json(drafting(model)), "ipc:///nowhere", gone.pid, "cpu", is_filler=False)
    kept = Beside(orders)
    kept.wait_until_ready()
    deadline = time.monotonic() + SOON_S
    while threads():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kept.close()


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
    assert threads() == []


def test_one_whose_model_finds_no_room_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a process of its own does. Stands against a fault without a word of what would be right."""

    def no_room(*_: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("tpspec.roles.drafter.build_ahead", no_room)
    with pytest.raises(OutOfMemory, match="loading ran out of memory"), drafting_beside(drafting(model)):
        pass
    assert threads() == []


def test_a_fault_of_any_kind_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a rank that waits for ever for a thread that has gone: a card that is not there, and a panic of a
    library in Rust, which is no Exception."""
    card = torch.device("cuda", 77)
    with pytest.raises(UserError, match="the drafter cannot start"), drafting_beside(drafting(model), card):
        pass

    def panics(*_: object) -> int:
        raise SystemExit("a panic")

    monkeypatch.setattr("tpspec.roles.beside.draft", panics)
    with pytest.raises(UserError, match="the drafter cannot start: a panic"), drafting_beside(drafting(model)):
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
