"""What a user gets wrong is one message that names the thing, the right exit code, and no traceback.

Through the front door of `generate`: in this process where one rank is enough to see it, under torchrun where not.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny, write_tokenizer
from tpspec.errors import OutOfMemory, UserError
from tpspec.generate import main
from tpspec.roles import door, memory
from tpspec.roles.fit import check_fits
from tpspec.topology.config import load

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
WORLDS = Path(__file__).parent / "worlds"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SOON_S = 25  # a start of torchrun and torch takes most of it on a busy machine; a time limit of ours is 60 s


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny("smollm2", tmp_path / "model")


@pytest.fixture
def topology_file(tmp_path: Path, model: Path) -> Callable[..., str]:
    """A topology of the model, for one rank, with other keys where asked."""

    def write(num_ranks: int = 1, **keys: Any) -> str:
        target = {"model": str(model), "ranks": list(range(num_ranks)), "dtype": "float32"} | keys.pop("target", {})
        made = {"name": "a test", "target": target, "device": "cpu", "cache": {"tokens": 256}} | keys
        path = tmp_path / "topology.yaml"
        path.write_text(json.dumps(made, indent=1))  # JSON is YAML
        return str(path)

    return write


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = UserError.exit_code) -> str:
    """The one message on stderr, when all is as it should be."""
    capsys.readouterr()  # transformers shows a bar where a checkpoint is written
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    return the_message(printed.err)


def the_message(stderr: str) -> str:
    assert "Traceback" not in stderr
    assert stderr.count("tpspec: error: ") == 1, stderr
    assert stderr.startswith("tpspec: error: "), stderr
    assert stderr.endswith("\n")
    return stderr.removeprefix("tpspec: error: ").rstrip("\n")


# What is wrong with the command


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("draft.tokenz=4", ["draft.tokenz", "unknown key", "did you mean tokens?"]),
        ("drafts=4", ["drafts", "unknown key", "did you mean draft?"]),
        ("draft.tokens=many", ["draft.tokens", "'many'", "from 1 to 64"]),
        ("cache.tokens=0.5", ["cache.tokens", "0.5", "a whole number"]),
        ("target.ranks=[0, 0]", ["target.ranks", "distinct"]),
        ("target.ranks=[0, -1]", ["target.ranks", "from 0"]),
        ("target.ranks=[1]", ["target.ranks", "rank 0 idle"]),
        ("draft={source: model, model: m, placement: {gaps: 5}}", ["draft.placement", "rank 5 holds no shard"]),
        ("pipeline.policy=fan_out", ["pipeline.policy", "should be serial"]),
        ("target.dtype=float8", ["target.dtype", "'float8'", "float32, bfloat16 or float16"]),
        ("draft.source=oracle", ["draft.source", "'oracle'", "one of none, ngram, "]),
        ("draft.source=model", ["draft.model", "is missing"]),
        ("target.quantize=int2", ["target.quantize", "'int2'", "null, int8 or int4"]),
        ("target.qk_norm=replicated", ["target.qk_norm", "'replicated'", "reduce or replicate"]),
        ("target.qk_norm=replicate", ["target.qk_norm", "no norm over the queries of all heads", "should be reduce"]),
        (
            "draft={source: ngram, quantize: int4}",
            ["draft.quantize", "no layers of its own", "source model or eagle or mtp"],
        ),
        ("accept=always", ["accept", "'always'", "match or rejection"]),
        ("target.ranks=[0, 3000000000]", ["target.ranks", "leaves rank 1, 2,", "and more idle"]),
        ("draft.source=[[ngram]]", ["draft.source", "one of none, ngram, "]),
        ("draft.source=[{a: b}]", ["draft.source", "one of none, ngram, "]),
        ("draft={source: none, source: ngram}", ["draft.source", "is given twice"]),
        (
            "draft={source: early_exit, options: {layer: abc}}",
            ["draft.options: layer is 'abc'", "should be a whole number"],
        ),
        ("target={1: 2}", ["target.1", "unknown key"]),
        ("link={null: 1}", ["link.null", "unknown key"]),
        ("cache.tokens=1" + 400 * "0", ["cache.tokens", "a whole number of tokens"]),
        ("cache.tokens=0x1" + 5000 * "0", ["cache.tokens", "thousands of digits", "a whole number of tokens"]),
        ("draft.tokens=" + 3000 * "[", ["draft.tokens", "not a YAML value"]),
        ("target.model=~nobody-here/model", ["~nobody-here/model", "should be a folder"]),
        ("target.model=" + 300 * "m", ["mmm", "should be a folder"]),
        ("nonsense", ["nonsense", "key.path=value"]),
        ("draft.tokens=[", ["draft.tokens"]),
    ],
)
def test_a_key_that_is_wrong_is_named_with_what_would_be_right(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], override: str, said: list[str]
) -> None:
    """Stands against misspelt options that are dropped, and values that are bent until they fit."""
    message = refused(capsys, [topology_file(), "--prompt", "a", "--set", override])
    assert all(words.lower() in message.lower() for words in said), message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--top-q"], "unrecognized arguments: --top-q (see python -m tpspec.generate --help)"),
        (["--top-k", "many"], "argument --top-k: invalid int value: 'many' (see python -m tpspec.generate --help)"),
        (["--prom"], "unrecognized arguments: --prom (see python -m tpspec.generate --help)"),
    ],
)
def test_an_option_that_there_is_not_is_one_message(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Stands against the usage and the fault from every rank, and beginnings of options that are taken for them."""
    assert refused(capsys, words) == said


