"""Simulated rounds: exact where there is a closed form, whole whatever the lengths, as long as what was recorded."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.checkpoints import tiny
from tpspec.comm.channel import OneRankChannel
from tpspec.measure.__main__ import main
from tpspec.measure.script import WRONG, Script, replays_of, scripts_of
from tpspec.measure.simulate_command import checked, report, simulation
from tpspec.measure.simulated_draft import OUTCOMES, Guesses
from tpspec.measure.simulator import COLLECTIVES, DETAILED, Crowd, Simulation, simulate
from tpspec.measure.time_model import TimeModel, on_cards
from tpspec.measure.timeline import chrome_trace
from tpspec.measure.trace import Recording, Round, guesses_of, made_up, read, write
from tpspec.request import Request
from tpspec.roles.target import lead_rounds
from tpspec.topology.cards import parse_gpus
from tpspec.topology.config import Topology
from tpspec.topology.cost import RankCost, StepCost, tokens_per_round
from tpspec.topology.layout import Layout, Wish
from tpspec.topology.links import Curve, LinkTable, straight
from tpspec.topology.plan import plan

ROOT = Path(__file__).parents[2]
# Powers of two, so that sums are exact.
COMPUTE_S, REDUCE_S, REDUCES, DRAFT_S, MESSAGE_S = 2.0**-4, 2.0**-12, 8, 2.0**-7, 2.0**-10
STEP_S = COMPUTE_S + REDUCES * REDUCE_S
CONSTANT = TimeModel(
    StepCost((RankCost(weights_s=COMPUTE_S),), reduces=REDUCES, row_bytes=64, link=LinkTable("c", Curve((), REDUCE_S))),
    StepCost((RankCost(weights_s=DRAFT_S),)),
    MESSAGE_S,
)
GROWING = TimeModel(
    StepCost((RankCost(weights_s=0.02, row_s=0.003),), 0.001, REDUCES, 1152, straight(300, 0.8)),
    StepCost((RankCost(weights_s=0.0, row_s=0.0015),)),
)


def topology(**keys: Any) -> Topology:
    made: dict[str, Any] = {"name": "a test", "target": {"model": "smollm2-135m", "ranks": (0, 1)}}
    return Topology.model_validate(made | {"draft": {"source": "ngram"}} | keys)


DEDICATED = topology(draft={"source": "model", "model": "smollm2-135m", "placement": {"dedicated": 2}})


def scripts(guesses: list[str], num_prompt: int = 5) -> list[Script]:
    return [Script(number, num_prompt, one, len(one)) for number, one in enumerate(guesses)]


# Time


@pytest.mark.parametrize("num_prompt", [1, 5])
def test_plain_decoding_takes_a_step_for_each_token_exactly(num_prompt: int) -> None:
    """The prompt's round gives the first token. Against time that is lost or counted twice between rounds."""
    ran = simulate(topology(), CONSTANT, scripts(["n" * 20, "y" * 7], num_prompt), num_drafts=0)
    assert ran.seconds == 27 * STEP_S
    assert [one.seconds for one in ran.rounds] == [STEP_S] * 25
    assert sum(one.reduce_s for one in ran.rounds) == 25 * REDUCES * REDUCE_S


def test_serial_drafts_add_their_steps_exactly() -> None:
    """Four tokens a round after the first; nothing is drafted for the one token that remains, or for none."""
    ran = simulate(topology(), CONSTANT, scripts(["y" * 14]), num_drafts=3)
    assert [one.tokens for one in ran.rounds] == [4, 4, 4, 1]
    assert ran.seconds == 5 * STEP_S + 3 * 3 * DRAFT_S


def test_a_round_costs_by_its_rows() -> None:
    """Two sequences, three drafts each: eight rows, and drafting steps of two rows."""
    ran = simulate(topology(), GROWING, scripts(["y" * 9] * 2), num_drafts=3, concurrency=2)
    first = ran.rounds[0]
    assert (first.rows, first.tokens) == (8, 8)
    assert first.forward_s == pytest.approx(GROWING.target.seconds(8))
    assert GROWING.draft is not None
    assert first.drafting_s == pytest.approx(3 * GROWING.draft.seconds(2))


