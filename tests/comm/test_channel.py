"""News reaches every follower, whole, in order, or the world ends."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tpspec.comm.channel import (
    Channel,
    FollowerZmqChannel,
    LeadZmqChannel,
    OneRankChannel,
    endpoint,
    thread_channels,
)
from tpspec.comm.messages import News
from tpspec.errors import WorldFailure
from tpspec.request import Request, Sampling

NEWS = News(
    round=7,
    requests=(Request(3, (1, 2), 9, Sampling(temperature=0.5, logit_bias={4: -1.0}, seed=2**63), frozenset({5})),),
    cancels=(1,),
    stop=4,
    digest={"pages": 2**63 + 1},
)


@pytest.fixture(params=["threads", "zmq"])
def channels(request: pytest.FixtureRequest) -> Iterator[list[Channel]]:
    if request.param == "threads":
        made = thread_channels(3, timeout_s=0.3)
    else:
        lead = LeadZmqChannel(2, timeout_s=0.3)
        made = [lead, *(FollowerZmqChannel(endpoint(lead.folder, i), 0.3, os.getpid()) for i in range(2))]
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
        closing(LeadZmqChannel(1, timeout_s=0.2)) as lead,
        pytest.raises(WorldFailure, match="follower 1 took no news"),
    ):
        lead.share(News(round=1))


def test_a_late_follower_misses_nothing() -> None:
    with closing(LeadZmqChannel(1, timeout_s=5)) as lead:
        sender = threading.Thread(target=lead.share, args=(NEWS,))
        sender.start()
        with closing(FollowerZmqChannel(endpoint(lead.folder, 0), 5, os.getpid())) as follower:
            assert follower.share(None) == NEWS
        sender.join()


def test_the_folder_is_private_and_removed() -> None:
    lead = LeadZmqChannel(1, timeout_s=1)
    folder = Path(lead.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    lead.close()
    assert not folder.exists()


def test_alone_news_comes_back() -> None:
    assert OneRankChannel().share(NEWS) is NEWS
    with pytest.raises(ValueError, match="the lead must pass"):
        OneRankChannel().share(None)
