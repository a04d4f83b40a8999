"""The texts of a training run on disk: JSON lines of a prompt's and its answer's ids, appended as they end.

What has been written once is kept: a run that was stopped goes on after it. Must not know how texts are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tpspec.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

NAME = "texts.jsonl"


class Told(msgspec.Struct, frozen=True):
    """One text. number: its place in the run, which decides its prompt and seed. kind: what sort of prompt it is."""

    number: int
    kind: str
    temperature: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer


class TextFile:
    """The texts in a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def read(self) -> list[Told]:
        """All whole texts, in the order they were written; none when there is no file. Raises UserError."""
        decoder = msgspec.json.Decoder(Told)
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut off while written
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from error
        try:
            return [decoder.decode(line) for line in lines]
        except msgspec.MsgspecError as error:
            raise UserError(f"{self.path}: should hold texts made by `generate`: {error}") from error

    def mend(self) -> None:
        """Drop the half line that a run leaves when it is stopped while writing."""
        if self.path.exists():
            whole = self.path.read_bytes().rfind(b"\n") + 1
            with self.path.open("r+b") as file:
                file.truncate(whole)

    def add(self, told: Told) -> None:
        """Raises UserError where the disk takes no more."""
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(told) + b"\n")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from error


def read_texts(folder: Path) -> list[Told]:
    """One or more. Raises UserError when the folder has none."""
    if not (texts := TextFile(folder).read()):
        raise UserError(f"{folder} has no texts; `python -m tpspec.train generate MODEL --out {folder}` makes them")
    return texts
