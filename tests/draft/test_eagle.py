"""EAGLE heads: every published layout against its formulas in float64, and every trap in which a reader has been."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import tiny
from tests.draft.heads.checked import Told, exercise, given
from tests.draft.heads.eagle import Target, Written, first, third
from tests.model.published import Format, gptq, publish
from tests.worlds import serve, topology
from tpspec.draft.eagle_checkpoint import load_head
from tpspec.draft.protocol import Ask, Taps
from tpspec.engine.engine import Engine
from tpspec.engine.hosts import Gathered, LeadHost
from tpspec.errors import UserError
from tpspec.model.decoder import FINAL
from tpspec.request import Request, Sampling
from tpspec.tokens import TokenTree
from tpspec.topology.config import Quantize
from tpspec.verify.draw import Draw, rank
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import RowLogits

NUM_LAYERS = 9
MOST_APART = {"int8": 0.02, "int4": 0.25}
Writer = Callable[[Target, Path], Written]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose rope is not that of any head."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=NUM_LAYERS, rope_parameters=rope)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.read(folder)


LAYOUTS: dict[str, Writer] = {
    "safeailab": third,
    "safeailab, own embedding": lambda target, folder: third(target, folder, own_embedding=True),
    "safeailab, whole vocabulary": lambda target, folder: third(target, folder, draft_vocab=263),
    "safeailab, rope said": lambda target, folder: third(target, folder, layer={"rope_theta": 777.0}),
    "safeailab, biases": lambda target, folder: third(target, folder, layer={"attention_bias": True}),
    "specforge, no norm before the logits": lambda target, folder: third(target, folder, norm_output=False),
    "specforge, a norm before the logits": lambda target, folder: third(target, folder, norm_output=True),
    "nvidia, norm before fc": lambda target, folder: third(
        target, folder, num_taps=2, eagle_aux_hidden_state_layer_ids=[4, 9], norm_before_fc=True
    ),
    "eagle 3.1": lambda target, folder: third(target, folder, fc_norm=True, norm_output=True),
    "speculators": lambda target, folder: third(target, folder, layout="speculators"),
    "speculators, qwen3": lambda target, folder: third(
        target, folder, layout="speculators", layer={"model_type": "qwen3"}, norm_before_residual=True
    ),
    "speculators, normed": lambda target, folder: third(
        target, folder, layout="speculators", norm_before_residual=True, norm_before_fc=True, norm_output=True
    ),
    "eagle 1": first,
    "eagle 1, pickled": lambda target, folder: first(target, folder, pickled=True),
    "eagle 1, no bias": lambda target, folder: first(target, folder, bias=False),
    "eagle 1, qwen2": lambda target, folder: first(target, folder, qwen2=True),
    "eagle 1, wrapped": lambda target, folder: first(target, folder, wrapped=True),
    "eagle 1, wrapped, bias": lambda target, folder: first(target, folder, wrapped=True, eagle_fc_bias=True),
}


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("layout", ["safeailab, biases", "safeailab, whole vocabulary", "eagle 1"])
def test_a_quantized_head_says_nearly_the_same(
    layout: str, quantize: Quantize, folder: Path, target: Target, tmp_path: Path
) -> None:
    """Against draft.quantize that is taken and does nothing; the logits have 8 bits with either."""
    LAYOUTS[layout](target, tmp_path)
    plain, small = (load_head(replace(given(folder, tmp_path), quantize=bits)) for bits in (None, quantize))
    inputs = torch.randn(5, 72)
    for mine, other, width, most in (
        (small.lm_head, plain.lm_head, 72, MOST_APART["int8"]),
        (small.layer.mlp.gate_up, plain.layer.mlp.gate_up, 72, MOST_APART[quantize]),
        (small.layer.mlp.down, plain.layer.mlp.down, 40, MOST_APART[quantize]),
    ):
        wanted = other(inputs[:, :width])
        assert 0 < (mine(inputs[:, :width]) - wanted).norm() / wanted.norm() < most


@pytest.mark.parametrize("branches", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_head_says_is_what_its_formulas_say(
    layout: str, branches: int, folder: Path, target: Target, tmp_path: Path
) -> None:
    """Whatever a layout means otherwise than we read it shows in the logits, at the latest after some drafts."""
    told = Told(LAYOUTS[layout](target, tmp_path), load_head(given(folder, tmp_path)), branches)
    exercise(told, branches)


def test_a_long_text_is_read_in_pieces_and_anew_after_a_preemption(
    folder: Path, target: Target, tmp_path: Path
) -> None:
    """Features that arrive in several rounds, are read in several forwards, or arrive twice."""
    told = Told(third(target, tmp_path), load_head(given(folder, tmp_path)), 1)
    told.grow(0, [n % 251 for n in range(130)])
    told.grow(0, [n % 241 for n in range(180)])
    told.draft(2)
    told.check()
    told.ahead.forget(0)
    for stop in (200, 309):
        told.ahead.observe(Taps({0: (0, told.taps[0][:200])} if stop == 200 else {0: (200, told.taps[0][200:])}))
    told.draft(3)
    assert told.check() == 2 + 1


def test_without_the_taps_of_a_text_a_head_is_silent(folder: Path, target: Target, tmp_path: Path) -> None:
    """Where a text is being read again its last tokens have no features yet, and a text of one token never has."""
    told = Told(third(target, tmp_path), load_head(given(folder, tmp_path)), 1)
    told.grow(0, [5, 6, 7, 8])
    assert len(told.draft(2)[0]) == 2
    told.ahead.observe(Taps({0: (0, told.taps[0][:2])}))
    told.texts[0].append(9)
    told.texts[1] = [4]
    assert [len(tree) for tree in told.draft(2).values()] == [0, 0]


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("said", "taps"),
    [
        ({}, (2, 4, 6)),
        ({IDS: [2, 5, 8]}, (2, 5, 8)),
        ({IDS: [1, 3, 5]}, (2, 4, 6)),
        ({IDS: [3, 6, 9]}, (3, 6, 9)),
        ({IDS: [1, 4, 8]}, (2, 5, 9)),
        ({"eagle_config": {IDS: [0, 5, 9]}}, (0, 5, 9)),
    ],
)
def test_layers_are_counted_as_their_trainer_did(
    said: dict[str, Any], taps: tuple[int, ...], folder: Path, target: Target, tmp_path: Path
) -> None:
    """Inputs of layers, or outputs when the first is 1; off by one costs a tenth of the accepted length, silently."""
    third(target, tmp_path, **said)
    assert load_head(given(folder, tmp_path)).taps == taps
    third(target, tmp_path, layout="speculators", **said.get("eagle_config", said))
    assert load_head(given(folder, tmp_path)).taps == taps


def test_an_eagle_1_head_taps_what_the_target_says_its_logits_of(folder: Path, target: Target, tmp_path: Path) -> None:
    first(target, tmp_path)
    assert load_head(given(folder, tmp_path)).taps == (FINAL,)


def test_an_eagle_1_head_shares_a_target_head_that_is_in_codes(tmp_path: Path) -> None:
    """Stands against a weight that is called missing, where config.json says how its codes lie."""
    form = gptq(lm_head=True)
    form = Format(form.config, form.write, ("lm_head",))
    quantized, meant = publish(tiny("llama", tmp_path / "plain"), tmp_path, form)
    first(Target.read(meant), tmp_path / "head")
    x = torch.randn(5, 96)
    wanted = x @ load_file(meant / "model.safetensors")["lm_head.weight"].T
    assert torch.allclose(load_head(given(quantized, tmp_path / "head")).lm_head(x), wanted, rtol=0, atol=1e-4)


def rewritten(
    folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None], name: str = "model.safetensors"
) -> None:
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / name)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)


def _lose(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: tensors.__delitem__(name)


def _have(name: str, value: Tensor) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: tensors.__setitem__(name, value)


def _say(**said: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: config.update(said)


REFUSED = {
    "missing": (third, _lose("midlayer.hidden_norm.weight"), "tensor layers.0.hidden_norm.weight is missing"),
    "no head": (third, _lose("lm_head.weight"), r"tensor lm_head.weight is missing; should be \[101, 72\]"),
    "no d2t": (third, _lose("d2t"), r"tensor d2t is missing; should be \[101\]"),
    "extra": (third, _have("midlayer.mlp.router.weight", torch.ones(2)), "does not have: layers.0.mlp.router.weight"),
    "norm in 1": (first, _have("layers.0.input_layernorm.weight", torch.ones(72)), "have: layers.0.input_layernorm"),
    "misshapen": (third, _have("fc.weight", torch.ones(72, 144)), r"has shape \[72, 144\]; .* be \[72, 216\]"),
    "no bias": (first, _lose("fc.bias"), "tensor fc.bias is missing"),
    "bias unsaid": (first, _say(bias=False), "tensor fc.bias is not nothing, and the architecture has no such bias"),
    "d2t of ids": (third, _have("d2t", torch.arange(101) * 2 + 1), "d2t does not lead to 101 ids of the target's 263"),
    "layers": (third, _say(**{IDS: [2, 5, 10]}), r"is \[2, 5, 10\]; should be of the 9 layers of the target"),
    "experts": (third, _say(model_type="qwen3_moe"), "model_type is qwen3_moe; heads of such layers are not supported"),
    "two layers": (third, _say(num_hidden_layers=2), "num_hidden_layers is 2; heads of 1 layer are supported"),
    "quantized": (third, _say(quantization_config={"bits": 4}), "quantized checkpoints are not supported"),
    "eagle_config": (third, _say(eagle_config="x"), "eagle_config is 'x'; should be a section, or left out"),
    "other norms": (third, _say(model_type="glm4"), "model_type is glm4; heads of such layers are not supported"),
    "norms behind": (third, _say(model_type="exaone4"), "model_type is exaone4; heads of such layers are not"),
    "norms behind rope": (
        third,
        _say(model_type="hunyuan_v1_dense"),
        "model_type is hunyuan_v1_dense; heads of such layers are not",
    ),
    "bends of their own": (third, _say(model_type="apertus"), "model_type is apertus; heads of such layers are not"),
    "norms with biases": (third, _say(model_type="starcoder2"), "model_type is starcoder2; heads of such layers"),
    "norms of all heads": (third, _say(model_type="olmo2"), "model_type is olmo2; heads of such layers are not"),
    "other speculator": (third, _say(speculators_model_type="dflash"), "'dflash' is not supported"),
    "other width": (first, _say(hidden_size=64), "hidden_size is 64; should be the target's 72"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_such_a_head_is_refused_by_name(fault: str, folder: Path, target: Target, tmp_path: Path) -> None:
    """Loaded in part, a head drafts nonsense, and a user sees plain speed without a reason."""
    writer, change, message = REFUSED[fault]
    writer(target, tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(UserError, match=message):
        load_head(given(folder, tmp_path))


def test_a_target_whose_embeddings_are_codes_is_refused(folder: Path, target: Target, tmp_path: Path) -> None:
    """Whoever reads them first. Stands against codes that pass for numbers, and a fault without a name."""

    def coded(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn)

    third(target, tmp_path / "head")
    rewritten(Path(shutil.copytree(folder, tmp_path / "target")), coded)
    with pytest.raises(UserError, match=r"embed_tokens.weight is float8_e4m3fn, and read as"):
        load_head(given(tmp_path / "target", tmp_path / "head"))


def test_a_file_that_runs_code_is_refused(folder: Path, target: Target, tmp_path: Path) -> None:
    """A .bin file is a pickle: read as anything but tensors it may do anything."""
    first(target, tmp_path, pickled=True)
    torch.save({"fc.weight": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin: not a file of tensors"):
        load_head(given(folder, tmp_path))


# In the engine


class Recording:
    """A host that keeps which tree each text was given."""

    def __init__(self, inner: LeadHost) -> None:
        self._inner, self._texts = inner, {}
        self.trees: dict[tuple[int, ...], TokenTree] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ask(self, asks: Sequence[Ask]) -> None:
        self._texts = {asked.seq: tuple(asked.tokens) for asked in asks}
        self._inner.ask(asks)

    def gather(self, ready: Sequence[int]) -> Gathered:
        gathered = self._inner.gather(ready)
        self.trees |= {self._texts[seq]: tree for seq, tree in gathered.trees.items()}
        return gathered


def served(folder: Path, draft: dict[str, Any], sampling: Sampling, num_ranks: int = 1, **keys: Any) -> Any:
    """What the lead told, and its host."""
    hosts: dict[int, Recording] = {}

    def record(rank: int, engine: Engine) -> None:
        engine.host = hosts[rank] = Recording(engine.host)  # type: ignore[assignment, arg-type]

    prompts = [[7, 3, 9, 7, 3, 9, 200], list(range(3, 43)), [5, 5]]
    requests = [Request(i, tuple(prompt), 20, sampling) for i, prompt in enumerate(prompts)]
    return serve(topology(folder, num_ranks, draft=draft, **keys), requests, begin=record), hosts[0]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("writer", [third, first])
def test_drafts_come_from_what_the_layers_really_made_of_the_text(
    writer: Writer, num_ranks: int, folder: Path, target: Target, tmp_path: Path
) -> None:
    """A tap of the wrong layer or of the wrong token is a number like any other: only another model's can tell."""
    from transformers import AutoModelForCausalLM

    written = writer(target, tmp_path)
    draft = {"source": "eagle", "model": str(tmp_path), "tokens": 4, "tree": "chain"}
    _, host = served(folder, draft, Sampling(), num_ranks)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).base_model.eval()
    drafts = {text: tree.tokens for text, tree in host.trees.items() if len(tree) == 4}
    assert len(drafts) > 30
    for text, tokens in drafts.items():
        with torch.inference_mode():
            out = model(torch.tensor([text[:-1]]), output_hidden_states=True)
        layers = [out.hidden_states[i][0] for i in (2, 4, 6)] if writer is third else [out.last_hidden_state[0]]
        path: list[int] = []
        for token in tokens:
            logits = written.logits(text, torch.cat(layers, 1), path)
            assert token == written.ids[int(logits.argmax())]
            path.append(token)


