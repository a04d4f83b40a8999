"""How a published checkpoint stores its matrices: the quantization_config of its config.json, read with types.

What is not supported is refused by name. Knows keys and module names; must not know tensors, shards or devices.
Sources: AutoGPTQ, GPTQModel, AutoAWQ, compressed-tensors, transformers (FineGrainedFP8Config, FbgemmFp8Config,
Mxfp4Config), NVIDIA's Model Optimizer, OCP's Microscaling Formats 1.0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, cast

from tpspec.errors import UserError
from tpspec.topology.groups import EXPONENT_BITS, GROUPS, STORED_SCALE_BITS, Bits
from tpspec.topology.mixtures import mlp_names
from tpspec.topology.multimodal import STORAGE, spellings, text_name
from tpspec.topology.reads import Reads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Kind = Literal["gptq", "awq", "packed", "int8", "float8", "float4", "mxfp4"]
HEAD = "lm_head"
LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
EXPERTS = ("w1", "w2", "w3")
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj_a", "in_proj_b", "in_proj_ba", "in_proj", "out_proj")
PER_LAYER = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", *LATENTS, *LINEAR, *PER_LAYER, "gate_proj", "up_proj", "down_proj",
            *EXPERTS, "fc1_latent_proj", "fc2_latent_proj", HEAD)  # fmt: skip
# What a module may consist of besides a weight or its codes, and a bias. Of activations and of the cache they are of no
# use here: neither is rounded.
UNUSED = frozenset((
    "input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
    "activation_scale", "k_scale", "v_scale",
))  # fmt: skip
PLAIN = ("F64", "F32", "F16", "BF16")  # dtypes of numbers that are no codes
HELD_PLAIN: tuple[Kind, ...] = ("float8", "float4")  # in the dtype of the model
NVFP4, MXFP4 = 16, 32  # inputs that share a scale
FOURS = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}
EVERY = "Linear"  # as a target: all matrices
PATTERN = "re:"  # before a regular expression


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one matrix is stored.

    group: consecutive inputs that share a scale, None: all of them. zeros: groups have a zero point. shuffled: an
    input's group is read from a table (desc_act). less_one: zero points are stored one too low (GPTQ's first format).
    block: of float8, outputs and inputs that share a scale, None: all of them. Of float4, the scale of a group is a
    float8, and all have another that multiplies, or divides, those; or it is a power of two (groups of 32).
    """

    kind: Kind
    bits: Bits = 8
    group: int | None = None
    zeros: bool = False
    shuffled: bool = False
    less_one: bool = False
    block: tuple[int | None, int | None] = (None, None)

    @property
    def is_small(self) -> bool:
        """Whether its codes are computed with as they are; else the weights are held in the dtype of the model."""
        return self.kind not in HELD_PLAIN and (self.group is None or self.group % GROUPS[-1] == 0)

    @property
    def scale_bits(self) -> int:
        """Of a scale, as it is held."""
        return EXPONENT_BITS if self.kind == "mxfp4" else STORED_SCALE_BITS


Schemes = tuple[tuple[tuple[str, ...], Scheme | None], ...]  # by targets


@dataclass(frozen=True, slots=True)
class Stored:
    """schemes: by targets, the first that names a matrix counts; None: it is stored as it is. So are those of plain.

    seen: modules of which the files have plain weights, whatever is said of them: lists have words, parts of words,
    and patterns of several kinds. rounds: its publisher's kernels round activations as well; ours do not. named: of
    a checkpoint that says of each matrix how it is stored, in place of schemes; others are plain.
    """

    method: str
    schemes: Schemes
    plain: tuple[str, ...] = (HEAD,)
    rounds: bool = False
    seen: frozenset[str] = frozenset()
    named: tuple[tuple[frozenset[str], Scheme], ...] = ()

    def scheme_of(self, name: str) -> Scheme | None:
        """Of a module such as model.layers.0.mlp.up_proj; None: a plain weight."""
        return _scheme_of(self, name)

    @property
    def small_bits(self) -> Bits | None:
        """Of its codes, the fewest; None where its weights are held in the dtype of the model."""
        return min((scheme.bits for scheme in self._every if scheme is not None and scheme.is_small), default=None)

    @property
    def is_small(self) -> bool:
        """Whether the codes of all its matrices are computed with as they are."""
        return all(scheme is None or scheme.is_small for scheme in self._every)

    @property
    def _every(self) -> tuple[Scheme | None, ...]:
        return (*(scheme for _, scheme in self.schemes), *(scheme for _, scheme in self.named))