def test_a_topology_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "nowhere.yaml"
    assert str(path) in refused(capsys, [str(path), "--prompt", "a"])


@pytest.mark.parametrize("text", [": [", "- a list", "\0", "", "name: {"])
def test_a_topology_that_is_no_yaml_mapping(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    assert str(path) in refused(capsys, [str(path), "--prompt", "a"])


def test_a_folder_instead_of_a_topology(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """The likeliest mistake of all: the model where the topology belongs."""
    assert str(model) in refused(capsys, [str(model), "--prompt", "a"])


def test_a_world_of_the_wrong_size_prints_the_command_that_is_right(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str]
) -> None:
    """Stands against a shard that waits for others that nobody started."""
    path = topology_file(2)
    message = refused(capsys, [path, "--prompt", "a"])
    assert "a test needs 2 ranks, this world has 1" in message
    assert message.endswith(f"torchrun --nproc-per-node 2 -m tpspec.generate {path}")
    changed = ["--set", "target.ranks=[0, 1, 2]"]
    message = refused(capsys, [path, "--prompt", "a", *changed])
    assert message.endswith(f"torchrun --nproc-per-node 3 -m tpspec.generate {path} {shlex.join(changed)}")


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str]) -> None:
    message = refused(capsys, [topology_file(target={"model": "./no/such/folder"}), "--prompt", "a"])
    assert "no model './no/such/folder'" in message