def test_padded_rounds_cost_their_padding() -> None:
    made = topology(deterministic=True, engine={"fixed_rows": 16})
    ran = simulate(made, GROWING, scripts(["y" * 9]), num_drafts=3)
    assert [one.forward_s for one in ran.rounds] == pytest.approx([GROWING.target.seconds(16)] * 2)


def test_the_length_that_pays_is_found_by_the_engines_own_pace() -> None:
    """Drafts that are never right end soon; those that always are grow long."""
    wrong = simulate(topology(), GROWING, scripts(["n" * 200]), num_drafts=None)
    assert sum(one.drafted for one in wrong.rounds) < 60
    right = simulate(topology(), GROWING, scripts(["y" * 400]), num_drafts=None)
    assert len(right.rounds) < 60


# Tokens


def test_drafts_end_where_the_drafter_was_silent_and_go_on_after_a_wrong_one() -> None:
    script = Script(0, 5, "?yy-yny", 20)
    assert script.chain(1, 5).tokens == (2, 3)
    assert script.chain(3, 5).tokens == ()
    assert script.chain(4, 5).tokens == (5, WRONG, WRONG, WRONG, WRONG)
    assert script.chain(4, 1).tokens == (5,)


@pytest.mark.parametrize(("acceptance", "num_drafts"), [(0.5, 3), (0.8, 1), (0.8, 4), (0.9, 8)])
def test_tokens_per_round_come_to_the_formula(acceptance: float, num_drafts: int) -> None:
    """Leviathan et al. 2023, equation 1. Fixed seed; 4% is more than 4 standard errors of any of the four."""
    made_scripts = scripts_of(made_up(acceptance, seed=5, count=4, num_tokens=2000), seed=0)
    ran = simulate(topology(), CONSTANT, made_scripts, num_drafts=num_drafts)
    tokens = sum(one.tokens for one in ran.rounds) / len(ran.rounds)
    assert tokens == pytest.approx(tokens_per_round(acceptance, num_drafts), rel=0.04)


@st.composite
def crowds(draw: st.DrawFn) -> list[Script]:
    guesses = draw(st.lists(st.text("yn-", min_size=1, max_size=30), min_size=1, max_size=7))
    prompts = [draw(st.integers(1, 40)) for _ in guesses]
    more = [draw(st.integers(0, 3)) for _ in guesses]
    parts = zip(guesses, prompts, more, strict=True)
    return [Script(number, prompt, one, len(one) + extra) for number, (one, prompt, extra) in enumerate(parts)]


class Inspector(Crowd):
    """Looks after every round."""

    def report(self, *arguments: Any) -> None:
        super().report(*arguments)
        self._simulation.scheduler.check_integrity()


@settings(max_examples=60, deadline=None)
@given(
    crowds(), st.sampled_from([0, 1, 3, 8, None]), st.integers(1, 5), st.sampled_from([128, 4096]), st.integers(2, 24)
)
def test_every_token_of_every_request_is_emitted_once(
    made: list[Script], num_drafts: int | None, concurrency: int, cache: int, max_rows: int
) -> None:
    """Whatever the lengths, with texts that leave a small cache and come back, and prompts read in chunks."""
    for placement in ("inline", {"dedicated": 2}):
        draft = {"source": "model", "model": "smollm2-135m", "placement": placement}
        box = topology(draft=draft, cache={"tokens": cache}, engine={"max_rows": max_rows})
        ready = Simulation(box, CONSTANT, made, Guesses(made, 0.6))
        requests: list[Request] = [script.request(num_drafts) for script in made]
        crowd = Inspector(ready, requests, concurrency)
        assert lead_rounds(ready.engine, OneRankChannel(), crowd) == 0
        assert crowd.outputs == {script.id: list(range(1, 1 + len(script.guesses))) for script in made}
        assert ready.engine.stats().pages_used == 0


# The timeline


