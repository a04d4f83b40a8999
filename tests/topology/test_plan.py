"""The planner and the what-if table: what they choose, what they refuse, and that what they write can be read."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import tiny
from tests.topology.test_cost import PUBLISHED
from tpspec.errors import OutOfMemory, UserError
from tpspec.published.shape import ModelShape, shape_of
from tpspec.topology.__main__ import main
from tpspec.topology.caches import kv_bytes, kv_bytes_read, num_attended
from tpspec.topology.cards import card, cards, parse_gpus
from tpspec.topology.config import load
from tpspec.topology.layout import Plan, Ranking, Wish
from tpspec.topology.placement import Placement
from tpspec.topology.plan import plan, widths
from tpspec.topology.planned import topology_of
from tpspec.topology.proposal import propose, yaml_of
from tpspec.topology.rounds import round_bytes
from tpspec.topology.shards import split, whole_shard
from tpspec.topology.sizes import layer_bytes, num_params, weight_bytes
from tpspec.topology.whatif import ACCEPTANCES, CONTEXT, cases, even_load
from tpspec.topology.working import working_bytes

ROOT = Path(__file__).parents[2]
LLAMA70, LLAMA1 = "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
QWEN30 = "Qwen/Qwen3-30B-A3B"


@pytest.fixture(autouse=True)
def _nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSPEC_CACHE", str(tmp_path / "cache"))


def wish(gpus: str = "8x3090", link: str = "pcie4", model: str = LLAMA70, draft: str = LLAMA1, **rest: float) -> Wish:
    return Wish(parse_gpus(gpus.split()), link, model, draft, **rest)  # type: ignore[arg-type]


def speed(one: Plan) -> float:
    return one.prediction.tokens_per_s


def of(ranking: Ranking, placement: str, num_shards: int, bits: int) -> Plan:
    for one in ranking.plans:
        if (one.layout.placement, len(one.layout.shards), one.layout.bits) == (placement, num_shards, bits):
            return one
    raise AssertionError(f"no {placement} of {num_shards} x {bits} bits")


def test_the_shipped_links_give_the_published_table() -> None:
    """Speeds to one token/s in a hundred or its rounding, times to 0.1 ms: the inputs there are rounded themselves."""
    rows = [case for bits in (16, 8, 4) for case in cases(shape_of(LLAMA70), bits)]
    assert len(rows) == len(PUBLISHED)
    for case, (*_, first, tokens_per_s, _, sixth, at60, at75, at85) in zip(rows, PUBLISHED, strict=True):
        assert case.step.seconds(1) * 1e3 == pytest.approx(first, abs=0.1)
        assert case.step.seconds(6) * 1e3 == pytest.approx(sixth, abs=0.15)
        assert case.plain_tokens_per_s == pytest.approx(tokens_per_s, abs=0.6)
        for acceptance, expected in zip(ACCEPTANCES, (at60, at75, at85), strict=True):
            assert case.tokens_per_s(acceptance) == pytest.approx(expected, rel=0.01)


def test_plans_are_ranked_and_speculation_pays_for_a_70b() -> None:
    """Against a ranking by anything but predicted speed."""
    ranking = plan(wish())
    speeds = [speed(one) for one in ranking.plans]
    assert speeds == sorted(speeds, reverse=True)
    assert speed(ranking.plans[0]) > 1.5 * speed(of(ranking, "none", 8, 4))
    assert speed(of(ranking, "dedicated", 7, 4)) > speed(of(ranking, "inline", 7, 4))


def test_the_draft_grows_with_acceptance_and_shrinks_with_its_cost() -> None:
    """Against one K for every box: the published best is 5-7 at 16 bits and 3-5 at 4 bits for a draft of 1 ms."""
    lengths = [of(plan(wish(acceptance=a)), "dedicated", 7, 4).num_drafted for a in (0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    ranking = plan(wish())
    assert of(ranking, "inline", 8, 16).num_drafted >= of(ranking, "inline", 8, 4).num_drafted
    assert of(plan(wish(draft="ngram")), "inline", 8, 4).num_drafted > of(ranking, "inline", 8, 4).num_drafted


def test_what_does_not_fit_is_refused_with_the_missing_memory() -> None:
    """Against a plan that dies of memory, and a refusal that leaves one guessing. 70B in 16 bits needs 7 x 24 GB."""
    ranking = plan(wish())
    plain = [one for one in ranking.refusals if one.layout.placement == "none"]
    refused = {(len(one.layout.shards), one.layout.bits): one.short_bytes for one in plain}
    assert (6, 16) in refused
    assert (7, 16) not in refused
    assert refused[4, 16] > 8e9
    # 68.45e9 weights of layers at 4.25 bits, the head's 1.05e9 at 8.125, 4096 tokens of 320 KiB; room: 0.92 of 24 GiB.
    assert refused[1, 4] == pytest.approx(36.36e9 + 1.07e9 + 4096 * 320 * 2**10 - 0.92 * 24 * 2**30, rel=0.001)
    assert any(
        "does not fit: 6 shards of 16 bits, 0.6 GiB short on a 3090" in line for line in propose(wish(), ranking)
    )
    with pytest.raises(OutOfMemory, match=r"the nearest, 1 shards of 4 bits, is \d+\.\d GiB short on a 4090"):
        plan(wish("1x4090"))


def test_speculation_pays_less_for_a_mixture() -> None:
    """Against a plan of long drafts: what they read of experts is not free, as it is of a dense model as fast alone."""
    mixture = shape_of(QWEN30)
    dense = replace(mixture, experts=None, model_type="qwen3", intermediate=8 * mixture.intermediate)
    for bits, at_most in ((16, 0.88), (8, 0.92), (4, 0.96)):
        for sparse, plain in zip(cases(mixture, bits), cases(dense, bits), strict=True):
            assert sparse.plain_tokens_per_s == pytest.approx(plain.plain_tokens_per_s, rel=0.01)
            assert all(sparse.tokens_per_s(one) < at_most * plain.tokens_per_s(one) for one in ACCEPTANCES)


def test_a_mixture_of_30b_on_eight_cards_by_hand() -> None:
    """Against 30 GB that every token reads. 3.042e9 parameters of a row in 16 bits over 8 x 936 x 0.88 GB/s."""
    own_kernel = next(one for one in cases(shape_of(QWEN30), 16) if one.name == "8x3090 gen4x16 P2P, own kernel")
    (rank, *_) = own_kernel.step.ranks
    per_s = 8 * 936e9 * 0.88
    assert rank.reading_s(1) == pytest.approx(2 * 3.042e9 / per_s, rel=1e-3)
    # 28.99e9 of experts, of which six rows read 32%.
    assert rank.reading_s(6) == pytest.approx(2 * (30.53e9 - 0.311e9 - 0.679 * 28.99e9) / per_s, rel=1e-3)


def test_a_mixture_is_held_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Against a card that was to hold the experts of one token: 30.22e9 parameters are 60 GB, 15.5 GiB in 4 bits, and
    0.85 for the scales of a third of the experts, which have groups of 32 instead of 128."""
    ranking = plan(wish(model=QWEN30, draft="Qwen/Qwen3-0.6B"))
    assert sum(of(ranking, "none", 8, 16).memory) == pytest.approx(61.5e9, rel=0.02)
    assert sum(of(ranking, "none", 1, 4).memory) / 2**30 == pytest.approx(16.35, abs=0.1)
    refused = {(len(one.layout.shards), one.layout.bits) for one in ranking.refusals if one.layout.placement == "none"}
    assert refused == {(1, 8), (1, 16), (2, 16)}
    lengths = [one.num_drafted for one in ranking.plans if one.layout.placement == "dedicated"]
    assert max(lengths) <= 4
    assert main(["plan", "--gpus", "8x3090", "--link", "pcie4", "--model", QWEN30, "--draft", "Qwen/Qwen3-0.6B"]) == 0
    assert main(["whatif", "--model", QWEN30]) == 0
    assert capsys.readouterr().err == ""


