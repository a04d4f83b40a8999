"""The tensors of a draft head, by name: safetensors, or what torch.save wrote. Knows no layout."""

from __future__ import annotations

import re
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from tpspec.errors import UserError
from tpspec.model.weights import Checkpoint, codes_in, open_file
from tpspec.published.head_files import HEAD_FILES as PATTERNS, head_files
from tpspec.published.places import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

SAFETENSORS = ".safetensors"


class HeadFiles(Checkpoint):
    """A checkpoint that remembers what of it nobody has read.

    rename: from a tensor's name in the files to the one it is asked for by; None for what is no part of the head.
    spelt: the other way, for whoever has to look for it there. plain: a slice of a matrix in codes, whose name is that
    in the files, as what it stands for; None where nobody says how it is stored. None: no file holds codes.
    """

    def __init__(
        self,
        folder: Path,
        rename: Callable[[str], str | None],
        spelt: Callable[[str], str] = lambda name: name,
        plain: Callable[[Place], Tensor | None] | None = None,
    ) -> None:
        self._spelt, self._plain = spelt, plain
        self._loaded: dict[str, Tensor] = {}
        files: dict[str, tuple[Path, str]] = {}
        for path in weight_files(folder):
            tensors = {} if path.suffix == SAFETENSORS else _loaded(path)
            for name in tensors or _names_in(path):
                if (new := rename(name)) is not None:
                    files[new] = path, name
                    if name in tensors:
                        self._loaded[new] = tensors[name]
        super().__init__(folder, files)
        self._left = dict.fromkeys(files)

    def __bool__(self) -> bool:
        """Whether any is left."""
        return bool(self._left)

    @property
    def names(self) -> list[str]:
        """Of all that are left."""
        return [*self._left]

    def like(self, pattern: re.Pattern[str]) -> str | None:
        """The name of one that matches."""
        return next((name for name in self._left if pattern.search(name)), None)

    def take(self, name: str, *shape: int) -> Tensor:
        """All of one, once. Raises UserError where it is missing, has another shape, or is a weight in codes."""
        taken = self._taken(name, shape, (range(shape[0]),), None)
        taken = taken.clone() if self._loaded.pop(name, None) is None else taken
        return self.checked(name, taken) if name.endswith(".weight") else taken

    def checked(self, name: str, numbers: Tensor) -> Tensor:
        if kind := codes_in(numbers):
            raise UserError(
                f"{self.folder}: tensor {self._spelt(name)} is {kind}, and what drafts is not read in codes; should be "
                "float32, bfloat16 or float16"
            )
        return numbers

    def check_all_taken(self, unused: Sequence[str]) -> None:
        """Raises UserError where a tensor is left that is none of `unused` (of any module): it would do something."""
        endings = tuple("." + name for name in unused)
        left = sorted(name for name in self._left if not f".{name}".endswith(endings))
        if left:
            names = ", ".join(map(self._spelt, left))
            raise UserError(f"{self.folder}: tensors that such a head does not have: {names}")

    def _taken(self, name: str, shape: tuple[int, ...], rows: tuple[range, ...], columns: range | None) -> Tensor:
        if name not in self:
            raise UserError(f"{self.folder}: tensor {self._spelt(name)} is missing; should be {list(shape)}")
        self._left.pop(name, None)
        module, _, part = name.rpartition(".")
        if self._plain is not None and part == "weight" and len(shape) == 2:
            of_inputs = range(shape[1]) if columns is None else columns
            place = Place(self._spelt(name).removesuffix(".weight"), *shape, rows[0], of_inputs)
            if (weight := self._plain(place)) is not None:
                for beside in self.under(module) - {"bias"}:
                    self._left.pop(f"{module}.{beside}", None)
                return weight
        return super()._taken(name, shape, rows, columns)

    def _slice(self, name: str) -> Any:
        return _InMemory(self._loaded[name]) if name in self._loaded else super()._slice(name)

    def _check_shape(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            if name.endswith(".weight"):
                self.checked(name, self._slice(name)[:])  # codes may have another shape
            called = self._spelt(name)
            raise UserError(
                f"{self.folder}: tensor {called} has shape {list(found)}; by the configs it should be {list(expected)}"
            )


class _InMemory:
    """As a slice of a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, which: slice | tuple[slice, ...]) -> Tensor:
        return self._tensor[which]


def weight_files(folder: Path) -> list[Path]:
    """Raises UserError where there are none."""
    if files := head_files(folder):
        return files
    raise UserError(f"{folder} holds no weights; should be {' or '.join(PATTERNS)}")


def _names_in(path: Path) -> list[str]:
    with open_file(path) as file:
        return [*file.keys()]


def _loaded(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, "cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise UserError(f"{path}: not a file of tensors ({error}); fetch it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise UserError(f"{path}: should hold tensors by name and nothing else")
    return tensors