def plain_modules(dtypes: Mapping[str, str]) -> frozenset[str]:
    """Of the matrices in a checkpoint, by its tensors' dtypes as safetensors spells them, those that are no codes."""
    parts = defaultdict[str, dict[str, str]](dict)
    for name, dtype in dtypes.items():
        module, _, part = text_name(name).rpartition(".")
        if module.endswith(MATRICES) and part not in UNUSED and part != "bias":
            parts[module][part] = dtype
    return frozenset(module for module, own in parts.items() if own.keys() == {"weight"} and own["weight"] in PLAIN)


@cache
def _scheme_of(stored: Stored, name: str) -> Scheme | None:
    if not name.endswith(MATRICES) or name in stored.seen or any(_names(entry, name) for entry in stored.plain):
        return None
    if stored.named:
        return next((scheme for names, scheme in stored.named if name in names), None)
    return next((scheme for targets, scheme in stored.schemes if any(_names(one, name) for one in targets)), None)


def _names(entry: str, name: str) -> bool:
    """Whether an entry of a list names the module: by a pattern, or by some of the words between its dots. Some lists
    keep a dot at the end."""
    if entry.startswith(PATTERN):
        return any(re.match(entry.removeprefix(PATTERN), spelling) for spelling in spellings(name))
    return entry == EVERY or f".{text_name(entry).strip('.')}." in f".{name}."


def stored_as(config: dict[str, object], where: str) -> Stored | None:
    """None for a checkpoint that is not quantized."""
    key = next((key for key in STORAGE if config.get(key)), None)
    if key is None:
        return None
    read = Reads(config, where).section(key)
    method = read.text("quant_method")
    if method not in METHODS:
        raise read.refusal("quant_method", f"one of {', '.join(METHODS)}, which are supported")
    stored = METHODS[method](read)
    _check_patterns(stored, f"{where}: {key}")
    _check_experts(stored, read, str(config.get("model_type")), mixed=bool(config.get("enable_moe_block")))
    return stored


def _check_experts(stored: Stored, read: Reads, model_type: str, *, mixed: bool) -> None:
    """Those of gpt-oss' layers are one tensor in mxfp4, and in no other format; and nobody else's are."""
    names = mlp_names(model_type, mixed=mixed)
    has_blocks = any(scheme is not None and scheme.kind == "mxfp4" for _, scheme in stored.schemes)
    if has_blocks and not names.alternate:
        raise read.refusal("quant_method", f"another for {model_type}: mxfp4 is read as gpt_oss has it")
    experts = f"{names.within('model.layers.0.')}experts.{names.together}"
    if names.alternate and not has_blocks and stored.scheme_of(experts) is not None:
        raise read.refusal("quant_method", f"mxfp4, or one that leaves the experts of {model_type} as they are")


def _check_patterns(stored: Stored, where: str) -> None:
    for entry in (*stored.plain, *(one for targets, _ in stored.schemes for one in targets)):
        try:
            if entry.startswith(PATTERN):
                re.compile(entry.removeprefix(PATTERN))
        except re.error as error:
            raise UserError(f"{where}: {entry!r} is no pattern of modules: {error}") from error


def check_unquantized(stored: Stored | None, quantize: str | None) -> None:
    """UserError where weights that are codes already are asked to be quantized."""
    if quantize is not None and stored is not None and stored.small_bits is not None:
        raise UserError(
            f"quantize: {quantize}: this is a {stored.method} checkpoint with weights of {stored.small_bits} bits "
            "already; leave quantize out"
        )


def _group(read: Reads, key: str = "group_size") -> int | None:
    return None if read.config.get(key) == -1 else read.size(key)


def _gptq(read: Reads) -> Stored:
    read.one_of("pack_dtype", ("int32",), "int32")
    lists = read.config.get("modules_in_block_to_quantize") or [[EVERY]]
    if not isinstance(lists, list) or not all(isinstance(some, list) for some in lists):
        raise read.refusal("modules_in_block_to_quantize", "a list of lists of texts")
    usual = (tuple(str(name) for some in lists for name in some), _gptq_scheme(read))
    return Stored("GPTQ", (*_overrides(read, _gptq_scheme), usual), () if read.flag("lm_head", False) else (HEAD,))