def test_no_prompt_at_all(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], tmp_path: Path
) -> None:
    assert "--prompt TEXT or --prompts FILE" in refused(capsys, [topology_file()])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    assert refused(capsys, [topology_file(), "--prompts", str(empty)]).startswith(
        f"{empty}: has no prompts; should hold"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON at column 2"),
        ("[" * 100_000, "not JSON that can be read"),
        ('{"prompt": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": "a\\ud800"}', "holds bytes that are no text; should be UTF-8"),
        ("[1]", '"prompt"'),
        ('{"prompt": 5}', '"prompt"'),
        ('{"text": "a"}', '"prompt"'),
        ('{"prompt": "a", "kind": "poem"}', "poem"),
        ('{"prompt": "a", "kind": ["chat"]}', "kind"),
    ],
)
def test_a_bad_line_of_prompts_is_named_by_its_number(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], tmp_path: Path, line: str, said: str
) -> None:
    """Blank lines count: the number is the editor's."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    message = refused(capsys, [topology_file(), "--prompts", str(path)])
    assert message.startswith(f"{path}:3: ")
    assert said in message


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ' * 5000 + "1" + "}" * 5000], ids=["cut", "a list", "too deep"])
def test_a_schema_that_cannot_be_read_is_named(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(text)
    message = refused(capsys, [topology_file(), "--prompt", "a", "--json-schema", str(path)])
    assert f"argument --json-schema: {path}: " in message


@pytest.mark.parametrize("what", ["missing", "folder", "latin-1"])
def test_a_file_of_prompts_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], tmp_path: Path, what: str
) -> None:
    path = tmp_path / "prompts"
    if what == "folder":
        path.mkdir()
    elif what == "latin-1":
        path.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    assert refused(capsys, [topology_file(), "--prompts", str(path)]).startswith(f"{path}: cannot be read")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--temperature", "-0.1", "0, or from 1e-06 to 100"),
        ("--temperature", "nan", "0, or from 1e-06 to 100"),
        ("--temperature", "1e9", "0, or from 1e-06 to 100"),
        ("--top-p", "0", "above 0, at most 1"),
        ("--top-p", "1.5", "above 0, at most 1"),
        ("--top-k", "-1", "0 (off) or more"),
        ("--min-p", "2", "from 0 to 1"),
        ("--temperature", "1e-300", "0, or from 1e-06 to 100"),
        ("--repetition-penalty", "0", "from 0.01 to 100"),
        ("--seed", str(2**63), "a 64-bit integer"),
    ],
)
def test_a_sampling_option_out_of_range_is_named_as_it_was_given(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], option: str, value: str, said: str
) -> None:
    message = refused(capsys, [topology_file(), "--prompt", "a", option, value])
    assert message.startswith(f"{option} is ")
    assert said in message


def test_a_topology_cannot_be_saved_where_there_is_no_folder(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "no" / "folder.yaml"
    assert str(path) in refused(capsys, [topology_file(), "--prompt", "a", "--save-topology", str(path)])


def test_a_topology_that_the_disk_has_no_room_for_is_one_line(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str]
) -> None:
    said = refused(capsys, [topology_file(), "--prompt", "a", "--save-topology", "/dev/full"])
    assert said.startswith("--save-topology /dev/full: cannot be written: No space left on device")


@pytest.mark.parametrize(("full", "code", "said"), [(True, 2, "No space left on device"), (False, 141, "")])
def test_answers_that_cannot_be_printed_end_without_a_traceback(
    topology_file: Callable[..., str], full: bool, code: int, said: str
) -> None:
    """A full disk is told, and `| head`, which has read what it wanted, is told nothing."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "tpspec.generate", topology_file(), "--prompt", "a", "--max-tokens", "2"]
    with open("/dev/full" if full else os.devnull, "wb") as disk:
        stdout = disk.fileno() if full else writes
        done = subprocess.run(command, env=ENV, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert done.returncode == code, done.stderr
    assert done.stderr == (f"tpspec: error: standard output: cannot be written: {said}\n" if said else "")


# What is wrong with the model


def config_with(**keys: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return spoil


def config_of(text: str | None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "config.json").unlink()
        if text is not None:
            (folder / "config.json").write_text(text)

    return spoil


def tensors_with(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return spoil


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: int(len(whole) * keep)])

    return spoil


def indexed(index: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))

    return spoil


