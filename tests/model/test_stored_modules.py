"""Which modules of a published quantized checkpoint are stored in codes, as its lists and its files say it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny
from tests.model import published
from tests.model.published import BLOCK, Format, publish
from tests.model.test_delta_net import tensors
from tests.model.test_stored import AT, CPU, changed, logits
from tpspec.comm.communicator import OneRank
from tpspec.errors import UserError
from tpspec.model.loader import Loader, load_whole
from tpspec.published.formats import Scheme, Stored
from tpspec.published.quantizers import stored_as
from tpspec.published.shape import ModelShape
from tpspec.topology.shards import Shard, split
from tpspec.topology.sizes import weight_bytes

SHARES = (3, 1, 2)
FORMATS = {
    "gptq": published.gptq(desc_act=True),
    "awq": published.awq(),
    "packed": published.pack_quantized(sym=False),
    "fp8": published.fp8(),
}
RATES = ("in_proj_a", "in_proj_b", "in_proj_ba")
PER_LAYER = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")


def is_right(quantized: Path, meant: Path, shares: tuple[int, ...] = (1,)) -> bool:
    return bool((logits(quantized, shares) - logits(meant, (1,))).abs().max() < 1e-4)


def said(config: dict[str, Any]) -> Stored:
    """What a quantization_config says."""
    made = stored_as({"quantization_config": config}, "here")
    assert made is not None
    return made


def held_by(quantized: Path, shape: ModelShape, shard: Shard) -> int:
    """Bytes of a shard's weights, once they are loaded."""
    states = 0 if shape.delta_net is None else 1
    decoder = Loader.open(quantized, shard, torch.float32, CPU).decoder(OneRank(), 8, num_states=states, compiled=False)
    return sum(x.nbytes for x in tensors([decoder.layers, decoder.norm, decoder.head]))


@pytest.mark.parametrize("rates", [(), RATES], ids=["rates as they are", "rates in codes"])
@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_layers_of_linear_attention_are_stored_as_others_are(
    kind: str, name: str, rates: tuple[str, ...], tmp_path: Path
) -> None:
    """As Qwen3.5's and Qwen3-Next's are in FP8, whose rates are in 16 bits though no list says so. Stands against names
    that are taken for plain weights, which then are missing."""
    form = FORMATS[name]
    quantized, meant = publish(tiny(kind, tmp_path / "plain"), tmp_path, Format(form.config, form.write, rates))
    assert is_right(quantized, meant, (2, 1))


@pytest.mark.parametrize("name", ["awq", "packed", "fp8"])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_a_plan_knows_codes_of_linear_attention(kind: str, name: str, tmp_path: Path) -> None:
    """Stands against a plan that counts them as plain weights."""
    form = FORMATS[name]
    quantized, _ = publish(tiny(kind, tmp_path / "plain"), tmp_path, Format(form.config, form.write, RATES))
    shape = ModelShape.of(quantized)
    for shard in split(shape, (2, 1)):
        assert shape.delta_net is not None
        key_of = 8 * len(shard.delta_values) * len(shape.delta_net.layers)  # which no plan counts
        assert held_by(quantized, shape, shard) - key_of == weight_bytes(shape, shard, "float32")


@pytest.mark.parametrize("kind", ["kimi_linear", "olmo_hybrid"])
def test_rates_and_what_they_are_made_of_may_be_in_codes(kind: str, tmp_path: Path) -> None:
    """Stands against a list of names of matrices, which lacked those: they were missing as plain weights."""
    form = Format(FORMATS["packed"].config, FORMATS["packed"].write, ("a_proj", "b_proj"))
    quantized, meant = publish(tiny(kind, tmp_path / "plain"), tmp_path, form)
    assert is_right(quantized, meant, (2, 1))


@pytest.mark.parametrize("name", list(FORMATS))
def test_what_layers_make_of_their_numbers_of_a_token_may_be_in_codes(name: str, tmp_path: Path) -> None:
    """As Gemma 4 E2B's and E4B's are."""
    form = FORMATS[name]
    plain = tiny("gemma4_small", tmp_path / "plain")
    assert is_right(*publish(plain, tmp_path, Format(form.config, form.write, PER_LAYER)), (2, 1))


