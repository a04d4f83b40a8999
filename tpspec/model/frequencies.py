"""Frequencies of rope, as a config says them and transformers computes them.

What its scaling needs of a config differs with its type; a config that lacks some of it is refused by name. Must not
know shards, ranks, or what is turned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpspec.errors import UserError
from tpspec.model.architecture import THETA
from tpspec.published.windows import CONV

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.published.reads import Reads

ROPE, PART = "rope_parameters", "partial_rotary_factor"
MOST_THETA = 1e30  # Falcon-H1's is 1e11
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


def head_dim_of(read: Reads) -> int:
    return read.size_if_given("head_dim") or read.size("hidden_size") // read.size("num_attention_heads")


def base_of(rope: Reads) -> float:
    return rope.number(THETA, most=MOST_THETA)


def ropes_of(read: Reads, *, by_kind: bool = False) -> dict[str | None, Reads]:
    """Rope's parameters, for each type of layers that has its own; of None where all have the same. by_kind: they
    cannot be the same."""
    rope = read.section(ROPE)
    types = sorted({*read.texts("layer_types")} - {CONV})
    if not by_kind and not {*types} & {*rope.config}:
        return {None: rope}
    if missing := [kind for kind in types if kind not in rope.config]:
        raise UserError(f"{read.where}: {ROPE} has nothing for {', '.join(missing)}; should for each layer type")
    return {kind: rope.section(kind) for kind in types}


def ropes_by_theta(read: Reads, thetas: str) -> dict[str | None, Reads]:
    """The same for each theta of a list of that name, as `theta_of` calls it; 0 is none."""
    rope, known = read.section(ROPE), {theta_of(theta): theta for theta in _thetas(read, thetas)}
    if len(known) > MOST_THETAS:
        raise read.refusal(thetas, f"a list of {MOST_THETAS} numbers besides 0, at most")
    rope.one_of("rope_type", ("default",), "default")
    return {name: rope.but({THETA: theta}) for name, theta in sorted(known.items())}


def check_one_theta(read: Reads, thetas: str) -> None:
    """That a list of that name has no theta but that of the only rope, or 0."""
    usual = base_of(read.section(ROPE))
    if {*_thetas(read, thetas)} - {usual}:
        raise read.refusal(thetas, f"{THETA}, {usual}, or 0 for each layer")


def _thetas(read: Reads, key: str) -> list[float]:
    """Of a list, but those that are 0."""
    listed = read.config.get(key)
    if not isinstance(listed, list) or not all(type(theta) in (int, float) and theta >= 0 for theta in listed):
        raise read.refusal(key, "a list of numbers, each 0 or more")
    return [theta for theta in listed if theta]


def stretched(read: Reads, rope: Reads) -> Reads:
    """Of dynamic scaling with an alpha, which is the same for every text: rope without scaling, of a larger base."""
    if rope.config.get("rope_type") != "dynamic" or rope.config.get("alpha") is None:
        return rope
    if (size := head_dim_of(read)) < 4:
        raise rope.refusal("alpha", "null, for heads of fewer than 4 numbers")
    theta = base_of(rope) * rope.number("alpha") ** (size / (size - 2))
    return rope.but({"rope_type": "default", THETA: theta})


def scaled(rope: Reads) -> Reads:
    """Of longrope that says by what its cosines and sines are multiplied, in short texts and long ones."""
    if rope.one_of("rope_type", ("default", "longrope"), "default") == "default":
        return rope
    scale = rope.number("short_mscale")
    if rope.number("long_mscale") != scale:
        raise rope.refusal("long_mscale", f"short_mscale, {scale}")
    return rope.but({"attention_factor": scale})


def theta_of(theta: float) -> str:
    return f"theta {float(theta)}"


def num_of_turned(read: Reads, rope: Reads) -> int:
    """Of a head's numbers, how many rope turns."""
    return int(head_dim_of(read) * rope.number(PART, 1.0))


def _growth(rope: Reads) -> QueryGrowth | None:
    key = "llama_4_scaling_beta"
    if rope.config.get(key) in (None, 0):
        return None
    return QueryGrowth(rope.number(key), rope.size("original_max_position_embeddings"))


def growth_alone(read: Reads) -> QueryGrowth | None:
    """Of queries in layers without rope, as Llama 4's."""
    turned = read.config.get("no_rope_layers")
    if not read.config.get("attn_temperature_tuning") or (isinstance(turned, list) and all(turned)):
        return None
    return QueryGrowth(read.number("attn_scale"), read.size("floor_scale"), ahead=1)


def still(head_dim: int, growth: QueryGrowth) -> Frequencies:
    """Of layers whose queries grow, and nothing is turned."""
    import torch

    return Frequencies(torch.zeros(head_dim // 2), 1.0, growth)


def frequencies_of(read: Reads, whole: Any, layers: str | None, rope: Reads, head_dim: int) -> Frequencies:
    """From transformers. whole: the config as that has it. layers: those that the parameters are for, or None. Raises
    UserError for what it lacks."""
    kind = str(rope.one_of("rope_type", ROPE_TYPES, "default"))
    if kind == "dynamic" and rope.config.get("alpha") is not None:  # `stretched` knows what it is
        raise UserError(f"{read.where}: {rope.within}alpha is not supported for {read.text('model_type')}")
    try:
        inverse, scale = _inverse(read, whole, layers, rope, head_dim)
        length = rope.size("original_max_position_embeddings") if kind == "longrope" else 0
        longer = _inverse(read, whole, layers, rope, head_dim, length + 1)[0] if length else None
        return Frequencies(inverse, scale, _growth(rope), longer, length)
    except (TypeError, ValueError, KeyError, ArithmeticError, RuntimeError) as error:
        said, right = rope.within.removesuffix("."), f"the numbers that {kind} needs, of which not all are"
        raise UserError(f"{read.where}: {said} is {rope.config}; should hold {right} ({error!r})") from error


def _inverse(
    read: Reads, whole: Any, layers: str | None, rope: Reads, head_dim: int, length: int | None = None
) -> tuple[Tensor, float]:
    """Inverse frequencies of texts of so many tokens, or of as few as may be, and their scale."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, turned = rope.config.get("rope_type", "default"), num_of_turned(read, rope)
    if kind == "default":
        dims = torch.arange(0, turned, 2, dtype=torch.float32)
        inverse, scale = 1.0 / (base_of(rope) ** (dims / turned)), 1.0
    elif kind == PROPORTIONAL:  # with the first of those that a whole head would be turned with
        dims = torch.arange(0, int(head_dim * rope.number(PART, 1.0)) // 2 * 2, 2)
        inverse, scale = 1.0 / (base_of(rope) ** (dims / head_dim)), 1.0
        inverse /= rope.number("factor", 1.0)
    else:
        for key in ("short_factor", "long_factor") if kind == "longrope" else ():
            factors = rope.config.get(key)
            if not isinstance(factors, list) or len(factors) != turned // 2:  # one would do for all
                raise rope.refusal(key, f"{turned // 2} numbers, one for each pair that is turned")
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](whole, torch.device("cpu"), seq_len=length, layer_type=layers)
        if kind == "longrope":  # its own, but where `scaled` says it
            scale = rope.number_if_given("attention_factor") or scale
    if not (inverse > 0).logical_and(inverse.isfinite()).all():
        raise ValueError("its frequencies are no positive numbers")
    return torch.nn.functional.pad(inverse.float(), (0, head_dim // 2 - len(inverse))), float(scale)
