"""From a model to a head that others can load: what is learnt from, what is written, and that a stop costs nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import loaded, tiny
from tests.model.test_multimodal import IDS as SEEN, seeing
from tpspec.comm.communicator import OneRank
from tpspec.draft import eagle_checkpoint
from tpspec.errors import UserError
from tpspec.model.batch import Span
from tpspec.model.decoder import FINAL
from tpspec.model.loader import Loader
from tpspec.published.shape import ModelShape
from tpspec.text import Text
from tpspec.topology.shards import split as split_shape
from tpspec.train.__main__ import main
from tpspec.train.batches import split
from tpspec.train.model import of_layers
from tpspec.train.objective import Caps, cross_entropy
from tpspec.train.prompts import Invented
from tpspec.train.taps import Shards, Tapper, tapped_layers
from tpspec.train.target import taught
from tpspec.train.texts import TextFile, Told, read_texts

CPU = torch.device("cpu")
IDS, HIDDEN, VOCAB, CHANNELS = 120, 72, 263, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine query heads on three, tied embeddings, and layers enough for three different taps."""
    return tiny("smollm2", tmp_path_factory.mktemp("model"), num_hidden_layers=5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of texts. What is learnt from them is what the target says about them."""
    folder = tmp_path_factory.mktemp("data")
    chance = random.Random(3)
    for number in range(70):
        first, size = chance.randrange(10, 60), chance.randrange(6, 30)
        ids = tuple(range(first, first + size))
        TextFile(folder).add(Told(number, "chat", 0.0, ids[:3], ids[3:]))
    return folder


def generate(model: Path, out: Path, *more: str) -> list[Told]:
    sizes = ["--sequences", "10", "--tokens", "12", "--longest", "300"]
    assert main(["generate", str(model), "--out", str(out), *sizes, *more]) == 0
    return sorted(read_texts(out), key=lambda told: told.number)


def train(kind: str, model: Path, data: Path, out: Path, *more: str) -> dict[str, Any]:
    own = ["--channels", str(CHANNELS), "--depth", "3"] if kind == "eagle" else ["--heads", "3"]
    options = ["--ids", str(IDS), "--rows", "256", "--every", "5", "--precision", "float32", *own, *more]
    assert main([kind, str(model), "--data", str(data), "--out", str(out), *options]) == 0
    record: dict[str, Any] = json.loads((out / "training.json").read_text())
    return record


def test_greedy_answers_are_what_the_model_says_alone(model: Path, tmp_path: Path) -> None:
    """A head trained on texts that the batch had mixed up would learn another model."""
    plain = AutoModelForCausalLM.from_pretrained(model)
    greedy = [told for told in generate(model, tmp_path) if not told.temperature]
    for told in greedy:
        logits = plain(torch.tensor([told.ids])).logits[0, len(told.prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(told.answer)
    assert len(greedy) > 4


def test_generation_goes_on_where_it_was_cut_off(model: Path, tmp_path: Path) -> None:
    """A half line, left by a kill, once made the file unreadable; texts already there must not be made again."""
    whole = generate(model, tmp_path)
    path = TextFile(tmp_path).path
    path.write_bytes(path.read_bytes()[:-20])
    assert generate(model, tmp_path) == whole


def test_an_invented_turn_is_encoded_as_if_a_user_had_typed_it(model: Path) -> None:
    """Ids of an opening and of its end, put together, are not those of the whole turn where a merge spans them."""
    text = Text.load(model)
    prompts = Invented(text, seed=0)
    start = next(s for s in map(prompts.start, range(50)) if s.turn is not None)
    invented = (*text.encode(" cat\n"), *text.eos_ids)
    turn = f"{start.turn} cat".strip()
    assert prompts.finished(start, invented) == text.encode_chat([{"role": "user", "content": turn}])


def test_given_prompts_are_drawn_warm_once_they_repeat(model: Path, tmp_path: Path) -> None:
    """A second greedy answer to the same prompt would be the same text twice."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat", "kind": "chat", "category": "a"}\n{"prompt": "the hat"}\n')
    texts = generate(model, tmp_path, "--prompts", str(prompts), "--sequences", "4")
    assert [told.temperature > 0 for told in texts] == [False, False, True, True]
    assert [told.kind for told in texts] == ["a", "all", "a", "all"]
    assert texts[0].prompt == texts[2].prompt


