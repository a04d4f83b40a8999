"""News reaches every follower, whole, in order, or the world ends."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tpspec.comm.channel import (
    GONE_S,
    Channel,
    FollowerSocketChannel,
    LeadSocketChannel,
    OneRankChannel,
    endpoint,
    thread_channels,
)
from tpspec.comm.messages import News
from tpspec.comm.sockets import LENGTH
from tpspec.errors import WorldFailure
from tpspec.request import Request, Sampling

pytestmark = pytest.mark.alone

NEWS = News(
    round=7,
    requests=(Request(3, (1, 2), 9, Sampling(temperature=0.5, logit_bias={4: -1.0}, seed=2**63), frozenset({5})),),
    cancels=(1,),
    stop=4,
    digest={"pages": 2**63 + 1},
)
LONG = News(round=1, requests=(Request(1, tuple(range(400_000)), 5),))


@pytest.fixture(params=["threads", "sockets"])
def channels(request: pytest.FixtureRequest) -> Iterator[list[Channel]]:
    if request.param == "threads":
        made = thread_channels(3, timeout_s=0.3)
    else:
        lead = LeadSocketChannel(2, timeout_s=0.3)
        made = [lead, *(FollowerSocketChannel(endpoint(lead.folder, i), 0.3, os.getpid()) for i in range(2))]
        lead.meet()
    yield made
    for channel in reversed(made):
        channel.close()


def test_news_survives_the_journey(channels: list[Channel]) -> None:
    lead, *followers = channels
    assert lead.share(NEWS) == NEWS
    assert [follower.share(None) for follower in followers] == [NEWS, NEWS]


def test_all_of_it_arrives_in_order(channels: list[Channel]) -> None:
    lead, *followers = channels
    heard: list[list[int]] = [[], []]

    def follow(i: int) -> None:
        heard[i] = [followers[i].share(None).round for _ in range(3000)]

    threads = [threading.Thread(target=follow, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for i in range(3000):
        lead.share(News(round=i))
    for thread in threads:
        thread.join()
    assert heard == [list(range(3000))] * 2


def test_silence_ends_the_wait(channels: list[Channel]) -> None:
    """A follower that waits for ever for a lead that died holds its GPU for ever."""
    with pytest.raises(WorldFailure, match=r"no news from the lead for 0\.3 s"):
        channels[1].share(None)


def test_a_follower_that_never_came_is_noticed() -> None:
    with (
        closing(LeadSocketChannel(1, timeout_s=0.2)) as lead,
        pytest.raises(WorldFailure, match="follower 1 has not come"),
    ):
        lead.meet()


@pytest.mark.parametrize("news", [NEWS, LONG], ids=["short", "longer than a socket holds"])
def test_a_late_follower_misses_nothing(news: News) -> None:
    """Stands against prompts that are cut where the system's buffer ends, too."""
    with closing(LeadSocketChannel(1, timeout_s=5)) as lead:
        sender = threading.Thread(target=lambda: (lead.meet(), lead.share(news)))
        sender.start()
        with closing(FollowerSocketChannel(endpoint(lead.folder, 0), 5, os.getpid())) as follower:
            assert follower.share(None) == news
        sender.join()


def test_a_follower_that_comes_to_a_lead_that_has_gone_says_so(tmp_path: Path) -> None:
    """Stands against a traceback, and the exit code of a bug, where a lead ends before all have come."""
    with pytest.raises(WorldFailure, match="the lead does not listen for its followers"):
        FollowerSocketChannel(endpoint(tmp_path, 0), 1, os.getpid())


def test_a_follower_that_is_gone_is_noticed() -> None:
    """Stands against a lead that computes a round with nobody, and waits for the time limit of a collective."""
    with closing(LeadSocketChannel(1, timeout_s=5)) as lead:
        FollowerSocketChannel(endpoint(lead.folder, 0), 5, os.getpid()).close()
        lead.meet()
        with pytest.raises(WorldFailure, match="follower 1 is gone"):
            lead.share(NEWS)


@pytest.mark.parametrize("said", [b"", b"\0\0", LENGTH.pack(9) + b"half"], ids=["nothing", "half a length", "half"])
def test_a_lead_that_has_ended_is_noticed_at_once(said: bytes, tmp_path: Path) -> None:
    """Stands against ranks that hold their cards for the whole time limit after the lead was killed."""
    where, lead = str(tmp_path / "news"), subprocess.Popen(["sleep", "60"])
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(where)
        door.listen()
        with closing(FollowerSocketChannel(where, 60, lead.pid)) as follower:
            end, _ = door.accept()
            end.sendall(said)
            end.close()
            threading.Timer(0.3, lead.kill).start()
            begin = time.monotonic()
            with pytest.raises(WorldFailure, match="the lead's process is gone"):
                follower.share(None)
            assert 0.2 < time.monotonic() - begin < GONE_S  # its own reason to end comes first
    lead.wait()


def test_the_folder_is_private_and_removed() -> None:
    lead = LeadSocketChannel(1, timeout_s=1)
    folder = lead.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    lead.close()
    assert not folder.exists()


def test_once_all_have_come_nothing_is_left_to_clear_up() -> None:
    """Stands against folders of ranks that were killed, or ended by a signal before they could hear it."""
    with (
        closing(LeadSocketChannel(1, timeout_s=1)) as lead,
        closing(FollowerSocketChannel(endpoint(lead.folder, 0), 1, os.getpid())) as follower,
    ):
        lead.meet()
        assert not lead.folder.exists()
        lead.share(NEWS)
        assert follower.share(None) == NEWS


def test_alone_news_comes_back() -> None:
    assert OneRankChannel().share(NEWS) is NEWS
    with pytest.raises(ValueError, match="the lead must pass"):
        OneRankChannel().share(None)
