"""What a command leaves behind is whole, or what was there before: whatever ends it, and wherever it was to go."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tpspec.errors import UserError
from tpspec.train.files import save_checkpoint
from tpspec.written import check, whole, write


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """A disk that takes no more than that of one file."""
    before, old = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


def test_what_was_there_stays_where_the_disk_has_no_room_for_more(tmp_path: Path) -> None:
    """Against a table of links, measured once, that a second measurement left empty."""
    path = tmp_path / "table"
    path.write_text("old")
    with room_for(100), pytest.raises(UserError, match=rf"^--out {path}: cannot be written: File too large$"):
        write(path, "new" * 100, "--out")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["table"]


def test_a_checkpoint_that_the_disk_has_no_room_for_says_why(tmp_path: Path) -> None:
    """torch says where in its own source it was."""
    with room_for(10_000), pytest.raises(UserError, match=r"checkpoint\.pt: cannot be written: .*File too large"):
        save_checkpoint(tmp_path, {"head": torch.zeros(100_000)})
    assert os.listdir(tmp_path) == []


def test_what_was_there_stays_where_a_command_is_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_text("old")
    with suppress(KeyboardInterrupt), whole(path) as part:
        part.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["table"]


def test_a_link_stays_one_and_a_file_keeps_who_may_read_it(tmp_path: Path) -> None:
    path, link = tmp_path / "table", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to("table")
    write(link, "new")
    assert (link.is_symlink(), path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (True, "new", 0o640)


def test_a_link_to_what_is_not_there_yet_leads_to_it(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("table")
    write(link, "new")
    assert (tmp_path / "table").read_text() == "new"


def test_pipes_and_devices_are_written_themselves(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reads = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(pipe, "new")
        assert os.read(reads, 100) == b"new"
    finally:
        os.close(reads)
    write(Path(os.devnull), "new")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_what_is_said_behind_a_file_that_goes_to_standard_output_is_not_lost(tmp_path: Path) -> None:
    """Against a file put in the place of the one that the shell has opened, which gets no more of what is said."""
    code = f"from pathlib import Path; from {write.__module__} import write; "
    code += "write(Path('/dev/stdout'), 'new\\n'); print('behind')"
    with (tmp_path / "said").open("ab") as said:
        subprocess.run([sys.executable, "-c", code], stdout=said, check=True)
    assert (tmp_path / "said").read_text().splitlines() == ["new", "behind"]


@pytest.mark.parametrize("name", [".", "no/folder/file", "file/in/a/file", "x" * 300, "away", f"{'y' * 300}/z"])
def test_what_cannot_be_written_is_told_before_and_after(tmp_path: Path, name: str) -> None:
    """Against a name that is too long: it was told in a traceback, and after all was measured."""
    (tmp_path / "file").touch()
    (tmp_path / "away").symlink_to("no/folder/file")
    path = tmp_path / name
    why = "File name too long" if "x" in name[:1] or "y" in name[:1] else "should be a file in a folder that exists"
    for act in (check, lambda path, named: write(path, "new", named)):
        with pytest.raises(UserError) as raised:
            act(path, "--out")
        assert str(raised.value) == f"--out {path}: cannot be written: {why}"


def test_a_link_that_leads_to_itself_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to("link")
    write(path, "new")
    assert path.read_text() == "new"
