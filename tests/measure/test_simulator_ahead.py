"""Simulated drafting elsewhere, by the real drafter's logic: closed forms, whole texts, counters as drawn."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tpspec.comm.channel import OneRankChannel
from tpspec.comm.messages import Drafting
from tpspec.measure.script import Script, rank_odds, scripts_of
from tpspec.measure.simulate_command import simulation
from tpspec.measure.simulated_draft import DRAFT, DRAFT_AHEAD, DRAFTER, OUTCOMES, WAITS, Guesses
from tpspec.measure.simulator import Crowd, Simulated, Simulation, simulate
from tpspec.measure.time_model import TimeModel, as_recorded
from tpspec.measure.timeline import Event
from tpspec.measure.trace import Recording, Round, made_up, write
from tpspec.roles.target import lead_rounds
from tpspec.topology.config import Topology
from tpspec.topology.cost import RankCost, StepCost, tokens_per_round
from tpspec.topology.links import Curve, LinkTable

ROOT = Path(__file__).parents[2]
DEDICATED, GAPS = {"dedicated": 2}, {"gaps": 1}
PLACEMENTS = [DEDICATED, GAPS]
POLICIES = ["serial", "optimistic", "fan_out", "alternate", "auto"]
# Powers of two, so that sums are exact. Half of a step is spent in collectives.
STEP_S, REDUCES, DRAFT_S, MESSAGE_S = 2.0**-4, 8, 2.0**-7, 2.0**-10


def time_model(draft_s: float = DRAFT_S, message_s: float = MESSAGE_S, row_s: float = 0.0) -> TimeModel:
    link = LinkTable("c", Curve((), STEP_S / 2 / REDUCES))
    target = StepCost((RankCost(weights_s=STEP_S / 2, row_s=row_s),), reduces=REDUCES, row_bytes=64, link=link)
    return TimeModel(target, StepCost((RankCost(weights_s=draft_s, row_s=row_s),)), message_s)


def topology(policy: str = "serial", placement: object = DEDICATED, **keys: Any) -> Topology:
    draft = {"source": "model", "model": "smollm2-135m", "placement": placement}
    made = {"name": "a test", "target": {"model": "smollm2-135m", "ranks": (0, 1)}, "draft": draft}
    return Topology.model_validate(made | {"pipeline": {"policy": policy}} | keys)


def scripts(guesses: list[str], num_prompt: int = 5) -> list[Script]:
    return [Script(number, num_prompt, one, len(one)) for number, one in enumerate(guesses)]


def events(ran: Simulated, track: str) -> list[Event]:
    return [event for event in ran.timeline.events if event.track == track]


def counted(ran: Simulated) -> Drafting:
    assert ran.stats.elsewhere is not None
    return ran.stats.elsewhere


# Closed forms


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_serial_drafts_add_their_steps_and_messages_exactly(placement: object) -> None:
    """The first answer is not waited for, and too late; what it said is kept. In gaps too: no round runs meanwhile."""
    ran = simulate(topology("serial", placement), time_model(), scripts(["y" * 18]), num_drafts=3)
    assert [one.tokens for one in ran.rounds] == [1, 4, 4, 4, 4]
    waited = [event.end - event.begin for event in events(ran, WAITS)]
    assert waited == [steps * DRAFT_S + 2 * MESSAGE_S for steps in (1, 3, 3, 3)]
    assert ran.seconds == 6 * STEP_S + sum(waited)


def test_a_wrong_draft_is_paid_for_in_full_again() -> None:
    ran = simulate(topology(), time_model(), scripts(["n" * 11]), num_drafts=2)
    assert [one.tokens for one in ran.rounds] == [1] * 10
    waited = [event.end - event.begin for event in events(ran, WAITS)]
    assert waited == [2 * DRAFT_S + 2 * MESSAGE_S] * 7 + [DRAFT_S + 2 * MESSAGE_S]  # one draft before the last token


@pytest.mark.parametrize("message_s", [0.0, MESSAGE_S])
@pytest.mark.parametrize("policy", ["optimistic", "fan_out"])
def test_who_is_always_right_and_fast_enough_leaves_the_verification_alone(policy: str, message_s: float) -> None:
    """Four drafts and the bonus token are five steps; eight fit. Against an answer that waits for a forward's end."""
    ran = simulate(topology(policy), time_model(message_s=message_s), scripts(["y" * 200]), num_drafts=4)
    settled = ran.rounds[3:-1]
    assert [one.tokens for one in settled] == [5] * len(settled)
    assert [one.seconds for one in settled] == [STEP_S] * len(settled)
    assert counted(ran).misses <= 2 >= counted(ran).waited_rounds