def test_prompts_that_leave_no_room_are_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that wrote nothing said nothing, and ended well."""
    prompts, options = tmp_path / "prompts.jsonl", ["--tokens", "12", "--longest", "30"]
    long, short = '{"prompt": "the cat and the hat and the cat and the hat"}\n' * 2, '{"prompt": "a"}\n'
    command = ["generate", str(model), "--out", str(tmp_path), "--prompts", str(prompts), *options]
    prompts.write_text(long)
    assert main(command) == 2
    assert "2 of 2 prompts leave no room for an answer within --longest 30; should be more" in capsys.readouterr().err
    prompts.write_text(long + short)
    assert main(command) == 0
    assert "2 of 3 prompts leave no room for an answer within --longest 30, and are" in capsys.readouterr().err
    assert [told.number for told in read_texts(tmp_path)] == [2]


def test_texts_longer_than_the_model_was_made_for_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stands against heads that learn what a model says beyond its positions, and a traceback for want of memory."""
    most = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert main(["generate", str(model), "--out", str(tmp_path / "texts"), "--longest", str(most + 1)]) == 2
    assert f"--longest {most + 1}: should be at most {most}, for which" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "qwen3_vl_text"])
def test_a_target_that_sees_is_run_as_its_text_model(kind: str, tmp_path: Path) -> None:
    """transformers has no class for causal models that loads it: that was a traceback, once the texts were there."""
    logits = seeing(tmp_path, kind)
    ((features, final),) = Tapper(tmp_path, CPU).taps([Told(0, "chat", 0.0, SEEN[:3], SEEN[3:])])
    target = taught(tmp_path)
    torch.testing.assert_close(final @ target.head_VD.T, logits, atol=1e-4, rtol=1e-4)
    assert features.shape == (len(SEEN), 3 * target.hidden)
    if kind == "qwen3_vl_text":
        with pytest.raises(UserError, match="transformers has no qwen3_vl_text that does not see; should be --hidden"):
            of_layers(target, 2, spread=False)


def test_taps_are_the_inputs_of_their_layers_and_padding_does_not_show(model: Path, data: Path) -> None:
    """The output of a layer for its input is the known trap; it costs acceptance and nothing complains."""
    texts = read_texts(data)[:5]
    plain = AutoModelForCausalLM.from_pretrained(model)
    seen: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(plain.model.layers):
        layer.register_forward_pre_hook(lambda _, args, index=index: seen.update({index: args[0][0]}))
    for told, (features, final) in zip(texts, Tapper(model, CPU).taps(texts), strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([told.ids])).logits[0]
            torch.testing.assert_close(plain.lm_head(final), logits)
        torch.testing.assert_close(features, torch.cat([seen[layer] for layer in tapped_layers(5)], -1))


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 30])
def test_the_layers_that_training_taps_are_those_that_serving_reads(num_layers: int) -> None:
    """Stands against a head of a target of two layers, trained to its end, that serving refuses: it had a tap of -1."""
    layers = tapped_layers(num_layers)
    assert eagle_checkpoint._taps([*layers], num_layers, "config.json") == layers
    assert max(layers) < num_layers


