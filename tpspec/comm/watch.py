"""A rank looks after the others of its host: one that is frozen is ended, and who does not notice a loss ends with it.

A thread beside the rounds, since a rank may wait where Python does not run. Knows pids and CPU time; must not know
collectives, rounds or requests.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from threading import Event, Thread
from typing import TYPE_CHECKING

from tpspec.comm.gap import cpu_s
from tpspec.comm.process import Peer, clear_after
from tpspec.errors import WorldFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

log = logging.getLogger(__name__)

LOOK_S = 0.25
GONE_S = 2.0  # a rank that is in a collective, or waits for news, has noticed by then


def end_at_once() -> None:
    """Without a farewell to whoever waits in a call that will never return."""
    clear_after(os.getpid())
    os._exit(WorldFailure.exit_code)


class Watch:
    """peers: pids of this host's other ranks. ends: those that stop everybody when they freeze, for hang_s or longer.

    Every rank's watch uses a little CPU time at each look. A process whose CPU time stands still is therefore stopped,
    or hangs where nothing of it can run; a slow one and one that waits are not, however long they take. What is counted
    are looks, not seconds: while the machine stands still or is too busy to look, nobody is late.
    """

    def __init__(
        self, peers: Mapping[int, int], ends: Collection[int], hang_s: float, leave: Callable[[], None] = end_at_once
    ) -> None:
        self._peers = _found(peers)
        self._ends, self._hang_s, self._leave = ends, hang_s, leave
        self._cpu_s: dict[int, float] = {}
        self._still: dict[int, int] = {}  # looks
        self._gone = 0  # looks since a loss
        self._over = Event()
        self._thread = Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._peers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """The world ends, and everybody may leave. May be called again."""
        self._over.set()
        for rank in self.lost:
            clear_after(self._peers[rank].pid)

    @property
    def lost(self) -> list[int]:
        """Ranks whose process has ended."""
        return [rank for rank, peer in self._peers.items() if peer.has_ended()]

    def look(self) -> None:
        lost = self.lost
        for rank in self._ends:
            if rank in self._peers and rank not in lost:
                self._look_at(rank)
        self._gone += bool(lost)
        if self._gone * LOOK_S >= GONE_S:
            log.error("rank %d has ended, and the world with it; this rank has not noticed, and is here:", lost[0])
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
            self.stop()
            self._leave()

    def _look_at(self, rank: int) -> None:
        now = cpu_s(self._peers[rank].pid)
        stands_still = now == self._cpu_s.get(rank) and now > 0  # 0: this system does not tell
        self._still[rank] = self._still.get(rank, 0) + 1 if stands_still else 0
        self._cpu_s[rank] = now
        if self._still[rank] * LOOK_S >= self._hang_s:
            log.error("rank %d hangs: its process has not run for %g s, and is ended", rank, self._hang_s)
            self._still[rank] = 0
            self._peers[rank].kill()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look()


def _found(peers: Mapping[int, int]) -> dict[int, Peer]:
    try:
        return {rank: Peer(pid) for rank, pid in peers.items()}
    except ProcessLookupError as error:
        raise WorldFailure("another rank ended before the first round") from error
