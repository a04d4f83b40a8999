"""Ranks that look after each other: who is frozen, who is gone, who is only slow. And torchrun, as ranks see it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import gettempdir, mkdtemp

import pytest

from tpspec.comm.launcher import VERDICT, Launcher
from tpspec.comm.process import Peer, clear_after
from tpspec.comm.watch import GONE_S, LOOK_S, Watch
from tpspec.errors import UserError, WorldFailure

pytestmark = pytest.mark.alone

TICKS = "import time\nwhile True: time.sleep(0.01)"
START = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[START]:
    """Processes that do next to nothing, as a rank that waits and has a watch."""
    made: list[subprocess.Popen[bytes]] = []

    def begin() -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen([sys.executable, "-c", TICKS]))
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.wait()


def look(watch: Watch, times: int) -> None:
    for _ in range(times):
        time.sleep(0.1)  # a busy machine, too, gives it a moment
        watch.look()


def test_a_frozen_rank_is_named_and_ended_and_one_that_waits_is_not(
    start: START, caplog: pytest.LogCaptureFixture
) -> None:
    """Stands against a world that hangs until torchrun loses patience, and one that ends whoever has nothing to do."""
    waits, frozen = start(), start()
    watch = Watch({1: waits.pid, 2: frozen.pid}, [1, 2], hang_s=10 * LOOK_S, leave=lambda: None)
    look(watch, 15)
    frozen.send_signal(signal.SIGSTOP)
    look(watch, 9)
    assert frozen.poll() is None
    look(watch, 3)
    assert frozen.wait(5) == -signal.SIGKILL
    assert waits.poll() is None
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"rank 2 hangs: its process has not run for {10 * LOOK_S:g} s, and is ended"
    ]


def test_a_pause_of_the_whole_machine_is_nobodys_fault(start: START) -> None:
    """Looks are counted, not seconds: a machine that was asleep has looked at nobody."""
    frozen = start()
    watch = Watch({1: frozen.pid}, [1], hang_s=0.5, leave=lambda: None)
    frozen.send_signal(signal.SIGSTOP)
    watch.look()
    time.sleep(1)
    watch.look()
    frozen.send_signal(signal.SIGCONT)
    look(watch, 5)
    assert frozen.poll() is None


def test_who_does_not_stop_others_may_be_stopped(start: START) -> None:
    """A drafter's guard: the world goes on without it."""
    guard = start()
    guard.send_signal(signal.SIGSTOP)
    watch = Watch({1: guard.pid}, [], hang_s=LOOK_S, leave=lambda: None)
    look(watch, 5)
    assert guard.poll() is None


def test_a_loss_that_a_rank_does_not_notice_ends_it(start: START, capfd: pytest.CaptureFixture[str]) -> None:
    """It may wait where no signal and no time limit reaches it; but not at once, since it may be about to notice. Its
    stack is all that will ever be known of why."""
    peer, left = start(), list[bool]()
    folder = Path(mkdtemp(prefix=f"tpspec-{peer.pid}-"))
    watch = Watch({1: peer.pid}, [1], hang_s=10, leave=lambda: left.append(True))
    assert watch.lost == []
    peer.kill()
    peer.wait()
    assert watch.lost == [1]
    look(watch, round(GONE_S / LOOK_S) - 1)
    assert not left
    look(watch, 1)
    assert left
    assert "in test_a_loss_that_a_rank_does_not_notice_ends_it" in capfd.readouterr().err
    assert not folder.exists()  # sockets of who could not clear up


def test_ranks_that_leave_in_order_are_no_loss(start: START) -> None:
    peer, left = start(), list[bool]()
    with Watch({1: peer.pid}, [1], hang_s=10, leave=lambda: left.append(True)) as watch:
        watch.stop()
        peer.kill()
        peer.wait()
        time.sleep(3 * LOOK_S)
    assert not left


def test_who_was_never_there_is_a_world_that_failed() -> None:
    with pytest.raises(WorldFailure, match="before the first round"):
        Watch({1: 2**22 + 1}, [1], hang_s=10)


def test_a_number_that_another_process_has_by_now_is_not_killed(start: START) -> None:
    gone = start()
    peer = Peer(gone.pid)
    gone.kill()
    gone.wait()
    assert peer.has_ended()
    peer.kill()


def test_only_what_is_ones_own_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link in a folder that everybody may write to would have us remove what it points to."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept, other = tmp_path / "kept", tmp_path / "tpspec-12-a"
    kept.mkdir()
    other.mkdir()
    (tmp_path / "tpspec-1-link").symlink_to(kept)
    clear_after(1)
    assert kept.exists()
    assert other.exists()
    clear_after(12)
    assert not other.exists()


# torchrun

ENVIRON = {
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "../none",
}


def test_a_launcher_is_read_from_what_torchrun_sets() -> None:
    found = Launcher.from_env(ENVIRON, 7)
    assert found == Launcher(7, "../none", 1, 3)
    assert found.restarts_left == 2
    assert Launcher.from_env({}, 7) is None
    assert Launcher.from_env(ENVIRON | {VERDICT: "/run/code"}, 7) == Launcher(7, "../none", 1, 3, Path("/run/code"))


def test_every_start_of_the_ranks_has_the_same_folder_and_nobody_else_has() -> None:
    """Against a lead that speaks to another server's clients, and a run's id that leads out of the folder."""
    folders = [Launcher(pid, run, 0, 3).folder for pid, run in ((7, "a"), (8, "a"), (7, "b"), (7, "../a"))]
    assert len(set(folders)) == 4
    assert {folder.parent for folder in folders} == {Path(gettempdir())}
    assert Launcher(7, "a", 2, 3).folder == folders[0]


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name can be guessed: whoever makes it first would hear every request."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launcher = Launcher(os.getpid(), "run", 0, 3)
    assert launcher.own_folder() == launcher.own_folder() == launcher.folder
    assert launcher.folder.stat().st_mode & 0o777 == 0o700
    launcher.folder.chmod(0o755)
    with pytest.raises(UserError, match="not a folder of this user alone"):
        launcher.own_folder()
    launcher.folder.rmdir()
    launcher.folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match="not a folder of this user alone"):
        launcher.own_folder()