def _gptq_scheme(read: Reads) -> Scheme:
    """Newer files say twice how zero points are kept."""
    read.refuse("rotation", "is_marlin_format", "adapter")
    known = ("gptq", "gptq_v2")
    layout = read.one_of("format", known, read.one_of("checkpoint_format", known, "gptq"))
    if read.one_of("checkpoint_format", known, layout) != layout:
        raise read.refusal("checkpoint_format", f"{layout}, as format is")
    bits = cast("Bits", read.one_of("bits", (4, 8)))
    return Scheme("gptq", bits, _group(read), zeros=not read.flag("sym", True),
                  shuffled=read.flag("desc_act", False), less_one=layout == "gptq")  # fmt: skip


def _overrides(read: Reads, scheme_of: Callable[[Reads], Scheme]) -> Schemes:
    """What GPTQModel's `dynamic` says of some modules: patterns, whose first that names one counts. With -: in front
    such modules are left as they are; else what is said is in place of what is said of all."""
    section, made = read.section("dynamic"), []
    for key in section.config:
        pattern = (PATTERN + key.removeprefix("+:").removeprefix("-:"),)
        own = section.section(key)
        said = Reads({**read.config, **own.config}, read.where, own.within)
        made.append((pattern, None if key.startswith("-:") else scheme_of(said)))
    return tuple(made)


def _awq(read: Reads) -> Stored:
    usual, plain = ((EVERY,), _awq_scheme(read)), read.texts("modules_to_not_convert")
    schemes = (*_overrides(read, _awq_scheme), usual)
    return Stored("AWQ", schemes, plain if read.flag("lm_head", False) else (HEAD, *plain))


def _awq_scheme(read: Reads) -> Scheme:
    read.refuse("rotation", "adapter")
    read.one_of("version", ("gemm", "GEMM"), "gemm")
    for key in ("format", "checkpoint_format"):
        read.one_of(key, ("gemm",), "gemm")
    read.one_of("zero_point", (True,), True)
    group = _group(read, "q_group_size" if "q_group_size" in read.config else "group_size")
    bits = cast("Bits", read.one_of("w_bit" if "w_bit" in read.config else "bits", (4,)))
    return Scheme("awq", bits, group, zeros=True)


def _fp8(read: Reads) -> Stored:
    read.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")  # the latter in MiniMax-M2
    read.one_of("scale_fmt", ("float", "ue8m0"), "float")  # the second: powers of two, whatever holds them
    read.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    read.refuse("modules_to_convert")
    plain = read.texts("modules_to_not_convert") or read.texts("ignored_layers")
    scheme = Scheme("float8", block=_block(read, "weight_block_size"))
    return Stored("FP8", (((EVERY,), scheme),), (HEAD, *plain), rounds=True)


