"""The tensors of a draft head, by name, each taken once: safetensors, or what torch.save wrote. Knows no layout."""

from __future__ import annotations

import re
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from tpspec.errors import UserError
from tpspec.model.weights import codes_in
from tpspec.published.head_files import HEAD_FILES as PATTERNS
from tpspec.published.head_files import head_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor


class HeadFiles:
    """rename: from a tensor's name in the files to the one it is asked for by; None for what is no part of the head.
    spelt: the other way, for whoever has to look for it there.
    """

    def __init__(
        self, folder: Path, rename: Callable[[str], str | None], spelt: Callable[[str], str] = lambda name: name
    ) -> None:
        self.folder, self._spelt = folder, spelt
        self._tensors: dict[str, Tensor] = {}
        for path in weight_files(folder):
            self._tensors |= _read(path, rename)

    def __bool__(self) -> bool:
        """Whether any is left."""
        return bool(self._tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that are left, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def like(self, pattern: re.Pattern[str]) -> str | None:
        """The name of one that matches."""
        return next((name for name in self._tensors if pattern.search(name)), None)

    def take(self, name: str, *shape: int) -> Tensor:
        """Raises UserError where it is missing, has another shape, or is a weight in codes."""
        if name not in self._tensors:
            raise UserError(f"{self.folder}: tensor {self._spelt(name)} is missing; should be {list(shape)}")
        tensor = self._tensors.pop(name)
        if name.endswith(".weight") and (kind := codes_in(tensor)):
            raise UserError(
                f"{self.folder}: tensor {self._spelt(name)} is {kind}, and what drafts is not read in codes; should be "
                "float32, bfloat16 or float16"
            )
        if tuple(tensor.shape) != shape:
            called, found = self._spelt(name), list(tensor.shape)
            raise UserError(
                f"{self.folder}: tensor {called} has shape {found}; by the configs it should be {list(shape)}"
            )
        return tensor

    def in_floats(self, plain: Callable[[str, tuple[int, int]], Tensor | None]) -> None:
        """Matrices in codes as what they stand for. plain: of a module by its name in the files, of so many rows and
        columns; None where nobody says how it is stored."""
        for name, tensor in [*self._tensors.items()]:
            module, _, part = name.rpartition(".")
            if part != "weight" or codes_in(tensor) is None or tensor.dim() != 2:
                continue
            weight = plain(self._spelt(name).removesuffix(".weight"), (tensor.shape[0], tensor.shape[1]))
            if weight is None:
                continue
            for beside in [one for one in self._tensors if one.startswith(f"{module}.") and one != f"{module}.bias"]:
                del self._tensors[beside]
            self._tensors[name] = weight

    def divide(self, module: str, other: str, sizes: Sequence[int]) -> None:
        """Rows of a module's tensors, so many in turn: every second such part is `other`'s from now on."""
        for part in ("weight", "bias"):
            if (rows := self._tensors.get(f"{module}.{part}")) is None or len(rows) != sum(sizes):
                continue  # which `take` finds
            parts = torch.split(rows, list(sizes))
            self._tensors |= {f"{module}.{part}": torch.cat(parts[::2]), f"{other}.{part}": torch.cat(parts[1::2])}

    def check_all_taken(self, unused: Sequence[str]) -> None:
        """Raises UserError where a tensor is left that is none of `unused` (of any module): it would do something."""
        endings = tuple("." + name for name in unused)
        left = sorted(name for name in self._tensors if not f".{name}".endswith(endings))
        if left:
            names = ", ".join(map(self._spelt, left))
            raise UserError(f"{self.folder}: tensors that such a head does not have: {names}")


def weight_files(folder: Path) -> list[Path]:
    """Raises UserError where there are none."""
    if files := head_files(folder):
        return files
    raise UserError(f"{folder} holds no weights; should be {' or '.join(PATTERNS)}")


def _read(path: Path, rename: Callable[[str], str | None]) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt", device="cpu") as file:
                return {new: file.get_tensor(name) for name in file.keys() if (new := rename(name)) is not None}  # noqa: SIM118
        tensors = torch.load(path, "cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise UserError(f"{path}: not a file of tensors ({error}); fetch it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise UserError(f"{path}: should hold tensors by name and nothing else")
    return {new: tensor for name, tensor in tensors.items() if (new := rename(name)) is not None}
