"""Reads slices of tensors out of safetensors files: one file, or several behind an index.

A slice is read alone, so a rank never holds more than its own part and the slice at hand. Must not know layers, ranks.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from tpspec.errors import UserError
from tpspec.published.multimodal import text_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PLAIN_BYTES = 2  # of a number, at least: in fewer, it is a code without its scale
MOST_MAPPED = 2 * 2**20  # bytes that are read before files are closed: until then their pages stay resident


def codes_in(numbers: Tensor) -> str | None:
    """The name of their dtype, where these are no numbers but codes."""
    is_plain = numbers.is_floating_point() and numbers.itemsize >= PLAIN_BYTES
    return None if is_plain else str(numbers.dtype).removeprefix("torch.")


class Checkpoint:
    """The tensors of a Hugging Face folder, by name; of one that sees besides reading, as its text model alone names
    them. Opening reads headers only. files: of each tensor its file, and its name there; None: as the folder says.

    A file serves many reads while it is open: its header takes as long to parse as it names tensors, and a file of
    quantized experts names ten thousands of small ones.
    """

    def __init__(self, folder: Path, files: Mapping[str, tuple[Path, str]] | None = None) -> None:
        self.folder = folder
        self._files = _tensor_files(folder) if files is None else files
        self._parts: dict[str, set[str]] = {}
        for name in self._files:
            module, _, part = name.rpartition(".")
            self._parts.setdefault(module, set()).add(part)
        self._opened: dict[Path, Any] = {}
        self._num_mapped = 0

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(
        self, name: str, shape: tuple[int, ...], *, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Rows and columns of tensor `name`, a copy of its own; `shape` is what the whole tensor must have."""
        rows = rows if rows is not None else range(shape[0])
        return self._taken(name, shape, (rows,), columns).clone()

    def read_into(self, there: Tensor, name: str, shape: tuple[int, ...], rows: range, columns: range) -> None:
        """The same to where it shall be, on whatever device and in its dtype. UserError where these are codes."""
        there.copy_(self.checked(name, self._taken(name, shape, (rows,), columns)))

    def read_one(
        self, name: str, shape: tuple[int, ...], index: int, rows: range, columns: range | None = None
    ) -> Tensor:
        """The same of one of the matrices, or vectors, that tensor `name` holds; its first dimension counts them."""
        return self._taken(name, shape, (range(index, index + 1), rows), columns)[0].clone()

    def one(self, name: str) -> Tensor:
        """The only number of tensor `name`, whatever its dimensions."""
        tensor = self._whole(name)
        if tensor.numel() != 1:
            raise UserError(
                f"{self._files[name][0]}: tensor {name} has shape {list(tensor.shape)}; should be one number"
            )
        return tensor.clone()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether there is a tensor of that name, and it has that shape."""
        return name in self and self.shape(name) == shape

    def under(self, module: str) -> set[str]:
        """What the tensors of a module, and not of modules in it, are called within it."""
        return self._parts.get(module, set())

    def mapped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole tensor, numbers and no codes, backed by the file: only rows that are looked at take memory."""
        tensor = self._whole(name)
        self._check_shape(name, tuple(tensor.shape), shape)
        return self.checked(name, tensor)

    def checked(self, name: str, numbers: Tensor) -> Tensor:
        """The numbers of a tensor. Raises UserError where they are codes."""
        if kind := codes_in(numbers):
            raise UserError(
                f"{self.folder}: {name} is {kind}, and read as plain numbers; should be float32, bfloat16 or float16, "
                "or codes of which quantization_config of config.json tells"
            )
        return numbers

    def _taken(self, name: str, shape: tuple[int, ...], rows: tuple[range, ...], columns: range | None) -> Tensor:
        """Backed by the file. rows: of the first dimensions; columns: of the one behind them."""
        part = self._slice(name)
        self._check_shape(name, tuple(part.get_shape()), shape)
        which = rows if columns is None else (*rows, columns)
        taken: Tensor = part[tuple(slice(some.start, some.stop) for some in which)]
        self._touched(prod(map(len, rows)) * prod(shape[len(rows) :]) * taken.itemsize)
        return taken

    def _slice(self, name: str) -> Any:
        """Of its file, open for others too: of what is copied."""
        path, stored = self._found(name)
        if path not in self._opened:
            self._opened[path] = open_file(path)
        return self._opened[path].get_slice(stored)

    def _touched(self, num_bytes: int) -> None:
        """Closing a file unmaps what was read of it, but for slices still in use."""
        self._num_mapped += num_bytes
        if self._num_mapped >= MOST_MAPPED:
            self._opened.clear()
            self._num_mapped = 0

    def _whole(self, name: str) -> Tensor:
        """Of its file, open for it alone."""
        path, stored = self._found(name)
        with open_file(path) as file:
            tensor: Tensor = file.get_tensor(stored)
        return tensor

    def _found(self, name: str) -> tuple[Path, str]:
        if name not in self._files:
            module, _, part = name.rpartition(".")
            others = ", ".join(sorted(self.under(module) - {"bias"}))
            if part == "weight" and others:
                raise UserError(
                    f"{self.folder}: tensor {name} is missing; {module} is stored as {others}, and read as plain "
                    "numbers: quantization_config of config.json should tell of codes"
                )
            raise UserError(f"{self.folder}: tensor {name} is missing; the checkpoint is incomplete")
        return self._files[name]

    def _check_shape(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise UserError(
                f"{self._files[name][0]}: tensor {name} has shape {list(found)}, config.json asks for {list(expected)}"
            )


def open_file(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error


def _tensor_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Every file is opened once, so that a truncated one is found before anything else is done."""
    index = folder / INDEX
    found: dict[str, tuple[Path, str]] = {}
    for path in _indexed_files(index) if index.exists() else [folder / SINGLE]:
        if not path.exists():
            raise UserError(f"{path}: file is missing; weights must be {SINGLE} or files listed in {INDEX}")
        with open_file(path) as file:
            found |= {text_name(name): (path, name) for name in file.keys()}  # noqa: SIM118 (a file is no mapping)
    return found


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted({Path(name).name for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index}: not a safetensors index ({error!r})") from error
    return [index.parent / name for name in names]
