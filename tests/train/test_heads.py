"""The arithmetic of training: drafts unrolled as they will be run, and what is counted as accepted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import tiny
from tests.model.published import Format, gptq, publish
from tpspec.draft.eagle_checkpoint import _spec
from tpspec.errors import UserError
from tpspec.published.checkpoint import read_config
from tpspec.train.batches import Batch
from tpspec.train.eagle import EagleHead
from tpspec.train.loop import Plan, rate_at
from tpspec.train.medusa import MedusaHeads
from tpspec.train.model import of_layers
from tpspec.train.objective import Acceptance, Judge
from tpspec.train.taps import Tapped
from tpspec.train.target import Taught, taught
from tpspec.train.texts import Told
from tpspec.train.vocabulary import DraftVocabulary

DEPTH, IDS = 3, tuple(range(4, 90, 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    found = taught(tiny("smollm2", tmp_path_factory.mktemp("model")))
    return replace(found, rope_theta=50.0)  # a base at which a position too many or too few shows


@pytest.fixture(scope="module")
def texts(target: Taught) -> list[Tapped]:
    """Two lengths, so that one is padded; features of chance."""
    noise = torch.Generator().manual_seed(1)
    made = []
    for number, (num_prompt, size) in enumerate([(3, 9), (2, 6)]):
        ids = tuple(torch.randint(4, 90, (size,), generator=noise).tolist())
        features = torch.randn(size, 3 * target.hidden, generator=noise)
        final = torch.randn(size, target.hidden, generator=noise)
        made.append(Tapped(Told(number, "chat", 0.0, ids[:num_prompt], ids[num_prompt:]), features, final))
    return made


def randomise(module: torch.nn.Module) -> None:
    noise = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        scale = 1.5 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.3
        parameter.data = scale * torch.randn(parameter.shape, generator=noise) + (parameter.dim() == 1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turned(x_HE: Tensor, position: int, theta: float) -> Tensor:
    half = x_HE.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x_HE[:, :half], x_HE[:, half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Reference:
    """EAGLE-3's formulas, one row at a time, as a drafter runs them: float64, from the published names alone."""

    def __init__(self, tensors: dict[str, Tensor], target: Taught) -> None:
        self.w, self.target = {name: tensor.double() for name, tensor in tensors.items()}, target
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def read(self, h_D: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """One row more: its pre-norm output and its logits."""
        w, t = self.w, self.target
        at = "midlayer."
        embedded = norm(t.embedding_VD[token].double(), w[at + "input_layernorm.weight"], t.eps)
        z = torch.cat([embedded, norm(h_D, w[at + "hidden_norm.weight"], t.eps)])
        q, k, v = ((w[f"{at}self_attn.{name}_proj.weight"] @ z).view(-1, t.head_dim) for name in "qkv")
        position = len(self.keys)
        self.keys.append(turned(k, position, t.rope_theta))
        self.values.append(v)
        heads = []
        for head, q_E in enumerate(turned(q, position, t.rope_theta)):
            group = head // (t.num_heads // t.num_kv_heads)
            scores = torch.stack([key[group] @ q_E for key in self.keys]) / math.sqrt(t.head_dim)
            heads.append(scores.softmax(0) @ torch.stack([value[group] for value in self.values]))
        h_D = h_D + w[at + "self_attn.o_proj.weight"] @ torch.cat(heads)
        x = norm(h_D, w[at + "post_attention_layernorm.weight"], t.eps)
        gated = F.silu(w[at + "mlp.gate_proj.weight"] @ x) * (w[at + "mlp.up_proj.weight"] @ x)
        h_D = h_D + w[at + "mlp.down_proj.weight"] @ gated
        return h_D, w["lm_head.weight"] @ norm(h_D, w["norm.weight"], t.eps)


def test_a_head_for_latents_has_heads_like_the_values_made_of_them(tmp_path: Path) -> None:
    """Stands against a head whose every query is as wide as a latent: 20 times 576 numbers for GLM-4.7-Flash."""
    found = taught(tiny("deepseek_v2", tmp_path))
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (6, 6, 20)


def test_a_head_is_taught_what_a_target_says_whose_own_is_in_codes(tmp_path: Path) -> None:
    """Stands against a weight that is called missing, where config.json says how its codes lie."""
    form = gptq(lm_head=True)
    quantized, meant = publish(
        tiny("llama", tmp_path / "plain"), tmp_path, Format(form.config, form.write, ("lm_head",))
    )
    wanted = load_file(meant / "model.safetensors")["lm_head.weight"].float()
    torch.testing.assert_close(taught(quantized).head_VD, wanted, rtol=0, atol=1e-4)


def test_a_head_has_as_many_heads_as_its_kind_may_have(tmp_path: Path) -> None:
    """Of a target like Qwen3.5-27B, whose 24 heads do not divide 5,120. Stands against hours of training for a head
    that nobody can read."""
    sizes = {"hidden_size": 128, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24}
    found = taught(tiny("qwen3", tmp_path, **sizes))
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 24)
    vocabulary = DraftVocabulary(IDS, found.vocab, 1.0)
    head = EagleHead(found, vocabulary, torch.ones(3 * found.hidden), channels=40, depth=DEPTH)
    shape = _spec(head.config(), "here").shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 24)
    with pytest.raises(UserError, match=r"here/config.json: not a configuration transformers can read"):
        _spec(head.config() | {"num_attention_heads": 6}, "here")


