"""Frontend and lead: both ways, through a restart of the lead, and no nonsense accepted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from tpspec.comm.link import FrontendLink, LeadLink
from tpspec.comm.messages import Cancel, Ready, Report, Stats, Stop, Submit, Tally, ToLead
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
        runner.run(send_all(frontend))
        assert hear(lead, 3) == ASKED
        assert lead.poll() == []
        lead.send(Ready(100, 3))
        lead.send(REPORT)
        assert runner.run(frontend.receive()) == Ready(100, 3)
        assert runner.run(frontend.receive()) == REPORT


def test_survives_a_restart_of_the_lead(runner: asyncio.Runner, frontend: LeadLink) -> None:
    """The frontend keeps its sockets, so that clients see a pause, not an error."""
    for generation in range(3):
        with closing(FrontendLink(frontend.endpoint)) as lead:
            lead.send(Ready(generation, 1))
            assert runner.run(frontend.receive()) == Ready(generation, 1)
            runner.run(send_all(frontend))
            assert hear(lead, 3) == ASKED


def test_requests_wait_for_a_lead(runner: asyncio.Runner, frontend: LeadLink) -> None:
    """The server takes requests while weights are still being read."""

    async def send_early() -> list[ToLead]:
        sending = asyncio.create_task(send_all(frontend))
        await asyncio.sleep(0.05)
        with closing(FrontendLink(frontend.endpoint)) as lead:
            await sending
            return hear(lead, 3)

    assert runner.run(send_early()) == ASKED


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
