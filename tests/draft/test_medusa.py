"""Medusa heads: every published layout against its formulas in float64, and every trap in which a reader has been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import tiny
from tests.draft.heads import medusa
from tests.draft.heads.medusa import NUM_HEADS, Written, drawn, original_names, vllm_names
from tests.draft.table import ask
from tests.model.published import Format, gptq, publish
from tests.worlds import serve, topology
from tpspec.draft.medusa import Medusa, MedusaHeads
from tpspec.draft.medusa_files import read_heads
from tpspec.draft.protocol import Taps
from tpspec.draft.shapes import Shape
from tpspec.errors import UserError
from tpspec.request import Request
from tpspec.tokens import NO_DRAFT
from tpspec.verify.draw import Draw, pick
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import RowLogits

VOCAB, HIDDEN = 263, 72
CPU = torch.device("cpu")
Writer = Callable[[Path, Path], Written]  # the target's folder, the heads'


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=2)


def made(folder: Path, target: Path) -> MedusaHeads:
    return MedusaHeads(read_heads(folder, target), torch.float32, CPU)


def assert_same(written: Written, heads: MedusaHeads) -> None:
    hidden_BD = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(5))
    logits_BHV = heads(hidden_BD)
    ids = list(range(VOCAB)) if heads.ids_V is None else heads.ids_V.tolist()
    assert ids == written.ids
    for i, hidden_D in enumerate(hidden_BD):
        torch.testing.assert_close(logits_BHV[i].double(), written.logits(hidden_D), rtol=1e-5, atol=1e-5)


def original(target: Path, folder: Path) -> Written:
    heads = drawn(target, 1)
    medusa.original(folder, original_names(heads), pickled=True, medusa_num_heads=NUM_HEADS, medusa_num_layers=1)
    return heads


def original_of_two_layers(target: Path, folder: Path) -> Written:
    heads = drawn(target, 2)
    medusa.original(folder, original_names(heads))
    return heads


def original_without_layers(target: Path, folder: Path) -> Written:
    heads = drawn(target, 0)
    medusa.original(folder, original_names(heads))
    return heads


def original_saved_once(target: Path, folder: Path) -> Written:
    """Three layers that are one: read as one layer, a head would say something else and nobody would notice."""
    heads = drawn(target, 3, shared=True)
    medusa.original(folder, original_names(heads, once=True), medusa_num_layers=3)
    return heads


def original_saved_twice(target: Path, folder: Path) -> Written:
    heads = drawn(target, 2, shared=True)
    medusa.original(folder, original_names(heads), pickled=True)
    return heads


def original_that_claims_two(target: Path, folder: Path) -> Written:
    """As the hub's configs of medusa-vicuna-v1.3 do."""
    heads = drawn(target, 1)
    medusa.original(folder, original_names(heads), pickled=True, medusa_num_heads=2)
    return heads


def whole_model(target: Path, folder: Path) -> Written:
    heads = drawn(target, 1)
    medusa.in_model(target, folder, original_names(heads))
    return heads


def vllm(target: Path, folder: Path) -> Written:
    heads = drawn(target, 2)
    medusa.vllm(target, folder, vllm_names(heads, mapped=False), num_hidden_layers=2)
    return heads


def vllm_with_a_prefix(target: Path, folder: Path) -> Written:
    heads = drawn(target, 1, 101)
    medusa.vllm(target, folder, vllm_names(heads), prefix="medusa_heads.", truncated_vocab_size=101)
    return heads


def vllm_without_biases(target: Path, folder: Path) -> Written:
    heads = drawn(target, 1)
    blocks = [[(weight, torch.zeros_like(bias)) for weight, bias in layers] for layers in heads.blocks]
    tensors = {name: one for name, one in vllm_names(heads, mapped=False).items() if not name.endswith("bias")}
    medusa.vllm(target, folder, tensors, medusa_fc_bias=False)
    return Written(blocks, heads.outputs, heads.ids)


def vllm_with_whole_outputs_and_a_map(target: Path, folder: Path) -> Written:
    heads = drawn(target, 1)
    ids = [9, 4, 200]
    medusa.vllm(target, folder, vllm_names(heads) | {"token_map": torch.tensor(ids)}, truncated_vocab_size=3)
    return Written(heads.blocks, [output[ids] for output in heads.outputs], ids)


