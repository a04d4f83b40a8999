"""Frequencies of rope, as a config says them and transformers computes them.

What its scaling needs of a config differs with its type; a config that lacks some of it is refused by name. Must not
know shards, ranks, or what is turned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpspec.errors import UserError
from tpspec.published.windows import CONV

if TYPE_CHECKING:
    from torch import Tensor

PROPORTIONAL = "proportional"  # may turn a part of each half of a head
MOST_THETAS = 2  # whose cosines and sines plans count
# Dynamic scaling begins beyond max_position_embeddings, where no text goes on.
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", PROPORTIONAL, "yarn")


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Of queries with their position p, so that attention stays as sharp in long texts: by 1 + rate log(1 + (p + ahead)
    // length). As Llama 4 has it (ahead: 1), and Ministral 3."""

    rate: float
    length: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Of rope, for heads of E numbers. inverse: [E / 2], float32; 0: two numbers that stay as they are. scale: of the
    others' cosines and sines. growth: or None. longer: [E / 2], in place of inverse where texts may have more than
    `length` tokens; or None."""

    inverse: Tensor
    scale: float
    growth: QueryGrowth | None
    longer: Tensor | None = None
    length: int = 0

    @property
    def turns(self) -> bool:
        """Whether anything, or queries grow alone."""
        return bool(self.inverse.any())

    def of_texts(self, longest: int) -> Tensor:
        """longest: number of tokens. Keys are cached as they were turned: a text that grows cannot change over."""
        return self.inverse if self.longer is None or longest <= self.length else self.longer


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def ropes_of(config: Any, where: str, *, by_kind: bool = False) -> dict[str | None, dict[str, Any]]:
    """Rope's parameters, for each type of layers that has its own; of None where all have the same. by_kind: they
    cannot be the same."""
    parameters = config.rope_parameters
    types = sorted(set(getattr(config, "layer_types", None) or ()) - {CONV})
    if not by_kind and not set(types) & set(parameters):
        return {None: parameters}
    if missing := [kind for kind in types if kind not in parameters]:
        raise UserError(f"{where}: rope_parameters has nothing for {', '.join(missing)}; should for each layer type")
    return {kind: parameters[kind] for kind in types}


def ropes_by_theta(config: Any, thetas: str, where: str) -> dict[str | None, dict[str, Any]]:
    """The same for each theta of a list of that name, as `theta_of` calls it; 0 is none."""
    parameters, known = config.rope_parameters, {theta_of(theta): theta for theta in getattr(config, thetas) if theta}
    if len(known) > MOST_THETAS:
        raise UserError(f"{where}: {thetas} has {len(known)} numbers besides 0; should have {MOST_THETAS} at most")
    if (kind := parameters.get("rope_type", "default")) != "default":
        raise UserError(f"{where}: rope_type {kind!r} is not supported beside {thetas}; only 'default' is")
    return {name: parameters | {"rope_theta": theta} for name, theta in sorted(known.items())}


def check_one_theta(config: Any, thetas: str, where: str) -> None:
    """That a list of that name has no theta but that of the only rope, or 0."""
    usual = config.rope_parameters["rope_theta"]
    if others := {theta for theta in getattr(config, thetas) if theta} - {usual}:
        raise UserError(f"{where}: {thetas} has {max(others)}; should have rope_theta, {usual}, or 0 for each layer")


def stretched(config: Any, parameters: dict[str, Any], where: str) -> dict[str, Any]:
    """Of dynamic scaling with an alpha, which is the same for every text: rope without scaling, of a larger base."""
    alpha, size = parameters.get("alpha"), head_dim_of(config)
    if parameters.get("rope_type") != "dynamic" or alpha is None:
        return parameters
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not alpha > 0 or size < 4:
        raise UserError(f"{where}: rope_parameters.alpha is {alpha!r}; should be above 0, for heads of 4 or more")
    return {"rope_type": "default", "rope_theta": parameters["rope_theta"] * alpha ** (size / (size - 2))}


def scaled(parameters: dict[str, Any], where: str) -> dict[str, Any]:
    """Of longrope that says by what its cosines and sines are multiplied, in short texts and long ones."""
    if (kind := parameters.get("rope_type", "default")) == "default":
        return parameters
    if kind != "longrope":
        raise UserError(f"{where}: rope_type {kind!r} is not supported beside short_mscale; only 'longrope' is")
    short, long = (parameters.get(f"{texts}_mscale") for texts in ("short", "long"))
    if not isinstance(short, int | float) or isinstance(short, bool) or not short > 0 or short != long:
        right = "a number above 0, and long_mscale the same"
        raise UserError(f"{where}: rope_parameters.short_mscale is {short!r}, long_mscale {long!r}; should be {right}")
    return parameters | {"attention_factor": short}


def theta_of(theta: float) -> str:
    return f"theta {float(theta)}"


def num_of_turned(config: Any, parameters: dict[str, Any]) -> int:
    """Of a head's numbers, how many rope turns."""
    return int(head_dim_of(config) * parameters.get("partial_rotary_factor", 1.0))


