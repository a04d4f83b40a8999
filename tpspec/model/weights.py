"""Reads slices of tensors out of safetensors files: one file, or several behind an index.

A slice is read alone, so a rank never holds more than its own part and the slice at hand. Must not know layers, ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from tpspec.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """The tensors of a Hugging Face folder, by name. Opening reads headers only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _tensor_files(folder)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(
        self, name: str, shape: tuple[int, ...], *, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Rows and columns of tensor `name`, a copy of its own; `shape` is what the whole tensor must have."""
        with self._open(name) as file:
            part = file.get_slice(name)
            self._check_shape(name, tuple(part.get_shape()), shape)
            rows = rows if rows is not None else range(shape[0])
            taken: Tensor = part[rows.start : rows.stop] if columns is None else part[_slices(rows, columns)]
            return taken.clone()

    def one(self, name: str) -> Tensor:
        """The only number of tensor `name`, whatever its dimensions."""
        with self._open(name) as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.numel() != 1:
            raise UserError(
                f"{self._file_of[name]}: tensor {name} has shape {list(tensor.shape)}; should be one number"
            )
        return tensor.clone()

    def under(self, module: str) -> set[str]:
        """What the tensors of a module are called within it."""
        return {name.removeprefix(module + ".") for name in self._file_of if name.startswith(module + ".")}

    def mapped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole tensor, backed by the file: only rows that are looked at take memory."""
        with self._open(name) as file:
            tensor: Tensor = file.get_tensor(name)
        self._check_shape(name, tuple(tensor.shape), shape)
        return tensor

    def _open(self, name: str) -> safe_open:
        # A handle per tensor: closing it unmaps the file, so pages read for one slice do not stay resident.
        if name not in self._file_of:
            raise UserError(f"{self.folder}: tensor {name} is missing; the checkpoint is incomplete")
        return _open_file(self._file_of[name])

    def _check_shape(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise UserError(
                f"{self._file_of[name]}: tensor {name} has shape {list(found)}, config.json asks for {list(expected)}"
            )


def _slices(rows: range, columns: range) -> tuple[slice, slice]:
    return slice(rows.start, rows.stop), slice(columns.start, columns.stop)


def _open_file(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, every file opened once so that a truncated one is found before anything else is done."""
    index = folder / INDEX
    files = _indexed_files(index) if index.exists() else [folder / SINGLE]
    file_of: dict[str, Path] = {}
    for path in files:
        if not path.exists():
            raise UserError(f"{path}: file is missing; weights must be {SINGLE} or files listed in {INDEX}")
        with _open_file(path) as file:
            file_of.update(dict.fromkeys(file.keys(), path))
    return file_of


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted({Path(name).name for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index}: not a safetensors index ({error!r})") from error
    return [index.parent / name for name in names]