def unreadable(name: str) -> Callable[[Path], None]:
    """To root too, whom no mode keeps out."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return spoil


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rope(**parameters: object) -> Callable[[Path], None]:
    return config_with(rope_parameters={"rope_type": "default", "rope_theta": 1e4} | parameters)


BIAS = "model.layers.0.self_attn.q_proj.bias"
TABLE = "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 263, "n_positions": 64}
SPOILT: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no config": (config_of(None), ["config.json"]),
    "a config cut short": (config_of('{"model_type": "llama", '), ["config.json", "JSON"]),
    "a config that is a list": (config_of("[]"), ["config.json", "object"]),
    "a config without a size": (config_with(hidden_size=None), ["hidden_size is missing"]),
    "a size that is text": (config_with(num_hidden_layers="two"), ["num_hidden_layers is 'two'"]),
    "heads that do not group": (config_with(num_key_value_heads=4), ["num_key_value_heads is 4", "divisor"]),
    "another architecture": (config_of(json.dumps(GPT2)), ["gpt2", "not supported", "llama"]),
    "an architecture nobody knows": (config_with(model_type="hyena9"), ["hyena9"]),
    "an activation": (config_with(hidden_act="gelu"), ["hidden_act", "gelu"]),
    "a rope nobody knows": (
        config_with(rope_parameters={"rope_type": "xpos", "factor": 2.0, "rope_theta": 1e4}),
        ["rope_type", "xpos"],
    ),
    "a rope base that is text": (
        config_with(rope_parameters={"rope_type": "default", "rope_theta": "a"}),
        ["rope_parameters.rope_theta is 'a'", "a number above 0"],
    ),
    "a rope with too few factors": (
        config_with(
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0],
                "long_factor": [1.0],
                "original_max_position_embeddings": 32,
            }
        ),
        ["rope_parameters.short_factor is [1.0]", "4 numbers"],
    ),
    "a rope factor that is text": (
        config_with(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": "x"}),
        ["rope_parameters", "'x'", "numbers"],
    ),
    "an epsilon that is text": (config_with(rms_norm_eps="a"), ["config.json", "rms_norm_eps", "transformers"]),
    "an activation that is a number": (config_with(hidden_act=5), ["config.json", "hidden_act", "transformers"]),
    "a dtype that is a list": (config_with(dtype=[]), ["config.json", "transformers"]),
    "a size of four hundred digits": (config_with(hidden_size=10**400), ["hidden_size is 1000", "below"]),
    "a quantized checkpoint of 5 bits": (
        config_with(quantization_config={"quant_method": "gptq", "bits": 5, "group_size": 128}),
        ["quantization_config.bits", "5", "2 or 3 or 4 or 8"],
    ),
    "a quantized checkpoint of another kind": (
        config_with(quantization_config={"quant_method": "hqq"}),
        ["quantization_config.quant_method", "hqq", "gptq"],
    ),
    "a pattern of modules that is none": (
        config_with(
            quantization_config={
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "ignore": ["re:["],
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                    }
                },
            }
        ),
        ["quantization_config", "'re:['", "no pattern of modules"],
    ),
    "weights cut in the header": (cut("model.safetensors", 0.001), ["model.safetensors", "not a whole"]),
    "weights cut in the data": (cut("model.safetensors", 0.7), ["model.safetensors", "not a whole"]),
    "no weights": (removed("model.safetensors"), ["model.safetensors", "missing"]),
    "weights of nothing": (cut("model.safetensors", 0), ["model.safetensors", "not a whole"]),
    "weights that cannot be read": (unreadable("model.safetensors"), ["model.safetensors"]),
    "a config that cannot be read": (unreadable("config.json"), ["config.json"]),
    "a tokenizer that cannot be read": (unreadable("tokenizer.json"), ["tokenizer"]),
    "a tensor less": (tensors_with(lambda tensors: tensors.pop(DOWN)), [DOWN, "missing"]),
    "a tensor transposed": (
        tensors_with(lambda tensors: tensors.update({DOWN: tensors[DOWN].T.contiguous()})),
        [DOWN, "[88, 72]", "[72, 88]"],
    ),
    "a tensor of one dimension": (
        tensors_with(lambda tensors: tensors.update({DOWN: tensors[DOWN].flatten().clone()})),
        [DOWN, "[6336]", "[72, 88]"],
    ),
    "layers that are not there": (config_with(num_hidden_layers=9), ["model.layers.3.", "missing"]),
    "an index to a file that is gone": (
        indexed({"weight_map": {DOWN: "model-00001-of-00002.safetensors"}}),
        ["model-00001-of-00002.safetensors", "missing"],
    ),
    "an index cut short": (indexed('{"weight_map": {'), ["model.safetensors.index.json", "not a safetensors index"]),
    "an index of something else": (
        indexed({"weight_map": {DOWN: 5}}),
        ["model.safetensors.index.json", "not a safetensors index"],
    ),
    "an index that is a list": (indexed([1]), ["model.safetensors.index.json", "not a safetensors index"]),
    "a norm that is text": (config_with(rms_norm_eps="1e-5"), ["config.json", "rms_norm_eps"]),
    "no norm": (config_with(rms_norm_eps=None), ["config.json", "rms_norm_eps"]),
    "a rope that is text": (rope(rope_theta="a"), ["config.json"]),
    "a rope of no base": (rope(rope_theta=0.0), ["config.json", "rope_parameters"]),
    "a rope of a negative base": (rope(rope_theta=-1.0), ["config.json", "rope_parameters"]),
    "a window of less than nothing": (
        config_with(model_type="mistral", sliding_window=-1),
        ["sliding_window is -1", "above 0"],
    ),
    "codes without their scales": (
        tensors_with(lambda tensors: tensors.update({DOWN: tensors[DOWN].to(torch.float8_e4m3fn)})),
        [DOWN, "float8_e4m3fn", "float32, bfloat16 or float16"],
    ),
    "a norm in codes": (
        tensors_with(
            lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].to(torch.int8)})
        ),
        ["model.norm.weight", "int8", "float32, bfloat16 or float16"],
    ),
    "an embedding in codes": (
        tensors_with(lambda tensors: tensors.update({TABLE: tensors[TABLE].to(torch.float8_e4m3fn)})),
        [TABLE, "float8_e4m3fn", "float32, bfloat16 or float16"],
    ),
    "whole numbers": (
        tensors_with(lambda tensors: tensors.update({DOWN: tensors[DOWN].long()})),
        [DOWN, "int64"],
    ),
    "a bias that the config does not mention": (
        tensors_with(lambda tensors: tensors.update({BIAS: torch.ones(72)})),
        ["q_proj", "bias", "no such bias"],
    ),
    "a head with a bias": (
        tensors_with(lambda tensors: tensors.update({"model.embed_tokens.bias": torch.ones(263)})),
        ["bias", "no such bias"],
    ),
    "no tokenizer": (removed("tokenizer.json"), ["tokenizer", "model"]),
    "a tokenizer cut short": (cut("tokenizer.json", 0.5), ["tokenizer"]),
    "another model's tokenizer": (
        lambda folder: write_tokenizer(folder, 290),
        ["tokenizer.json has", "the model's config.json 263"],
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_model_is_named_with_what_is_wrong(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], model: Path, how: str
) -> None:
    """Stands against KeyError: 'model.layers.1...', silent zeros, and a garbled text of half a download."""
    spoil, said = SPOILT[how]
    spoil(model)
    message = refused(capsys, [topology_file(), "--prompt", "a"])
    assert str(model) in message
    assert all(words in message for words in said), message
    assert message.count("\n") <= 2


def test_a_draft_model_of_another_tongue_is_refused_with_both_names(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    """Stands against drafts that are never accepted, and nobody knows why."""
    draft = tiny("llama", tmp_path / "stranger", num_hidden_layers=1)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refused(capsys, [topology_file(draft={"source": "model", "model": str(draft)}), "--prompt", "a"])
    assert str(model) in message
    assert str(draft) in message
    assert "tokenizer" in message
    assert "'a'" in message


def test_a_spoilt_draft_model_is_named_and_not_the_target(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    draft = tiny("llama", tmp_path / "short", num_hidden_layers=1)
    cut("model.safetensors", 0.7)(draft)
    message = refused(capsys, [topology_file(draft={"source": "model", "model": str(draft)}), "--prompt", "a"])
    assert f"{draft}/model.safetensors" in message


def test_a_tokenizer_may_have_ids_that_the_draft_pads(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    """The other side of the refusal: a padded head with the same tokens is no mismatch."""
    draft = tiny("llama", tmp_path / "padded", num_hidden_layers=1, vocab_size=304)
    write_tokenizer(draft, 263)
    path = topology_file(draft={"source": "model", "model": str(draft)})
    capsys.readouterr()
    assert main([path, "--prompt", "the cat", "--max-tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] >= 1


def test_a_folder_too_deep_for_sockets_is_named(topology_file: Callable[..., str], tmp_path: Path) -> None:
    """Stands against `AF_UNIX path too long`, forty lines of it, in a container with a long TMPDIR."""
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    command = ["--standalone", "--nproc-per-node", "2", "-m", "tpspec.generate", topology_file(2), "--prompt", "a"]
    world = subprocess.run([sys.executable, "-m", "tpspec.launch", *command], env=ENV | {"TMPDIR": str(deep)},
                           capture_output=True, text=True, timeout=60)  # fmt: skip
    assert world.returncode == UserError.exit_code
    message = the_message(world.stderr)
    assert str(deep) in message
    assert "TMPDIR" in message


# What does not fit


def test_a_prompt_longer_than_the_cache_names_both_lengths(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str]
) -> None:
    message = refused(capsys, [topology_file(cache={"tokens": 32}), "--prompt", "xyzuv" * 20])
    assert "100 tokens" in message
    assert "32" in message
    assert "cache.tokens" in message


def test_a_prompt_longer_than_the_cache_is_named_by_its_line_before_any_is_answered(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], tmp_path: Path
) -> None:
    """Against an hour of answers to the lines before it, and a search for the line."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("fine", "xyzuv" * 20)))
    message = refused(capsys, [topology_file(cache={"tokens": 32}), "--prompts", str(path)])
    assert message.startswith(f"{path}:2: the prompt has 100 tokens; 32 can be served")


