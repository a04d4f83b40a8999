"""Frontend and lead: both ways, through a restart of the lead, and no nonsense accepted."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from tpspec.comm.link import FrontendLink, LeadLink, endpoint as place, frontend_at
from tpspec.comm.messages import Cancel, Hello, Ready, Report, Stats, Stop, Submit, Tally, ToLead
from tpspec.errors import WorldFailure
from tpspec.request import Delta, Request

pytestmark = pytest.mark.alone

REPORT = Report([Delta(1, (5, 6), "stop", (2, 1), (1, 0))], Stats(rounds=3, collectives={"mlp": Tally(4, 5, 0.5)}))
ASKED: list[ToLead] = [Submit(Request(1, (1, 2, 3), 4)), Cancel(1), Stop(3)]


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def frontend(runner: asyncio.Runner) -> Iterator[LeadLink]:
    link = LeadLink()
    yield link
    runner.run(link.close())


async def send_all(frontend: LeadLink) -> None:
    for message in ASKED:
        frontend.send(message)


def framed(frame: bytes) -> bytes:
    return struct.pack(">I", len(frame)) + frame


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
        lead.send(Ready(100, 3, 4))
        lead.send(REPORT)
        assert runner.run(frontend.receive()) == Ready(100, 3, 4)
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
        old.send(Ready(1, 1, 4))
        old.send(REPORT)
        new.send(Ready(2, 1, 4))
        assert runner.run(frontend.receive()) == Ready(2, 1, 4)
        runner.run(send_all(frontend))
        assert hear(new, 3) == ASKED
        assert old.poll() == []


def test_a_folder_that_was_made_for_it_says_who_listens_there_and_goes_with_it(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    assert frontend_at(folder) is None
    link = LeadLink(folder)
    assert (link.endpoint, frontend_at(folder)) == (place(folder), os.getpid())
    runner.run(link.close())
    assert not folder.exists()
    folder.mkdir()
    (folder / "pid").write_text(str(2**22 + 1))  # above any
    assert frontend_at(folder) is None


def test_where_one_was_killed_another_can_listen(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Where its lead was killed with it, every start of the ranks failed at a socket that was left in their folder."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(place(tmp_path))
    link = LeadLink(tmp_path)
    assert frontend_at(tmp_path) == os.getpid()
    FrontendLink(place(tmp_path)).close()
    runner.run(link.close())


def test_messages_cut_anywhere_arrive_whole(runner: asyncio.Runner, frontend: LeadLink) -> None:
    """A stream keeps no bounds of messages: against a head that is split, or a second message lost with the first."""
    messages = [Hello(1, 0), REPORT, Ready(7, 2, 4)]
    frames = b"".join(framed(msgspec.msgpack.encode(message)) for message in messages)

    async def exchange(size: int) -> list[object]:
        first = asyncio.ensure_future(frontend.receive())
        _, writer = await asyncio.open_unix_connection(frontend.endpoint)
        for at in range(0, len(frames), size):
            writer.write(frames[at : at + size])
            await asyncio.sleep(0)
        found = [await first, await frontend.receive(), await frontend.receive()]
        writer.close()
        return found

    for size in (1, 3, 5, len(frames)):
        assert runner.run(exchange(size)) == messages


def test_a_message_larger_than_the_socket_takes_arrives_once_it_is_read(
    runner: asyncio.Runner, frontend: LeadLink
) -> None:
    """Prompts of 100,000 ids, one way; a report beside a frontend that is busy, the other."""
    long = Submit(Request(1, tuple(range(300_000)), 4))
    reports = [Report([Delta(n, tuple(range(50_000)))], Stats(rounds=n)) for n in range(20)]
    with closing(FrontendLink(frontend.endpoint)) as lead:
        lead.send(Hello(1, 0))
        assert runner.run(frontend.receive()) == Hello(1, 0)
        began = time.monotonic()
        for report in reports:
            lead.send(report)
        assert time.monotonic() - began < 1  # nobody reads, and the lead has work to do
        heard: list[ToLead] = []

        async def converse() -> list[object]:
            frontend.send(long)
            found: list[object] = []
            while len(found) < len(reports):
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        while True:
                            found.append(await frontend.receive())
                heard.extend(lead.poll())
            return found

        assert runner.run(converse()) == reports
        assert heard + lead.poll() == [long]


def test_a_frontend_that_reads_nothing_for_long_is_an_error(
    frontend: LeadLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a lead that fills the memory with reports nobody will read."""
    monkeypatch.setattr("tpspec.comm.link.MOST_WAITING", 1 << 16)  # beside what the socket itself takes
    lead = FrontendLink(frontend.endpoint, timeout_s=0.1)
    long = Report([Delta(1, tuple(range(300_000)))], Stats())
    with pytest.raises(WorldFailure, match=r"read nothing for 0\.1 s"):
        lead.send(long)
    monkeypatch.setattr("tpspec.comm.link.LINGER_S", 0.1)
    lead.close()


def test_a_lead_notices_that_the_frontend_has_gone(runner: asyncio.Runner) -> None:
    """Against an error in the middle of a round, and against rounds for nobody."""
    frontend = LeadLink()
    with closing(FrontendLink(frontend.endpoint)) as lead:
        lead.send(Hello(1, 0))
        runner.run(frontend.receive())
        runner.run(send_all(frontend))
        runner.run(frontend.close())
        assert hear(lead, 3) == ASKED
        assert lead.poll(0.01) == []
        assert lead.is_over
        lead.send(REPORT)
    with pytest.raises(WorldFailure, match="does not listen at"):
        FrontendLink(frontend.endpoint)


NO_MESSAGES = [b"", b"\xff", b"\x81\xa4type\xa4Quit", b"\x80", b"\x81\xa2\xff\xff\x01"]
ENDLESS = b"\xff\xff\xff\xff"


@pytest.mark.parametrize("sent", [*map(framed, NO_MESSAGES), ENDLESS])
def test_nonsense_is_refused(runner: asyncio.Runner, frontend: LeadLink, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(frontend.endpoint)
        stranger.sendall(sent)
        with pytest.raises(WorldFailure, match="what came from the lead is no message of ours"):
            runner.run(frontend.receive())


NO_REQUESTS = [b"", b"\xc1", b"\x81\xa4type\xa5Ready", b"\x82\xa4type\xa6Cancel\xa2id\xa2\xff\xff"]


@pytest.mark.parametrize("sent", [*map(framed, NO_REQUESTS), ENDLESS])
def test_nonsense_is_refused_by_the_lead(tmp_path: Path, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "link"))
        listener.listen()
        with closing(FrontendLink(str(tmp_path / "link"))) as lead, closing(listener.accept()[0]) as stranger:
            stranger.sendall(sent)
            with pytest.raises(WorldFailure, match="what came from the frontend is no message of ours"):
                lead.poll(5)


def test_the_frontend_needs_no_torch() -> None:
    """The server starts in a moment and holds no GPU memory; an import of torch takes seconds."""
    code = "import sys, tpspec.comm.link; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
