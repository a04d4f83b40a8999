"""How the lead's news reaches the other target ranks, once a round. Integers and msgspec; never a tensor, never a GPU.

Must not know what the news means. The lead binds one ipc socket for each follower in a directory only this user can
enter; a socket of one reader keeps order and loses nothing.
"""

from __future__ import annotations

import os
import queue
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from tpspec.comm.messages import MALFORMED, News
from tpspec.comm.process import folder_prefix, is_alive
from tpspec.errors import WorldFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.comm.distributed import World

LIFE_MS = 500  # how often a follower that waits looks whether the lead's process is still there
GONE_S = 3.0  # all followers connect before the first round: whoever takes no news for this long has gone
LINGER_MS = 500  # how long the last news may take to leave when the lead closes


class Channel(Protocol):
    """One end of it on every target rank. All call `share` equally often."""

    def share(self, news: News | None) -> News:
        """The lead passes news and has it back at once; the others pass None and wait for it.

        Raises WorldFailure when it does not come, or cannot be handed over, within the time limit: an idle lead
        shares empty news every now and then.
        """

    def close(self) -> None: ...


class OneRankChannel:
    """Nobody to tell."""

    def share(self, news: News | None) -> News:
        return _given(news)

    def close(self) -> None:
        return


class LeadThreadChannel:
    """The lead's end for ranks that are threads."""

    def __init__(self, queues: Sequence[queue.SimpleQueue[News]]) -> None:
        self._queues = queues

    def share(self, news: News | None) -> News:
        for follower in self._queues:
            follower.put(_given(news))
        return _given(news)

    def close(self) -> None:
        return


class FollowerThreadChannel:
    """A follower's end for ranks that are threads."""

    def __init__(self, news: queue.SimpleQueue[News], timeout_s: float) -> None:
        self._news, self._timeout_s = news, timeout_s

    def share(self, news: News | None) -> News:
        try:
            return self._news.get(timeout=self._timeout_s)
        except queue.Empty as error:
            raise _silent(self._timeout_s) from error

    def close(self) -> None:
        return


def thread_channels(size: int, timeout_s: float = 60.0) -> list[Channel]:
    """Channels of `size` ranks in one process, by rank; the first is the lead's."""
    queues: list[queue.SimpleQueue[News]] = [queue.SimpleQueue() for _ in range(size - 1)]
    return [LeadThreadChannel(queues), *(FollowerThreadChannel(news, timeout_s) for news in queues)]


class LeadZmqChannel:
    """The lead's end: one PUSH socket for each follower. Encodes once a round."""

    def __init__(self, num_followers: int, timeout_s: float) -> None:
        self._timeout_s = min(timeout_s, GONE_S)
        self._folder = TemporaryDirectory(prefix=folder_prefix())  # mode 0700
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets = [self._bound(endpoint(self.folder, i)) for i in range(num_followers)]

    @property
    def folder(self) -> str:
        return self._folder.name

    def share(self, news: News | None) -> News:
        frame = self._encoder.encode(_given(news))
        for i, socket in enumerate(self._sockets):
            try:
                socket.send(frame)
            except zmq.Again as error:
                raise WorldFailure(f"follower {i + 1} took no news for {self._timeout_s:g} s") from error
        return _given(news)

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)
        self._folder.cleanup()

    def _bound(self, where: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.sndtimeo = int(self._timeout_s * 1000)
        socket.bind(where)
        return socket


class FollowerZmqChannel:
    """A follower's end."""

    def __init__(self, where: str, timeout_s: float, lead_pid: int) -> None:
        self._timeout_s, self._lead_pid = timeout_s, lead_pid
        self._context = zmq.Context()
        self._decoder = msgspec.msgpack.Decoder(News)
        self._socket = self._context.socket(zmq.PULL)
        self._socket.connect(where)

    def share(self, news: News | None) -> News:
        deadline = monotonic() + self._timeout_s
        while not self._socket.poll(LIFE_MS):
            if not is_alive(self._lead_pid):
                raise WorldFailure("the lead's process is gone")
            if monotonic() > deadline:
                raise _silent(self._timeout_s)
        try:
            return self._decoder.decode(self._socket.recv())
        except MALFORMED as error:
            raise WorldFailure(f"what came from the lead is no news: {error}") from error

    def close(self) -> None:
        self._context.destroy(linger=0)


def endpoint(folder: str, follower: int) -> str:
    return f"ipc://{folder}/news-{follower}"


def open_channel(world: World, ranks: Sequence[int], timeout_s: float) -> Channel | None:
    """The channel of `ranks`, the first of which leads; None on the other ranks. Every rank of the world calls it."""
    lead, *followers = ranks
    if not followers:
        return OneRankChannel() if world.rank == lead else None
    if world.rank == lead:
        channel = LeadZmqChannel(len(followers), timeout_s)
        world.announce(f"{os.getpid()} {channel.folder}", lead)
        return channel
    pid, _, folder = world.announce(None, lead).partition(" ")
    if world.rank not in followers:
        return None
    return FollowerZmqChannel(endpoint(folder, followers.index(world.rank)), timeout_s, int(pid))


def _given(news: News | None) -> News:
    if news is None:
        raise ValueError("the lead must pass the news that it shares")
    return news


def _silent(timeout_s: float) -> WorldFailure:
    return WorldFailure(f"no news from the lead for {timeout_s:g} s: it is gone or hangs")