def test_a_cache_longer_than_the_model_was_made_for_does_not_lengthen_its_texts(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], model: Path
) -> None:
    """Stands against a text that turns to nonsense at the model's last position, without a word."""
    config_with(max_position_embeddings=24)(model)
    path = topology_file()
    assert "24 can be served" in refused(capsys, [path, "--prompt", "xyzuv" * 8])
    assert main([path, "--prompt", "xyzuv" * 2, "--max-tokens", "100", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt_tokens"] + answer["tokens"] <= 24


def test_a_link_cannot_be_emulated_between_cards(
    capsys: pytest.CaptureFixture[str],
    topology_file: Callable[..., str],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stands against a refusal after the world has met: known as soon as the devices are."""
    (model / "config.json").unlink()  # not looked at
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    path = topology_file(device="auto", link={"table": "pcie4", "emulate": True})
    assert refused(capsys, [path, "--prompt", "a"]).startswith("link.emulate: works where the host waits")


def test_a_cache_larger_than_the_machine_is_exit_code_3_with_the_bytes(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], model: Path
) -> None:
    """Stands against the OOM killer, which tells nobody."""
    path = topology_file(cache={"tokens": 10**10})
    message = refused(capsys, [path, "--prompt", "a"], OutOfMemory.exit_code)
    assert str(model) in message
    assert "GiB" in message
    assert "cache.tokens" in message


def test_a_draft_cache_larger_than_the_machine_names_the_draft_model(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], tmp_path: Path
) -> None:
    """What the drafter keeps beside the shard must be asked for too. Its cache is 500 times the target's a token."""
    draft = tiny("llama", tmp_path / "wide", num_hidden_layers=1, num_key_value_heads=6, head_dim=512)
    config_with(num_hidden_layers=300)(draft)  # refused before anybody looks for the layers
    path = topology_file(draft={"source": "model", "model": str(draft)}, cache={"tokens": 30_000})
    message = refused(capsys, [path, "--prompt", "a"], OutOfMemory.exit_code)
    assert f"draft model {draft}" in message


def test_ranks_of_one_host_do_not_count_its_memory_twice(
    topology_file: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against the OOM killer: each of two ranks found room for a shard where both were about to load one; and
    against a draft model that is counted on ranks that hold none, since the lead drafts for all."""
    wide = tiny("llama", tmp_path / "wide", num_hidden_layers=1, num_key_value_heads=6, head_dim=512)
    config_with(num_hidden_layers=6)(wide)  # 144 KiB a token, 6 GiB with the futures of a draft
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    memory.MEMINFO.write_text(f"MemAvailable: {10 * 2**20} kB\n")
    made = load(topology_file(2, target={"model": str(wide)}, cache={"tokens": 84_000}))
    for rank in range(2):
        with pytest.raises(OutOfMemory, match=f"shard {rank} of {wide} .* of the rest of this world, 10.00 GiB are fr"):
            check_fits(made, rank, torch.device("cpu"), range(2))
    check_fits(made, 1, torch.device("cpu"), [1])  # alone on its host
    made = load(topology_file(2, draft={"source": "model", "model": str(wide)}, cache={"tokens": 42_000}))
    for rank in range(2):
        check_fits(made, rank, torch.device("cpu"), range(2))


# What only a world of several ranks can see


def torchrun(num_ranks: int, *command: str) -> tuple[subprocess.CompletedProcess[str], float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    begin = time.monotonic()
    ended = subprocess.run([*launch, *command], env=ENV, capture_output=True, text=True, timeout=120, check=False)
    return ended, time.monotonic() - begin


def ends_with_one_message(num_ranks: int, *command: str) -> str:
    """The line of ours. torchrun's own report of the children that failed, traceback and all, is not ours."""
    ended, seconds = torchrun(num_ranks, *command)
    assert ended.returncode != 0
    assert seconds < SOON_S
    ours = ended.stderr.split("ChildFailedError", 1)[0]
    lines = [line for line in ended.stderr.splitlines() if line.startswith("tpspec: ")]
    assert len(lines) == 1, ended.stderr
    before_torchrun = ours.split("Traceback", 1)[0] if "torch/distributed/run.py" in ours else ours
    assert ours.count("Traceback") <= ("torch/distributed/run.py" in ours), ended.stderr
    assert lines[0] in before_torchrun
    return lines[0].removeprefix("tpspec: error: ")


def test_a_fault_that_every_rank_sees_is_said_once(topology_file: Callable[..., str]) -> None:
    """Stands against the same message from each of eight ranks, interleaved."""
    arguments = ["-m", "tpspec.generate", topology_file(2), "--prompt", "a", "--set", "draft.tokenz=4"]
    assert "draft.tokenz: unknown key" in ends_with_one_message(2, *arguments)


def test_a_fault_that_one_rank_sees_is_said_by_the_lead_in_its_name(
    topology_file: Callable[..., str], model: Path
) -> None:
    """Stands against the other ranks waiting in their first collective until the time limit."""
    arguments = [str(WORLDS / "short_of_memory.py"), topology_file(2), "--prompt", "a"]
    message = ends_with_one_message(2, *arguments)
    assert message.startswith(f"rank 1: shard 1 of {model} with 256 cached tokens needs 0.00 GiB on cpu")


def test_a_fault_that_another_rank_alone_sees_before_the_world_has_met_is_said_by_it(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against a world that ends without a word, as where ranks share a pipe of prompts."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(door, "SPEAKING_S", 0.0)
    message = refused(capsys, [topology_file(2), "--prompts", "/nowhere"])
    assert message == "rank 1: /nowhere: cannot be read: No such file or directory"


def test_prompts_in_a_pipe_are_refused_by_a_world_of_several_ranks(
    capsys: pytest.CaptureFixture[str],
    topology_file: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Stands against one rank that reads what is there, and others that find nothing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused(capsys, [topology_file(2), "--prompts", str(pipe)])
    assert message == f"{pipe}: is a pipe, which 2 ranks cannot all read; should be a file"


def test_a_fault_that_the_lead_sees_when_rounds_run_ends_the_others_too(topology_file: Callable[..., str]) -> None:
    """Stands against followers that wait for news of a lead that has gone."""
    prompt = "xyzuv" * 60
    message = ends_with_one_message(2, "-m", "tpspec.generate", topology_file(2), "--prompt", prompt)
    assert "the prompt has 300 tokens" in message


def test_more_shards_than_heads_is_refused_with_both_numbers(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str]
) -> None:
    """Ten ranks for nine heads: what each of them would find, found by `check` before any is started."""
    from tpspec.topology.__main__ import main as check

    capsys.readouterr()
    assert check(["check", topology_file(10)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "10 shards for 9 query heads" in printed.err


def test_a_message_longer_than_an_announcement_still_arrives(topology_file: Callable[..., str], model: Path) -> None:
    """A rank's error travels in a note of fixed size; one that does not fit must be cut, not end in a traceback."""
    config_with(hidden_act="x" * 5000)(model)
    message = ends_with_one_message(2, "-m", "tpspec.generate", topology_file(2), "--prompt", "a")
    assert "hidden_act is 'xxx" in message