def test_in_gaps_a_step_takes_as_much_longer_as_its_card_is_busy() -> None:
    """Half of a round is waiting: of eight steps four fit, the tokens of a round whatever is asked for."""
    times, text = time_model(message_s=0.0), scripts(["y" * 120])
    fits, late = (simulate(topology("optimistic", GAPS), times, text, num_drafts=num) for num in (3, 4))
    assert {(one.seconds, one.tokens) for one in fits.rounds[4:-2]} == {(STEP_S, 4)}
    assert sum(one.tokens for one in late.rounds[4:-2]) / sum(
        one.seconds for one in late.rounds[4:-2]
    ) == pytest.approx(4 / STEP_S, rel=0.03)
    ahead = [event for event in events(fits, DRAFTER) if event.name == DRAFT_AHEAD]
    assert [event.end - event.begin for event in ahead[4:-4]] == [2 * DRAFT_S] * len(ahead[4:-4])


def test_a_rank_without_gaps_is_never_waited_for() -> None:
    """Against a division by the nothing that is left of its card."""
    alone = TimeModel(StepCost((RankCost(weights_s=STEP_S),)), time_model().draft, MESSAGE_S)
    box = topology("optimistic", {"gaps": 0}, target={"model": "smollm2-135m", "ranks": (0,)})
    ran = simulate(box, alone, scripts(["y" * 41]), num_drafts=3)
    assert ran.seconds == 41 * STEP_S


def test_with_eight_draft_steps_in_a_round_drafting_ahead_is_worth_it() -> None:
    """Serial rounds come to the formula, the better for being ready more often: by 10% and by 15% at least."""
    made, times = scripts_of(made_up(0.8, seed=3, count=3, num_tokens=250), 0), time_model(STEP_S / 8, 0.0)

    def tokens_per_step(policy: str) -> float:
        ran = simulate(topology(policy), times, made, num_drafts=4)
        return STEP_S * sum(one.tokens for one in ran.rounds) / sum(one.seconds for one in ran.rounds)

    serial, optimistic, fan_out = (tokens_per_step(policy) for policy in POLICIES[:3])
    assert serial == pytest.approx(tokens_per_round(0.8, 4) / (1 + 4 / 8), rel=0.05)
    assert serial * 1.1 < optimistic
    assert serial * 1.15 < fan_out


# Tokens


@st.composite
def crowds(draw: st.DrawFn) -> list[Script]:
    guesses = draw(st.lists(st.text("yn-", min_size=1, max_size=30), min_size=1, max_size=6))
    prompts = [draw(st.integers(1, 300)) for _ in guesses]
    more = [draw(st.integers(0, 3)) for _ in guesses]
    parts = zip(guesses, prompts, more, strict=True)
    return [Script(number, prompt, one, len(one) + extra) for number, (one, prompt, extra) in enumerate(parts)]


def ran_whole(box: Topology, times: TimeModel, made: list[Script], num_drafts: int | None, concurrency: int) -> None:
    ready = Simulation(box, times, made, Guesses(made, 0.6))
    crowd = Crowd(ready, [script.request(num_drafts) for script in made], concurrency)
    assert lead_rounds(ready.engine, OneRankChannel(), crowd) == 0
    assert crowd.outputs == {script.id: list(range(1, 1 + len(script.guesses))) for script in made}
    assert ready.engine.stats().pages_used == 0
    for before, after in pairwise(event for event in ready.timeline.events if event.track == DRAFTER):
        assert before.end <= after.begin


@settings(max_examples=60, deadline=None)
@given(
    made=crowds(),
    policy=st.sampled_from(POLICIES),
    placement=st.sampled_from(PLACEMENTS),
    num_drafts=st.sampled_from([0, 1, 3, 8, None]),
    concurrency=st.integers(1, 4),
    cache=st.sampled_from([512, 4096]),
    draft_s=st.sampled_from([0.0, 0.0003, 0.01, 0.3]),
    message_s=st.sampled_from([0.0, 0.0004, 0.05]),
)
def test_every_token_is_emitted_once_whoever_drafts_ahead(
    made: list[Script],
    policy: str,
    placement: object,
    num_drafts: int | None,
    concurrency: int,
    cache: int,
    draft_s: float,
    message_s: float,
) -> None:
    """Drafters that are slower than the lead's patience, answers that come late, texts that leave a small cache."""
    box = topology(policy, placement, cache={"tokens": cache})
    ran_whole(box, time_model(draft_s, message_s, row_s=0.0001), made, num_drafts, concurrency)


