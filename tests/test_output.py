"""Standard output that takes no more: a full disk is one message, a reader who has gone none; neither is a traceback,
nor are characters that a terminal has no bytes for.

Through the smallest front door; `generate` has its own in tests/world/test_bad_input.py.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpspec.errors import UserError
from tpspec.output import output_in_words

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "tpspec.topology", "check", str(ROOT / "topologies" / "cpu-2.yaml")]


def checked(stdout: int) -> tuple[int, str]:
    """The exit code of `topology check` and what it says on stderr."""
    done = subprocess.run(COMMAND, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_a_disk_that_is_full_is_one_line() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        assert checked(full) == (2, "standard output: cannot be written: No space left on device\n")
    finally:
        os.close(full)


def test_who_reads_no_further_is_told_nothing() -> None:
    """Against `| head`, which took what it wanted and left."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        assert checked(writes) == (141, "")
    finally:
        os.close(writes)


def test_a_character_that_the_terminal_has_not_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a traceback where a model's answer leaves what a locale such as Latin-1 can write."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    with pytest.raises(UserError, match=r"standard output: latin-1 has no '日'; should be UTF-8"), output_in_words():
        sys.stdout.write("café 日")
