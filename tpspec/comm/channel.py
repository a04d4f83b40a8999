"""How the lead's news reaches the other target ranks, once a round. Integers and msgspec; never a tensor, never a GPU.

Must not know what the news means. The lead listens at one socket for each follower in a directory only this user can
enter. Plain sockets: every round waits for the news, and a thread of a message library between two processes that wait
for each other would have to be woken, too.
"""

from __future__ import annotations

import os
import queue
import select
import socket
from collections import deque
from pathlib import Path
from shutil import rmtree
from time import monotonic, sleep
from typing import TYPE_CHECKING, Protocol

import msgspec

from tpspec.comm.messages import News
from tpspec.comm.process import is_alive, num_cores
from tpspec.comm.sockets import Inbox, framed, private_folder
from tpspec.errors import WorldFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.comm.distributed import World

AT_ONCE = 1 << 20  # bytes of one read
SPIN_S = 0.003  # a draft head's work at the lead: who does not sleep hears in half the time, and costs the lead no call
GONE_S = 3.0  # all followers connect before the first round: whoever takes no news for this long has gone
LOOK_S = 0.02  # how often a follower looks whether a lead that says no more has ended


class Channel(Protocol):
    """One end of it on every target rank. All call `share` equally often. is_heard: whether others take what it is
    given here."""

    is_heard: bool

    def share(self, news: News | None) -> News:
        """The lead passes news and has it back at once; the others pass None and wait for it.

        Raises WorldFailure when it does not come, or cannot be handed over, within the time limit: an idle lead
        shares empty news every now and then.
        """

    def close(self) -> None: ...


class OneRankChannel:
    """Nobody to tell."""

    is_heard = False

    def share(self, news: News | None) -> News:
        return _given(news)

    def close(self) -> None:
        return


class LeadThreadChannel:
    """The lead's end for ranks that are threads."""

    is_heard = True

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

    is_heard = False

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


class LeadSocketChannel:
    """The lead's end: one socket for each follower, who are met before they are told anything. Encodes once a round.

    timeout_s: how long a follower may take to come.
    """

    is_heard = True

    def __init__(self, num_followers: int, timeout_s: float) -> None:
        self._timeout_s = min(timeout_s, GONE_S)
        self.folder = private_folder()
        self._encoder = msgspec.msgpack.Encoder()
        self._doors = [_opened(endpoint(self.folder, i), timeout_s) for i in range(num_followers)]
        self._followers: list[socket.socket] = []

    def meet(self) -> None:
        """Waits until all followers have come. Then the folder goes, so that a process that is ended without a word
        leaves none behind. Raises WorldFailure."""
        while len(self._followers) < len(self._doors):
            number = 1 + len(self._followers)
            try:
                follower, _ = self._doors[number - 1].accept()
            except OSError as error:
                raise WorldFailure(f"follower {number} has not come: {error}") from error
            follower.settimeout(self._timeout_s)
            self._followers.append(follower)
        rmtree(self.folder, ignore_errors=True)

    def share(self, news: News | None) -> News:
        news = _given(news)
        self.send(self._encoder.encode(news))
        return news

    def send(self, message: bytes) -> None:
        """Encoded news, to all. Raises WorldFailure."""
        frame = framed(message)
        for number, follower in enumerate(self._followers, start=1):
            try:
                follower.sendall(frame)
            except TimeoutError as error:
                raise WorldFailure(f"follower {number} took no news for {self._timeout_s:g} s") from error
            except OSError as error:
                raise WorldFailure(f"follower {number} is gone: {error}") from error

    def close(self) -> None:
        for one in (*self._followers, *self._doors):
            one.close()  # what was sent can still be read
        rmtree(self.folder, ignore_errors=True)


class FollowerSocketChannel:
    """A follower's end. spin_s: how long it looks for news before it sleeps. Raises WorldFailure where the lead does
    not listen any more."""

    is_heard = False

    def __init__(self, where: str, timeout_s: float, lead_pid: int, spin_s: float = 0.0) -> None:
        self._timeout_s, self._lead_pid, self._spin_s = timeout_s, lead_pid, spin_s
        self._inbox: Inbox[News] = Inbox(News, "lead")
        self._heard: deque[News] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(where)
        except OSError as error:
            self._socket.close()
            raise WorldFailure(f"the lead does not listen for its followers: {error}") from error
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def share(self, news: News | None) -> News:
        if not self._heard:
            self._spin()
        while not self._heard:
            self._heard.extend(self._inbox.feed(self._received()))
        return self._heard.popleft()

    def close(self) -> None:
        self._socket.close()

    def _spin(self) -> None:
        end = monotonic() + self._spin_s
        while not self._poll.poll(0) and monotonic() < end:
            os.sched_yield()

    def _received(self) -> bytes:
        """What is there, once something is."""
        try:
            data = self._socket.recv(AT_ONCE)
        except TimeoutError as error:
            raise _silent(self._timeout_s) from error
        except OSError as error:
            raise WorldFailure(f"news from the lead is cut off: {error}") from error
        if not data:
            self._let_lead_end()
            raise WorldFailure("the lead's process is gone")
        return data

    def _let_lead_end(self) -> None:
        """It may close before it ends; how it ends is what the world should be told first."""
        end = monotonic() + GONE_S
        while is_alive(self._lead_pid) and monotonic() < end:
            sleep(LOOK_S)


def endpoint(folder: Path, follower: int) -> str:
    return str(folder / f"news-{follower}")


def open_channel(world: World, ranks: Sequence[int], timeout_s: float) -> Channel | None:
    """The channel of `ranks`, the first of which leads; None on the other ranks. Every rank of the world calls it."""
    lead, *followers = ranks
    if not followers:
        return OneRankChannel() if world.rank == lead else None
    if world.rank == lead:
        channel = LeadSocketChannel(len(followers), timeout_s)
        world.announce(f"{os.getpid()} {channel.folder}", lead)
        channel.meet()
        return channel
    pid, _, folder = world.announce(None, lead).partition(" ")
    if world.rank not in followers:
        return None
    spin_s = SPIN_S if len(ranks) <= num_cores() else 0.0  # with fewer, who spins holds up the one it waits for
    return FollowerSocketChannel(endpoint(Path(folder), followers.index(world.rank)), timeout_s, int(pid), spin_s)


def _opened(where: str, timeout_s: float) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.settimeout(timeout_s)
    door.bind(where)
    door.listen(1)
    return door


def _given(news: News | None) -> News:
    if news is None:
        raise ValueError("the lead must pass the news that it shares")
    return news


def _silent(timeout_s: float) -> WorldFailure:
    return WorldFailure(f"no news from the lead for {timeout_s:g} s: it is gone or hangs")