@pytest.mark.parametrize("odds", [0.0, 0.6, 1.0])
def test_what_is_true_stands_among_the_alternatives_as_often_as_asked(odds: float) -> None:
    """And at its places as often as the source says. 3 in 4 of 4000 lie within 0.04 but for odds below 1e-6."""
    ranks = Script(0, 1, "y" + "n" * 4000, 5000).ranks(odds)
    assert ranks[0] == 0
    assert sum(1 <= rank <= 3 for rank in ranks) / 4000 == pytest.approx(odds, abs=0.04)
    for place in (1, 2, 3):
        assert ranks.count(place) / 4000 == pytest.approx(rank_odds(odds, place), abs=0.04)


def test_a_recorded_draft_step_is_one_row_and_hardly_more_for_eight() -> None:
    """Against eight futures at the price of eight forwards; what is looked up in the text costs as much each time."""
    rounds = [Round(1 + k, k, 0, 1, 0.02 + 0.002 * k, 0.02, 0.002 * k) for k in (0, 2, 4, 0, 3, 1) * 4]
    one = Recording("all", 5, "?" + "n" * len(rounds), 99, 4, speculative=tuple(rounds))
    ngram = topology(placement="inline", draft={"source": "ngram"})
    model, looked_up = (as_recorded([one], box).draft for box in (topology(), ngram))
    assert model is not None
    assert looked_up is not None
    assert 0 < model.seconds(1) == pytest.approx(looked_up.seconds(1))
    assert model.seconds(8) == pytest.approx(1.35 * model.seconds(1))
    assert looked_up.seconds(8) == pytest.approx(8 * looked_up.seconds(1))


# What is counted and drawn


@pytest.mark.parametrize("policy", ["serial", "optimistic", "fan_out"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_hits_and_misses_are_those_on_the_timeline(policy: str, placement: object, concurrency: int) -> None:
    made = scripts_of(made_up(0.8, 3, count=6, num_tokens=60), 0)
    ran = simulate(topology(policy, placement), time_model(), made, num_drafts=3, concurrency=concurrency)
    found, waits = counted(ran), events(ran, WAITS)
    at_home = sum(event.notes["answered"] for event in events(ran, OUTCOMES))
    assert at_home + sum(event.notes["foreseen"] for event in waits) == found.hits
    assert sum(event.notes["made"] for event in waits) == found.misses
    assert sum(event.end - event.begin for event in waits) == pytest.approx(found.waited_s)
    drawn = events(ran, DRAFTER)
    assert all(before.end <= after.begin for before, after in pairwise(drawn))
    assert {event.name for event in drawn} >= ({DRAFT} if policy == "serial" else {DRAFT, DRAFT_AHEAD})
    assert (DRAFT_AHEAD in {event.name for event in drawn}) == (policy != "serial")
    assert sum(event.notes["rows"] for event in drawn) >= found.num_read >= found.num_dropped


def test_alternatives_are_worth_what_their_odds_are() -> None:
    """The more often one of three is right, the more answers are ready."""
    made = scripts_of(made_up(0.7, 3, count=2, num_tokens=200), 0)
    box = topology("fan_out")
    times = time_model(draft_s=STEP_S / 16, message_s=0.0)
    hits = [counted(simulate(box, times, made, num_drafts=3, fan_out_odds=odds)).hits for odds in (0.0, 0.6, 1.0)]
    assert hits[0] < hits[1] < hits[2]


def test_the_command_simulates_what_the_topology_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write(tmp_path / "trace.jsonl", made_up(0.8, seed=1, count=3, num_tokens=60))
    arguments = [str(ROOT / "topologies" / "8x3090.yaml"), "--trace", str(tmp_path / "trace.jsonl"), "--gpus", "8x3090"]
    keys = ("link.table=pcie4", "pipeline.policy=fan_out", "draft.placement={gaps: 0}", "draft.source=model")
    for key in (*keys, "draft.model=meta-llama/Llama-3.2-1B-Instruct"):
        arguments += ["--set", key]
    capsys.readouterr()
    assert simulation([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["elsewhere"]
    assert found["hits"] > found["misses"] > 0
    assert 0 < found["waited_share"] < 1
    assert found["read"] > found["dropped"] > 0
    assert simulation(arguments) == 0
    assert f"{found['hits']} ready when asked for, {found['misses']} not" in capsys.readouterr().out