def test_layers_that_keep_states_make_no_draft_model(tmp_path: Path) -> None:
    """Stands against hours of training for a model that is then refused."""
    with pytest.raises(
        UserError, match="the target's keep states, which drafts do not go back from; should be --hidden"
    ):
        of_layers(taught(tiny("qwen3_5", tmp_path)), 2, spread=True)


def test_a_target_may_list_thetas_of_its_layers(tmp_path: Path) -> None:
    """As Step 3.5 Flash was published. Stands against hours of taps, and then a traceback."""
    listed = read_config(tiny("step3p5", tmp_path))["rope_theta"]
    assert isinstance(listed, list)
    assert taught(tmp_path).rope_theta == max(listed)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("exaone", "transformers calls tensors of exaone otherwise than"), ("phi", "the target's head has a bias")],
)
def test_layers_that_are_no_draft_model_are_refused_in_words(kind: str, reason: str, tmp_path: Path) -> None:
    """Stands against a checkpoint called incomplete, and a bias that is left out of what a draft says."""
    with pytest.raises(UserError, match=f"--from-layers: {reason}.*; should be --hidden"):
        of_layers(taught(tiny(kind, tmp_path)), 2, spread=True)


def test_steps_are_unrolled_as_a_drafter_runs_them(target: Taught, texts: list[Tapped]) -> None:
    """A mask, position, shift or feedback that differs from use trains a head for something nobody runs."""
    vocabulary, scale = DraftVocabulary(IDS, target.vocab, 1.0), torch.rand(3 * target.hidden) + 0.5
    head = EagleHead(target, vocabulary, scale, channels=40, depth=DEPTH)
    randomise(head)
    tensors = head.tensors()
    drafts = head(Batch.of(texts, answers=True))
    for step, (predicts_BA, x_RD) in enumerate(drafts):
        expected = []
        for text, place in predicts_BA.nonzero().tolist():
            ids, row = texts[text].told.ids, len(texts[text].told.prompt) - 1 + place
            reference = Reference(tensors, target)
            for position in range(row + 1):
                features = texts[text].features_SX[position].double()
                h_D, scores = reference.read(tensors["fc.weight"].double() @ features, ids[position + 1])
            for ahead in range(1, step + 1):
                h_D, scores = reference.read(h_D, ids[row + 1 + ahead])
            expected.append(scores)
        assert len(expected) == sum(len(t.told.answer) - 1 - step for t in texts)
        logits = (x_RD @ head.output.T).double()
        torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_medusa_heads_read_the_last_hidden_state_of_their_row(target: Taught, texts: list[Tapped]) -> None:
    """Head k one place off predicts what the target has already said."""
    heads = MedusaHeads(target, DraftVocabulary(IDS, target.vocab, 1.0), DEPTH, 2)
    randomise(heads)
    w = heads.tensors()
    for step, (predicts_BA, x_RD) in enumerate(heads(Batch.of(texts, answers=True))):
        expected = []
        for text, place in predicts_BA.nonzero().tolist():
            x = texts[text].final_SD[len(texts[text].told.prompt) - 1 + place]
            for layer in range(2):
                at = f"blocks.{step}.layers.{layer}."
                x = x + F.silu(w[at + "weight"] @ x + w[at + "bias"])
            expected.append(w["lm_heads.0.weight"] @ x)
        torch.testing.assert_close(x_RD @ heads.output.T, torch.stack(expected))


