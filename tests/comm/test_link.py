"""Frontend and lead: both ways, through a restart of the lead, and no nonsense accepted."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from tpspec.comm.link import FrontendLink, LeadLink, frontend_at
from tpspec.comm.link import endpoint as place
from tpspec.comm.messages import Cancel, Hello, Ready, Report, Stats, Stop, Submit, Tally, ToLead
from tpspec.errors import WorldFailure
from tpspec.request import Delta, Request

REPORT = Report([Delta(1, (5, 6), "stop", (2, 1), (1, 0))], Stats(rounds=3, collectives={"mlp": Tally(4, 5, 0.5)}))
ASKED: list[ToLead] = [Submit(Request(1, (1, 2, 3), 4)), Cancel(1), Stop(3)]


async def close_soon(link: LeadLink) -> None:
    link.close()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def frontend(runner: asyncio.Runner) -> Iterator[LeadLink]:
    async def opened() -> LeadLink:
        return LeadLink()

    link = runner.run(opened())
    yield link
    runner.run(close_soon(link))


async def send_all(frontend: LeadLink) -> None:
    for message in ASKED:
        await frontend.send(message)


def hear(lead: FrontendLink, count: int) -> list[ToLead]:
    heard: list[ToLead] = []
    for _ in range(50):
        heard += lead.poll(0.1)
        if len(heard) >= count:
            break
    return heard


def test_both_ways(runner: asyncio.Runner, frontend: LeadLink) -> None:
    with closing(FrontendLink(frontend.endpoint)) as lead:
        lead.send(Hello(1, 0))
        assert runner.run(frontend.receive()) == Hello(1, 0)
        runner.run(send_all(frontend))
        assert hear(lead, 3) == ASKED
        assert lead.poll() == []
        lead.send(Ready(100, 3))
        lead.send(REPORT)
        assert runner.run(frontend.receive()) == Ready(100, 3)
        assert runner.run(frontend.receive()) == REPORT


def test_leads_come_and_go_and_none_hears_what_was_meant_for_another(
    runner: asyncio.Runner, frontend: LeadLink
) -> None:
    """The frontend keeps its sockets, so that clients see a pause, not an error. What was sent in between is sent again
    by who knows what became of it; a link that kept it would have every request run twice."""
    runner.run(send_all(frontend))
    for generation in range(3):
        with closing(FrontendLink(frontend.endpoint)) as lead:
            lead.send(Hello(generation, 1))
            assert runner.run(frontend.receive()) == Hello(generation, 1)
            assert lead.poll(0.1) == []
            runner.run(send_all(frontend))
            assert hear(lead, 3) == ASKED
            runner.run(send_all(frontend))
        runner.run(send_all(frontend))


def test_a_lead_is_not_heard_any_more_when_another_has_said_hello(runner: asyncio.Runner, frontend: LeadLink) -> None:
    """Against tokens of a world that was given up, and requests that go to whichever lead is still connected."""
    with closing(FrontendLink(frontend.endpoint)) as old, closing(FrontendLink(frontend.endpoint)) as new:
        old.send(Hello(1, 1))
        assert runner.run(frontend.receive()) == Hello(1, 1)
        new.send(Hello(2, 0))
        assert runner.run(frontend.receive()) == Hello(2, 0)
        old.send(Ready(1, 1))
        old.send(REPORT)
        new.send(Ready(2, 1))
        assert runner.run(frontend.receive()) == Ready(2, 1)
        runner.run(send_all(frontend))
        assert hear(new, 3) == ASKED
        assert old.poll() == []


def test_a_folder_that_was_made_for_it_says_who_listens_there_and_goes_with_it(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def opened() -> LeadLink:
        return LeadLink(folder)

    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    assert frontend_at(folder) is None
    link = runner.run(opened())
    assert (link.endpoint, frontend_at(folder)) == (place(folder), os.getpid())
    runner.run(close_soon(link))
    assert not folder.exists()
    folder.mkdir()
    (folder / "pid").write_text(str(2**22 + 1))  # above any
    assert frontend_at(folder) is None


@pytest.mark.parametrize("nonsense", [b"", b"\xff", b"\x81\xa4type\xa4Quit", b"\x80", b"\x81\xa2\xff\xff\x01"])
def test_nonsense_is_refused(runner: asyncio.Runner, frontend: LeadLink, nonsense: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(frontend.endpoint)
        stranger.send(nonsense)
        with pytest.raises(WorldFailure, match="what came from the lead is no message of ours"):
            runner.run(frontend.receive())


@pytest.mark.parametrize(
    "nonsense", [b"", b"\xc1", b"\x81\xa4type\xa5Ready", b"\x82\xa4type\xa6Cancel\xa2id\xa2\xff\xff"]
)
def test_nonsense_is_refused_by_the_lead(tmp_path: Path, nonsense: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.bind(f"ipc://{tmp_path}/link")
        with closing(FrontendLink(f"ipc://{tmp_path}/link")) as lead:
            stranger.send(nonsense)
            with pytest.raises(WorldFailure, match="what came from the frontend is no message of ours"):
                lead.poll(5)


def test_the_frontend_needs_no_torch() -> None:
    """The server starts in a moment and holds no GPU memory; an import of torch takes seconds."""
    code = "import sys, tpspec.comm.link; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
