"""Writes quantized checkpoints the way published ones are, straight from the documented names, shapes and packing, and
beside each the same model with the weights that its codes stand for.

Everything is done with numpy and one loop per packed value, in float64, so that it shares nothing with what reads it.
Sources: AutoGPTQ's, GPTQModel's and AutoRound's QuantLinear.pack, AutoAWQ's WQLinear_GEMM.from_linear,
compressed-tensors' pack_to_int32, transformers' FineGrainedFP8Config, OpenAI's gpt-oss, OCP's Microscaling Formats 1.0,
and bitsandbytes' QuantState with QLoRA (arXiv 2305.14314). Knows no tpspec.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Array = npt.NDArray[Any]
Tensors = dict[str, torch.Tensor]
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("indexer.wq_b", "indexer.wk"),
    *("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "c_fc", "c_fc_0", "c_fc_1", "c_proj"),
    *("query_key_value", "dense", "fc1", "fc2"),
    *("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj"),
    *("shared_mlp.input_linear", "shared_mlp.output_linear"),
)


BLOCK = (24, 32)  # rows and columns of floats of 8 bits: of as many columns, or times as many, codes are computed with


@dataclass(frozen=True)
class Format:
    """config: its quantization_config. write: a weight [O, I] -> its tensors, and the weight they stand for.

    edit: what is done to the config besides.
    """

    config: dict[str, Any]
    write: Callable[[Array, np.random.Generator], tuple[Tensors, Array]]
    also: tuple[str, ...] = field(default=())  # matrices besides the layers', such as lm_head


def publish(plain: Path, folder: Path, form: Format) -> tuple[Path, Path]:
    """From a plain folder: (the quantized checkpoint, the plain one it stands for), in `folder`."""
    noise = np.random.default_rng(0)
    tensors = load_file(plain / "model.safetensors")
    packed: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith((*PROJECTIONS, *form.also)) or not name.endswith(".weight"):
            packed[name] = tensor
            continue
        parts, weight = form.write(tensor.double().numpy(), noise)
        packed |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        tensors[name] = torch.from_numpy(weight).float()
    return _written(plain, folder, packed, form.config, tensors)


def _written(
    plain: Path, folder: Path, packed: Tensors, quantization: dict[str, Any], meant_tensors: Tensors
) -> tuple[Path, Path]:
    config = json.loads((plain / "config.json").read_text())
    quantized, meant = folder / "quantized", folder / "meant"
    for made, held, more in ((quantized, packed, {"quantization_config": quantization}), (meant, meant_tensors, {})):
        made.mkdir(parents=True)
        save_file(held, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(config | more))
        for extra in plain.glob("tokenizer*"):
            (made / extra.name).write_bytes(extra.read_bytes())
    return quantized, meant


def groups_of(num_inputs: int, group: int, noise: np.random.Generator | None = None) -> Array:
    """The group of every input; shuffled with noise, as when columns are quantized by their activations."""
    group = num_inputs if group == -1 else group
    of = np.arange(num_inputs) // group
    return of if noise is None else of[noise.permutation(num_inputs)]


def rounded(weight: Array, of: Array, bits: int, *, zeros: bool, scale_dtype: Any) -> tuple[Array, Array, Array, Array]:
    """Codes from 0 [O, I], scales [O, G], zero points [O, G], and the weight they stand for."""
    top, num_groups = 2**bits - 1, of.max() + 1
    codes, meant = np.zeros(weight.shape, int), np.zeros(weight.shape)
    scales, points = np.zeros((len(weight), num_groups)), np.zeros((len(weight), num_groups), int)
    for g in range(num_groups):
        part = weight[:, of == g]
        low, high = part.min(1), part.max(1)
        scale = (high - low) / top if zeros else 2 * np.maximum(-low, high) / top
        scale = torch.from_numpy(scale).to(scale_dtype).double().numpy()
        point = np.clip(np.round(-low / scale), 0, top).astype(int) if zeros else np.full(len(weight), 2 ** (bits - 1))
        codes[:, of == g] = np.clip(np.round(part / scale[:, None]) + point[:, None], 0, top)
        meant[:, of == g] = scale[:, None] * (codes[:, of == g] - point[:, None])
        scales[:, g], points[:, g] = scale, point
    return codes, scales, points, meant


def packed(values: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """[R, N] -> words of int32 with 32 // bits values: that at order[k] of each word's goes to bits k * bits."""
    each = 32 // bits
    order = order or tuple(range(each))
    words = np.zeros((len(values), -(-values.shape[1] // each)), np.uint32)
    for at in range(words.shape[1]):
        for k, of in enumerate(order):
            if at * each + of < values.shape[1]:
                words[:, at] |= values[:, at * each + of].astype(np.uint32) << np.uint32(bits * k)
    return words.view(np.int32)


def streamed(values: Array, bits: int) -> Array:
    """[R, N] -> words of int32 that follow each other without a gap, bit by bit: the value at `at` has those from
    at * bits on."""
    words = np.zeros((len(values), -(-values.shape[1] * bits // 32)), np.uint32)
    for at in range(values.shape[1]):
        for k in range(bits):
            word, bit = divmod(at * bits + k, 32)
            words[:, word] |= (values[:, at] >> k & 1).astype(np.uint32) << np.uint32(bit)
    return words.view(np.int32)


def lessened(points: Array, bits: int) -> Array:
    """Zero points [R, N] as GPTQ's first format packs them, less one: words taken as numbers, but where values cross
    them, one by one (GPTQModel)."""
    if 32 % bits:
        return streamed((points - 1) % 2**bits, bits)
    one = np.uint32(int(f"{1:0{bits}b}" * (32 // bits), 2))
    return (streamed(points, bits).view(np.uint32) - one).view(np.int32)


def tensor(values: Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(values))
    return made if dtype is None else made.to(dtype)


def gptq(
    bits: int = 4, group: int = 32, *, sym: bool = True, desc_act: bool = False, v2: bool = False, **more: Any
) -> Format:
    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        of = groups_of(weight.shape[1], group, noise if desc_act else None)
        codes, scales, points, meant = rounded(weight, of, bits, zeros=not sym, scale_dtype=torch.float16)
        made = {
            "qweight": tensor(streamed(codes, bits).T),
            "qzeros": tensor((streamed if v2 else lessened)(points.T, bits)),
            "scales": tensor(scales.T, torch.float16),
            "g_idx": tensor(of.astype(np.int32)),
        }
        return made, meant

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act,
              "checkpoint_format": "gptq_v2" if v2 else "gptq", "lm_head": False}  # fmt: skip
    return Format(config | more, write)


def awq(group: int = 32, *, sym: bool = False) -> Format:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        of = groups_of(weight.shape[1], group)
        codes, scales, points, meant = rounded(weight, of, 4, zeros=not sym, scale_dtype=torch.float16)
        made = {
            "qweight": tensor(packed(codes.T, 4, order)),
            "qzeros": tensor(packed(points.T, 4, order)),
            "scales": tensor(scales.T, torch.float16),
        }
        return made, meant

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True,
              "modules_to_not_convert": None}  # fmt: skip
    return Format(config, write)


def autoround(layout: str = "auto_round:auto_gptq", **more: Any) -> Format:
    """In the layout of GPTQ, without a table of groups, or in AWQ's, of which its zero points may be none."""
    sym, bits = more.get("sym", True), more.get("bits", 4)
    form = awq(sym=sym) if "awq" in layout else gptq(bits, sym=sym, v2=layout == "auto_round:gptqmodel")

    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        made, meant = form.write(weight, noise)
        return {name: part for name, part in made.items() if name != "g_idx"}, meant

    config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": sym, "data_type": "int",
              "packing_format": layout, "autoround_version": "0.9.5"}  # fmt: skip
    return Format(config | more, write)


def compressed(
    layout: str, weights: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",), **more: Any
) -> dict[str, Any]:
    one = {"targets": ["Linear"], "weights": {"dynamic": False} | weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": one},
            "ignore": list(ignore), "quantization_status": "compressed", "kv_cache_scheme": None} | more  # fmt: skip


def pack_quantized(
    bits: int = 4, group: int = 32, *, sym: bool = True, actorder: str | None = None, dtype: Any = torch.bfloat16,
    spaced: bool = False,
) -> Format:  # fmt: skip
    """spaced: as 0.17 packed bits that do not divide 32, as many to a word as fit whole."""
    pack = packed if spaced else streamed

    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        of = groups_of(weight.shape[1], group, noise if actorder == "group" else None)
        codes, scales, points, meant = rounded(weight, of, bits, zeros=not sym, scale_dtype=dtype)
        made = {
            "weight_packed": tensor(pack(codes, bits)),
            "weight_scale": tensor(scales, dtype),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            made["weight_zero_point"] = tensor(pack(points.T, bits).T)
        if actorder == "group":
            made["weight_g_idx"] = tensor(of.astype(np.int32))
        return made, meant

    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    said = {"num_bits": bits, "type": "int", "symmetric": sym, "actorder": actorder} | strategy
    return Format(compressed("pack-quantized", said), write)


def int_quantized(*, sym: bool = True) -> Format:
    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        of = groups_of(weight.shape[1], -1)
        codes, scales, points, meant = rounded(weight, of, 8, zeros=not sym, scale_dtype=torch.bfloat16)
        made = {"weight": tensor(codes - 128, torch.int8), "weight_scale": tensor(scales, torch.bfloat16)}
        if not sym:
            made["weight_zero_point"] = tensor(points - 128, torch.int8)
        return made, meant

    return Format(compressed("int-quantized", {"num_bits": 8, "symmetric": sym, "strategy": "channel"}), write)


def floats(weight: Array, rows: int, columns: int) -> tuple[torch.Tensor, Array, Array]:
    """In blocks of so many rows and columns: float8 [O, I], scales of blocks, and the weight they stand for."""
    num_blocks = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    scales, stored, meant = (
        np.zeros(num_blocks),
        torch.zeros(weight.shape, dtype=torch.float8_e4m3fn),
        np.zeros(weight.shape),
    )
    for i in range(num_blocks[0]):
        for j in range(num_blocks[1]):
            at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = np.float32(np.abs(weight[at]).max() / 448)
            stored[at] = tensor(weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[at] = stored[at].double().numpy() * scales[i, j]
    return stored, scales, meant


def float_quantized(strategy: str, block: tuple[int, int] = BLOCK) -> Format:
    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        whole = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": block}[strategy]
        stored, scales, meant = floats(weight, *whole)
        scale = tensor(scales, torch.float32)
        return {"weight": stored, "weight_scale": scale.view(1) if strategy == "tensor" else scale}, meant

    more = {"block_structure": list(block)} if strategy == "block" else {}
    config = compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": strategy} | more)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    return Format(config, write)


def fp8(block: tuple[int, int] | None = BLOCK) -> Format:
    """With blocks as DeepSeek and Qwen publish them, or one static scale for a matrix."""

    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        stored, scales, meant = floats(weight, *(block or weight.shape))
        if block is not None:
            return {"weight": stored, "weight_scale_inv": tensor(scales, torch.float32)}, meant
        scale = torch.tensor(scales.item(), dtype=torch.float32)
        return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, meant

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if block is None else "dynamic"}
    return Format(config | ({} if block is None else {"fmt": "e4m3", "weight_block_size": list(block)}), write)


def fbgemm() -> Format:
    """As Meta published Llama 3.1 405B."""
    write = float_quantized("channel").write
    return Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []}, write)


def modelopt() -> Format:
    """As NVIDIA publishes models in FP8, of which its older tools said so in hf_quant_config.json alone."""
    config = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_scheme": {"num_bits": 8},
        "ignore": ["lm_head"],
    }
    return Format(config, fp8(None).write)


FOURS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of E2M1, without the sign


def fours(weight: Array, scales: Array, group: int) -> tuple[Array, Array]:
    """With a scale for each group of inputs: two codes in a byte, the first lower, and the weight they stand for."""
    scaled = weight / np.repeat(scales, group, 1)[:, : weight.shape[1]]
    codes = np.abs(np.abs(scaled)[..., None] - FOURS).argmin(-1)
    meant = np.sign(scaled) * FOURS[codes] * np.repeat(scales, group, 1)[:, : weight.shape[1]]
    codes += 8 * (scaled < 0)
    pairs = np.zeros((len(codes), codes.shape[1] // 2), np.uint8)
    for at in range(pairs.shape[1]):
        pairs[:, at] = codes[:, 2 * at] | codes[:, 2 * at + 1] << 4
    return pairs, meant


def largest(weight: Array, group: int) -> Array:
    """Of each group of inputs, the last of which may be shorter."""
    firsts = range(0, weight.shape[1], group)
    return np.stack([np.abs(weight[:, first : first + group]).max(1) for first in firsts], 1)


def power_below(weight: Array) -> Array:
    """Exponents of groups of 32 such that the largest is at most 1.5 * 2^2."""
    exponents: Array = np.floor(np.log2(largest(weight, 32))).astype(int) - 2
    return exponents


def nvfp4(*, by_modelopt: bool = False) -> Format:
    """Groups of 16 with a float8, and a scale of all, by which compressed-tensors divides and ModelOpt multiplies."""

    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        of_all = np.float32(np.abs(weight).max() / (6 * 448))
        scale = tensor(largest(weight, 16) / 6 / of_all).to(torch.float8_e4m3fn)
        pairs, meant = fours(weight, scale.double().numpy() * of_all, 16)
        if by_modelopt:
            told = torch.tensor(of_all.item()), torch.tensor(0.5)
            return dict(zip(("weight", "weight_scale", "weight_scale_2", "input_scale"),
                            (tensor(pairs), scale, *told), strict=True)), meant  # fmt: skip
        told = torch.tensor([1 / of_all.item()]), torch.tensor([8.0])
        return dict(zip(("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
                        (tensor(pairs), scale, *told), strict=True)), meant  # fmt: skip

    if by_modelopt:
        return Format(modelopt().config | {"quant_algo": "NVFP4", "group_size": 16}, write)
    four = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    config = compressed("nvfp4-pack-quantized", four)
    config["config_groups"]["group_0"]["input_activations"] = four | {"dynamic": "local"}
    return Format(config, write)


def packed_mxfp4() -> Format:
    """As compressed-tensors packs any matrix: groups of 32 with an exponent."""

    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        exponents = power_below(weight)
        pairs, meant = fours(weight, 2.0**exponents, 32)
        return {"weight_packed": tensor(pairs), "weight_scale": tensor((exponents + 127).astype(np.uint8))}, meant

    four = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    return Format(compressed("mxfp4-pack-quantized", four), write)


def normal_fours() -> Array:
    """NF4: quantiles of a normal distribution, eight above zero and seven below, and zero (QLoRA, 3), of which the
    largest is 1."""
    most, quantile = 0.9677083, NormalDist().inv_cdf
    above = [quantile(one) for one in np.linspace(most, 0.5, 9)[:-1]]
    below = [-quantile(one) for one in np.linspace(most, 0.5, 8)[:-1]]
    return np.array(sorted([*above, 0.0, *below])) / max(above)


FOUR_OF = {
    "nf4": normal_fours(),
    "fp4": np.array([sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3)]),
}


def bitsandbytes(kind: str = "nf4", *, nested: bool = True) -> Format:
    """Blocks of 64, of the whole matrix, one row behind the other. nested: their scales are codes, too, of 256 numbers
    of a table, for so many of which there is one scale, and all have had their mean taken off."""
    numbers, rungs = FOUR_OF[kind].astype(np.float32), np.linspace(-1, 1, 256).astype(np.float32) ** 3

    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        blocks, each = weight.reshape(-1, 64), 256
        scales, below = np.abs(blocks).max(1), "weight.quant_state.bitsandbytes__" + kind
        said: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [*weight.shape]}
        made = {"weight.absmax": tensor(scales.astype(np.float32)), "weight.quant_map": tensor(numbers.copy())}
        if nested:
            offset = float(np.float32(scales.mean()))
            outer = np.array([np.abs(scales[at : at + each] - offset).max() for at in range(0, len(scales), each)])
            outer_of = np.repeat(outer.astype(np.float32), each)[: len(scales)]
            codes = np.abs(((scales - offset) / outer_of)[:, None] - rungs).argmin(1)
            scales = rungs[codes].astype(np.float64) * outer_of + offset
            said |= {"nested_blocksize": each, "nested_dtype": "float32", "nested_offset": offset}
            made |= {
                "weight.absmax": tensor(codes.astype(np.uint8)),
                "weight.nested_absmax": tensor(outer.astype(np.float32)),
                "weight.nested_quant_map": tensor(rungs.copy()),
            }
        codes = np.abs((blocks / scales[:, None])[..., None] - numbers).argmin(-1)
        pairs = np.zeros((codes.size // 2, 1), np.uint8)
        for at, (first, second) in enumerate(codes.reshape(-1, 2)):
            pairs[at] = first << 4 | second
        made |= {"weight": tensor(pairs), below: tensor(np.array([*json.dumps(said).encode()], np.uint8))}
        return made, (numbers[codes] * scales[:, None]).reshape(weight.shape)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
              "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None,
              "llm_int8_has_fp16_weight": False}  # fmt: skip
    return Format(config, write)


def of_tables() -> dict[str, Format]:
    """Those whose codes stand for what a table has, not for even steps. The last wants whole blocks of 64 inputs."""
    return {"nvfp4": nvfp4(), "mxfp4": packed_mxfp4(), "fp8": fp8(None), "nf4": bitsandbytes()}


def llm_int8() -> Format:
    """A row's largest weight is 127."""

    def write(weight: Array, noise: np.random.Generator) -> tuple[Tensors, Array]:
        largest = np.abs(weight).max(1, keepdims=True).astype(np.float32)
        codes = np.round(weight / largest * 127).astype(np.int8)
        made = {"weight": tensor(codes), "SCB": tensor(largest[:, 0]), "weight_format": torch.tensor(0).byte()}
        return made, codes * (largest.astype(np.float64) / 127)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0,
              "llm_int8_skip_modules": ["lm_head"], "llm_int8_has_fp16_weight": False}  # fmt: skip
    return Format(config, write)


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def publish_mxfp4(plain: Path, folder: Path) -> tuple[Path, Path]:
    """`publish` for gpt-oss, whose experts of a layer are one tensor, [experts, inputs, outputs]."""
    tensors = load_file(plain / "model.safetensors")
    packed: Tensors = {}
    for name, weights in list(tensors.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = weights
            continue
        blocks, scales, meant = microscaled(weights.transpose(1, 2).double().numpy())
        packed |= {f"{name}_blocks": tensor(blocks), f"{name}_scales": tensor(scales)}
        tensors[name] = torch.from_numpy(meant).float().transpose(1, 2).contiguous()
    return _written(plain, folder, packed, MXFP4, tensors)


def microscaled(weights: Array) -> tuple[Array, Array, Array]:
    """[N, O, I] -> blocks [N, O, I / 32, 16], scales [N, O, I / 32], and the weights they stand for."""
    rows = weights.reshape(-1, weights.shape[-1])
    exponents = power_below(rows)
    pairs, meant = fours(rows, 2.0**exponents, 32)
    blocks, scales = pairs.reshape(*weights.shape[:2], -1, 16), (exponents + 127).astype(np.uint8)
    return blocks, scales.reshape(blocks.shape[:3]), meant.reshape(weights.shape)