def test_the_law_of_a_step_is_the_targets_at_the_place_before_its_token(target: Taught, texts: list[Tapped]) -> None:
    """A law one place off is learnt just as well, and no draft is accepted. Undraftable tokens do not count."""
    batch, vocabulary = Batch.of(texts, answers=True), DraftVocabulary(IDS, target.vocab, 1.0)
    noise = torch.Generator().manual_seed(5)
    head_VD, output_VD = (torch.randn(len(IDS), target.hidden, generator=noise) / 9 for _ in range(2))
    output_VD.requires_grad_()
    predicts = [batch.predicts(step) for step in range(DEPTH)]
    rows = [torch.randn(int(p.sum()), target.hidden, generator=noise).requires_grad_() for p in predicts]
    judge = Judge(head_VD, vocabulary.place_of(), torch.float32)
    found = judge.losses([*zip(predicts, rows, strict=True)], output_VD, batch)
    for step, loss in enumerate(found):
        left, terms = iter(rows[step]), []
        for tapped in texts:
            for at in range(len(tapped.told.prompt) + step, len(tapped.told.ids) - 1):
                logits, law = output_VD @ next(left), (head_VD @ tapped.final_SD[at]).softmax(0)
                if tapped.told.ids[at + 1] in IDS:
                    terms.append(-(law * logits.log_softmax(0)).sum())
        expected = torch.stack(terms).mean()
        torch.testing.assert_close(loss, expected)
        wanted = torch.autograd.grad(2 * expected, [rows[step], output_VD])
        torch.testing.assert_close(torch.autograd.grad(2 * loss, [rows[step], output_VD]), wanted)


def test_a_chain_agrees_up_to_its_first_wrong_draft(target: Taught, texts: list[Tapped]) -> None:
    """A right draft behind a wrong one is never reached, and must not be counted."""
    batch = Batch.of(texts, answers=True)
    vocabulary = DraftVocabulary(tuple(range(target.vocab)), target.vocab, 1.0)
    drafts = []
    for step in range(DEPTH):
        predicts = batch.predicts(step)
        right = F.one_hot(batch.tokens(step + 2)[predicts], target.vocab).float()
        drafts.append((predicts, -right if step == 1 else right))
    judge = Judge(torch.zeros(target.vocab, target.hidden), vocabulary.place_of(), torch.float32)
    agreed = judge.agreed(drafts, torch.eye(target.vocab), batch)
    assert torch.equal(agreed[..., 0], batch.predicts(0))
    assert not agreed[..., 1:].any()


def test_rounds_are_walked_as_a_chain_drafter_would() -> None:
    """The mean over all rows is not the mean over the rows at which rounds begin."""
    found = Acceptance()
    found.add("chat", [2, 0, 0, 1, 0], depth=2)
    assert found.report()["all"] == {"tokens_per_round": 2.5, "by_depth": [0.4, 0.2]}  # rows 0 and 3: 3 + 2 tokens


@given(st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=5), st.integers(1, 40))
def test_a_draft_vocabulary_maps_both_ways(answers: list[list[int]], count: int) -> None:
    """d2t is an offset, not the id; read as an id it drafts nonsense."""
    vocabulary = DraftVocabulary.most_used(answers, count, 31, always=[2])
    ids = torch.arange(len(vocabulary.ids)) + vocabulary.d2t()
    assert tuple(ids.tolist()) == vocabulary.ids == tuple(sorted(set(vocabulary.ids)))
    assert len(ids) == min(count, 31)
    assert 2 in vocabulary.ids
    assert vocabulary.place_of()[ids].tolist() == list(range(len(ids)))
    assert vocabulary.t2d().nonzero().flatten().tolist() == ids.tolist()
    used = [token for answer in answers for token in answer]
    assert vocabulary.coverage * max(1, len(used)) == pytest.approx(sum(token in vocabulary.ids for token in used))


def test_a_run_limited_in_time_still_ends_its_cosine() -> None:
    """Stopped at the highest rate, a head is worse than one trained for half as long to the end."""
    plan = Plan(steps=1000, minutes=10.0, rate=1.0, rows=1, every=1, seed=0)
    assert plan.progress(500, 60.0) == 0.5
    assert plan.progress(10, 600.0) == 1.0
    rates = [rate_at(done / 100) for done in range(101)]
    peak = rates.index(max(rates))
    assert rates == sorted(rates[: peak + 1]) + sorted(rates[peak + 1 :], reverse=True)
    assert rates[-1] < 0.05 < 0.9 < max(rates) <= 1.0