def test_a_longer_context_takes_memory_and_time() -> None:
    short, long = plan(wish("4x3090")), plan(wish("4x3090", context=100_000))
    assert max(of(long, "none", 4, 4).memory) > max(of(short, "none", 4, 4).memory)
    assert speed(of(long, "none", 4, 4)) < speed(of(short, "none", 4, 4))
    assert (4, 8) in {(len(one.layout.shards), one.layout.bits) for one in long.refusals}


def test_unlike_cards_carry_in_proportion() -> None:
    """Against an equal split that makes the fast card wait, and a drafter on a card that is not there."""
    asked = wish("2x3090 1x4090", model="Qwen/Qwen2.5-14B-Instruct", draft="Qwen/Qwen3-0.6B")
    three = of(plan(asked), "none", 3, 16)
    assert topology_of(asked, three).target.weights == (1008.0, 936.0, 936.0)
    assert three.layout.shards == (2, 0, 1)
    drafters = {one.layout.drafter for one in plan(asked).plans if one.layout.placement == "dedicated"}
    assert drafters == {1, 2}  # a 3090, or the 4090


@pytest.mark.parametrize("draft", ["ngram", LLAMA1])
def test_a_card_carries_what_it_has_room_for(draft: str) -> None:
    """A 5090 reads six times as fast as an L4, and six sevenths of a 70B in 4 bits are more than it holds. Stands
    against a box that was refused though the two hold it together, as `target.weights: auto` would have it."""
    asked = wish("1x5090 1xl4", draft=draft)
    for one in plan(asked).plans:
        room = [asked.gpus[index].usable_bytes for index in one.layout.cards]
        assert all(held <= free for held, free in zip(one.memory, room, strict=True))
        first, second = one.weights
        assert 1 < first / second < 1792 / 300
        assert topology_of(asked, one).target.weights == one.weights
    drafts = {one.layout.placement for one in plan(asked).plans}
    assert drafts >= ({"none", "inline"} if draft == "ngram" else {"none", "inline", "gaps"})