def _growth(parameters: dict[str, Any]) -> QueryGrowth | None:
    """Raises what `frequencies_of` catches."""
    if (rate := parameters.get("llama_4_scaling_beta")) is None:
        return None
    if (length := int(parameters["original_max_position_embeddings"])) < 1:
        raise ValueError("original_max_position_embeddings is no length")
    return QueryGrowth(float(rate), length)


def growth_alone(config: Any, where: str) -> QueryGrowth | None:
    """Of queries in layers without rope, as Llama 4's."""
    if not config.attn_temperature_tuning or all(config.no_rope_layers):
        return None
    if (length := config.floor_scale) < 1:
        raise UserError(f"{where}: floor_scale is {length}; should be 1 or more")
    return QueryGrowth(float(config.attn_scale), length, ahead=1)


def still(head_dim: int, growth: QueryGrowth) -> Frequencies:
    """Of layers whose queries grow, and nothing is turned."""
    import torch

    return Frequencies(torch.zeros(head_dim // 2), 1.0, growth)


def frequencies_of(
    config: Any, whole: Any, layers: str | None, parameters: dict[str, Any], head_dim: int, where: str
) -> Frequencies:
    """From transformers. whole: the config as that has it. layers: those that the parameters are for, or None. Raises
    UserError for what it lacks."""
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise UserError(f"{where}: rope_type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if kind == "dynamic" and parameters.get("alpha") is not None:  # `stretched` knows what it is
        raise UserError(f"{where}: rope_parameters.alpha is not supported for {config.model_type}")
    try:
        inverse, scale = _inverse(config, whole, layers, parameters, head_dim)
        length = int(parameters["original_max_position_embeddings"]) if kind == "longrope" else 0
        longer = _inverse(config, whole, layers, parameters, head_dim, length + 1)[0] if length else None
        return Frequencies(inverse, scale, _growth(parameters), longer, length)
    except (TypeError, ValueError, KeyError, ArithmeticError, RuntimeError) as error:
        right = f"the numbers that {kind} needs, of which not all are"
        raise UserError(f"{where}: rope_parameters is {parameters}; should hold {right} ({error!r})") from error


def _inverse(
    config: Any,
    whole: Any,
    layers: str | None,
    parameters: dict[str, Any],
    head_dim: int,
    length: int | None = None,
) -> tuple[Tensor, float]:
    """Inverse frequencies of texts of so many tokens, or of as few as may be, and their scale."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, turned = parameters.get("rope_type", "default"), num_of_turned(config, parameters)
    if kind == "default":
        dims = torch.arange(0, turned, 2, dtype=torch.float32)
        inverse, scale = 1.0 / (float(parameters["rope_theta"]) ** (dims / turned)), 1.0
    elif kind == PROPORTIONAL:  # with the first of those that a whole head would be turned with
        dims = torch.arange(0, int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2 * 2, 2)
        inverse, scale = 1.0 / (float(parameters["rope_theta"]) ** (dims / head_dim)), 1.0
        inverse /= parameters.get("factor", 1.0)
    else:
        for factors in ("short_factor", "long_factor") if kind == "longrope" else ():
            if (count := len(parameters[factors])) != turned // 2:  # one would do for all
                raise ValueError(f"{factors} has {count} numbers for {turned // 2} pairs")
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](whole, torch.device("cpu"), seq_len=length, layer_type=layers)
        if kind == "longrope":
            scale = parameters.get("attention_factor") or scale  # which is what it is, but where `scaled` says it
    if not (inverse > 0).logical_and(inverse.isfinite()).all():
        raise ValueError("its frequencies are no positive numbers")
    return torch.nn.functional.pad(inverse.float(), (0, head_dim // 2 - len(inverse))), float(scale)
