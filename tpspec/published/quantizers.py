"""How tools that quantize say what they did: the quantization_config of a published checkpoint, read with types.

What is not supported is refused by name. Knows the keys of each tool; must not know tensors, shards or devices.
Sources: AutoGPTQ, GPTQModel, AutoAWQ, AutoRound, compressed-tensors, transformers (BitsAndBytesConfig,
FineGrainedFP8Config, FbgemmFp8Config, Mxfp4Config), NVIDIA's Model Optimizer, OCP's Microscaling Formats 1.0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, cast

from tpspec.errors import UserError
from tpspec.published.formats import BLOCK, EVERY, HEAD, MXFP4, NVFP4, PATTERN, Scheme, Stored
from tpspec.published.mixtures import mlp_names
from tpspec.published.multimodal import STORAGE, text_name
from tpspec.published.reads import Reads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpspec.published.formats import Kind, Schemes

FOURS = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}
MODULE = re.compile(rf"{HEAD}|[\w.-]+\.layers\.[\w.-]+")  # a name of one, in which a dot is a dot
GPTQ_BITS = (2, 3, 4, 8)  # of a code in its layout, which others have as well
PACKED_BITS = (2, 3, 4, 5, 6, 7, 8)  # of one that compressed-tensors packs
PLAIN_BITS = 16  # of a module that AutoRound left as it was
# AutoRound's layouts, as it has named them: whether zero points are stored one too low; of AWQ's, they are not.
AS_GPTQ = {
    "auto_round:auto_gptq": True, "auto_round:auto_gptq:exllamav2": True, "auto_round:gptq": True,
    "auto_round:gptq:exllamav2": True, "auto": True,
    "auto_round": False, "auto_round:gptqmodel": False, "auto_round:exllamav2": False,
}  # fmt: skip
AS_AWQ = ("auto_round:auto_awq", "auto_round:awq")


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
    at = names.within("model.layers.0.")
    experts = "" if names.together is None else at + names.together[0]
    if names.alternate and not has_blocks and stored.scheme_of(experts) is not None:
        raise read.refusal("quant_method", f"mxfp4, or one that leaves the experts of {model_type} as they are")


def _check_patterns(stored: Stored, where: str) -> None:
    for entry in (*stored.plain, *(one for targets, _ in stored.schemes for one in targets)):
        try:
            if entry.startswith(PATTERN):
                re.compile(entry.removeprefix(PATTERN))
        except re.error as error:
            raise UserError(f"{where}: {entry!r} is no pattern of modules: {error}") from error


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
    bits = cast("int", read.one_of("bits", GPTQ_BITS))
    return Scheme("gptq", bits, _group(read), zeros=not read.flag("sym", True),
                  shuffled=read.flag("desc_act", False), less_one=layout == "gptq")  # fmt: skip


def _overrides(read: Reads, scheme_of: Callable[[Reads], Scheme]) -> Schemes:
    """What GPTQModel's `dynamic` says of some modules: patterns, whose first that names one counts. With -: in front
    such modules are left as they are; else what is said is in place of what is said of all."""
    section, made = read.section("dynamic"), []
    for key in section.config:
        pattern = (PATTERN + key.removeprefix("+:").removeprefix("-:"),)
        said = _over(read, section.section(key))
        made.append((pattern, None if key.startswith("-:") else scheme_of(said)))
    return tuple(made)


def _over(read: Reads, own: Reads) -> Reads:
    """What is said of some modules, in place of what is said of all."""
    return Reads({**read.config, **own.config}, read.where, own.within)


def _by_scheme(names: Mapping[Scheme | None, set[str]]) -> tuple[tuple[frozenset[str], Scheme | None], ...]:
    """As Stored has those of single modules."""
    return tuple((frozenset(some), scheme) for scheme, some in names.items())


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
    bits = cast("int", read.one_of("w_bit" if "w_bit" in read.config else "bits", (4,)))
    return Scheme("awq", bits, group, zeros=True)


def _autoround(read: Reads) -> Stored:
    """Intel's. What is said of a module goes before what is said of a pattern, and both before what is said of all;
    the rest of the model is plain."""
    read.refuse("modules_in_block_to_quantize", "modules_to_not_convert", "dynamic")
    section, named, patterns = read.section("extra_config"), defaultdict[Scheme | None, set[str]](set), []
    for key in section.config:
        own = section.section(key)
        scheme = _autoround_scheme(_over(read, own))
        if MODULE.fullmatch(key):
            named[scheme].add(text_name(key))
        elif own.config:
            patterns.append(((f"{PATTERN}.*(?:{key})",), scheme))
    blocks = _blocks(read)
    usual = [] if HEAD in blocks else [((HEAD,), None)]
    schemes = (*patterns, *usual, (blocks or (EVERY,), _autoround_scheme(read)))
    return Stored("AutoRound", schemes, (), named=_by_scheme(named))


def _autoround_scheme(read: Reads) -> Scheme | None:
    read.refuse("rotation_config", "spinquant_config", "super_bits")
    bits = read.size("bits")
    if bits >= PLAIN_BITS:
        return None
    read.one_of("data_type", ("int",), "int")
    if read.size("act_bits", PLAIN_BITS) < PLAIN_BITS:
        raise read.refusal("act_bits", f"{PLAIN_BITS} or more: activations are not rounded")
    zeros, group = not read.flag("sym", True), _group(read)
    older = not read.config.get("packing_format") and str(read.config.get("backend")).startswith("auto_round")
    layout = read.one_of("backend" if older else "packing_format", (*AS_GPTQ, *AS_AWQ), "auto_round:auto_gptq")
    if layout in AS_AWQ:
        return Scheme("awq", cast("int", read.one_of("bits", (4,))), group, zeros)
    less_one = AS_GPTQ[str(layout)]
    return Scheme("gptq", cast("int", read.one_of("bits", GPTQ_BITS)), group, zeros, less_one=less_one)


def _blocks(read: Reads) -> tuple[str, ...]:
    """Which are quantized: names with commas between them, or lists of names; none where all are."""
    said = read.config.get("block_name_to_quantize") or read.config.get("to_quant_block_names") or []
    given: list[object] = [*said.split(",")] if isinstance(said, str) else said if isinstance(said, list) else [said]
    names = [name for some in given for name in (some if isinstance(some, list) else [some])]
    texts = tuple(name.strip() for name in names if isinstance(name, str))
    if len(texts) < len(names):
        raise read.refusal("block_name_to_quantize", "names with commas between them, or a list of names")
    return texts


def _bitsandbytes(read: Reads) -> Stored:
    """Every matrix but those that are named, or, where none are, but the head."""
    plain = (HEAD,) if read.config.get("llm_int8_skip_modules") is None else read.texts("llm_int8_skip_modules")
    if read.flag("load_in_8bit", False):
        read.one_of("llm_int8_has_fp16_weight", (False,), False)
        return Stored("LLM.int8", (((EVERY,), Scheme("llm_int8")),), plain, rounds=True)
    read.one_of("load_in_4bit", (True,))
    read.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
    kind = cast("Kind", read.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4"))
    return Stored(f"bitsandbytes {kind.upper()}", (((EVERY,), Scheme(kind, 4, BLOCK)),), plain)


def _fp8(read: Reads) -> Stored:
    read.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")  # the latter in MiniMax-M2
    read.one_of("scale_fmt", ("float", "ue8m0"), "float")  # the second: powers of two, whatever holds them
    read.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    read.refuse("modules_to_convert")
    plain = read.texts("modules_to_not_convert") or read.texts("ignored_layers")
    scheme = _float8(*_block(read, "weight_block_size"))
    return Stored("FP8", (((EVERY,), scheme),), (HEAD, *plain), rounds=True)


def _float8(rows: int | None, columns: int | None) -> Scheme:
    """Of a block of so many outputs and inputs, None: all of them, that share a scale."""
    return Scheme("float8", 8, columns, rows=rows)


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
    packed = layout == "pack-quantized"
    bits = cast("int", weights.one_of("num_bits", PACKED_BITS if packed else (4, 8), 8))
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
            return _float8(1, None)
    if weights.config.get("block_structure") is None:
        raise weights.refusal("block_structure", "two whole numbers above 0")
    return _float8(*_block(weights, "block_structure"))


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
    return Stored("FBGEMM FP8", (((EVERY,), _float8(1, None)),), plain, rounds=True)


def _modelopt(read: Reads) -> Stored:
    """NVIDIA's. What its patterns leave out is seen by what there is of it."""
    plain = read.texts("ignore") or read.texts("exclude_modules")
    if read.config.get("quant_algo") != "MIXED_PRECISION":
        algorithm, scheme = _algorithm(read)
        return Stored(f"ModelOpt {algorithm}", (((EVERY,), scheme),), (HEAD, *plain), rounds=True)
    layers, names = read.section("quantized_layers"), defaultdict[Scheme | None, set[str]](set)
    for name in layers.config:
        names[_algorithm(layers.section(name))[1]].add(text_name(name))
    return Stored("ModelOpt mixed", (), (HEAD, *plain), rounds=True, named=_by_scheme(names))


def _algorithm(read: Reads) -> tuple[object, Scheme]:
    algorithm = read.one_of("quant_algo", ("FP8", "NVFP4"))
    if algorithm == "FP8":
        return algorithm, Scheme("float8")
    read.one_of("group_size", (NVFP4,), NVFP4)
    return algorithm, Scheme("float4", 4, NVFP4)


METHODS = {
    "auto-round": _autoround, "intel/auto-round": _autoround, "awq": _awq, "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed, "fbgemm_fp8": _fbgemm, "fp8": _fp8, "gptq": _gptq, "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}  # fmt: skip