@pytest.mark.parametrize(
    "model", ["MiniMaxAI/MiniMax-M2", "mistralai/Mistral-Small-4-119B-2603", "moonshotai/Kimi-K2-Instruct-0905"]
)
def test_a_model_that_was_published_in_floats_of_8_bits_is_planned_so(model: str) -> None:
    """Stands against a plan by name that has 16 bits of what nobody can fetch but in 8."""
    assert widths(shape_of(model)) == {8: None, 4: "int4"}


def test_an_inline_draft_model_is_on_the_first_card_alone() -> None:
    """The lead drafts for all. Stands against a plan that does not fit because every card was to hold the model."""
    ranking = plan(wish())
    inline, plain = (of(ranking, placement, 8, 4).memory for placement in ("inline", "none"))
    first, *others = (a - b for a, b in zip(inline, plain, strict=True))
    assert first > 0
    assert not any(others)


@pytest.mark.parametrize("placement", ["none", "inline", "dedicated", "gaps"])
def test_every_plan_can_be_read_back(tmp_path: Path, placement: str) -> None:
    """Against a planner that writes what `load` refuses."""
    asked, path = wish("1x4090 4x3090"), tmp_path / "box.yaml"
    ranking = plan(asked)
    best = next(one for one in ranking.plans if one.layout.placement == placement)
    path.write_text(yaml_of(asked, Ranking((best, *ranking.plans), ranking.refusals)), encoding="utf-8")
    topology = load(path)
    assert topology == topology_of(asked, best)
    assert len(topology.target.ranks) == len(best.layout.shards)
    if placement == "dedicated":
        assert topology.draft.placement == Placement("dedicated", len(best.layout.shards))