@pytest.mark.parametrize("made", [topology(), DEDICATED])
def test_the_timeline_shows_what_the_shares_say(made: Topology) -> None:
    """Events of a track one after the other; collectives as long as the rounds say."""
    texts = scripts_of(made_up(0.7, 3, count=5, num_tokens=30), 0)
    ways = {
        way: simulate(made, GROWING, texts, num_drafts=num, concurrency=2)
        for way, num in (("plain", 0), ("speculative", 4))
    }
    found = report(ways)
    drawn = chrome_trace({way: ran.timeline for way, ran in ways.items()})["traceEvents"]
    for process, (way, ran) in enumerate(ways.items(), start=1):
        own = [one for one in drawn if one["pid"] == process]
        names = {one["args"]["name"]: one["tid"] for one in own if one["name"] == "thread_name"}
        events = [one for one in own if one["ph"] == "X"]
        for thread in names.values():
            track = [one for one in events if one["tid"] == thread]
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(track))
        verifying = [one for one in events if one["tid"] == names[COLLECTIVES] and "(verify)" in one["name"]]
        seconds = sum(one.seconds for one in ran.rounds)
        assert sum(one["dur"] for one in verifying) / 1e6 == pytest.approx(found[way]["wait_share"] * seconds, rel=1e-5)
        ends = [one["ts"] + one["dur"] for one in events if one["tid"] != names.get(OUTCOMES)]
        assert max(ends) / 1e6 == pytest.approx(ran.seconds)


def test_the_first_rounds_show_every_collective_and_later_ones_one_block() -> None:
    ran = simulate(topology(), GROWING, scripts(["n" * 9]), num_drafts=0)
    counts = [0] * 10
    for event in ran.timeline.events:
        counts[event.notes["round"]] += event.track == COLLECTIVES
    assert counts[1:] == [REDUCES] * DETAILED + [1] * (9 - DETAILED)


# Recorded rounds


def recorded(pairs: list[tuple[int, int]], asked: int = 4, category: str = "all", slow: float = 1.0) -> Recording:
    """What `savings` would have recorded of rounds with these (drafted, accepted), timed by GROWING."""
    num_tokens = 1 + sum(accepted + 1 for _, accepted in pairs)
    plain = tuple(_timed(0, 0, slow) for _ in range(num_tokens - 1))
    speculative = tuple(_timed(drafted, accepted, slow) for drafted, accepted in pairs)
    guesses = guesses_of(speculative, num_tokens, num_tokens + 9, asked)
    return Recording(category, 12, guesses, num_tokens + 9, asked, plain, speculative)


def _timed(drafted: int, accepted: int, slow: float) -> Round:
    step, rows = GROWING.target, 1 + drafted
    forward_s, reduce_s = slow * (step.seconds(rows) - step.fixed_s), slow * step.waiting_s(rows)
    return Round(
        rows=rows,
        drafted=drafted,
        accepted=accepted,
        tokens=accepted + 1,
        seconds=forward_s + slow * step.fixed_s + 0.0015 * drafted,
        forward_s=forward_s,
        drafting_s=0.0015 * drafted,
        reduces=REDUCES,
        reduce_bytes=REDUCES * rows * step.row_bytes,
        reduce_s=reduce_s,
    )


pairs_of_rounds = st.lists(
    st.integers(0, 4).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))),
    min_size=1,
    max_size=12,
)


@given(pairs_of_rounds)
def test_at_the_recorded_draft_length_the_recorded_rounds_come_back(pairs: list[tuple[int, int]]) -> None:
    """Through the same guesses that any other length is simulated from. Against a trace that lost something."""
    recording = recorded(pairs)
    for made, num_drafts in ((scripts_of([recording], seed=1), 4), (replays_of([recording]), 64)):
        ran = simulate(topology(), GROWING, made, num_drafts=num_drafts)
        assert [(one.drafted, one.accepted) for one in ran.rounds] == pairs