def vllm_with_one_output(target: Path, folder: Path) -> Written:
    heads = drawn(target, 1, 101)
    tensors = vllm_names(heads, num_outputs=1)
    medusa.vllm(target, folder, tensors, truncated_vocab_size=101, original_lm_head=True)
    return Written(heads.blocks, heads.outputs[:1] * NUM_HEADS, heads.ids)


def vllm_with_the_targets_output(target: Path, folder: Path) -> Written:
    heads = drawn(target, 1, 101)
    tensors = vllm_names(heads, num_outputs=0)
    medusa.vllm(target, folder, tensors, truncated_vocab_size=101, original_lm_head=True)
    own = load_file(target / "model.safetensors")["model.embed_tokens.weight"]  # tied
    return Written(heads.blocks, [own[heads.ids]] * NUM_HEADS, heads.ids)


def test_heads_through_a_targets_own_head_read_it_in_codes(tmp_path: Path) -> None:
    """Stands against a weight that is called missing, where config.json says how its codes lie."""
    form = gptq(lm_head=True)
    quantized, meant = publish(
        tiny("llama", tmp_path / "plain"), tmp_path, Format(form.config, form.write, ("lm_head",))
    )
    written = drawn(quantized, 1, 101)
    tensors = vllm_names(written, num_outputs=0)
    medusa.vllm(quantized, tmp_path / "heads", tensors, truncated_vocab_size=101, original_lm_head=True)
    own = load_file(meant / "model.safetensors")["lm_head.weight"]
    (output,) = read_heads(tmp_path / "heads", quantized).outputs_VD
    torch.testing.assert_close(output, own[written.ids].float(), rtol=0, atol=1e-4)


def test_heads_through_a_targets_own_head_add_its_bias(tmp_path: Path) -> None:
    """Of Phi. Stands against the bias left out: odds of other tokens, and fewer drafts that win."""
    target = tiny("phi", tmp_path / "target")
    written = drawn(target, 1, 101)
    tensors = {name: one * (name == "token_map") for name, one in vllm_names(written, num_outputs=0).items()}
    medusa.vllm(target, tmp_path / "heads", tensors, truncated_vocab_size=101, original_lm_head=True)
    own = load_file(target / "model.safetensors")
    assert own["lm_head.bias"].any()
    hidden_BD = torch.randn(2, own["lm_head.weight"].shape[1])
    wanted = (hidden_BD @ own["lm_head.weight"].T + own["lm_head.bias"])[:, written.ids]
    torch.testing.assert_close(made(tmp_path / "heads", target)(hidden_BD)[:, 0], wanted, rtol=0, atol=1e-4)