def test_a_norm_over_all_heads_is_made_whole_where_a_bus_takes_longer(tmp_path: Path) -> None:
    """MiniMax-M2 by hand, in 4 bits: 62 of 187 collectives are saved, for the queries and keys of 40 + 6 heads more,
    that each of six cards has to hold and to read. In 16 bits, of OLMo 2, reading takes longer than a slot does."""
    asked, path = wish("8x3090", "pcie4", model="MiniMaxAI/MiniMax-M2", draft="ngram"), tmp_path / "box.yaml"
    ranking = plan(asked)
    best = ranking.plans[0]
    other = next(one for one in ranking.plans if one.layout == replace(best.layout, replicates_norm=False))
    assert best.layout.replicates_norm
    assert (best.step.collectives, other.step.collectives) == (125, 187)
    assert speed(best) > 1.08 * speed(other)
    held = [more - less for more, less in zip(best.memory, other.memory, strict=True)]
    assert held == pytest.approx([62 * 46 * 128 * 3072 * 4.25 / 8] * 6, rel=0.01)
    path.write_text(yaml_of(asked, ranking), encoding="utf-8")
    assert load(path).target.qk_norm == "replicate"
    assert main(["check", str(path)]) == 0
    asked = wish("8x3090", "pcie4", model="allenai/OLMo-2-0325-32B-Instruct", draft="ngram")
    plain = [one for one in plan(asked).plans if one.layout.placement == "none" and one.layout.bits == 16]
    assert not plain[0].layout.replicates_norm


def test_the_command_prints_a_table_and_writes_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "box.yaml"
    words = ["plan", "--gpus", "8x3090", "--link", "pcie4", "--model", LLAMA70, "--draft", LLAMA1, "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[3].split()[:4] == ["tok/s", "shards", "draft", "K"]
    assert len([line for line in printed if " reduces of " in line]) == 10
    assert printed[-1] == f"wrote {out}"
    text = out.read_text()
    assert text.startswith("# 8x3090, predicted")
    assert main(["check", str(out)]) == 0


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("openai/gpt-oss-20b", "float32"), ("google/gemma-3-12b-it", "float32"), ("Qwen/Qwen3-8B", "float16")],
)
def test_a_plan_for_cards_without_bfloat16_can_be_checked(model: str, dtype: str, tmp_path: Path) -> None:
    """Stands against a topology in float16 for models whose numbers are too large for it: `check` refuses it."""
    asked, path = wish("4x2080ti", model=model, draft="ngram"), tmp_path / "box.yaml"
    path.write_text(yaml_of(asked, plan(asked)), encoding="utf-8")
    assert load(path).target.dtype == dtype
    assert main(["check", str(path)]) == 0


def test_a_drafter_on_a_card_without_bfloat16_is_not_planned_in_it() -> None:
    """Stands against the target's cards deciding for another's: the drafter had bfloat16 on a card that has none."""
    asked = wish("2x3090 1x2080ti")
    best = of(plan(asked), "dedicated", 2, 4)
    assert [asked.gpus[index].name for index in best.layout.cards] == ["3090", "3090", "2080ti"]
    assert topology_of(asked, best).target.dtype == "float16"


def test_a_plan_on_recalled_numbers_says_so() -> None:
    """Against a data sheet from memory taken for a measurement."""
    asked = wish("8xa10", draft="ngram")
    assert "# Check first: the numbers of a10 are recalled" in yaml_of(asked, plan(asked))
    assert "Check first" not in yaml_of(wish(), plan(wish()))


