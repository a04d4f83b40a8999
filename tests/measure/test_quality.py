"""What small weights cost in quality, as the command finds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import tiny
from tests.model.published import gptq, publish
from tpspec.measure.__main__ import main
from tpspec.measure.quality_command import CHUNK, Kind, compare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("tiny"))


def test_perplexity_is_that_of_transformers_and_four_bits_cost_more_than_eight(folder: Path) -> None:
    """Stands against an expected token off by one where a chunk ends, and a model compared with itself."""
    noise = torch.Generator().manual_seed(0)
    long, short = (tuple(torch.randint(3, 263, (n,), generator=noise).tolist()) for n in (CHUNK + 70, 12))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        losses = [
            float(model(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in map(torch.tensor, ([long], [short]))
        ]
    kinds = [Kind(str(folder)), Kind(str(folder), "int8"), Kind(str(folder), "int4")]
    plain, eight, four = compare(kinds, "float32", [short], [long, short], 16)
    assert torch.tensor(plain.perplexity).log().item() == pytest.approx(sum(losses) / (len(long) + 10), rel=1e-4)
    assert plain.agreement == plain.same_answers == 1
    assert plain.num_bytes > eight.num_bytes > four.num_bytes
    off = [abs(one.perplexity / plain.perplexity - 1) for one in (eight, four)]
    assert 0 < off[0] < off[1]
    assert four.agreement < 1


def test_the_command_says_it_as_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts").write_text('{"prompt": "the cat"}\n{"prompt": "the hat"}\n')
    options = ["--quantize", "int8", "--prompts", str(tmp_path / "prompts"), "--tokens", "4", "--json"]
    assert main(["quality", str(folder), *options]) == 0
    plain, eight = json.loads(capsys.readouterr().out)
    assert (plain["weights"], eight["weights"]) == ("bfloat16", "int8")


def test_a_small_cache_and_other_checkpoints_are_compared_with_the_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stands against a published checkpoint that is compared with itself, and one whose codes are quantized again."""
    (tmp_path / "prompts").write_text('{"prompt": "the cat and the hat, the end of the other one"}\n')
    quantized, meant = map(str, publish(folder, tmp_path, gptq()))
    options = ["--prompts", str(tmp_path / "prompts"), "--tokens", "4", "--dtype", "float32", "--json"]
    assert main(["quality", quantized, "--cache", "--also", meant, str(folder), *options]) == 0
    first, cache, same, plain = json.loads(capsys.readouterr().out)
    assert [one["weights"] for one in (first, cache, same, plain)] == [
        "float32",
        "float32, cache int8",
        meant,
        str(folder),
    ]
    assert same["perplexity"] == pytest.approx(first["perplexity"], rel=1e-4)
    assert same["num_bytes"] > 1.5 * first["num_bytes"]
    assert abs(plain["perplexity"] / first["perplexity"] - 1) > 1e-3
    assert 0 < abs(cache["perplexity"] / first["perplexity"] - 1) < 0.05


def test_what_fewer_bits_cost_in_accepted_drafts_is_said_of_both_models(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the model as its own draft, which it accepts whole, in the same weights alone. Stands against drafts that are
    compared with the first model's answers only, and weights of the target's that are taken for the draft's."""
    (tmp_path / "prompts").write_text('{"prompt": "the cat and the hat"}\n{"prompt": "the end of the other one"}\n')
    options = ["--draft", str(folder), "--prompts", str(tmp_path / "prompts"), "--dtype", "float32"]
    assert main(["quality", str(folder), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["agreement"] == 1 > found[2]["agreement"]  # with the first one's answers
    accepted = {one["weights"]: one["accepted"] for one in found}
    assert list(accepted) == ["float32", "int8", "int4"]
    assert all(list(of) == list(accepted) and of[weights] == 1 for weights, of in accepted.items())
    assert accepted["float32"]["int4"] < 1
    assert accepted["int4"]["float32"] < 1
    assert main(["quality", str(folder), *options, "--quantize", "int4", "--tokens", "8"]) == 0
    heads, _, four, note = capsys.readouterr().out.splitlines()
    assert heads.endswith("accepts float32 drafts  accepts int4 drafts")
    assert four.startswith("int4")
    assert four.endswith("100.0%")
    assert note.endswith("drafts after the model's that accepts")


def test_a_text_that_is_not_there_is_a_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", str(folder), "--text", str(tmp_path / "none")]) == 2
    assert "--text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--tokens", "0"], "--tokens: 0 is not 1 or more"),
        (["--tokens", "-5"], "--tokens: -5 is not 1 or more"),
        (["--text", "{tmp}/letter"], "is one token; should be two or more"),
        (["--prompts", "{tmp}/letters"], "the prompts are of one token each"),
        (["--also", "{tmp}/other"], "--also {tmp}/other: should be a checkpoint of the same model"),
        (["--also", "{tmp}/small"], "263 ids in the one and 100 in the other"),
        (["--draft", "{tmp}/other"], "a draft model must share the target's tokenizer"),
    ],
)
def test_what_nothing_can_be_said_of_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], why: str
) -> None:
    """Stands against divisions by nothing, and a table that compares texts of two tongues."""
    (tmp_path / "letter").write_text("a")
    (tmp_path / "letters").write_text('{"prompt": "a"}\n')
    tokenizer = json.loads((tiny("llama", tmp_path / "other") / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    tiny("llama", tmp_path / "small", vocab_size=100)
    assert main(["quality", str(folder), *(word.format(tmp=tmp_path) for word in given)]) == 2
    assert why.format(tmp=tmp_path) in capsys.readouterr().err
