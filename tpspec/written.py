"""Files that a command leaves behind: each appears whole, or what was there stays. Must not know what is in them."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tpspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICES = Path("/dev")


def fault(path: Path) -> str:
    """Why `path` cannot be written, as far as that can be told before it is; empty where nothing is in the way."""
    try:
        if path.is_dir() or not _target(path).parent.is_dir():
            return "should be a file in a folder that exists"
        written = path if _is_written_itself(path) else _target(path).parent
        return "" if os.access(written, os.W_OK) else "no permission"
    except OSError as error:  # a name that is too long
        return _words(error)


def check(path: Path, named: str = "") -> None:
    """Before minutes of work, not after them. named: the option, which the UserError for a fault begins with."""
    if why := fault(path):
        raise _unwritable(path, named, why)


@contextmanager
def whole(path: Path, named: str = "") -> Iterator[Path]:
    """Where to write what `path` is to hold: beside it, and moved there once all is written. A link stays one.

    Raises UserError for a fault and for an OSError meanwhile; it begins with `named`.
    """
    check(path, named)
    try:
        if _is_written_itself(path):
            yield path
            return
        target = _target(path)
        part = target.with_name(f".tpspec-{os.getpid()}.part")
        try:
            yield part
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, named, _words(error)) from error


def write(path: Path, text: str, named: str = "") -> None:
    """As UTF-8."""
    with whole(path, named) as part:
        part.write_text(text, encoding="utf-8")


def _is_written_itself(path: Path) -> bool:
    """Pipes and devices, what a process has open by now (/dev/stdout), and a file whose folder takes no other."""
    may_be_replaced = path.is_file() and DEVICES not in path.absolute().parents
    return path.exists() and not (may_be_replaced and os.access(_target(path).parent, os.W_OK))


def _target(path: Path) -> Path:
    """What links lead to."""
    return Path(os.path.realpath(path))  # Path.resolve raises where they lead round in a circle


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _unwritable(path: Path, named: str, why: str) -> UserError:
    return UserError(f"{named} {path}: cannot be written: {why}".lstrip())
