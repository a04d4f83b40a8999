"""What a process keeps for good, once it has loaded everything."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from tpspec.comm.process import Peer

pytestmark = pytest.mark.alone

SCRIPT = """
import gc, time, weakref
from tpspec.comm.process import settle
class Node: pass
loaded = [[n] for n in range(300_000)]
settle()
begin = time.perf_counter()
gc.collect()
seconds = time.perf_counter() - begin
node = Node()
node.itself, gone = node, weakref.ref(node)
del node
gc.collect()
print(seconds, gone() is None)
"""


def test_a_full_collection_looks_at_nothing_that_was_loaded() -> None:
    """Against 0.1 s in the middle of a round, for a quarter of a million objects that torch brings; garbage made later
    is still found."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    seconds, is_collected = done.stdout.split()
    assert float(seconds) < 0.002
    assert is_collected == "True"


def test_a_kernel_without_pidfds_is_no_world_without_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a sandboxed kernel to which the C library's call means nothing: every world would end at once."""

    def unknown(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", unknown, raising=False)
    peer = Peer(os.getpid())
    assert not peer.has_ended()
    peer.close()