def _block(read: Reads, key: str) -> tuple[int | None, int | None]:
    sizes = read.config.get(key)
    if isinstance(sizes, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", sizes):  # as compressed-tensors once wrote them
        sizes = [*map(int, sizes.split("x"))]
    match sizes:
        case None:
            return None, None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise read.refusal(key, "two whole numbers above 0")


def _compressed(read: Reads) -> Stored:
    read.refuse("moe_sparsity_config")
    read.section("transform_config").refuse("config_groups")
    read.section("sparsity_config").one_of("format", ("dense",), "dense")
    groups = read.section("config_groups")
    sections = [one for one in map(groups.section, groups.config) if one.config.get("weights")]
    if not sections:
        raise read.refusal("config_groups", "a section with at least one group with weights")
    found = {target: _compressed_scheme(read, one) for one in sections for target in _targets(one)}  # the last counts
    schemes = tuple(((target,), found[target]) for target in sorted(found, key=_order))
    rounds = any(one.config.get("input_activations") for one in sections)
    return Stored("compressed-tensors", schemes, read.texts("ignore"), rounds)


def _targets(group: Reads) -> tuple[str, ...]:
    if not (targets := group.texts("targets")):
        raise group.refusal("targets", f"a list of at least one text, as [{EVERY}]")
    return targets


def _order(target: str) -> tuple[bool, bool, str]:
    """A name goes before a pattern, and a pattern before all matrices, in whichever group they are."""
    return target == EVERY, target.startswith(PATTERN), target


def _compressed_scheme(read: Reads, group: Reads) -> Scheme:
    group.refuse("output_activations")
    layout = (group if group.config.get("format") else read).one_of(
        "format", ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", *FOURS)
    )
    weights = group.section("weights")
    weights.one_of("dynamic", (False,), False)
    if layout in FOURS:
        return _compressed_fours(weights, FOURS[str(layout)])
    if weights.one_of("type", ("int", "float"), "int") == "float":
        return _compressed_floats(weights)
    packed, bits = layout == "pack-quantized", cast("Bits", weights.one_of("num_bits", (4, 8), 8))
    columns = _group(weights) if weights.one_of("strategy", ("group", "channel"), _usual(weights)) == "group" else None
    zeros = not weights.flag("symmetric", True)
    order = weights.one_of("actorder", ("group", "dynamic", "weight", "static", True, False), False)
    # What is not packed has a byte to a code, whatever its bits.
    kind: Kind = "packed" if packed else "int8"
    return Scheme(kind, bits if packed else 8, columns, zeros, shuffled=order in ("group", "dynamic", True))


def _usual(weights: Reads) -> str | None:
    """The strategy, where none is named, that a size of groups stands for."""
    size = weights.config.get("group_size")
    return None if size is None else "channel" if size == -1 else "group"


def _compressed_floats(weights: Reads) -> Scheme:
    weights.one_of("num_bits", (8,), 8)
    weights.one_of("symmetric", (True,), True)
    match weights.one_of("strategy", ("tensor", "channel", "block"), _usual(weights) or "tensor"):
        case "tensor":
            return Scheme("float8")
        case "channel":
            return Scheme("float8", block=(1, None))
    if weights.config.get("block_structure") is None:
        raise weights.refusal("block_structure", "two whole numbers above 0")
    return Scheme("float8", block=_block(weights, "block_structure"))


def _compressed_fours(weights: Reads, group: int) -> Scheme:
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (4,))
    weights.one_of("symmetric", (True,), True)
    weights.one_of("strategy", ("tensor_group", "group"), "group")
    weights.one_of("group_size", (group,), group)
    return Scheme("float4", 4, group)


def _mxfp4(read: Reads) -> Stored:
    """Experts alone are; modules_to_not_convert, which says so with stars for numbers, adds nothing."""
    return Stored("MXFP4", ((("mlp.experts",), Scheme("mxfp4", 4, MXFP4)),))


def _fbgemm(read: Reads) -> Stored:
    """As Llama 3.1 405B was published: a scale for a row."""
    plain = (HEAD, *read.texts("modules_to_not_convert"))
    return Stored("FBGEMM FP8", (((EVERY,), Scheme("float8", block=(1, None))),), plain, rounds=True)


def _modelopt(read: Reads) -> Stored:
    """NVIDIA's. What its patterns leave out is seen by what there is of it."""
    plain = read.texts("ignore") or read.texts("exclude_modules")
    if read.config.get("quant_algo") != "MIXED_PRECISION":
        algorithm, scheme = _algorithm(read)
        return Stored(f"ModelOpt {algorithm}", (((EVERY,), scheme),), (HEAD, *plain), rounds=True)
    layers, names = read.section("quantized_layers"), defaultdict[Scheme, set[str]](set)
    for name in layers.config:
        names[_algorithm(layers.section(name))[1]].add(text_name(name))
    named = tuple((frozenset(some), scheme) for scheme, some in names.items())
    return Stored("ModelOpt mixed", (), (HEAD, *plain), rounds=True, named=named)


def _algorithm(read: Reads) -> tuple[object, Scheme]:
    algorithm = read.one_of("quant_algo", ("FP8", "NVFP4"))
    if algorithm == "FP8":
        return algorithm, Scheme("float8")
    read.one_of("group_size", (NVFP4,), NVFP4)
    return algorithm, Scheme("float4", 4, NVFP4)


METHODS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "fbgemm_fp8": _fbgemm,
           "modelopt": _modelopt, "mxfp4": _mxfp4}  # fmt: skip
