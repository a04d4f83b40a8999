"""Where models live on this machine, and how a name in a topology becomes a folder with config.json and weights.

Reads names and JSON; must not read a weight or import torch. The one room that looks at TPSPEC_CACHE.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpspec.errors import UserError
from tpspec.published.multimodal import BESIDE, STORAGE, text_config

if TYPE_CHECKING:
    from collections.abc import Iterable

ODD = ("Infinity", "-Infinity", "NaN")
CODED = (".qweight", ".weight_scale")  # tensors of modules in codes
DEMO_MODELS = frozenset({"smollm2-135m"})
DEMO_HEADS = frozenset({"smollm2-135m-eagle3"})  # these come with the package
HEADS = Path(__file__).parents[1] / "heads"
# What huggingface_hub takes, of the ids with an owner.
_HUB_ID = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]{0,94}\w)?")
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_COPIES = ["consolidated*", "original/*"]  # of the same weights, by other names: Mistral's, Llama's
METADATA = "__metadata__"  # of a header, beside its tensors
MOST_HEADER = 100 << 20  # bytes, as safetensors has it
_HEAD_FILES = ["*.json", "*.safetensors", "*.bin", "*.pt"]  # many heads were never published as anything else


def cache_root() -> Path:
    """TPSPEC_CACHE, or tpspec under XDG_CACHE_HOME, or ~/.cache/tpspec. It may not exist yet."""
    if own := os.environ.get("TPSPEC_CACHE"):
        return _expanded(own, "TPSPEC_CACHE")
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME") / "tpspec"


def find(model: str, *, head: bool = False) -> Path:
    """The folder of a model: one that is there, a demo model's, or a download from the hub. May use the network.

    head: of a draft head, whose weights may be in a file of torch's.
    """
    folder = local(model, head=head)
    if folder is not None:
        return folder
    check_name(model, head=head)
    return _download(model, _HEAD_FILES if head else _FILES)


def check_name(model: str, *, head: bool = False) -> None:
    """UserError where what is not on this machine cannot be a hub id either. head: whether a draft head is named."""
    if model in DEMO_HEADS:
        raise UserError(f"{model} is a draft head, not a model; should be draft.model, beside draft.source: eagle")
    if model in DEMO_MODELS:
        raise UserError(
            f"demo model {model} is not in {_demo_folder(model)}; make it with: python -m tpspec.model.demo {model}"
        )
    if not _HUB_ID.fullmatch(model):
        demos = ", ".join(sorted(DEMO_MODELS | DEMO_HEADS if head else DEMO_MODELS))
        raise UserError(
            f"no model {model!r}: should be a folder that exists, a demo model ({demos}), or a hub id such as org/name"
        )


def local(model: str, *, head: bool = False) -> Path | None:
    """The folder of a model when it is on this machine already, without any network."""
    if folder := _folder(model):
        return folder
    if head and model in DEMO_HEADS:
        return HEADS / model
    if model in DEMO_MODELS:
        folder = _demo_folder(model)
        return folder if (folder / "config.json").is_file() else None
    return _cached(model, head) if _HUB_ID.fullmatch(model) else None


def read_config(folder: Path) -> dict[str, object]:
    """config.json of a model's folder; of one that sees besides reading, what it says of the text model. Under the name
    of a file beside it, what that says of how weights are stored, where it says nothing of that."""
    path = folder / "config.json"
    if (config := _object(path)) is None:
        raise UserError(f"{folder} holds no config.json; should be a model's folder in Hugging Face layout")
    if not any(config.get(key) for key in STORAGE):
        config |= _said_beside(folder)
    return text_config(config)


def _said_beside(folder: Path) -> dict[str, object]:
    """Such a file may have been left beside weights that are plain by now, or tell of the cache alone."""
    for name, method in BESIDE.items():
        if (told := _object(folder / name)) is not None:
            inner = told.get("quantization")
            section = inner if isinstance(inner, dict) else told
            said = {key: value for key, value in section.items() if value is not None}
            found = tensors(folder)
            if not found or any(tensor.endswith(CODED) for tensor in found):
                return {name: {"quant_method": method} | said}
    return {}


def _number(told: dict[str, object]) -> object:
    """A number that JSON has no word for, as transformers writes it."""
    return float(named) if told.keys() == {"__float__"} and (named := str(told["__float__"])) in ODD else told


def _object(path: Path) -> dict[str, object] | None:
    """None where there is no such file."""
    try:
        told: object = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(told, dict):
        raise UserError(f"{path} should hold a JSON object")
    return told


class TensorInfo(NamedTuple):
    """What a header says of one: its dtype as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]


def tensors(folder: Path) -> dict[str, TensorInfo]:
    """Those in a model's folder, by name, as the headers of its files say; none where there are no such files, or one
    that cannot be read."""
    try:
        return {name: told for path in folder.glob("*.safetensors") for name, told in _header(path)}
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {}


def written(folder: Path) -> tuple[int, ...]:
    """Sizes and times of those files: other ones, or the same written anew, have others."""
    stats = [path.stat() for path in sorted(folder.glob("*.safetensors")) if path.exists()]
    return tuple(number for stat in stats for number in (stat.st_size, stat.st_mtime_ns))


def _header(path: Path) -> Iterable[tuple[str, TensorInfo]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(min(size, MOST_HEADER)))
    return [
        (name, TensorInfo(told["dtype"], tuple(told["shape"]))) for name, told in header.items() if name != METADATA
    ]


def _expanded(folder: str, variable: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:  # no such user, or a user without a home
        raise UserError(f"{variable} is {folder!r}; should be a folder ({error})") from error


def _folder(model: str) -> Path | None:
    """The folder that a text names; None where it names none, or cannot."""
    try:
        folder = Path(model).expanduser()
        return folder if model and folder.is_dir() else None
    except (RuntimeError, OSError, ValueError):  # no such user; too long; a zero in it
        return None


def _demo_folder(model: str) -> Path:
    return cache_root() / "models" / model


def _cached(model: str, head: bool) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) and _complete(Path(found).parent, head) else None


def _complete(folder: Path, head: bool) -> bool:
    """Whether the weights are there too: a download that was cut short must be taken up again, not loaded."""
    if head and any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt")):
        return True
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return all((folder / shard).is_file() for shard in shards)


def _download(model: str, files: list[str]) -> Path:
    # OSError holds the hub's own errors (no such repository, gated, offline); httpx raises its own without a network.
    from httpx import HTTPError
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=files, ignore_patterns=_COPIES))
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(f"model {model} cannot be had from the Hugging Face hub: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "it is gated; accept its licence on its page, then run `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "no such repository, or a private one; check the name, or run `hf auth login`"
    if isinstance(error, HfHubHTTPError):
        return str(error).splitlines()[0] if str(error) else "the hub refused the download"
    return (
        f"the hub cannot be reached or the disk written ({type(error).__name__}); a folder with the model works offline"
    )