def test_ngram_needs_no_model_and_no_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "2x3090", "--link", "pcie4", "--model", "Qwen/Qwen2.5-14B-Instruct"]) == 0
    out = capsys.readouterr().out
    assert "drafts looked up" in out
    assert "dedicated" not in out
    assert "draft: {source: ngram, tokens: " in out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gpus": "8x3900"}, "no card '3900' is known; did you mean 3090"),
        ({"gpus": "0x3090"}, "should be a number of cards, 1 to 999, and their name"),
        ({"gpus": "99999x3090"}, "should be a number of cards, 1 to 999, and their name"),
        ({"link": "pcie44"}, "no link table 'pcie44'; did you mean pcie4"),
        ({"model": "llama-70b"}, "no model 'llama-70b'"),
        ({"draft": "llama-1b"}, "no model 'llama-1b'"),
        ({"acceptance": 1.5}, "should be between 0 and 1"),
        ({"draft": ""}, "--draft : is empty; should be a draft model's folder or hub id, or one of none, ngram, lay"),
        ({"draft": "medusa"}, "--draft medusa: is not costed here"),
        ({"draft": "model"}, "--draft model: costs what its model does; should be a draft model's folder"),
    ],
)
def test_names_nobody_knows_are_errors_with_a_way_out(change: dict[str, object], why: str) -> None:
    """Against a KeyError, and against planning for something else than what was asked."""
    with pytest.raises(UserError, match=why):
        plan(wish(**change))  # type: ignore[arg-type]


@pytest.mark.parametrize("spelt", ["3090", "RTX3090", "rtx 3090", "NVIDIA GeForce RTX 3090", "rtx_3090"])
def test_a_card_is_found_however_it_is_dressed(spelt: str) -> None:
    assert card(spelt) is cards()["3090"]
    assert len(parse_gpus([f"3x{spelt}"])) == 3


