"""A small model trained to draft: where it begins, what is written, and that the target takes more of its drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import tiny
from tests.worlds import serve, topology
from tpspec.request import Request, Sampling
from tpspec.train import command, objective
from tpspec.train.__main__ import main
from tpspec.train.batches import Batch
from tpspec.train.model import Design, DraftModel
from tpspec.train.taps import Tapped
from tpspec.train.texts import TextFile, Told

NUM_LAYERS, NUM_TEXTS, NUM_PROMPTS, NUM_TOKENS = 5, 70, 12, 20
STARTS = {
    "random": ["--layers", "2", "--hidden", "64"],
    "first": ["--layers", "3", "--from-layers", "first"],
    "spread": ["--layers", "3", "--from-layers", "spread"],
}
REQUESTS = [Request(i, (4 + i, 30 + i, 60 + i), NUM_TOKENS, Sampling()) for i in range(NUM_PROMPTS)]
SEES = [f"{how}_attention" for how in ("sliding", "full", "sliding", "sliding", "full")]
LAYERS = {"random": [], "first": [0, 1, 2], "spread": [0, 2, 4]}


def texts_of(model: Path, folder: Path) -> Path:
    """Two shards of what the model itself says, greedily, by transformers: a few prompts, over and over."""
    ids = torch.tensor([request.prompt for request in REQUESTS])
    plain = AutoModelForCausalLM.from_pretrained(model)
    for _ in range(NUM_TOKENS):
        ids = torch.cat([ids, plain(ids).logits[:, -1:].argmax(-1)], 1)
    rows = ids.tolist()
    for number in range(NUM_TEXTS):
        row = rows[number % NUM_PROMPTS]
        TextFile(folder).add(Told(number, "chat", 0.0, tuple(row[:3]), tuple(row[3:])))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("model"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts_of(model, tmp_path_factory.mktemp("data"))


def train(model: Path, data: Path, out: Path, *options: str) -> dict[str, Any]:
    fixed = ["--rows", "512", "--every", "5", "--precision", "float32", "--rate", "0.005"]
    assert main(["model", str(model), "--data", str(data), "--out", str(out), *fixed, *options]) == 0
    record: dict[str, Any] = json.loads((out / "training.json").read_text())
    return record


def untrained(model: Path, data: Path, out: Path, *options: str) -> dict[str, Any]:
    return train(model, data, out, *options, "--steps", "1", "--rate", "1e-12")


@pytest.fixture(scope="module", params=STARTS)
def start(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def trained(start: str, model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(start)
    train(model, data, folder, "--steps", "30", *STARTS[start])
    return folder


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    return serve(topology(model), REQUESTS).texts()


def test_a_draft_model_learns_and_is_one_that_others_load(start: str, trained: Path, model: Path) -> None:
    """A tensor more or less, a config that says otherwise, or another tokenizer, and nobody can draft with it."""
    losses = [point["loss"][0] for point in json.loads((trained / "training.json").read_text())["history"]]
    assert losses[-1] < 0.9 * losses[0]
    loaded, found = AutoModelForCausalLM.from_pretrained(trained, output_loading_info=True)
    assert not any(found.values())
    assert loaded.config.num_hidden_layers == int(STARTS[start][1])
    assert loaded.config.from_layers == LAYERS[start]
    tensors = load_file(trained / "model.safetensors")
    assert set(tensors) == {name for name, _ in loaded.named_parameters()}  # a table that is shared is there once
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (trained, model))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template


def test_a_target_takes_more_of_what_was_learnt(
    start: str, trained: Path, plain: list[list[int]], model: Path, data: Path, tmp_path: Path
) -> None:
    """A file that another loader reads as another model drafts, too: but it is not accepted. The text stays."""
    untrained(model, data, tmp_path, *STARTS[start])
    shares = []
    for folder in (tmp_path, trained):
        draft = {"source": "model", "model": str(folder), "tokens": 4}
        told = serve(topology(model, draft=draft), REQUESTS)
        assert told.texts() == plain
        shares.append(sum(stats.accepted for stats in told.stats) / sum(stats.drafted for stats in told.stats))
    assert shares[1] > 1.3 * shares[0]


@pytest.mark.parametrize("kind", ["qwen3", "smollm3", "mistral", "llama3", "granite", "gemma4"])
def test_all_layers_of_a_target_are_the_target(kind: str, tmp_path: Path) -> None:
    """A layer out of its place, its own options left behind, or a token one place off, and not all drafts are right."""
    own = {"smollm3": {"no_rope_layers": [1, 0, 1, 1, 0]}, "gemma4": {"layer_types": SEES}}.get(kind, {})
    model = tiny(kind, tmp_path / "model", num_hidden_layers=NUM_LAYERS, **own)
    texts_of(model, tmp_path)
    record = untrained(model, tmp_path, tmp_path / "out", "--layers", "5", "--from-layers", "spread")
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values())
    assert record["history"][-1]["acceptance"]["all"]["by_depth"] == pytest.approx(
        [(NUM_TOKENS - 1 - step) / (NUM_TOKENS - 1) for step in range(4)], abs=1e-3
    )


def test_layers_keep_what_their_target_says_of_them(tmp_path: Path) -> None:
    """The third layer of a target turns by rope; as the second of a draft model, it must not take the second's word."""
    model = tiny("smollm3", tmp_path / "model", num_hidden_layers=NUM_LAYERS, no_rope_layers=[1, 0, 1, 1, 0])
    untrained(model, texts_of(model, tmp_path), tmp_path / "out", *STARTS["spread"])
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", model))
    for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
        for place, layer in enumerate(LAYERS["spread"]):
            expected = theirs[f"model.layers.{layer}.{name}"].bfloat16()
            assert torch.equal(ours[f"model.layers.{place}.{name}"], expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["no_rope_layers"] == [1, 1, 0]


def test_layers_of_heads_unlike_each_other_stay_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of Gemma 4, whose layers have scales that are not trained. Without them, or with the heads of the layer whose
    place it takes, the draft model is another, or none; and the last of its layers has no window."""
    model = tiny("gemma4", tmp_path / "model", num_hidden_layers=NUM_LAYERS, layer_types=SEES)
    out, data = tmp_path / "out", texts_of(model, tmp_path)
    untrained(model, data, out, *STARTS["spread"])
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, model))
    for name in ("self_attn.q_proj.weight", "self_attn.q_norm.weight", "layer_scalar"):
        for place, layer in enumerate(LAYERS["spread"]):
            expected = theirs[f"model.layers.{layer}.{name}"].bfloat16()
            assert torch.equal(ours[f"model.layers.{place}.{name}"], expected)
    draft = {"source": "model", "model": str(out), "tokens": 2}
    told = serve(topology(model, draft=draft), REQUESTS[:3])
    assert told.texts() == serve(topology(model), REQUESTS[:3]).texts()
    assert told.stats[-1].drafted > 0
    command = ["model", str(model), "--data", str(data), "--out", str(out), "--from-layers", "first", "--layers"]
    assert main([*command, "3"]) == 2
    assert "--layers 3: the last of them, layer 2 of the target, has a window" in capsys.readouterr().err
    small = tiny("gemma4_small", tmp_path / "small")
    assert main(["model", str(small), *command[2:], "2"]) == 2
    assert "--from-layers: the target's read what others keep" in capsys.readouterr().err


def test_embeddings_and_head_stay_the_targets(model: Path, data: Path, tmp_path: Path) -> None:
    """They are most of a small model: trained on a few texts they forget the tokens that do not occur."""
    train(model, data, tmp_path, "--steps", "5", *STARTS["first"])
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path, model))
    assert torch.equal(ours["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"].bfloat16())
    assert not torch.equal(ours["model.norm.weight"], theirs["model.norm.weight"].bfloat16())


@pytest.mark.parametrize("start", ["random", "first"])
def test_a_stopped_training_ends_as_one_that_ran_through(
    start: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run that repeats batches, forgets the optimiser or thaws the embeddings ends elsewhere."""

    class Killed(Exception):
        pass

    def kill(*_: object) -> bool:
        raise Killed

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(model, data, whole, "--steps", "10", *STARTS[start])
    with monkeypatch.context() as patch:
        patch.setattr(command, "draw", kill)
        with pytest.raises(Killed):
            train(model, data, parts, "--steps", "10", *STARTS[start])
    assert train(model, data, parts, "--steps", "10", *STARTS[start])["history"][-1]["step"] == 10
    for name in ("model.safetensors", "config.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "2", "--hidden", "60"], "--hidden 60 should be a multiple of 8"),
        (["--layers", "6", "--from-layers", "first"], "--layers 6 is more than the target's own 5"),
        (["--layers", "2"], "one of the arguments --hidden --from-layers is required"),
        (["--layers", "2", "--hidden", "64", "--from-layers", "first"], "not allowed with argument"),
        (["--hidden", "64"], "required: --layers"),
    ],
)
def test_options_that_make_no_model_are_refused_at_once(
    options: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused only after hours of hidden states, or not at all, they cost more than a look at the help."""
    try:
        code: object = main(["model", str(model), "--data", str(tmp_path), "--out", str(tmp_path / "out"), *options])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_layers_of_experts_are_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stands against a tensor that is called missing, since transformers holds experts in one piece."""
    mixture = tiny("qwen3_moe", tmp_path / "mixture")
    given = ["model", str(mixture), "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--layers", "2"]
    assert main([*given, "--from-layers", "first"]) == 2
    assert "--from-layers: the target's have experts, which are not trained here" in capsys.readouterr().err


def test_a_target_is_not_written_over(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target's own folder for --out once would have been its end."""
    weights = (model / "model.safetensors").read_bytes()
    for kind, options in (("model", STARTS["random"]), ("medusa", [])):
        assert main([kind, str(model), "--data", str(data), "--out", str(model), *options]) == 2
        assert "the folder of the target itself" in capsys.readouterr().err
    assert (model / "model.safetensors").read_bytes() == weights


def test_other_layers_are_not_gone_on_with(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of as many other layers fits, and would be taken for what was asked."""
    train(model, data, tmp_path, "--steps", "5", *STARTS["first"])
    options = ["--precision", "float32", *STARTS["spread"]]
    assert main(["model", str(model), "--data", str(data), "--out", str(tmp_path), *options]) == 2
    assert "other texts or sizes" in capsys.readouterr().err


def test_drafts_of_a_model_that_are_right_in_a_row() -> None:
    """A right draft behind a wrong one, or beyond the text's end, is never reached, and must not be counted."""
    right_BA1 = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]]).bool()[..., None]
    counts = objective.chained(right_BA1, 3).sum(-1)
    assert counts.tolist() == [[2, 1, 0, 1], [0, 3, 2, 1]]