@pytest.mark.parametrize("layout", ["safeailab", "speculators, normed", "eagle 1, wrapped"])
@pytest.mark.parametrize("keys", [{"accept": "rejection"}, {"deterministic": True, "target": {"dtype": "bfloat16"}}])
def test_rejection_and_fixed_rows_take_heads_too(
    keys: dict[str, Any], layout: str, folder: Path, target: Target, tmp_path: Path
) -> None:
    """Drawn with noise of its own and told from what; and the same bits whatever a head drafts."""
    written = LAYOUTS[layout](target, tmp_path)
    sampling = Sampling(temperature=0.8, seed=3)
    draft = {"source": "eagle", "model": str(tmp_path), "tokens": 3}
    told, host = served(folder, draft, sampling, 2, **keys)
    assert told.stats[-1].drafted > 0
    if "accept" in keys:
        draws = [tree.draws for tree in host.trees.values() if len(tree)]
        assert all(draw is not None and set(draw.ids) <= set(written.ids) for row in draws for draw in row[:-1])
        assert told.texts() == served(folder, draft, sampling, 2, **keys)[0].texts()
    else:
        assert told.texts() == served(folder, {}, sampling, 2, **keys)[0].texts()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(top_k=1),
        Sampling(top_p=0.7),
        Sampling(temperature=0.8, seed=4),
        Sampling(temperature=0.8, top_k=5),
        Sampling(temperature=1.2, top_p=0.7),
        Sampling(temperature=0.9, repetition_penalty=1.5, logit_bias={3: 4.0}),
    ],
)
def test_listed_ids_are_ranked_as_the_same_ids_in_a_whole_row(sampling: Sampling) -> None:
    """By the target's id, not by the column: noise, penalties and truncation are all about ids. Where the likeliest is
    drawn nothing is truncated: a draft for it had no other branch than that, and was said to be certain."""
    noise = torch.Generator().manual_seed(11)
    ids = torch.randperm(263, generator=noise)[:40]
    logits = torch.randn(3, 40, generator=noise) * 2
    whole = torch.full((3, 263), -torch.inf)
    whole[:, ids] = logits
    draws = [Draw([5, 3, int(ids[row])], 1, sampling, (int(ids[7]),) * row) for row in range(3)]
    listed = rank(RowLogits(logits, 263, listed_V=ids), draws, 4, CounterNoise())
    for (tokens, odds), (expected, likely) in zip(
        listed, rank(RowLogits(whole, 263), draws, 4, CounterNoise()), strict=True
    ):
        assert tokens[0] == expected[0]
        if not sampling.truncates:
            assert (tokens, odds) == (expected, pytest.approx(likely))


def test_bias_and_penalties_speak_of_the_targets_ids(folder: Path, target: Target, tmp_path: Path) -> None:
    """A head that knows few ids has another number for each of them; and an id it does not know is no id of its."""
    written = third(target, tmp_path)
    wanted = written.ids[-1]
    sampling = Sampling(logit_bias={wanted: 100.0})
    told, host = served(folder, {"source": "eagle", "model": str(tmp_path), "tokens": 4, "tree": "chain"}, sampling)
    assert {token for tree in host.trees.values() for token in tree.tokens} == {wanted}
    assert told.stats[-1].accepted == told.stats[-1].drafted
