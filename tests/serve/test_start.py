"""What a rank says and does when it cannot serve at all, through its front door."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tpspec.comm.launcher import Launcher
from tpspec.serve.__main__ import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such file; should be the path of one"),
        (["--bogus"], "unrecognized arguments: --bogus (see python -m tpspec.serve --help)"),
    ],
)
def test_a_mistake_is_said_once_and_no_other_start_makes_it_again(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Stands against an exit code and not a word: the launcher, told to start the ranks no more, ended this one before
    it had spoken. And against a wrong option that was said again by every start."""
    ended: list[int] = []
    verdict = tmp_path / "exit-code"
    mine = Launcher(os.getpid(), "", restarts=0, max_restarts=3, verdict=verdict)  # whom it signals, as torchrun would
    monkeypatch.setattr(Launcher, "from_env", lambda *_: mine)
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    try:
        assert main(words) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ended, verdict.read_text()) == ([], "2")
    assert capsys.readouterr().err == f"tpspec: error: {said}\n"
