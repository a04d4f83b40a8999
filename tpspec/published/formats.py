"""How the matrices of a published checkpoint are stored: which are codes, of what kind, and which are plain.

Knows module names; must not know the words of the tools that wrote them (quantizers.py), tensors, shards or devices.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Literal

from tpspec.errors import UserError
from tpspec.published.groups import FLOAT_SCALE_BITS, GROUPS, STORED_SCALE_BITS, Bits
from tpspec.published.multimodal import spellings, text_name

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["gptq", "awq", "packed", "int8", "llm_int8", "float8", "float4", "mxfp4", "fp4", "nf4"]
Table = Literal["e2m1", "e4m3", "fp4", "nf4"]  # what codes may stand for, if not for numbers in even steps
HEAD = "lm_head"
# Modules with matrices that tools do not mean where they say all.
NO_LINEAR = ("embed_tokens", "block_sparse_moe.input_linear", "block_sparse_moe.output_linear")
# What a module may consist of besides a weight or its codes, and a bias. Of activations and of the cache they are of no
# use here: neither is rounded.
UNUSED = frozenset((
    "input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
    "activation_scale", "k_scale", "v_scale",
))  # fmt: skip
PLAIN = ("F64", "F32", "F16", "BF16")  # dtypes of numbers that are no codes
NVFP4, MXFP4, BLOCK = 16, 32, 64  # inputs that share a scale; the last in bitsandbytes
TABLE_OF: dict[Kind, Table] = {"float8": "e4m3", "float4": "e2m1", "mxfp4": "e2m1", "fp4": "fp4", "nf4": "nf4"}
EVERY = "Linear"  # as a target: all matrices
PATTERN = "re:"  # before a regular expression


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one matrix is stored.

    bits: of a code, from 2 to 8. group: consecutive inputs that share a scale, None: all of them. zeros: groups have a
    zero point. shuffled: an input's group is read from a table (desc_act). less_one: zero points are stored one too low
    (GPTQ's first format). rows: of float8, outputs that share a scale, None: all of them. Of float4, the scale of a
    group is a float8, and all have another that multiplies, or divides, those; or it is a power of two (groups of 32).
    """

    kind: Kind
    bits: int = 8
    group: int | None = None
    zeros: bool = False
    shuffled: bool = False
    less_one: bool = False
    rows: int | None = None

    @property
    def is_small(self) -> bool:
        """Whether its codes are computed with, exactly; else the weights are held in the dtype of the model."""
        least = NVFP4 if self.kind == "float4" else GROUPS[-1]
        return self.group is None or self.group % least == 0

    @property
    def can_be_rounded(self) -> bool:
        """Whether its weights may be quantized again: floats of 8 bits lose no more than others then do."""
        return self.kind == "float8"

    @property
    def held_bits(self) -> Bits:
        """Of a code as it is computed with: those of 2 and 3 bits are held in 4, of 5 to 7 in 8."""
        return 4 if self.bits <= 4 else 8

    @property
    def step(self) -> int:
        """Held codes from one that is stored to the next, which have a scale so many times smaller."""
        return 1 << (self.held_bits - self.bits)

    @property
    def table(self) -> Table | None:
        return TABLE_OF.get(self.kind)

    @property
    def scale_bits(self) -> int:
        """Of a scale, as it is held."""
        return FLOAT_SCALE_BITS if self.table == "e2m1" else STORED_SCALE_BITS

    @property
    def gain_bits(self) -> int:
        """Of what an output has beside them."""
        return STORED_SCALE_BITS if self.kind == "float4" and self.group == NVFP4 else 0


Schemes = tuple[tuple[tuple[str, ...], Scheme | None], ...]  # by targets


@dataclass(frozen=True, slots=True)
class Stored:
    """schemes: by targets, the first that names a matrix counts; None: it is stored as it is. So are those of plain,
    and those that nothing names.

    seen: modules of which the files have plain weights, whatever is said of them: lists have words, parts of words,
    and patterns of several kinds. rounds: its publisher's kernels round activations as well; ours do not. named: of
    single modules, by their whole names; goes before schemes.
    """

    method: str
    schemes: Schemes
    plain: tuple[str, ...] = (HEAD,)
    rounds: bool = False
    seen: frozenset[str] = frozenset()
    named: tuple[tuple[frozenset[str], Scheme | None], ...] = ()

    def scheme_of(self, name: str) -> Scheme | None:
        """Of a matrix, by its module's name, such as model.layers.0.mlp.up_proj; None: a plain weight."""
        return _scheme_of(self, name)

    @property
    def small_bits(self) -> Bits | None:
        """Of its codes as they are held, the fewest; None where its weights are held in the dtype of the model."""
        return min((scheme.held_bits for scheme in self._small), default=None)

    @property
    def widths(self) -> tuple[tuple[int, Bits], ...]:
        """Bits of codes that cannot be rounded again: as they are stored, the fewest first, and as they are held."""
        fixed = (scheme for scheme in self._small if not scheme.can_be_rounded)
        return tuple(sorted({(scheme.bits, scheme.held_bits) for scheme in fixed}))

    @property
    def is_small(self) -> bool:
        """Whether the codes of all its matrices are computed with as they are."""
        return all(scheme is None or scheme.is_small for scheme in self._every)

    @property
    def _small(self) -> tuple[Scheme, ...]:
        """Those whose codes are computed with."""
        return tuple(scheme for scheme in self._every if scheme is not None and scheme.is_small)

    @property
    def _every(self) -> tuple[Scheme | None, ...]:
        return (*(scheme for _, scheme in self.schemes), *(scheme for _, scheme in self.named))


def plain_modules(dtypes: Mapping[str, str]) -> frozenset[str]:
    """Of the modules in a checkpoint, by its tensors' dtypes as safetensors spells them, those that are no codes."""
    parts = defaultdict[str, dict[str, str]](dict)
    for name, dtype in dtypes.items():
        module, _, part = text_name(name).rpartition(".")
        if part not in UNUSED and not part.endswith("bias"):  # which is also what a router chooses by
            parts[module][part] = dtype
    return frozenset(module for module, own in parts.items() if own.keys() == {"weight"} and own["weight"] in PLAIN)


@cache
def _scheme_of(stored: Stored, name: str) -> Scheme | None:
    if name in stored.seen or any(_names(entry, name) for entry in stored.plain):
        return None
    of_one = (scheme for names, scheme in stored.named if name in names)
    of_some = (scheme for targets, scheme in stored.schemes if any(_names(one, name) for one in targets))
    return next(chain(of_one, of_some), None)


def _names(entry: str, name: str) -> bool:
    """Whether an entry of a list names the module: by a pattern, or by some of the words between its dots. Some lists
    keep a dot at the end."""
    if entry.startswith(PATTERN):
        return any(re.match(entry.removeprefix(PATTERN), spelling) for spelling in spellings(name))
    if entry == EVERY:
        return not name.endswith(NO_LINEAR)
    return f".{text_name(entry).strip('.')}." in f".{name}."


def check_unquantized(stored: Stored | None, quantize: str | None) -> None:
    """UserError where weights that are codes already are asked to be quantized."""
    if quantize is not None and stored is not None and stored.widths:
        bits, held = stored.widths[0]
        own = f"{bits} bits" if bits == held else f"{bits} bits, held in {held},"
        raise UserError(
            f"quantize: {quantize}: this is a {stored.method} checkpoint with weights of {own} already; leave quantize "
            "out"
        )