def test_costs_fitted_to_some_prompts_give_the_times_of_others() -> None:
    """To the rounding; and 1.2 times too little for prompts on a machine that had become 1.2 times as slow."""
    some = [recorded([(4, 2), (4, 4), (0, 0), (2, 1)] * 3), recorded([(4, 0), (3, 3), (1, 0)] * 4)]
    found = checked(topology(), some)
    assert found["plain"]["ratio"] == pytest.approx(1, abs=0.01)
    assert found["speculative"]["ratio"] == pytest.approx(1, abs=0.06)  # the last round drafts for nobody
    assert found["speculative"]["rounds"] == found["speculative"]["recorded_rounds"] == 12
    assert found["plain"]["wait_share"] == pytest.approx(found["plain"]["recorded_wait_share"], abs=0.01)
    slow = checked(topology(), [some[0], recorded([(4, 0), (3, 3), (1, 0)] * 4, slow=1.2)])
    assert slow["plain"]["ratio"] == pytest.approx(1 / 1.2, abs=0.01)


def test_savings_records_what_the_simulator_replays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Real rounds on a tiny checkpoint. Against rounds that are lost, counted twice or timed apart from the total."""
    keys: dict[str, Any] = {
        "target": {"model": str(tiny("smollm2", tmp_path / "model")), "ranks": [0], "dtype": "float32"}
    }
    keys["draft"] = {"source": "ngram", "tokens": 4}
    (tmp_path / "box.yaml").write_text(json.dumps({"name": "a box", "device": "cpu", "cache": {"tokens": 512}} | keys))
    texts = ("the cat and the hat, the cat and the hat, the cat", "abababab", "one two three one two three one")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    box, trace = str(tmp_path / "box.yaml"), str(tmp_path / "trace.jsonl")
    prompts = str(tmp_path / "prompts.jsonl")
    capsys.readouterr()
    assert main(["savings", box, "--prompts", prompts, "--max-tokens", "24", "--trace", trace, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    recordings = read(Path(trace))
    for way in ("plain", "speculative"):
        rounds = [one for recording in recordings for one in getattr(recording, way)]
        assert len(rounds) == found[way]["rounds"]
        assert sum(one.tokens for one in rounds) == found[way]["tokens"]
        seconds = found[way]["tokens"] / found[way]["tokens_per_second"]
        assert sum(one.seconds for one in rounds) == pytest.approx(seconds, rel=0.02)
    ran = simulate(topology(), GROWING, scripts_of(recordings, seed=0), num_drafts=4)
    assert [(one.rows, one.accepted, one.tokens) for one in ran.rounds] == [
        (one.rows, one.accepted, one.tokens) for recording in recordings for one in recording.speculative
    ]
    assert main(["simulate", box, "--trace", trace, "--calibrate"]) == 0
    assert "check, speculative" in capsys.readouterr().out


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["savings", "--trace", "/nowhere/trace.jsonl"]) == 2
    assert "--trace /nowhere/trace.jsonl: cannot be written: should be a file in a folder" in capsys.readouterr().err


# The command


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    code = simulation([str(ROOT / "topologies" / "8x3090.yaml"), *arguments])
    printed = capsys.readouterr()
    assert (code == 0) == (printed.err == "")
    return printed.out + printed.err


CARDS = ("--gpus", "8x3090", "--set", "link.table=pcie4")


def test_a_big_box_is_simulated_without_a_card(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Plain steps as `whatif` and the published table have them: 31.3 ms, 28% of it in collectives."""
    path = tmp_path / "timeline.json"
    found = json.loads(said(capsys, *CARDS, "--acceptance", "0.8", "--timeline", str(path), "--json"))
    assert found["plain"]["round_s"] == pytest.approx(0.0313, rel=0.01)
    assert found["plain"]["wait_share"] == pytest.approx(0.28, abs=0.01)
    assert found["plain"]["tokens"] == found["speculative"]["tokens"] == found["plain"]["rounds"]
    assert found["speedup"] > 3
    assert {one["ph"] for one in json.loads(path.read_text())["traceEvents"]} == {"X", "M"}


def test_drafts_through_the_shards_cost_their_layers_and_collectives() -> None:
    """Stands against drafts of early_exit that are free: 20 of 80 layers are 40 all-reduces for every drafted token."""
    box = {"target": {"model": "meta-llama/Llama-3.3-70B-Instruct", "ranks": list(range(8)), "quantize": "int4"}}
    link, cards = {"table": "pcie4"}, parse_gpus(["8x3090"])
    time = on_cards(topology(**box, draft={"source": "early_exit"}, link=link), cards, 4096)
    assert time.draft is not None
    assert (time.target.reduces, time.draft.reduces) == (160, 40)
    planned = plan(Wish(cards, "pcie4", box["target"]["model"], "early_exit")).plans
    (same,) = [one for one in planned if one.layout == Layout(tuple(range(8)), 4, "inline")]
    assert time.draft.seconds(1) == pytest.approx(same.draft_s)
    assert on_cards(topology(**box, link=link), cards, 4096).draft is None


