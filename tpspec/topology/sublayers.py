"""Which sublayers of a model a draft leaves out: up to which layer it goes, or a file that names them.

Numbers and JSON; must not know a tensor, nor how a draft runs. Attention and MLP of a layer are two sublayers, each of
which ends in one all-reduce, but where both are summed at once (rounds.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tpspec.errors import UserError
from tpspec.published.checkpoint import read_config
from tpspec.published.reads import Reads

FILE = "layer_skip.json"


@dataclass(frozen=True, slots=True)
class Sublayers:
    """Numbers of layers, by what of them is meant."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def dump(self) -> dict[str, list[int]]:
        return {"attention": sorted(self.attention), "mlp": sorted(self.mlp)}


NOTHING = Sublayers()


def behind(layer: int, folder: Path | None, num_layers: int) -> Sublayers:
    """Everything from a layer on. layer: 0 is what config.json calls early_exit_layer, or else a quarter of them.

    folder: of the model, None where it is not here. Elhoushi et al., LayerSkip, arXiv 2404.16710: their
    checkpoints are trained to be left so early.
    """
    layer = layer or (0 if folder is None else _trained_exit(folder)) or max(1, num_layers // 4)
    if not 0 < layer < num_layers:
        raise UserError(
            f"the draft leaves after layer {layer}; should be 1 to {num_layers - 1}, of {num_layers} layers"
        )
    rest = frozenset(range(layer, num_layers))
    return Sublayers(rest, rest)


def _trained_exit(folder: Path) -> int:
    return Reads(read_config(folder), f"{folder}/config.json").size_if_given("early_exit_layer") or 0


def skipped(file: str, folder: Path | None, num_layers: int) -> Sublayers:
    """What a file of `measure skips` names. file: "" is the one beside the checkpoint in `folder`.

    Zhang et al., Draft & Verify, arXiv 2309.08168.
    """
    if folder is None and not file:
        raise UserError(f"the model is not here, so {FILE} is not; should be named: draft.options.skip")
    path = Path(file) if file or folder is None else folder / FILE
    try:
        found = json.loads(path.expanduser().read_text(encoding="utf-8"))
        return _checked(found["attention"], found["mlp"], num_layers)
    except FileNotFoundError:
        raise UserError(f"{path} is not there; find one with: python -m tpspec.measure skips MODEL") from None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{path} should hold {{"attention": [...], "mlp": [...]}}, layers from 0 to {num_layers - 1}: {error!r}'
        ) from error


def _checked(attention: object, mlp: object, num_layers: int) -> Sublayers:
    for layers in (attention, mlp):
        if not isinstance(layers, list) or not set(layers) <= set(range(num_layers)):
            raise ValueError(f"{layers!r}")
    return Sublayers(frozenset(attention), frozenset(mlp))  # type: ignore[call-overload]