def test_training_is_told_of_hidden_states_what_our_decoder_tells(tmp_path: Path) -> None:
    """Of a target whose hidden state our decoder holds at another scale. Stands against heads that are trained on what
    they will never be given."""
    model, layers = tiny("granite", tmp_path, num_hidden_layers=5), tapped_layers(5)
    told = Told(0, "chat", 0.0, (5, 6, 7), (8, 9, 10, 11))
    ((features, final),) = Tapper(model, CPU).taps([told])
    (whole,) = split_shape(ModelShape.of(model), (1.0,))
    decoder = Loader.open(model, whole, torch.float32, CPU).decoder(OneRank(), 64)
    size = len(told.ids)
    forward = decoder.tapped([Span(0, 0, tuple(told.ids), ((0, size),), size)], (*layers, 5, FINAL))
    logits, taps = forward.logits_TV, forward.tapped
    torch.testing.assert_close(torch.cat([taps[layer] for layer in layers], -1), features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(taps[FINAL], final, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(final @ taught(model).head_VD.T, logits, atol=1e-4, rtol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(model)
    last: list[torch.Tensor] = []
    plain.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0]))
    with torch.no_grad():
        plain(torch.tensor([told.ids]))
    torch.testing.assert_close(taps[5], last[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama4", "nanochat", "phi"])
def test_the_law_that_is_taught_is_that_of_the_target(kind: str, tmp_path: Path) -> None:
    """Stands against the bias of a head left out, and the model with its head taken for the decoder (Llama 4)."""
    target = taught(tiny(kind, tmp_path))
    told = Told(0, "chat", 0.0, (5, 6, 7), (8, 9, 10, 11))
    ((_, final),) = Tapper(tmp_path, CPU).taps([told])
    noise = torch.Generator().manual_seed(6)
    rows, output_VD = torch.randn(7, 9, generator=noise), torch.randn(target.vocab, 9, generator=noise)
    caps = Caps(target.cap, None)
    found = cross_entropy(rows, output_VD, final, target.head_VD, caps, target.head_bias_V)
    with torch.no_grad():
        law = loaded(tmp_path)(torch.tensor([told.ids])).logits[0].softmax(-1)
    torch.testing.assert_close(found, F.cross_entropy(rows @ output_VD.T, law), atol=1e-4, rtol=1e-4)


def test_a_draft_step_that_no_row_of_a_batch_reaches_costs_nothing() -> None:
    """Stands against a loss that is no number, of texts that are shorter than the head is deep."""
    weight_VD = torch.ones(3, 2, requires_grad=True)
    loss = cross_entropy(torch.zeros(0, 2), weight_VD, torch.zeros(0, 2), torch.ones(3, 2))
    loss.backward()
    assert loss.item() == 0
    assert weight_VD.grad is not None
    assert not weight_VD.grad.any()


def test_taps_are_of_the_rope_that_was_published(tmp_path: Path) -> None:
    """Of LFM3, whose config transformers reads as turning whole heads. Stands against heads taught by another model."""
    told, path = Told(0, "chat", 0.0, (5, 6, 7), (8, 9, 10, 11)), tiny("lfm3", tmp_path) / "config.json"
    ((_, due),) = Tapper(tmp_path, CPU).taps([told])
    config = json.loads(path.read_text())
    config["rope_parameters"]["full_attention"]["rope_type"] = "default"
    path.write_text(json.dumps(config))
    ((_, final),) = Tapper(tmp_path, CPU).taps([told])
    assert torch.equal(final, due)


def test_taps_of_other_texts_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    """Shards that stay behind when the texts are made anew would pair tokens with another text's states."""
    texts = read_texts(data)
    shards = Shards(tmp_path, texts, "a")
    shards.write(1, Tapper(model, CPU).taps(shards.texts(1)))
    shorter = [Told(t.number, t.kind, 0.0, t.prompt, t.answer[:-1]) for t in texts]
    with pytest.raises(Exception, match="not of these texts"):
        Shards(tmp_path, shorter, "a").read(1)


def eagle_shapes() -> dict[str, tuple[int, ...]]:
    """SafeAILab/EAGLE and sgl-project/SpecForge, as `facts` of their published files say them."""
    D, E = HIDDEN, HIDDEN // 9
    return {
        "fc.weight": (D, 3 * D),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.input_layernorm.weight": (D,),
        "midlayer.post_attention_layernorm.weight": (D,),
        "midlayer.self_attn.q_proj.weight": (9 * E, 2 * D),
        "midlayer.self_attn.k_proj.weight": (3 * E, 2 * D),
        "midlayer.self_attn.v_proj.weight": (3 * E, 2 * D),
        "midlayer.self_attn.o_proj.weight": (D, 9 * E),
        "midlayer.mlp.gate_proj.weight": (CHANNELS, D),
        "midlayer.mlp.up_proj.weight": (CHANNELS, D),
        "midlayer.mlp.down_proj.weight": (D, CHANNELS),
        "norm.weight": (D,),
        "lm_head.weight": (IDS, D),
        "d2t": (IDS,),
        "t2d": (VOCAB,),
    }


def medusa_shapes() -> dict[str, tuple[int, ...]]:
    """vLLM's layout, with one shared and truncated output head."""
    shapes: dict[str, tuple[int, ...]] = {"token_map": (IDS,), "lm_heads.0.weight": (IDS, HIDDEN)}
    for head in range(3):
        shapes |= {f"blocks.{head}.layers.0.weight": (HIDDEN, HIDDEN), f"blocks.{head}.layers.0.bias": (HIDDEN,)}
    return shapes


@pytest.mark.parametrize(("kind", "shapes"), [("eagle", eagle_shapes()), ("medusa", medusa_shapes())])
def test_a_head_learns_and_is_written_as_published(
    kind: str, shapes: dict[str, tuple[int, ...]], model: Path, data: Path, tmp_path: Path
) -> None:
    """One tensor more, less or misnamed, and nobody else's loader takes the file."""
    record = train(kind, model, data, tmp_path, "--steps", "40", "--rate", "0.005")
    first, last = record["history"][0], record["history"][-1]
    assert last["step"] == 40
    assert all(after < 0.9 * before for before, after in zip(first["loss"], last["loss"], strict=True))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    floats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    assert floats == {torch.bfloat16}


def test_the_eagle_config_leaves_nothing_to_guess(model: Path, data: Path, tmp_path: Path) -> None:
    """A loader that finds no rope base takes 10000, and one that finds no layer ids takes its own convention."""
    train("eagle", model, data, tmp_path, "--steps", "5")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 2, 2]
    assert config["rope_theta"] == json.loads((model / "config.json").read_text())["rope_parameters"]["rope_theta"]
    tensors = load_file(tmp_path / "model.safetensors")
    ids = torch.arange(config["draft_vocab_size"]) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_stopped_training_ends_as_one_that_ran_through(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    """A resumed run that repeats batches, forgets the optimiser or restarts the warm-up ends elsewhere."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(kind, model, data, whole, "--steps", "10")
    stop_after(5, kind, model, data, parts)
    train(kind, model, data, parts, "--steps", "10")
    for name in ("model.safetensors", "config.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


def test_a_training_that_is_stopped_as_it_writes_its_head_writes_it_in_the_end(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """Stands against a checkpoint of the last step without its head: who goes on from it has nothing to do."""
    stop_after(5, "medusa", model, data, tmp_path, at="publish")
    assert not (tmp_path / "model.safetensors").exists()
    train("medusa", model, data, tmp_path, "--steps", "5")
    assert (tmp_path / "model.safetensors").exists()


def stop_after(step: int, kind: str, model: Path, data: Path, out: Path, at: str = "draw") -> None:
    """Ends a training of ten steps as a kill would, right after it has measured at `step`, or where it writes."""
    from tpspec.train import command

    class Killed(Exception):
        pass

    def kill(*_: object) -> bool:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, at, kill)
        with pytest.raises(Killed):
            train(kind, model, data, out, "--steps", "10")
    if at == "draw":
        assert json.loads((out / "training.json").read_text())["history"][-1]["step"] == step


def test_a_checkpoint_of_other_texts_is_not_gone_on_from(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many texts as before, of the same ids. Stands against a run that takes what it learnt of others for its
    own."""
    out, others = tmp_path / "out", tmp_path / "others"
    train("medusa", model, data, out, "--steps", "5")
    others.mkdir()
    for told in read_texts(data):
        TextFile(others).add(Told(told.number, told.kind, 0.0, told.prompt, told.answer[::-1]))
    options = ["--out", str(out), "--heads", "3", "--ids", str(IDS), "--precision", "float32"]
    assert main(["medusa", str(model), "--data", str(others), *options]) == 2
    assert "other texts or sizes" in capsys.readouterr().err


@pytest.mark.parametrize("num_texts", [0, 3])
def test_too_few_texts_are_refused(
    num_texts: int, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training without held-out texts would report its own memory as acceptance. Stands against a refusal that does not
    say how many there should be."""
    for told in read_texts(data)[:num_texts]:
        TextFile(tmp_path).add(told)
    assert main(["medusa", str(model), "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    wrong = f"{tmp_path} holds 3 texts; should hold more than 64" if num_texts else "has no texts"
    assert wrong in capsys.readouterr().err


def test_a_checkpoint_of_other_sizes_is_not_gone_on_from(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another draft vocabulary every row of the old head would stand for another token."""
    train("medusa", model, data, tmp_path, "--steps", "5")
    options = [
        "--data",
        str(data),
        "--out",
        str(tmp_path),
        "--heads",
        "3",
        "--ids",
        str(IDS + 1),
        "--precision",
        "float32",
    ]
    assert main(["medusa", str(model), *options]) == 2
    assert "other texts or sizes" in capsys.readouterr().err


def spoilt_checkpoint(out: Path) -> None:
    out.mkdir()
    torch.save({"head": torch.zeros(5000)}, out / "checkpoint.pt")
    whole = (out / "checkpoint.pt").read_bytes()
    (out / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("spoil", "options", "why"),
    [
        (None, ["--minutes", "0"], "--minutes: 0 is not a number above 0"),
        (None, ["--minutes", "nan"], "--minutes: nan is not a number above 0"),
        (None, ["--rate", "nan"], "--rate: nan is not a number above 0"),
        (None, ["--rate", "-1"], "--rate: -1 is not a number above 0"),
        (None, ["--rate", "fast"], "--rate: fast is not a number above 0"),
        (None, ["--seed", "1" + 20 * "0"], "0 is not a whole number of up to 18 digits"),
        (None, ["--rows", "many"], "--rows: many is not 1 or more"),
        (lambda out: out.write_text("a"), [], "should be a folder, and cannot be made one: File exists"),
        (lambda out: out.symlink_to("/proc/nothing/there"), [], "should be a folder, and cannot be made one"),
        (spoilt_checkpoint, [], "checkpoint.pt: not a whole checkpoint; delete it"),
        (lambda out: (out.mkdir(), torch.save({}, out / "checkpoint.pt")), [], "not a checkpoint of a head"),
    ],
)
def test_what_a_training_cannot_run_with_is_one_line(
    spoil: Callable[[Path], object] | None,
    options: list[str],
    why: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stands against tracebacks, some of them after hours, and a limit of nan minutes that is none."""
    if spoil is not None:
        spoil(tmp_path / "out")
    given = ["medusa", str(model), "--data", str(data), "--out", str(tmp_path / "out"), "--precision", "float32"]
    assert main([*given, *options]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert "Traceback" not in said


def test_taps_of_another_target_are_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stands against a head that learns another model: only how many texts a shard has was compared."""
    for told in read_texts(data):
        TextFile(tmp_path).add(told)
    assert main(["taps", str(model), "--data", str(tmp_path)]) == 0
    assert main(["taps", str(model), "--data", str(tmp_path)]) == 0
    other = tiny("smollm2", tmp_path / "other", num_hidden_layers=5, seed=7)
    assert main(["taps", str(other), "--data", str(tmp_path)]) == 2
    assert f"is of another target; delete {tmp_path / 'taps'} to make it again" in capsys.readouterr().err


def test_what_is_measured_with_has_greedy_answers(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stands against a run that measures nothing, and ends in its picture, where all that is warm comes last."""
    for told in read_texts(data):
        late = Told(told.number, told.kind, float(told.number >= 60), told.prompt, told.answer)
        TextFile(tmp_path / "late").path.parent.mkdir(exist_ok=True)
        TextFile(tmp_path / "late").add(late)
        TextFile(tmp_path).add(Told(told.number, told.kind, 0.7, told.prompt, told.answer))
    assert split(Shards(tmp_path, read_texts(tmp_path / "late"), ""), 0.03) == ([1], [0])
    assert main(["medusa", str(model), "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path} holds no text with a greedy answer" in capsys.readouterr().err


def test_texts_in_a_folder_whose_name_is_too_long_are_refused_in_words() -> None:
    with pytest.raises(UserError, match=r"texts\.jsonl: cannot be read: File name too long"):
        read_texts(Path("y" * 300))


def test_texts_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    """Stands against a run that looks for its first batch for ever."""
    short = [Told(number, "chat", 0.0, (1, 2), (3, 4)) for number in range(64)]
    with pytest.raises(UserError, match="no text with an answer of more than 2 tokens"):
        split(Shards(tmp_path, [*short, Told(64, "chat", 0.0, (1, 2), (3, 4, 5))], ""), 0.03)