def test_rounds_of_a_mixture_cost_the_experts_that_their_rows_are_sent_to() -> None:
    """Against a simulation that verifies six rows of Qwen3-30B-A3B as fast as one, or drafts with all its experts."""
    box = {"target": {"model": "Qwen/Qwen3-30B-A3B", "ranks": list(range(8)), "quantize": "int4"}}
    link, cards = {"table": "pcie4"}, parse_gpus(["8x3090"])
    time = on_cards(topology(**box, draft={"source": "early_exit"}, link=link), cards, 4096)
    planned = plan(Wish(cards, "pcie4", box["target"]["model"], "none")).plans
    (same,) = [one for one in planned if one.layout == Layout(tuple(range(8)), 4, "none")]
    rows = (1, 6, 100)
    assert [time.target.compute_s(num) for num in rows] == pytest.approx([same.step.compute_s(num) for num in rows])
    assert time.target.compute_s(6) - time.target.compute_s(1) > 0.5e-3
    assert time.draft is not None
    assert time.draft.ranks[0].reading_s(6) > 2 * time.draft.ranks[0].reading_s(1)


def test_a_trace_is_simulated_and_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, [recorded([(4, 2), (4, 4), (0, 0), (2, 1)] * 3), recorded([(4, 0), (3, 3), (1, 0)] * 4)])
    told = said(capsys, "--trace", str(path), "--calibrate", "--tokens", "2", "--concurrency", "2")
    assert "speed-up" in told
    assert "check, plain" in told
    assert "check, speculative" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--acceptance", "1.5", *CARDS), "between 0 and 1"),
        (("--acceptance", "0.5", *CARDS, "--fan-out-odds", "2"), "2 is not between 0 and 1"),
        (("--acceptance", "0.5"), "--gpus"),
        (("--acceptance", "0.5", "--gpus", "8x3090"), "link.table"),
        (("--acceptance", "0.5", "--gpus", "7x3090", "--set", "link.table=pcie4"), "7 cards"),
        (("--acceptance", "0.5", *CARDS, "--set", "cache.tokens=1000000"), "GiB short"),
        (("--acceptance", "0.5", "--calibrate"), "no recorded rounds"),
        (("--acceptance", "0.5", *CARDS, "--tokens", "65"), "1 to 64"),
        (("--acceptance", "0.5", *CARDS, "--tokens", "few"), "few is neither auto nor a number from 1 to 64"),
        (("--acceptance", "0.5", *CARDS, "--fan-out-odds", "half"), "half is not between 0 and 1"),
        (("--acceptance", "0.5", *CARDS, "--concurrency", "0"), "1 or more"),
        (("--acceptance", "0.5", *CARDS, "--set", "draft.source=none"), "nothing to compare"),
        (("--acceptance", "0.5", *CARDS, "--set", "cache.tokens=64"), "do not fit"),
        (("--trace", "nowhere.jsonl", *CARDS), "nowhere.jsonl"),
        (("--acceptance", "0.5", *CARDS, "--set", "draft={source: mtp}"), "source mtp: what its drafts cost"),
        (("--acceptance", "0.5", *CARDS, "--set", "draft={source: eagle, model: h}"), "source eagle: what its drafts"),
        (("--acceptance", "0.5", *CARDS, "--set", "draft={source: medusa, model: h}"), "source medusa: what its"),
        (("--acceptance", "0.5", *CARDS, "--set", "draft={source: layer_skip}"), "draft.options.skip"),
        (("--acceptance", "0.5", *CARDS, "--timeline", "/nowhere/t.json"), "cannot be written"),
    ],
)
def test_a_wrong_command_is_one_message(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    told = said(capsys, *arguments)
    assert message in told
    assert told.count("\n") == 1