@pytest.mark.parametrize("context", ["0", "-1", "long", "1" + 30 * "0"])
def test_a_context_of_no_tokens_is_answered_in_words(context: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stands against `invalid _positive value`, the name of a function of ours, and a traceback at a number that no
    float holds."""
    assert main(["plan", "--gpus", "8x3090", "--link", "pcie4", "--model", LLAMA70, "--context", context]) == 2
    assert f"--context: {context} is not a whole number above 0" in capsys.readouterr().err


def test_the_command_tells_errors_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "8x3900", "--link", "pcie4", "--model", LLAMA70]) == 2
    assert capsys.readouterr().err == "no card '3900' is known; did you mean 3090?\n"
    assert main(["plan", "--gpus", "1x4090", "--link", "pcie4", "--model", LLAMA70]) == OutOfMemory.exit_code
    words = ["plan", "--gpus", "8x3090", "--link", "pcie4", "--model", LLAMA70, "--out", str(tmp_path)]
    assert main(words) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_no_more_cards_are_planned_than_there_are_groups_of_heads_with_a_state(tmp_path: Path) -> None:
    """Stands against a box of seven that is refused for a model which three of its cards hold."""
    shape = ModelShape.of(tiny("falcon_h1_normed", tmp_path))
    assert (shape.num_heads, shape.most_shards) == (6, 3)
    ranking = plan(wish("7x3090", model=str(tmp_path), draft="ngram"))
    assert {len(one.layout.shards) for one in ranking.plans} == {1, 2, 3}


def test_whatif_sends_what_a_round_sends() -> None:
    """Stands against a mixture's sum of its own, beside its MLP's, that took no time on the link."""
    shape = shape_of("google/gemma-4-26B-A4B-it")
    step = next(cases(shape, 16)).step
    assert step.row_bytes * step.reduces == sum(round_bytes(shape, 8, 1, 2, num_logit_rows=0).values())


def test_whatif_divides_no_latents() -> None:
    """Stands against an eighth of a cache that every rank holds whole, and of the matrices that make it."""
    shape = shape_of("zai-org/GLM-4.7-Flash")
    load, (first, *_) = even_load(shape, 8, 4), split(shape, (1.0,) * 8)
    assert load.kv == kv_bytes_read(shape, first, "bfloat16", CONTEXT)
    assert load.params == num_params(shape, first) + num_attended(shape, first, CONTEXT)


def test_whatif_prints_the_table_without_torch() -> None:
    """Against a planner that takes ten seconds and a GPU driver."""
    code = (
        "import sys; from tpspec.topology.__main__ import main; "
        f"code = main(['whatif', '--model', '{LLAMA70}']) or "
        f"main(['plan', '--gpus', '8x3090', '--link', 'pcie4', '--model', '{LLAMA70}']); "
        "sys.exit(code or bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    cells = [line.split() for line in done.stdout.splitlines() if line.startswith("8x3090 gen3x8 stock ")]
    assert [row[7] for row in cells] == ["30", "43", "54"]
    assert "16-bit" in done.stdout


def test_a_layer_behind_the_target_s_last_is_costed_by_what_it_reads() -> None:
    """Against a source that most of these models are published with and no plan knows. It moves, too."""
    ranking = plan(wish(model="Qwen/Qwen3.5-27B", draft="mtp"))
    shape = shape_of("Qwen/Qwen3.5-27B")
    plain, inline, away = (of(ranking, placement, 4, 4) for placement in ("none", "inline", "dedicated"))
    beside = inline.memory[0] - plain.memory[0]
    assert layer_bytes(shape, "bfloat16") < beside < 1.05 * layer_bytes(shape, "bfloat16")
    assert away.memory[-1] == beside
    assert inline.draft_s == pytest.approx(layer_bytes(shape, "bfloat16") / (0.8 * 936e9), rel=0.25)
    assert inline.prediction.tokens_per_s > plain.prediction.tokens_per_s
    assert topology_of(wish(model="Qwen/Qwen3.5-27B", draft="mtp"), away).draft.source == "mtp"


def test_the_states_of_a_draft_model_are_counted() -> None:
    """Against a card that is full before the texts come: 17 states of Qwen3.5-0.8B take half a GiB."""
    ranking = plan(wish(model="Qwen/Qwen3.5-27B", draft="Qwen/Qwen3.5-0.8B"))
    one = next(plan for plan in ranking.plans if plan.layout.placement == "dedicated")
    shape = shape_of("Qwen/Qwen3.5-0.8B")
    (whole,) = split(shape, (1.0,))
    beside = weight_bytes(shape, whole, "bfloat16") + kv_bytes(shape, whole, "bfloat16", wish().page_context)
    assert one.memory[-1] - beside == pytest.approx(0.52 * 2**30, rel=0.1)


def test_a_draft_through_the_shards_pays_for_its_collectives() -> None:
    """Against drafts that are free: 20 of 80 layers are 40 all-reduces and a gather for every drafted token."""
    best = of(plan(wish(draft="early_exit")), "inline", 8, 4)
    tokens = best.prediction.tokens_per_round
    assert best.prediction.collectives == pytest.approx((161 + best.num_drafted * 41) / tokens)
    looked_up = of(plan(wish(draft="ngram")), "inline", 8, 4)
    assert best.draft_s > looked_up.step.seconds(1) / 5
    assert speed(best) < speed(looked_up)
    assert topology_of(wish(draft="early_exit"), best).draft.source == "early_exit"


def test_rounds_take_what_the_widest_mlp_makes() -> None:
    """Stands against layers that keep nothing of a token and have MLPs twice as wide, of which no round was counted."""
    wide = shape_of("google/gemma-4-E2B-it")
    assert wide.sharing is not None
    narrow = replace(wide, sharing=replace(wide.sharing, channels=wide.intermediate))
    more = [working_bytes(shape, whole_shard(shape), "bfloat16", 4096, 256) for shape in (wide, narrow)]
    assert more[0] - more[1] == (256 + 64) * 2 * 3 * (wide.sharing.channels - wide.intermediate)