WRITERS = [
    original,
    original_of_two_layers,
    original_without_layers,
    original_saved_once,
    original_saved_twice,
    original_that_claims_two,
    whole_model,
    vllm,
    vllm_with_a_prefix,
    vllm_without_biases,
    vllm_with_whole_outputs_and_a_map,
    vllm_with_one_output,
    vllm_with_the_targets_output,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_layout_says_what_its_formulas_say(write: Writer, target: Path, tmp_path: Path) -> None:
    """Wrong names, a block too few or an id map the wrong way round cost acceptance and raise nothing."""
    assert_same(write(target, tmp_path), made(tmp_path, target))


def test_heads_inside_the_targets_own_checkpoint_are_found_there(target: Path, tmp_path: Path) -> None:
    """Medusa-2: one folder is both."""
    written = whole_model(target, tmp_path)
    assert_same(written, made(tmp_path, tmp_path))


MISSING = [
    (original, "medusa_lm_head.pt", "1.0.linear.bias"),
    (original, "medusa_lm_head.pt", "2.1.weight"),
    (original_of_two_layers, "medusa_lm_head.safetensors", "0.2.weight"),
    (whole_model, "model.safetensors", "medusa_head.0.0.linear.bias"),
    (vllm, "model.safetensors", "blocks.1.layers.1.weight"),
    (vllm, "model.safetensors", "lm_heads.2.weight"),
    (vllm_with_one_output, "model.safetensors", "token_map"),
    (vllm_with_one_output, "model.safetensors", "blocks.0.layers.0.bias"),
]


def edit(file: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = torch.load(file, weights_only=True) if file.suffix == ".pt" else load_file(file)
    change(tensors)
    torch.save(tensors, file) if file.suffix == ".pt" else save_file(tensors, file)


@pytest.mark.parametrize(("write", "file", "name"), MISSING, ids=[name for *_, name in MISSING])
def test_a_missing_tensor_is_refused_by_name(write: Writer, file: str, name: str, target: Path, tmp_path: Path) -> None:
    write(target, tmp_path)
    edit(tmp_path / file, lambda tensors: tensors.pop(name))  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match=rf"tensor {name.removeprefix('medusa_head.')} is missing"):
        read_heads(tmp_path, target)


@pytest.mark.parametrize(("write", "file", "name"), MISSING, ids=[name for *_, name in MISSING])
def test_a_misshapen_tensor_is_refused_by_name(
    write: Writer, file: str, name: str, target: Path, tmp_path: Path
) -> None:
    """Heads of a larger model of the family, most of all."""
    write(target, tmp_path)
    edit(tmp_path / file, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(UserError, match=rf"tensor {name.removeprefix('medusa_head.')} has shape .*; by the configs it"):
        read_heads(tmp_path, target)


@pytest.mark.parametrize(
    ("write", "file", "name"),
    [
        (original, "medusa_lm_head.pt", "0.0.norm.weight"),
        (whole_model, "model.safetensors", "medusa_head.prefix.weight"),
        (vllm, "model.safetensors", "lm_heads.3.weight"),
        (vllm, "model.safetensors", "embed_tokens.weight"),
    ],
)
def test_a_tensor_that_no_layout_has_is_refused_by_name(
    write: Writer, file: str, name: str, target: Path, tmp_path: Path
) -> None:
    """What is not read would have changed what the heads say."""
    write(target, tmp_path)
    edit(tmp_path / file, lambda tensors: tensors.update({name: torch.ones(2)}))
    with pytest.raises(UserError, match=f"such a head does not have: {name.removeprefix('medusa_head.')}"):
        read_heads(tmp_path, target)


def test_what_is_no_heads_at_all_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no weights; should be"):
        read_heads(tmp_path, target)
    with pytest.raises(UserError, match="holds no Medusa heads; their tensors are called"):
        read_heads(target, target)
    torch.save({"0.0.linear.weight": print}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="not a file of tensors"):
        read_heads(tmp_path, target)


def test_a_map_to_ids_that_the_target_has_not_is_refused(target: Path, tmp_path: Path) -> None:
    vllm_with_one_output(target, tmp_path)
    edit(tmp_path / "model.safetensors", lambda tensors: tensors["token_map"].__setitem__(3, VOCAB))
    with pytest.raises(UserError, match="distinct ids from 0 to 262"):
        read_heads(tmp_path, target)


# What is made of the heads


def drafter(target: Path, folder: Path, write: Writer = original, *, coupled: bool = True, branches: int = 1,
            shape: Shape | None = None) -> tuple[Medusa, Written]:  # fmt: skip
    written = write(target, folder)
    heads = made(folder, target)
    return Medusa(heads, VOCAB, CounterNoise(), coupled=coupled, branches=branches, shape=shape), written


def rows(first: int, count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(first))


def test_head_0_speaks_of_the_token_after_the_root(target: Path, tmp_path: Path) -> None:
    """The row before the root has said the root; a head too early or a row too late is never right."""
    source, written = drafter(target, tmp_path)
    source.observe([], Taps({7: (0, rows(0, 4))}))
    (tree,) = source.propose([ask(7, [1, 2, 3, 4, 5], 9)])
    assert tree.tokens == tuple(written.logits(rows(0, 4)[-1]).argmax(1).tolist())
    assert tree.is_chain


def test_heads_that_know_the_text_are_right_about_it(target: Path, tmp_path: Path) -> None:
    """The same in a world: the token that a head is asked for and the one that is verified are the same place's."""
    prompts = [(3,) * 4, (9, 4) * 6]
    heads = medusa.fitted(target, prompts)
    medusa.vllm(target, tmp_path, vllm_names(heads), truncated_vocab_size=len(heads.ids))
    draft = {"source": "medusa", "model": str(tmp_path), "tree": "chain", "tokens": NUM_HEADS}
    told = serve(topology(target, draft=draft), [Request(i, ids, 24) for i, ids in enumerate(prompts)])
    assert told.stats[-1].accepted > 0.8 * told.stats[-1].drafted > 0


def test_without_the_row_before_the_root_it_is_silent(target: Path, tmp_path: Path) -> None:
    """A row of another place would make drafts that are wrong, and nothing else would show it."""
    source, _ = drafter(target, tmp_path)
    source.observe([], Taps({0: (0, rows(0, 3)), 1: (0, rows(0, 3)), 2: (5, rows(1, 0))}))
    source.observe([], Taps({1: (3, rows(1, 2))}))
    asks = [ask(0, [1] * 5), ask(1, [1] * 6, 2), ask(2, [1] * 6), ask(3, [1, 2]), ask(1, [1] * 6, 0)]
    assert [len(tree) for tree in source.propose(asks)] == [0, 2, 0, 0, 0]
    source.observe([], Taps({1: (0, rows(2, 1))}))  # it is read again
    assert source.propose([ask(1, [1] * 6)]) == [NO_DRAFT]
    source.forget(1)
    source.observe([], Taps({0: (3, rows(2, 1))}))
    assert [len(tree) for tree in source.propose([ask(1, [1, 2]), ask(0, [1] * 5)])] == [0, NUM_HEADS]


@pytest.mark.parametrize("write", [original, vllm_with_one_output])
def test_a_head_draws_with_the_noise_of_the_place_it_speaks_of(write: Writer, target: Path, tmp_path: Path) -> None:
    """The noise of another position is worse than none."""
    source, written = drafter(target, tmp_path, write)
    hidden = rows(3, 1)
    source.observe([], Taps({0: (3, hidden)}))
    asked = ask(0, [1, 2, 3, 4, 5], 9, temperature=6.0, seed=11)
    (tree,) = source.propose([asked])
    logits_HV = torch.full((NUM_HEADS, VOCAB), -torch.inf)
    logits_HV[:, written.ids] = written.logits(hidden[0]).float()
    draws = [Draw(asked.tokens, 1, asked.sampling, (0,) * depth) for depth in range(NUM_HEADS)]
    assert list(tree.tokens) == pick(RowLogits(logits_HV, VOCAB), draws, CounterNoise())
    assert list(tree.tokens) != logits_HV.argmax(1).tolist()


def test_where_shared_noise_is_not_exact_it_drafts_what_is_likeliest(target: Path, tmp_path: Path) -> None:
    """And says of no token that it was drawn."""
    source, written = drafter(target, tmp_path, coupled=False, branches=2)
    source.observe([], Taps({0: (3, rows(3, 1))}))
    (tree,) = source.propose([ask(0, [1, 2, 3, 4, 5], 64, temperature=0.9, seed=11)])
    assert tree.draws is None
    best = written.logits(rows(3, 1)[0]).topk(2).indices.tolist()
    depths = tree.depths()
    for depth, tokens in enumerate(best, 1):
        assert {tree.tokens[node] for node in range(len(tree)) if depths[node] == depth} == set(tokens)
    assert len(tree) == 2 + 4 + 8


def test_a_tree_holds_the_likeliest_paths_best_first(target: Path, tmp_path: Path) -> None:
    """A tree is cut from its end where rows do not pay."""
    source, _ = drafter(target, tmp_path, vllm_with_the_targets_output, branches=4)
    source.observe([], Taps({0: (3, rows(3, 1))}))
    trees = [source.propose([ask(0, [1, 2, 3, 4, 5], most)])[0] for most in range(1, 12)]
    for most, tree in enumerate(trees, 1):
        assert len(tree) == most
        assert tree == trees[-1].pruned(most)
        assert tree.odds is not None
        paths: list[float] = []
        for parent, odds in zip(tree.parents, tree.odds, strict=True):
            paths.append(odds * (paths[parent] if parent >= 0 else 1.0))
        assert paths == sorted(paths, reverse=True)


def test_what_came_true_is_believed_more(target: Path, tmp_path: Path) -> None:
    """Odds as the heads give them are worth what they are worth: a head that is always right is believed."""
    source, _ = drafter(target, tmp_path)
    text = [1, 2, 3, 4, 5]
    odds = []
    for _ in range(30):
        source.observe([], Taps({0: (len(text) - 2, rows(3, 1))}))
        (tree,) = source.propose([ask(0, text, 3)])
        assert tree.odds is not None
        odds.append(tree.odds[0])
        text = [*text, *tree.tokens, 9]
    assert odds[-1] > max(odds[0], 0.7)