@pytest.mark.parametrize("caps", [(None, None), (1.5, None), (2.0, 0.7)], ids=str)
@pytest.mark.parametrize("learns", [True, False])
def test_the_loss_is_whole_whatever_the_chunks(
    learns: bool, caps: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the last chunk lost, or the law of another chunk, do not show where all rows fit one chunk. Logits of
    some targets are capped, which is another law."""
    monkeypatch.setattr(objective, "LEAST", 3)
    monkeypatch.setattr(objective, "SCORES", 1)
    noise = torch.Generator().manual_seed(4)
    x, judged = (torch.randn(8, size, generator=noise) for size in (5, 6))
    weight, head = (torch.randn(11, size, generator=noise) for size in (5, 6))
    x.requires_grad_()
    weight.requires_grad_(learns)
    given = [x, weight] if learns else [x]
    law, said = (
        logits if cap is None else cap * (logits / cap).tanh()
        for logits, cap in zip((judged @ head.T, x @ weight.T), caps, strict=True)
    )
    expected = F.cross_entropy(said, law.softmax(-1))
    wanted = torch.autograd.grad(3 * expected, given)
    found = objective.cross_entropy(x, weight, judged, head, objective.Caps(*caps))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * found, given), wanted)


@pytest.mark.parametrize("kind", ["cohere", "granite"])
def test_logits_of_a_draft_in_training_are_those_that_it_will_have(kind: str, tmp_path: Path) -> None:
    """Stands against what a config multiplies them with, left out: the same argmax, and odds that nobody asked for."""
    config = AutoConfig.from_pretrained(tiny(kind, tmp_path))
    draft = DraftModel(cast("Any", None), Design(config), 1)
    ids = torch.arange(5, 25)
    texts = [Tapped(Told(0, "chat", 0.0, tuple(ids[:4].tolist()), tuple(ids[4:].tolist())), torch.zeros(20, 1),
                    torch.zeros(20, 1))]  # fmt: skip
    batch = Batch.of(texts, answers=False)
    ((predicts_BA, rows),) = draft(batch)
    wanted = draft.model(ids[None]).logits[0, batch.rows_BA[predicts_BA] + 1]
    assert torch.allclose(rows @ draft.output.T, wanted, atol=1e-5)