@pytest.mark.parametrize(
    "listed", [["model.layers.0.", "self_attn"], ["model.layers.0.mlp", "attn"], [r"model\.layers\..*"]]
)
def test_a_weight_alone_is_plain_whatever_a_list_means(listed: list[str], tmp_path: Path) -> None:
    """Lists have words, words with a dot at the end, parts of words, and patterns. Stands against any that is not
    understood: what a module consists of tells the same."""
    form = FORMATS["awq"]
    form = Format(form.config | {"modules_to_not_convert": listed}, form.write)
    quantized, meant = publish(tiny("llama", tmp_path / "plain"), tmp_path, form)
    held, wanted = load_file(quantized / "model.safetensors"), load_file(meant / "model.safetensors")
    for module in {name.rpartition(".")[0] for name in held if ".layers.0." in name or "self_attn" in name}:
        if f"{module}.qweight" in held:
            for part in ("qweight", "qzeros", "scales"):
                del held[f"{module}.{part}"]
            held[f"{module}.weight"] = wanted[f"{module}.weight"]
    save_file(held, quantized / "model.safetensors", {"format": "pt"})
    assert is_right(quantized, meant, SHARES)
    shape = ModelShape.of(quantized)
    (whole,) = split(shape, (1,))
    assert held_by(quantized, shape, whole) == weight_bytes(shape, whole, "float32")


