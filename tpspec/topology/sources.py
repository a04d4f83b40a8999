"""What draft sources are called in a topology, and what each asks of it. draft/sources.py says how they are made.

Knows names; must not know what a source does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tpspec.errors import UserError
from tpspec.published.shape import ModelShape
from tpspec.topology.rank_paths import CHOICES
from tpspec.topology.sublayers import Sublayers, behind, skipped

Value = int | float | str
Options = Mapping[str, Value]  # as a topology gives them, by name


@dataclass(frozen=True, slots=True)
class Option:
    """usual: what it is where nobody says. least, most: a number's bounds, these included; most None: no bound."""

    usual: int | str
    least: int = 0
    most: int | None = None

    @property
    def right(self) -> str:
        """What one may give."""
        if isinstance(self.usual, str):
            return "a text"
        bounds = f"{self.least} or more" if self.most is None else f"from {self.least} to {self.most}"
        return f"a whole number, {bounds}"

    def takes(self, given: object) -> bool:
        if isinstance(self.usual, str):
            return isinstance(given, str)
        return type(given) is int and self.least <= given and (self.most is None or given <= self.most)


@dataclass(frozen=True, slots=True)
class Kind:
    """loads: what draft.model names: nothing, a whole model, or a head that goes on from the target's own layers.

    takes_states: whether that model may keep states of texts: the source reads what it has drafted again.
    behind: whether it has weights of its own in the target's files, a layer behind the last.
    moves: whether it can run in a process of its own. computes: whether it has weights of its own, with which two
    machines may not make the same drafts. quantizes: whether its matrices can be held in 8 or 4 bits. whole: whether
    its trees are verified whole or not at all. learns: whether from what the target says at every row, which
    `rejection` does not tell. shaped: the rules of acceptance beside which its trees can have a fixed shape: one whose
    tokens are drawn for `rejection` drafts chains. options: by name.
    thins: of a source that drafts with the target itself, what it leaves out of that, by its options, the target's
    folder (None: not here) and the number of its layers; ask `left_out`.
    """

    loads: Literal["nothing", "model", "head"] = "nothing"
    takes_states: bool = False
    behind: bool = False
    moves: bool = False
    computes: bool = False
    quantizes: bool = False
    whole: bool = False
    learns: bool = False
    shaped: tuple[str, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    thins: Callable[[Options, Path | None, int], Sublayers] | None = None

    def check_model(self, shape: ModelShape, model: object) -> None:
        """UserError where this model, as it is called, cannot draft so."""
        if shape.stateful and not self.takes_states:
            others = " or ".join(name for name, kind in SOURCES.items() if kind.takes_states)
            raise UserError(
                f"draft.model {model}: {shape.model_type} keeps states of texts, which drafts cannot be taken back out "
                f"of; should be a model without, or source {others}"
            )

    def left_out(self, options: Options, folder: Path | None, shape: ModelShape) -> Sublayers | None:
        """Of the target; None where it does not draft itself. UserError for one that cannot."""
        if self.thins is None:
            return None
        check_thins(shape)
        found = self.thins(options, folder, shape.num_layers)
        _check_kept(found, shape.keepers)
        return found


def check_thins(shape: ModelShape) -> None:
    """UserError where a model cannot draft for itself with a part of its layers."""
    if shape.blocks and not shape.stateful:
        raise UserError(
            f"layers of {shape.model_type} are one sublayer each, and none can be left out; should be another source, "
            "such as ngram"
        )
    if shape.stateful:
        raise UserError(
            f"{shape.model_type} keeps states of texts, which its own drafts could not be taken back out of; "
            "should be another source, such as mtp or ngram"
        )


def check_behind(shape: ModelShape) -> None:
    """UserError where nobody says which of a model's layers the one behind the last is like, or it is none of those."""
    if shape.blocks:
        raise UserError(
            f"layers of {shape.model_type} are one sublayer each, and those for multi-token prediction are not read "
            "here; should be another source, such as ngram"
        )
    if 0 < shape.num_windowed < shape.num_layers:
        raise UserError(
            f"some layers of {shape.model_type} have a window, and whether its layer for multi-token prediction has is "
            "not known here; should be another source, such as ngram"
        )


def _check_kept(left_out: Sublayers, keepers: Mapping[int, int]) -> None:
    """UserError where a layer that stays would attend to what nobody has written, or chosen. keepers: of the shape."""
    for layer, keeper in keepers.items():
        if keeper in left_out.attention and layer not in left_out.attention:
            raise UserError(
                f"attention of layer {keeper} is left out, and layer {layer} reads what that keeps or chooses; should "
                "both stay, or both go"
            )


def _behind(options: Options, folder: Path | None, num_layers: int) -> Sublayers:
    return behind(int(options.get("layer", 0)), folder, num_layers)


def _skipped(options: Options, folder: Path | None, num_layers: int) -> Sublayers:
    return skipped(str(options.get("skip", "")), folder, num_layers)


_SUPPORT = {"support": Option(64, least=1, most=65536)}
_COUPLED = ("match",)
SOURCES = {
    "none": Kind(),
    "ngram": Kind(options={"min_match": Option(1, least=1, most=8), "floor": Option(10, most=100)}),
    "model": Kind(
        loads="model", takes_states=True, moves=True, computes=True, quantizes=True, shaped=_COUPLED, options=_SUPPORT
    ),
    "layer_skip": Kind(thins=_skipped, shaped=_COUPLED, options={"skip": Option(""), **_SUPPORT}),
    "early_exit": Kind(thins=_behind, shaped=_COUPLED, options={"layer": Option(0), **_SUPPORT}),
    "eagle": Kind(loads="head", moves=True, computes=True, quantizes=True, shaped=_COUPLED, options=_SUPPORT),
    "mtp": Kind(behind=True, moves=True, computes=True, quantizes=True, shaped=_COUPLED, options=_SUPPORT),
    "medusa": Kind(loads="head", computes=True, shaped=("match", "rejection")),
    "pard": Kind(
        loads="model",
        computes=True,
        quantizes=True,
        shaped=_COUPLED,
        options={"places": Option(12, least=1, most=64), **_SUPPORT},
    ),
    "lookahead": Kind(
        whole=True,
        learns=True,
        options={
            "window": Option(7, least=1, most=256),
            "level": Option(5, least=2, most=64),
            "guesses": Option(7, least=1, most=256),
        },
    ),
    "suffix": Kind(
        options={"max_depth": Option(16, least=8), "min_odds": Option(10, most=100), "kept_tokens": Option(32_768)}
    ),
}
OF_ANY_SOURCE = {CHOICES: Option("")}  # a file with the shape of a static tree