def test_a_dot_at_the_end_of_a_listed_name_changes_nothing() -> None:
    """Stands against a plan of codes for what is plain."""
    made = said({"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["model.layers.0."]})
    names = [f"model.layers.{index}.mlp.up_proj" for index in (0, 1, 10)]
    assert [made.scheme_of(name) is None for name in names] == [True, False, False]


def test_what_gptq_says_of_some_modules_goes_before_what_it_says_of_all(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: as published, the modules that stay as they are. Stands against one that is read with
    another's bits, and against the second pattern that names one."""
    dynamic = {
        "-:.*self_attn.*": {},
        "+:.*gate_proj": {"bits": 8, "sym": False},
        ".*_proj": {"group_size": 16},
        "lm_head": {},
    }
    made = said(published.gptq(dynamic=dynamic).config)
    usual = Scheme("gptq", 4, 32, less_one=True)
    names = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.experts.0.w1")
    found = [made.scheme_of(f"model.layers.0.{name}") for name in names]
    assert found == [
        None,
        Scheme("gptq", 8, 32, zeros=True, less_one=True),
        Scheme("gptq", 4, 16, less_one=True),
        usual,
    ]
    assert made.scheme_of("lm_head") is None
    assert made.small_bits == 4
    some = said(published.awq().config | {"dynamic": {"-:.*down_proj": {}}})
    assert [some.scheme_of(f"model.layers.0.mlp.{name}") is None for name in ("down_proj", "up_proj")] == [True, False]
    mixed = published.gptq(8, dynamic={".*": {"bits": 8}})
    mixed = Format(mixed.config | {"bits": 4}, mixed.write)
    assert is_right(*publish(tiny("llama", tmp_path / "plain"), tmp_path, mixed), SHARES)


def test_autoround_says_of_modules_what_goes_before_what_it_says_of_all(tmp_path: Path) -> None:
    """As mixed models are published: modules by their names in a whole model that sees, patterns, and blocks. Stands
    against a name whose dots are any letter (a router's names the gate of an MLP), a pattern that says nothing, a part
    of a name that is taken for a whole one, and a head in codes."""
    extra: dict[str, Any] = {
        "model.language_model.layers.0.self_attn.q_proj": {"bits": 16, "data_type": "float"},
        "model.language_model.layers.1.mlp.gate": {"bits": 16},
        ".*k_proj.*": {},
        "k_proj": {"bits": 8, "group_size": 16, "sym": False},
        r".*self_attn\.k.*": {"bits": 16},
    }
    blocks = "model.language_model.layers, model.visual.blocks"
    made = said(published.autoround(extra_config=extra, block_name_to_quantize=blocks).config)
    usual = Scheme("gptq", 4, 32, less_one=True)
    names = ("layers.0.self_attn.q_proj", "layers.10.self_attn.q_proj", "layers.1.mlp.gate_proj")
    assert [made.scheme_of(f"model.{name}") for name in names] == [None, usual, usual]
    assert made.scheme_of("model.layers.1.self_attn.k_proj") == Scheme("gptq", 8, 16, zeros=True, less_one=True)
    assert [made.scheme_of(name) for name in ("lm_head", "mtp.layers.0.mlp.up_proj")] == [None, None]
    assert made.small_bits == 4
    whole = said(published.autoround(extra_config={"lm_head": {"bits": 8}}).config)
    assert whole.scheme_of("lm_head") == Scheme("gptq", 8, 32, less_one=True)
    assert whole.scheme_of("mtp.layers.0.mlp.up_proj") == usual
    listed = said(published.autoround(to_quant_block_names=[["model.layers.0", "model.layers.1"]]).config)
    assert [listed.scheme_of(f"model.layers.{index}.mlp.up_proj") is None for index in (1, 10)] == [False, True]
    mixed = published.autoround(bits=8, extra_config={"(q|k|v|o|gate|up|down)_proj$": {"bits": 8}})
    mixed = Format(mixed.config | {"bits": 4}, mixed.write)
    assert is_right(*publish(tiny("llama", tmp_path / "plain"), tmp_path, mixed), SHARES)


def test_autoround_may_mix_few_bits_with_more(tmp_path: Path) -> None:
    """As its models of 2 bits are published: attention in 4, and a layer in 8. Stands against a plan by the bits that
    most have, and matrices of other bits that are computed as one."""
    plain, held, wanted = tiny("llama", tmp_path / "plain"), dict[str, Any](), dict[str, Any]()
    extra = {".*self_attn.*": {"bits": 4}, "model.layers.1.mlp.up_proj": {"bits": 8}}
    for bits, named in ((2, ""), (4, "self_attn"), (8, "layers.1.mlp.up_proj")):
        made = publish(plain, tmp_path / str(bits), published.autoround(bits=bits, extra_config=extra))
        for folder, into in zip(made, (held, wanted), strict=True):
            found = load_file(folder / "model.safetensors")
            into |= {name: x for name, x in found.items() if named in name}
    quantized, meant = (tmp_path / "2" / folder for folder in ("quantized", "meant"))
    for folder, into in ((quantized, held), (meant, wanted)):
        save_file(into, folder / "model.safetensors", {"format": "pt"})
    assert is_right(quantized, meant, SHARES)
    shape = ModelShape.of(quantized)
    assert shape.stored is not None
    assert shape.stored.widths == ((2, 4), (4, 4), (8, 8))
    for shard in split(shape, SHARES):
        assert held_by(quantized, shape, shard) == weight_bytes(shape, shard, "float32")


def test_older_autoround_says_its_layout_as_the_kernel_it_had_in_mind() -> None:
    """Stands against zero points read one too low: what such files call the method has a name in front, too."""
    older = published.autoround(sym=False).config | {"quant_method": "intel/auto-round", "packing_format": None}
    ways = ("auto_round:gptq:exllamav2", "auto_round:exllamav2", "auto_round:awq", "auto", None)
    found = [said(older | {"backend": way}).scheme_of("model.layers.0.mlp.up_proj") for way in ways]
    first, second = (Scheme("gptq", 4, 32, zeros=True, less_one=less_one) for less_one in (True, False))
    assert found == [first, second, Scheme("awq", 4, 32, zeros=True), first, first]


def test_the_narrowest_target_counts_in_whichever_group_it_is() -> None:
    """compressed-tensors' own order: names, patterns, classes, each by the alphabet; of groups with one and the same
    target the last. Stands against the first group that names a module."""

    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {"num_bits": bits, "strategy": "channel"}}

    wide, pattern, name = group(4, "Linear"), group(8, "re:.*up_proj"), group(4, "model.layers.0.mlp.up_proj")
    ways = [[wide, pattern, name], [name, pattern, wide], [pattern, name, wide]]
    ways += [[group(8, "Linear"), wide, pattern, name], [group(4, "re:.*up_proj$"), wide, pattern, name]]
    for groups in ways:
        named = dict(zip("abcd", groups, strict=False))
        made = said(published.compressed("pack-quantized", {}) | {"config_groups": named})
        found = [
            made.scheme_of(f"model.layers.{where}") for where in ("0.mlp.up_proj", "1.mlp.up_proj", "1.mlp.down_proj")
        ]
        assert [one is not None and one.bits for one in found] == [4, 8, 4]


def test_a_group_of_activations_alone_is_no_group_of_weights() -> None:
    config = published.compressed("pack-quantized", {"num_bits": 4, "strategy": "channel"})
    config["config_groups"]["b"] = {"targets": ["re:.*up_proj"], "weights": None, "input_activations": {"num_bits": 8}}
    assert said(config).scheme_of("model.layers.0.mlp.up_proj") == Scheme("packed", 4)


HEADS = {
    "gptq": published.gptq(lm_head=True),
    "awq": Format(published.awq().config | {"lm_head": True}, published.awq().write),
    "packed": Format(published.pack_quantized().config | {"ignore": []}, published.pack_quantized().write),
    "nvfp4": Format(published.nvfp4().config | {"ignore": []}, published.nvfp4().write),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", list(HEADS))
def test_a_head_in_codes_is_read_unless_it_is_the_table(
    name: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stands against the table of embeddings in its place without a word."""
    form = Format(HEADS[name].config, HEADS[name].write, ("lm_head",))
    quantized, meant = publish(tiny("llama", tmp_path / "plain"), tmp_path, form)
    if tied:
        for folder in (quantized, meant):
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        plain = load_file(meant / "model.safetensors")
        del plain["lm_head.weight"]
        save_file(plain, meant / "model.safetensors", {"format": "pt"})
    assert is_right(quantized, meant, SHARES)
    assert ("is not read, model.embed_tokens makes logits" in caplog.text) == tied


def test_what_kind_of_zero_points_gptq_has_is_said_by_either_key(tmp_path: Path) -> None:
    """GPTQModel's own key is `format`, beside which it writes the older one. Stands against zero points one off."""
    form = published.gptq(sym=False, v2=True)
    form.config["format"] = form.config.pop("checkpoint_format")
    assert is_right(*publish(tiny("llama", tmp_path / "plain"), tmp_path, form))
    both = form.config | {"checkpoint_format": "gptq"}
    with pytest.raises(UserError, match="checkpoint_format is 'gptq'; should be gptq_v2, as format is"):
        said(both)


@pytest.mark.parametrize(("group", "has_way"), [(8, True), (32, False)])
def test_who_has_groups_that_are_too_small_is_told_of_a_way_that_there_is(
    group: int, has_way: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stands against advice to quantize that is then refused, for other matrices are computed with as they are."""
    folder = tiny("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    form = published.gptq(group=group, dynamic={".*k_proj": {"group_size": 8}})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    (whole,) = split(ModelShape.of(folder), (1,))
    for quantize in (None, "int8") if has_way else (None,):
        Loader.open(folder, whole, torch.bfloat16, CPU, quantize)
    assert "GPTQ weights like these are held in bfloat16, 2 bytes each" in caplog.text
    assert ("with quantize: int8 it is one, rounded once more" in caplog.text) == has_way


def weights(config: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = config["config_groups"]["group_0"]["weights"]
    return section


OTHERWISE: dict[str, tuple[str, Any]] = {
    "zero points of activations": ("packed", lambda c, t: t.update({AT + "input_zero_point": torch.ones(1)})),
    "zero points that are not packed": ("packed", lambda c, t: unpack(t)),
    "powers of two": ("fp8", lambda c, t: c.update(scale_fmt="ue8m0")),
    "a block as a text": ("blocks", lambda c, t: weights(c).update(block_structure="24x32")),
    "no strategy": ("packed", lambda c, t: weights(c).pop("strategy")),
    "no transforms": ("packed", lambda c, t: c.update(transform_config={"config_groups": {}})),
    "a table, if it is said by true": ("ordered", lambda c, t: weights(c).update(actorder=True)),
}  # fmt: skip
WRITTEN = FORMATS | {
    "blocks": published.float_quantized("block"),
    "ordered": published.pack_quantized(actorder="group", group=16),
}


def unpack(held: dict[str, torch.Tensor]) -> None:
    """As compressed-tensors kept them before it packed them: one byte each, less the middle."""
    for name in [name for name in held if name.endswith("weight_zero_point")]:
        num_outputs = held[name.replace("zero_point", "scale")].shape[0]
        nibbles = [held[name] >> shift & 15 for shift in range(0, 32, 4)]
        held[name] = (torch.stack(nibbles, 1).flatten(0, 1)[:num_outputs] - 8).to(torch.int8)


@pytest.mark.parametrize("case", list(OTHERWISE))
def test_other_ways_to_say_the_same_are_read(case: str, tmp_path: Path) -> None:
    name, change = OTHERWISE[case]
    quantized, meant = publish(tiny("llama", tmp_path / "plain"), tmp_path, WRITTEN[name])
    assert is_right(changed(quantized, tmp_path, change), meant, SHARES)


def test_scales_that_are_powers_of_two_may_be_bytes(tmp_path: Path) -> None:
    quantized, meant = publish(tiny("llama", tmp_path / "plain"), tmp_path, published.fp8())
    plain = load_file(meant / "model.safetensors")

    def powers(config: dict[str, Any], held: dict[str, torch.Tensor]) -> None:
        config["scale_fmt"] = "ue8m0"
        for name in [name for name in held if name.endswith("_scale_inv")]:
            module = name.removesuffix("_scale_inv")
            held[name] = held[name].log2().round().exp2()
            scales = held[name].repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            weight = held[module].float()
            plain[module] = weight * scales[: weight.shape[0], : weight.shape[1]]
            held[name] = held[name].to(torch.float8_e8m0fnu)

    read = changed(quantized, tmp_path, powers)
    save_file(plain, meant / "model.safetensors", {"format": "pt"})
    assert is_right(read, meant, SHARES)


UNTOLD: dict[str, tuple[str, Any, str]] = {
    "codes that no config tells of": ("gptq", lambda c, t: c.update(modules_in_block_to_quantize=[["attn.q_proj"]]),
                                      "weight is missing; .* is stored as g_idx, qweight, qzeros, scales, and read as"),
    "floats that no config tells of": ("fp8", lambda c, t: c.update(modules_to_not_convert=["down_proj"]),
                                       "down_proj.weight is float8_e4m3fn, and read as plain"),
    "no scale": ("fp8", lambda c, t: t.pop(AT + "weight_scale_inv"), "or .weight_scale_inv is needed, and neither is"),
    "two scales": ("fp8", lambda c, t: t.update({AT + "weight_scale": torch.ones(1)}), "is needed, and both are there"),
    "a scale of another type": ("whole", lambda c, t: t.update({AT + "weight_scale": torch.tensor(1)}),
                                "weight_scale is of int64, not float16 or"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(UNTOLD))
def test_what_is_stored_otherwise_than_it_is_said_is_named(case: str, tmp_path: Path) -> None:
    """Stands against messages of a checkpoint that is incomplete, which it is not."""
    name, change, message = UNTOLD[case]
    written = FORMATS | {"whole": published.fp8(None)}
    quantized, _ = publish(tiny("llama", tmp_path / "plain"), tmp_path, written[name])
    folder = changed(quantized, tmp_path, change)
    with pytest.raises(UserError, match=message):
        load_whole(folder, ModelShape.of(folder), torch.float32, CPU, 8)


BESIDE: dict[str, tuple[str, Format, Any]] = {
    "AutoGPTQ": ("quantize_config.json", published.gptq(sym=False), lambda told: told),
    "AutoAWQ": ("quant_config.json", published.awq(), lambda told: {
        "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    "ModelOpt": ("hf_quant_config.json", published.modelopt(), lambda told: {
        "producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}),
}  # fmt: skip


@pytest.mark.parametrize("tool", list(BESIDE))
def test_a_file_beside_config_json_may_say_how_weights_are_stored(tool: str, tmp_path: Path) -> None:
    """As older tools left it. Stands against weights that are told missing, of a checkpoint that is whole."""
    name, form, written = BESIDE[tool]
    quantized, meant = publish(tiny("llama", tmp_path / "plain"), tmp_path, form)
    config = json.loads((quantized / "config.json").read_text())
    told = config.pop("quantization_config")
    del told["quant_method"]
    (quantized / "config.json").write_text(json.dumps(config))
    (quantized / name).write_text(json.dumps(written(told)))
    assert is_right(quantized, meant, SHARES)
    assert is_right(beside(meant, quantized / name), meant)
    (quantized / name).write_text(json.dumps({"bits": 9, "quant_algo": "NVFP4_AWQ"}))
    with pytest.raises(UserError, match=rf"{name}\.\w+ is (9|missing|'NVFP4_AWQ')"):
        ModelShape.of(quantized)
    (quantized / name).write_text("[]")
    with pytest.raises(UserError, match=f"{name} should hold a JSON object"):
        ModelShape.of(quantized)


def beside(plain: Path, file: Path) -> Path:
    """A folder of plain weights that such a file was left in."""
    made = Path(shutil.copytree(plain, plain.parent / "left"))
    shutil.copy(file, made)
    return made


def test_what_patterns_leave_out_is_seen_by_what_there_is_of_it(tmp_path: Path) -> None:
    """ModelOpt's lists have stars. Stands against a scale that is asked for."""
    form = published.modelopt()
    form.config["ignore"] = ["lm_head", "model.layers.1.mlp*"]
    quantized, meant = publish(tiny("llama", tmp_path / "plain"), tmp_path, form)
    plain = load_file(meant / "model.safetensors")

    def left_out(config: dict[str, Any], held: dict[str, torch.Tensor]) -> None:
        for name in [name for name in held if name.startswith("model.layers.1.mlp.")]:
            held.pop(name)
        held.update({name: x for name, x in plain.items() if name.startswith("model.layers.1.mlp.")})
        held["model.layers.1.mlp.up_proj.k_scale"] = torch.ones(())  # of a cache, as beside keys

    assert is_right(changed(quantized, tmp_path, left_out), meant)


def test_each_matrix_may_say_how_it_is_stored(tmp_path: Path) -> None:
    """As Nemotron 3 Super is published by ModelOpt: experts in NVFP4, others in FP8, by the names of its files. Stands
    against one of both read as the other."""
    plain = tiny("nemotron_h", tmp_path / "plain")
    ways = {"FP8": published.modelopt(), "NVFP4": published.nvfp4(by_modelopt=True)}
    made = {name: publish(plain, tmp_path / name, form) for name, form in ways.items()}
    held: list[dict[str, torch.Tensor]] = [{}, {}]  # codes, and what they stand for
    layers: dict[str, dict[str, object]] = {}
    for way, folders in made.items():
        for into, folder in zip(held, folders, strict=True):
            found = load_file(folder / "model.safetensors")
            into |= {name: x for name, x in found.items() if (".experts." in name) is (way == "NVFP4")}
    for name in [name for name in held[0] if name.endswith(".weight_scale")]:
        is_four = f"{name}_2" in held[0]
        said = {"quant_algo": "NVFP4", "group_size": 16} if is_four else {"quant_algo": "FP8"}
        layers[name.removesuffix(".weight_scale")] = said
    quantized, meant = made["FP8"]
    for folder, both in zip((quantized, meant), held, strict=True):
        save_file(both, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (quantized / "config.json").write_text(json.dumps(config))
    assert layers
    assert all(name.startswith("backbone.") for name in layers)
    assert is_right(quantized, meant)
    shape = ModelShape.of(quantized)
    assert shape.stored is not None
    assert shape.stored.is_small
    assert shape.stored.small_bits == 4


def test_files_that_are_written_anew_are_looked_at_anew(tmp_path: Path) -> None:
    """Stands against plain modules remembered of weights that are in codes by now."""
    quantized, meant = publish(tiny("llama", tmp_path / "plain"), tmp_path, FORMATS["fp8"])
    shape, module = ModelShape.of(quantized), "model.layers.0.mlp.up_proj"
    assert shape.stored is not None
    assert module not in shape.stored.seen
    shutil.copy(meant / "model.safetensors", quantized)
    again = ModelShape.of(quantized)
    assert again.stored is not None
    assert module in again.stored.seen
