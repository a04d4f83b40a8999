"""Whole rounds on an emulated card: the texts of the CPU's, with one wait a round and one for every drafted token.

Stands against what only a card refuses: an index or a mask left on the host, a wait inside a recording, a number that
a recording took for what it was in one round. tests/gpu says the same of a real card.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.checkpoints import tiny
from tests.draft.heads.assistant import assistant
from tests.draft.heads.medusa import drawn, original, original_names
from tests.draft.kits import draft_section
from tests.emulated_card import CARD, Card, emulated_card
from tests.engine.wire import DrafterEnd, Faults, Wire
from tests.model.published import of_tables, publish, publish_mxfp4
from tests.slow import slowly
from tests.worlds import Script, Told, drafting_beside, once_it_drafts, serve, topology
from tpspec.comm import peer
from tpspec.comm.communicator import Communicator, OneRank
from tpspec.comm.distributed import Place
from tpspec.comm.gap import go_first, go_last
from tpspec.comm.messages import Cancel, News, Reach, Stats, Submit, ToLead
from tpspec.comm.peer import PeerMemory, memory_bytes
from tpspec.comm.threads import ThreadCommunicator, ThreadWorld
from tpspec.draft.medusa import MedusaHeads
from tpspec.draft.medusa_files import read_heads
from tpspec.engine import remote
from tpspec.engine.engine import Engine
from tpspec.engine.next_round import NextRound
from tpspec.engine.remote import RemoteHost, Way
from tpspec.errors import UserError
from tpspec.model import graphs, runner
from tpspec.model.batch import Span
from tpspec.model.decoder import Decoder
from tpspec.model.graphs import CardRecorder, Forward, Graphs
from tpspec.model.layers import Layer
from tpspec.model.loader import Loader
from tpspec.model.target import ShardedTarget
from tpspec.published.shape import ModelShape
from tpspec.request import Delta, Request, Sampling
from tpspec.roles.build import build_engine
from tpspec.roles.build_drafter import BRANCHES, build_ahead
from tpspec.roles.door import pick_device
from tpspec.roles.drafter import Drafter
from tpspec.topology.shards import split
from tpspec.topology.sublayers import NOTHING
from tpspec.verify import shards
from tpspec.verify.rows import RowLogits

pytest.importorskip("triton")
from tpspec.model.card.rows import MOST_ROWS

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one: tests/gpu"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card"),
]
CUDA = torch.device("cuda")
SUM = ["sum_add_norm"]
LAUNCHES = 21  # of a round of many rows and two layers: nine each, the copy of a table and of rows, the head
FEW = 4  # rows that are recorded here: the interpreter of kernels takes its time
WARM = Sampling(temperature=0.8, seed=3)
SAMPLINGS = [
    [Sampling()],
    [WARM],
    [Sampling(), WARM],
    [Sampling(temperature=0.8, top_k=20, seed=1), Sampling(temperature=0.8, top_p=0.9, seed=2)],
    [
        Sampling(temperature=0.8, repetition_penalty=1.2, logit_bias={5: 1.0, 9: -2.0}),
        Sampling(min_tokens=50, withheld=frozenset({2}), presence_penalty=0.5),
    ],
]
REPLAYED = {"model", "eagle", "mtp", "layer_skip", "early_exit"}
STEPS = {
    "none": 0,
    "ngram": 0,
    "suffix": 0,
    "lookahead": 0,
    "medusa": 1,
    "pard": 1,
    "model": 3,
    "eagle": 3,
    "mtp": 3,
    "layer_skip": 3,
    "early_exit": 3,
}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpspec.model.card.many import MOST_SPLITS, ManySteps
    from tpspec.model.card.steps import CardSteps

    fits = CardSteps.fits
    monkeypatch.setattr(CardSteps, "fits", lambda steps, spans, num: num <= FEW and fits(steps, spans, num))
    monkeypatch.setattr(ManySteps, "rehearsed", (1, 2, MOST_SPLITS + 1))  # the last, as ever, more than is recorded
    for room in (graphs, runner):
        monkeypatch.setattr(room, "ROW_COUNTS", (1, 2, FEW))
    monkeypatch.setattr(graphs, "REHEARSALS", 1)  # the second is for who times it
    monkeypatch.setattr(runner, "wide_counts", lambda num_verified: ())


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Span]]:
    """Spans of the rounds that were launched before they were known."""
    told, launch = list[Sequence[Span]](), Graphs.launch

    def noted(graphs: Graphs, spans: Sequence[Span], num_rows: int) -> bool:
        if is_launched := launch(graphs, spans, num_rows):
            told.append(spans)
        return is_launched

    monkeypatch.setattr(Graphs, "launch", noted)
    return told


def small(kind: str, folder: Path) -> Path:
    """For the interpreter."""
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny(kind, folder, num_hidden_layers=2, **sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small("smollm2", tmp_path_factory.mktemp("target"))


def requests(samplings: list[Sampling], first: int = 0) -> list[Request]:
    return [Request(first + i, (5, 6, 7, 8 + i) * 3, 8, sampling) for i, sampling in enumerate(samplings)]


def on_the_card(folder: Path, messages: dict[int, list[ToLead]], **keys: Any) -> tuple[Told, Card]:
    """What it told, and the card, whose waits are those of rounds."""
    with emulated_card() as card:
        made = topology(folder, device="cuda", **keys)
        told = serve(made, messages=messages, device=CUDA, begin=lambda rank, engine: card.waits.clear())
    return told, card


@pytest.mark.parametrize("accept", ["match", *slowly("rejection")])
def test_the_host_waits_for_the_verdict_alone(accept: str, folder: Path, few: None) -> None:
    """However a token is chosen, one way after another, and in rounds of prompts too."""
    asks = {1 + 10 * i: requests(ways, 10 * i) for i, ways in enumerate(SAMPLINGS)}
    messages: dict[int, list[ToLead]] = {round: [*map(Submit, some)] for round, some in asks.items()}
    told, card = on_the_card(folder, messages.copy(), accept=accept)
    assert told.texts() == serve(topology(folder, accept=accept), messages=messages).texts()
    assert len(card.waits) == told.stats[-1].rounds, card.waits
    assert card.replays > 0


@pytest.mark.parametrize(("device", "source"), [("cuda", "ngram"), ("cpu", "ngram"), ("cuda", "model")])
def test_a_round_is_told_of_while_a_card_computes_the_next(
    device: str, source: str, folder: Path, few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at once where nothing else goes on: on a CPU, before drafts are made or waited for, after the last. Stands
    against a card that waits for the host to write a message, and tokens that are kept back longer than that takes."""
    events: list[str] = []

    def noted(event: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def doing(*given: Any, **keys: Any) -> Any:
            events.append(event)
            return work(*given, **keys)

        return doing

    def begin(rank: int, engine: Engine) -> None:
        engine.target.logits = noted("asked", engine.target.logits)  # type: ignore[method-assign]
        engine.host.gather = noted("gathered", engine.host.gather)  # type: ignore[method-assign]
        engine.rule.judge = noted("judged", engine.rule.judge)  # type: ignore[method-assign]

    monkeypatch.setattr(Script, "report", noted("told", Script.report))
    section = draft_section(source, folder, tmp_path / "head") | {"tokens": 2}
    with emulated_card() if device == "cuda" else nullcontext():
        made = topology(folder, device=device, draft=section)
        told = serve(made, requests([Sampling()]), device=torch.device(device), begin=begin)
    rounds = told.stats[-1].rounds
    assert events.count("told") == rounds
    late = device == "cuda" and source == "ngram"
    first, each, last = (
        (["gathered", "asked", "judged"], ["gathered", "asked", "told", "judged"], ["told", "gathered"])
        if late
        else ([], ["gathered", "asked", "judged", "told"], ["gathered"])
    )
    assert events == first + each * (rounds - late) + last


def test_a_round_of_many_rows_is_told_of_what_was_before_it(
    folder: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no replay: until all of it has been launched nobody would hear of the last one."""
    events: list[str] = []
    logits, report = ShardedTarget.logits, Script.report

    def asked(target: ShardedTarget, spans: Sequence[Span]) -> RowLogits:
        events.append("many" if sum(len(span.tokens) for span in spans) > FEW else "few")
        return logits(target, spans)

    def told(script: Script, deltas: list[Delta], stats: Stats) -> None:
        events.append("told")
        report(script, deltas, stats)

    monkeypatch.setattr(ShardedTarget, "logits", asked)
    monkeypatch.setattr(Script, "report", told)
    one, other = requests([Sampling()] * 2)
    on_the_card(folder, {1: [Submit(one)], 3: [Submit(other)]})
    # The third had been launched before the other came.
    assert events[:8] == ["many", "few", "told", "few", "told", "told", "many", "few"]


@pytest.mark.parametrize("kind", ["gemma3", *slowly("smollm2")])
def test_plain_rounds_are_launched_before_the_verdicts_of_the_one_before_them(
    kind: str, few: None, tmp_path: Path, released: list[Sequence[Span]]
) -> None:
    """Of texts that end at their length or at a stop token, are cancelled, and come meanwhile; also of layers with a
    window. Stands against a host that waits for what waits for it (the emulated card refuses), and against rows of the
    round before."""
    folder = small(kind, tmp_path / "model")
    prompt = (5, 6, 7, 8) * 4
    first = serve(topology(folder), [Request(0, prompt, 30)]).texts()[0]
    stop = frozenset({first[9]})
    asks = [Request(0, prompt, 30, stop_ids=stop), Request(1, prompt[1:], 14, WARM), Request(2, prompt[2:], 60)]
    messages: dict[int, list[ToLead]] = {1: [*map(Submit, asks)], 18: [Submit(Request(3, prompt[3:], 12))]}
    messages[25] = [Cancel(2)]
    draft = {"source": "none"}
    told, card = on_the_card(folder, dict(messages), draft=draft)
    plain = serve(topology(folder, draft=draft), messages=dict(messages))
    # Who is cancelled has come as far as he has: a round is later for whom one had been launched.
    assert [told.tokens[i] for i in (0, 1, 3)] == [plain.tokens[i] for i in (0, 1, 3)]
    assert told.tokens[2] == plain.tokens[2][: len(told.tokens[2])]
    assert told.finish == plain.finish
    rounds = told.stats[-1].rounds
    assert len(card.waits) == rounds
    assert rounds - len(released) <= 8  # those of prompts and what follows them, of who comes, and at an end
    assert {1, 2} <= set(map(len, released))


@pytest.mark.parametrize(("dtype", "num_greedy"), [("float32", 0), *slowly(("bfloat16", 1))])
def test_a_round_of_rows_that_keep_few_ids_is_launched_before_their_verdicts_and_may_be_in_vain(
    dtype: str, num_greedy: int, folder: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ids a row keeps cannot always be told from those that shards tell first: then the card has to be asked
    again, in every third round here. Stands against a host that waits for a card that waits for it, and against logits
    that the next round has overwritten meanwhile (in float32 they are the scores)."""
    launched, vain = list[int](), list[int]()
    supports, launch, more = shards._supports, Graphs.launch, NextRound.given_up

    def noted_launch(graphs: Graphs, spans: Sequence[Span], *given: Any) -> bool:
        launched.append(len(spans))
        return launch(graphs, spans, *given)

    def noted_more(round: NextRound) -> None:
        vain.append(1)
        more(round)

    def unclear(scores_NTC: torch.Tensor, *given: Any) -> list[shards.Support | None]:
        found, told_first = supports(scores_NTC, *given), scores_NTC.shape[2] == shards.NUM_CANDIDATES
        return [None, *found[1:]] if told_first and len(launched) % 3 == 1 else found

    made = {"target": {"model": str(folder), "dtype": dtype}, "draft": {"source": "none"}}
    warm = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=5)
    asks = [Request(i, (5, 6, 7, 8 + i) * 3, 16, Sampling() if i < num_greedy else warm) for i in range(3)]
    with monkeypatch.context() as in_turn:
        in_turn.setattr(Engine, "_next_round", lambda engine, plan: None)
        plain, _ = on_the_card(folder, {1: [*map(Submit, asks)]}, **made)
    monkeypatch.setattr(Graphs, "launch", noted_launch)
    monkeypatch.setattr(NextRound, "given_up", noted_more)
    monkeypatch.setattr(shards, "_supports", unclear)
    told, _ = on_the_card(folder, {1: [*map(Submit, asks)]}, **made)
    assert told.texts() == plain.texts()
    assert len(launched) > 10
    assert 3 < len(vain) < len(launched) - 3


def test_a_text_whose_places_are_more_than_a_recording_copies_is_not_launched_before_it_is_known(
    folder: Path, few: None, released: list[Sequence[Span]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against a table the rest of which comes behind the forward that reads it: from 32,000 keys on."""
    from tpspec.model.card import tables as card_tables

    monkeypatch.setattr(card_tables, "USUAL_BLOCKS", 3)  # of 64 keys; what may be scattered is counted as two
    asks = [Request(0, (5, 6, 7, 8) * 28, 24)]
    told, _ = on_the_card(folder, {1: [*map(Submit, asks)]}, draft={"source": "none"})
    assert told.texts() == serve(topology(folder), asks).texts()
    assert max(span.start for (span,) in released) == 126  # 127 tokens with its own


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"accept": "rejection"}, {}),
        ({}, {"logprobs": 2}),
        ({}, {"sampling": Sampling(temperature=0.8, top_p=0.9)}),
        ({"draft": {"source": "ngram"}}, {}),
        ({"draft": "medusa"}, {"num_drafts": 0}),
        ({"deterministic": True, "engine": {"fixed_rows": 8}}, {}),
    ],
    ids=["rejection", "logprobs", "top-p", "drafts", "taps", "deterministic"],
)
def test_what_is_asked_of_a_card_once_a_verdict_is_known_is_not_asked_of_one_that_waits(
    keys: dict[str, Any], wanted: dict[str, Any], folder: Path, few: None, tmp_path: Path
) -> None:
    """Stands against a host that would wait for ever: none of these is launched before it is known."""
    target = shutil.copytree(folder, tmp_path / "target")
    if keys.get("draft") == "medusa":
        keys = {"draft": draft_section("medusa", target, tmp_path / "head")}
    asks = [Request(0, (5, 6, 7, 8) * 3, 6, **wanted)]
    with patch.object(Graphs, "launch", side_effect=AssertionError("it was launched")):
        told, _ = on_the_card(target, {1: [*map(Submit, asks)]}, **keys)
    assert told.texts() == serve(topology(target, **keys), asks).texts()


@pytest.mark.parametrize("agrees", [True, False])
def test_ranks_launch_before_a_verdict_if_all_can(agrees: bool, folder: Path, few: None) -> None:
    """Stands against collectives of some of them, for a forward that turns out to be in vain."""
    with emulated_card(), patch.object(Decoder, "_everywhere", lambda decoder, holds: holds and agrees):
        engine = build_engine(topology(folder, device="cuda", draft={"source": "none"}), OneRank(), CUDA)
        assert isinstance(engine.own.target, ShardedTarget)
        engine.own.prepare()
        assert engine.own.target.launches == agrees


@pytest.mark.parametrize("fails", ["tpspec.staged.Fetched.here", "tpspec.model.embedding.Embedding.put"])
def test_whatever_befalls_a_round_the_card_does_not_wait_for_ever(fails: str, folder: Path, few: None) -> None:
    """Stands against an error that nobody learns of, for who ends waits for the card, and the card for him."""
    with emulated_card() as card:
        engine = build_engine(topology(folder, device="cuda", draft={"source": "none"}), OneRank(), CUDA)
        engine.own.prepare()
        rounds = engine.engine
        rounds.hear(News(round=1, requests=(Request(0, (5, 6, 7), 20),)))
        for round in range(3):
            rounds.step()
            rounds.hear(News(round=round + 2))
        with (
            patch(fails, side_effect=RuntimeError("it has failed")),
            pytest.raises(RuntimeError, match="it has failed"),
        ):
            rounds.step()
        assert card.held_back() is None
        rounds.step()  # what was launched is another's: it is made anew


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # in rows that are padding
@pytest.mark.parametrize("kind", ["smollm2", *slowly("qwen3_moe")])
def test_rounds_that_verify_for_many_texts_are_replays(
    kind: str, few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three texts of four rows each are more than the few of a recording here. Stands against a host that launches
    every kernel of a round once some users are served at a time (chunks of their prompts it does launch), and against
    padding that a mixture of so many rows sends to an expert, which torch sorts them by."""
    from tpspec.model.card import router as card_router

    folder = small(kind, tmp_path)
    monkeypatch.setattr(card_router, "MOST_SORTED", FEW)
    monkeypatch.setattr(runner, "wide_counts", lambda num_verified: (2 * FEW, 3 * FEW) if num_verified else ())
    asks, draft = requests([Sampling()] * 3), {"source": "model", "model": str(folder), "tokens": FEW - 1}
    launched: list[int] = []
    rows = Decoder._launched

    def noted(decoder: Decoder, spans: Sequence[Span], tokens: Sequence[int], *more: Any) -> Forward:
        launched.append(sum(span.num_logits for span in spans))
        return rows(decoder, spans, tokens, *more)

    monkeypatch.setattr(Decoder, "_launched", noted)
    told, _ = on_the_card(folder, {1: [*map(Submit, asks)]}, draft=draft, serve={"max_running": 3})
    assert told.texts() == serve(topology(folder), asks).texts()
    assert told.stats[-1].accepted > 0
    assert max(launched) <= 3  # of prompts


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_whichever_tiles_are_the_fastest_a_text_is_the_same(
    quantize: str | None, folder: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of products and of a gate in the kernel of its product, which a round then does not launch. In 16 bits: of
    float32 products are torch's."""
    from tpspec.model.card import products as card_products

    told, kernels = [], list[list[str]]()

    def note(rank: int, engine: Engine) -> None:
        assert isinstance(engine.target, ShardedTarget)
        (graphs_of,) = engine.target.decoder._runner._graphs
        kernels.extend(recording.kernels for recording in graphs_of._recorder._graphs)

    for place in (0, -1):
        monkeypatch.setattr(
            card_products,
            "chosen",
            lambda candidates, *of, place=place: [tiles[place] for tiles in candidates.values()],
        )
        target = {"model": str(folder), "dtype": "bfloat16", "quantize": quantize}
        with emulated_card():
            made = topology(folder, device="cuda", target=target, draft={"source": "ngram", "tokens": 2})
            told.append(serve(made, requests([Sampling()] * 2), device=CUDA, begin=note).texts())
    assert told[0] == told[1]
    assert {"gate" in names for names in kernels[: len(kernels) // 2]} == {True}
    assert {"gate" in names for names in kernels[len(kernels) // 2 :]} == {False}


def test_drafts_of_a_part_of_the_layers_are_recorded_of_few_rows_alone(folder: Path) -> None:
    """They are a row a text; stands against logits for many, in memory that nobody has counted."""
    (whole,) = split(ModelShape.of(folder), (1.0,))
    with emulated_card():
        decoder = Loader.open(folder, whole, torch.float32, CUDA).decoder(OneRank(), 512, most_verified=100)
        thin = decoder.thinned(NOTHING, OneRank(), recorded=True)
        assert [decoder.is_replay(100, 100), thin.is_replay(100, 100), thin.is_replay(64, 64)] == [True, False, True]


@pytest.mark.parametrize(
    "source",
    [
        "medusa",
        "eagle",
        "layer_skip",
        *slowly("none", "ngram", "suffix", "lookahead", "pard", "model", "mtp", "early_exit"),
    ],
)
def test_a_source_waits_for_the_tokens_it_drafts(source: str, folder: Path, few: None, tmp_path: Path) -> None:
    """Once for those that it drafts at once. Each pass of a model or a head is a replay."""
    target = shutil.copytree(folder, tmp_path / "target")
    section = draft_section(source, target, tmp_path / "head") | ({} if source == "none" else {"tokens": 3})
    asks = requests([Sampling(), WARM])
    told, card = on_the_card(target, {1: [*map(Submit, asks)]}, draft=section)
    last = told.stats[-1]
    assert told.texts() == serve(topology(target, draft=section), asks).texts()
    assert len(card.waits) <= last.rounds * (1 + STEPS[source]), card.waits
    assert card.replays > last.rounds or source not in REPLAYED  # not of the target's rounds alone


def test_an_assistant_waits_for_the_tokens_it_drafts(few: None, tmp_path: Path) -> None:
    """Stands against keys that it makes anew in another order than they are read, and a feature of the last draft that
    a replay overwrites."""
    target = tiny("gemma4", tmp_path / "target", hidden_size=32, intermediate_size=96)
    section = {"source": "eagle", "model": str(assistant(target, tmp_path / "head")), "tokens": 3}
    asks = [Request(0, (5, 6, 7, 8) * 3, 8), Request(1, (9, 5, 6), 8, WARM)]
    told, card = on_the_card(target, {1: [*map(Submit, asks)]}, draft=section)
    last = told.stats[-1]
    assert told.texts() == serve(topology(target, draft=section), asks).texts()
    assert len(card.waits) <= 4 * last.rounds, card.waits
    assert last.drafted > 9
    assert card.replays > last.rounds  # not of the target's rounds alone


def test_medusa_heads_of_a_few_texts_are_one_replay(folder: Path, tmp_path: Path) -> None:
    """Stands against launches a layer and head, and against rows of an earlier call in what a replay pads with."""
    original(tmp_path, original_names(drawn(folder, 2)))
    weights = read_heads(tmp_path, folder)
    on_cpu = MedusaHeads(weights, torch.float32, torch.device("cpu"))
    with emulated_card() as card:
        heads = MedusaHeads(weights, torch.float32, CUDA)
        for num_rows, num_replays in ((3, 1), (8, 1), (1, 1), (9, 0)):
            seeded = torch.Generator().manual_seed(num_rows)
            rows_BD = torch.randn(num_rows, weights.weights_LHDD.shape[-1], generator=seeded)
            here_BD, before = rows_BD.to(CUDA), (card.replays, card.launches)
            logits_BHV = heads(here_BD)
            assert card.replays - before[0] == num_replays
            assert (card.launches - before[1] <= 2) == bool(num_replays)
            due_BHV = on_cpu(rows_BD)  # in float32, whose last bits depend on how many rows a product has
            assert (logits_BHV.cpu() - due_BHV).abs().max() <= 2e-6 * due_BHV.abs().max()


FEATURES: dict[str, dict[str, Any]] = {
    "head": {"cache": {"dtype": "int8"}, "source": "eagle"},
    "tree": {"target": {"quantize": "int8"}, "source": "model", "tree": "dynamic"},
    "list": {"source": "eagle", "tree": "static"},
    "deterministic": {"deterministic": True, "engine": {"fixed_rows": 16}, "source": "ngram"},
}


@pytest.mark.parametrize("kind", [*list(FEATURES)[1::2], *slowly(*list(FEATURES)[::2])])
def test_texts_are_those_of_the_cpu(kind: str, folder: Path, few: None, tmp_path: Path) -> None:
    """Of requests that come one after another, begin as others did and are told odds, with small weights or caches."""
    keys = dict(FEATURES[kind])
    section = draft_section(keys.pop("source"), folder, tmp_path) | {"tokens": 4, "tree": keys.pop("tree", "chain")}
    if kind == "list":
        section["source"] = ["ngram", "eagle"]
    prompt = (5, 6, 7, 8) * 10
    asks = [Request(0, prompt, 8), Request(1, prompt[:12], 8, WARM, logprobs=3)]
    late = [Request(2, (*prompt, 9, 9), 6, WARM, prompt_logprobs=2), Request(3, (*prompt, 9, 9), 6)]
    texts = []
    for device in ("cpu", "cuda"):
        with emulated_card() if device == "cuda" else nullcontext():
            made = topology(folder, device=device, draft=section, **keys)
            messages = {1: [*map(Submit, asks)], 14: [*map(Submit, late)]}
            told = serve(made, messages=messages, device=torch.device(device))
        assert told.stats[-1].prefix_found > 0
        texts.append(told.texts())
    assert texts[0] == texts[1]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # in rows that are padding
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("glm4_moe_lite", {}),
        ("gemma3", {}),
        ("gemma4_small", {}),
        ("olmo3", {}),
        ("kimi_linear", {}),
        ("lfm3", {"quantize": "int4"}),
        *slowly(
            ("gpt_oss", {}),
            ("nemotron_h", {}),
            ("llama4", {"quantize": "int8"}),
            ("step3p5", {"quantize": "int8"}),
            ("qwen3_moe", {}),
            ("mixtral", {"quantize": "int8"}),
            ("glm4_moe", {}),
            ("deepseek_v3", {}),
            ("gemma2", {}),
            ("gemma4", {}),
            ("gemma4_moe", {"quantize": "int8"}),
            ("laguna", {}),
            ("mimo", {}),
            ("phimoe", {}),
            ("starcoder2", {"quantize": "int8"}),
            ("phi", {"quantize": "int8"}),
            ("nanochat", {}),
            ("apertus", {}),
            ("hunyuan", {"quantize": "int4"}),
            ("cohere2", {}),
            ("cohere2_moe", {}),
            ("flint", {}),
            ("kolibri1", {}),
            ("muse_glimmer", {}),
            ("granite_hybrid", {}),
            ("falcon_h1", {"quantize": "int8"}),
            ("olmo_hybrid", {}),
            ("lfm2", {"quantize": "int8"}),
            ("lfm2_moe", {}),
        ),
    ],
)
def test_texts_of_any_architecture_are_those_of_the_cpu(
    kind: str, keys: dict[str, str], few: None, tmp_path: Path
) -> None:
    """Stands against a router that the host waits for, and rows that a recording sends where those of its rehearsal
    went; and against norms, ropes or gates of another layer. The prompts have more rows than are recorded here."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    if kind.startswith("gemma4"):
        is_small = kind == "gemma4_small"
        sizes |= {"layer_types": ["full_attention"] * 2 if is_small else ["sliding_attention", "full_attention"]}
        sizes |= {"num_kv_shared_layers": int(is_small), "num_global_key_value_heads": 1}
    if kind == "nemotron_h":
        sizes |= {"layers_block_type": ["linear_attention", "moe", "full_attention"]}
        sizes |= {"mamba_num_heads": 4, "n_groups": 2, "n_routed_experts": 3, "num_experts_per_tok": 2}
    if kind == "granite_hybrid":
        sizes |= {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4}
    if kind == "falcon_h1":
        sizes |= {"mamba_d_ssm": 28, "mamba_n_heads": 4}
    if kind == "kimi_linear":
        sizes |= {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2}
    if kind == "olmo_hybrid":
        sizes |= {"layer_types": ["linear_attention", "full_attention"]}
    if kind.startswith("lfm2"):
        sizes |= {"layer_types": ["conv", "full_attention"]}
    if kind == "lfm3":
        sizes |= {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "conv", "full_attention"]}
    if kind in ("olmo3", "cohere2", "flint", "kolibri1", "laguna", "mimo", "step3p5"):
        sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
    if kind == "llama4":
        sizes |= {"no_rope_layers": [1, 0]}
    if kind == "muse_glimmer":
        sizes |= {"layer_types": ["sliding_attention", "full_attention"], "layer_rope_theta": [10000.0, 0]}
    if kind == "mimo":
        sizes |= {"mlp_layer_types": ["dense", "sparse"]}
    if kind == "laguna":
        sizes |= {"num_attention_heads_per_layer": [3, 2]}
    if kind == "step3p5":
        sizes |= {"num_sliding_attention_heads": 3, "mlp_layer_types": ["dense", "sparse"]}
        sizes |= {"swiglu_limits": [0.0, 0.5], "swiglu_limits_shared": [0.0, 0.4]}
    if kind == "cohere2_moe":
        sizes |= {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]}
    target = tiny(kind, tmp_path / "target", **sizes, intermediate_size=96)
    if kind == "gpt_oss":
        target, _ = publish_mxfp4(target, tmp_path)
    section = draft_section("ngram", target, tmp_path) | {"tokens": 3}
    asks = [Request(0, (5, 6, 7, 8) * 3, 6), Request(1, (9, 5, 6), 6, WARM)]
    plain = serve(topology(target, draft=section, target=keys), asks)
    with emulated_card() as card:
        made = topology(target, device="cuda", draft=section, target=keys)
        told = serve(made, asks, device=CUDA, begin=lambda rank, engine: card.waits.clear())
    assert told.texts() == plain.texts()
    assert len(card.waits) == told.stats[-1].rounds, card.waits
    assert card.replays > 0


FORMS = of_tables()


# Rows that are padding are sent to no expert: what a gate finds there is anything.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "form"), [("qwen3_moe", "nvfp4"), *slowly(*(("llama", name) for name in FORMS), ("qwen3_moe", "fp8"))]
)
def test_texts_of_codes_that_are_no_even_steps_are_those_of_the_cpu(
    kind: str, form: str, few: None, tmp_path: Path
) -> None:
    """Stands against a recording that keeps no gains, or those of one expert, and a gate that is fused with a product
    of other codes."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    plain_target = tiny(kind, tmp_path / "plain", **sizes, intermediate_size=128, num_hidden_layers=2)
    target, _ = publish(plain_target, tmp_path, FORMS[form])
    section = draft_section("ngram", target, tmp_path) | {"tokens": 3}
    asks = [Request(0, (5, 6, 7, 8) * 3, 6), Request(1, (9, 5, 6), 6, WARM)]
    plain = serve(topology(target, draft=section), asks)
    with emulated_card() as card:
        told = serve(topology(target, device="cuda", draft=section), asks, device=CUDA)
    assert told.texts() == plain.texts()
    assert card.replays > 0


@pytest.mark.parametrize("source", ["ngram", *slowly("model")])
def test_states_stay_on_the_card(source: str, few: None, tmp_path: Path) -> None:
    """Of layers with linear attention. Stands against a place among rows that the host waits for, and what a recording
    took for the same in every round: whose state a row reads, and which rows its text has kept. The last text begins
    with the state of the first; and a model that drafts, here for itself, has states of its own."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
    sizes |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    target = tiny("qwen3_5", tmp_path, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **sizes)
    section = {"source": source, "tokens": 3} | ({"model": str(target)} if source == "model" else {})
    asks = [Request(0, (5, 6, 7, 8) * 20, 9), Request(1, (9, 5, 6), 9, WARM), Request(2, (5, 6, 7, 8) * 19, 9)]

    def messages() -> dict[int, list[ToLead]]:
        return {1: [*map(Submit, asks[:2])], 14: [Submit(asks[2])]}

    plain = serve(topology(target, draft=section), messages=messages())
    with emulated_card() as card:
        made = topology(target, device="cuda", draft=section)
        told = serve(made, messages=messages(), device=CUDA, begin=lambda rank, engine: card.waits.clear())
    assert told.texts() == plain.texts()
    assert told.stats[-1].prefix_found > 0
    if source == "model":
        assert told.stats[-1].accepted == told.stats[-1].drafted > 9
    else:
        assert len(card.waits) == told.stats[-1].rounds, card.waits
    assert card.replays > 0


def test_cards_of_which_one_has_no_steps_for_few_rows_all_do_without(folder: Path, few: None) -> None:
    """Stands against ranks on unlike cards that wait for each other's rehearsals, for wide heads in 16 bits."""
    with emulated_card():
        built = build_engine(topology(folder, device="cuda", draft={"source": "none"}), OneRank(), CUDA)
        assert isinstance(built.engine.target, ShardedTarget)
        steps = built.engine.target.decoder._runner
        steps.agree(lambda holds: holds)
        assert steps.few is not None
        steps.agree(lambda holds: False)
        assert steps.few is None
        assert not steps.is_replay(1, 1)


def test_a_drafter_elsewhere_has_a_card_too(folder: Path, few: None, tmp_path: Path) -> None:
    """Stands against what the target's layers made, told from a card, and read to another."""
    section = draft_section("eagle", folder, tmp_path) | {"placement": {"gaps": 0}}
    asks = requests([Sampling(), WARM])
    plain = serve(topology(folder), asks)
    with emulated_card():
        made = topology(folder, device="cuda", draft=section)
        wire = Wire(lambda wire: Drafter(build_ahead(made, CUDA), DrafterEnd(wire)), Faults(), random.Random(0))

        def begin(rank: int, engine: Engine) -> None:
            engine.draft_tokens = 3
            engine.host = RemoteHost(wire, wire.clock.now, (Way(Reach(ahead=True, width=3)),), BRANCHES)
            verify = engine.target.logits

            def logits(spans: Sequence[Span]) -> RowLogits:
                wire.work(3)
                return verify(spans)

            engine.target.logits = logits  # type: ignore[method-assign]

        told = serve(made, asks, device=CUDA, begin=begin, link=wire)
    assert told.texts() == plain.texts()
    assert told.stats[-1].drafted > 0


def test_a_drafter_in_gaps_has_the_card_at_the_same_time(
    folder: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread, which is waited for here: where kernels are interpreted, it is slow. Stands against what two threads
    ask of a card at one time and each needs for itself: recordings, numbers on their way, streams; against a drafter on
    the first card, or in the stream that goes before all others; and against a card that waits for a word of the host,
    in a round without drafts, while the other thread asks it for memory."""
    monkeypatch.setattr(remote, "LEAST_S", 20.0)
    monkeypatch.setattr(remote, "MOST_S", 20.0)
    asks = [Request(0, (5, 6, 7, 8) * 3, 12, WARM)]
    plain = serve(topology(folder), asks)
    section = {"source": "model", "model": str(folder), "tokens": 3, "placement": {"gaps": 0}}
    made = topology(folder, device="cuda", draft=section, pipeline={"policy": "fan_out"})

    record, own_streams = CardRecorder.record, list[bool]()

    def noting(recorder: CardRecorder, work: Callable[[], Any]) -> Any:
        if threading.current_thread().name == "drafter":
            own_streams.append(torch.cuda.current_stream() is torch.cuda.current_stream())  # else there is none set
        return record(recorder, work)

    monkeypatch.setattr(CardRecorder, "record", noting)

    def begin(rank: int, engine: Engine) -> None:
        once_it_drafts(rank, engine)
        assert isinstance(engine.target, ShardedTarget)
        assert not engine.target.launches

    devices = list[torch.device]()
    with emulated_card():
        monkeypatch.setattr(torch.cuda, "set_device", devices.append)
        with drafting_beside(made, CARD) as (link, _):
            told = serve(made, asks, device=CARD, link=link, begin=begin, launches=False)
    assert told.texts() == plain.texts()
    assert told.stats[-1].accepted > 3
    assert own_streams
    assert all(own_streams)
    assert devices == [CARD]


@pytest.mark.parametrize(
    ("sampling", "most", "sums"),
    [(Sampling(), 6, "sum_add_norm"), (WARM, 9, "exchange")],
    ids=["greedy", "warm, rows that are too wide"],
)
def test_a_recording_has_two_sums_a_layer_and_little_stands_beside_it(
    sampling: Sampling, most: int, sums: str, folder: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank, which writes to its own memory as to a peer's. Stands against a collective that a recording leaves out,
    a round that launches kernel by kernel, and noise of one operation after another (75 of them, once)."""
    if sums == "exchange":
        monkeypatch.setattr(peer, "ROW_BYTES", 0)
    with emulated_card() as card:
        memory = torch.zeros(memory_bytes(1), dtype=torch.uint8)
        peers = PeerMemory(OneRank(), [memory.data_ptr()], CUDA)
        peers._on_card = False  # the interpreter knows no fence
        built = build_engine(topology(folder, device="cuda", draft={"source": "none"}), peers, CUDA)
        built.own.prepare()
        engine = built.engine
        assert isinstance(engine.target, ShardedTarget)
        (graphs_of,) = engine.target.decoder._runner._graphs
        for recording in graphs_of._recorder._graphs:
            assert recording.kernels.count(sums) == 2 * 2
            assert not {"exchange", "sum_add_norm"}.difference({sums}).intersection(recording.kernels)
        engine.hear(News(round=1, requests=(Request(0, (5, 6, 7, 8), 40, sampling),)))
        engine.step()
        before = card.launches, card.replays
        for round in range(10):
            engine.hear(News(round=round + 2))
            engine.step()
        assert card.replays - before[1] == 11  # one is of the next round
        assert card.launches - before[0] <= 10 * most


@pytest.mark.parametrize(("kind", "sums"), [("olmo3", ["exchange", *SUM, *SUM]), ("cohere2", SUM)])
def test_a_recording_has_the_sums_of_its_kind(kind: str, sums: list[str], few: None, tmp_path: Path) -> None:
    """Stands against norms of all heads together that a recording makes of one rank's, and a layer with an MLP beside
    attention that sums twice."""
    folder = tiny(kind, tmp_path)
    with emulated_card():
        memory = torch.zeros(memory_bytes(1), dtype=torch.uint8)
        peers = PeerMemory(OneRank(), [memory.data_ptr()], CUDA)
        peers._on_card = False  # the interpreter knows no fence
        built = build_engine(topology(folder, device="cuda", draft={"source": "none"}), peers, CUDA)
        built.own.prepare()
        assert isinstance(built.engine.target, ShardedTarget)
        (graphs_of,) = built.engine.target.decoder._runner._graphs
        for recording in graphs_of._recorder._graphs:
            assert [kernel for kernel in recording.kernels if kernel in {"exchange", *SUM}] == 3 * sums


class Unqueued(OneRank):
    """Collectives of which none can be recorded, as through the host's memory."""

    is_queued = False


def test_a_round_of_many_rows_is_as_many_launches_however_many_texts_it_is_of(folder: Path) -> None:
    """Stands against one that asks for each text by itself: eight that verify drafts are more rows than a recording
    has, and were as many launches a layer, and masks that the host made and sent."""
    (whole,) = split(ModelShape.of(folder), (1.0,))
    told = []
    with emulated_card() as card:
        decoder = Loader.open(folder, whole, torch.float32, CUDA).decoder(OneRank(), 512)
        card.waits.clear()
        for num_texts in (1, 12):
            count = MOST_ROWS + 8 if num_texts == 1 else 6
            begun, starts = card.launches, range(0, 40 * num_texts, 40)
            decoder.forward([Span(start, 3, (5,) * count, ((start, 3 + count),), count) for start in starts])
            told.append(card.launches - begun)
            assert not card.waits
    assert told == [LAUNCHES, LAUNCHES]


def test_rounds_that_cannot_be_recorded_have_compiled_their_kernels_before_the_first(
    folder: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against seconds in Triton's compiler in the middle of a text, for each tile that it first meets."""
    from tpspec.model.card.many import ManySteps
    from tpspec.model.card.steps import CardSteps

    attention, rows = CardSteps.attention, list[int]()

    def noted(steps: CardSteps, layer: Layer, qkv_TX: torch.Tensor, round: int) -> torch.Tensor:
        rows.append(len(qkv_TX))
        return attention(steps, layer, qkv_TX, round)

    monkeypatch.setattr(CardSteps, "attention", noted)
    with emulated_card() as card:
        made = topology(folder, device="cuda", draft={"source": "none"})
        built = build_engine(made, Unqueued(), CUDA)
        built.own.prepare()
        built.supply(made).prepare()  # as of another source
        counts = [*reversed(graphs.ROW_COUNTS), *ManySteps.rehearsed]
        assert rows == [count for count in counts for _ in range(2)]  # layers
        assert card.replays == 0
        assert built.engine.stats().collectives == {}


@pytest.mark.parametrize("others", [("none", "eagle"), ("medusa", "none")])
def test_ranks_record_another_source_together(
    others: tuple[str, str], few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against a lead that rehearses what it has not recorded with the taps of its source, where the others have
    all they need: its collectives would meet none, or others."""
    target = small("smollm2", tmp_path / "target")
    made = [topology(target, 2, device="cuda", draft=draft_section(one, target, tmp_path / one)) for one in others]
    monkeypatch.setattr(ThreadCommunicator, "is_queued", True)

    def prepare(comm: Communicator) -> None:
        built = build_engine(made[0], comm, CARD)
        for supply in (built.own, built.supply(made[1])):
            supply.prepare()

    with emulated_card(computes=False):
        ThreadWorld(2).run(prepare)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_ranks_without_a_card_each_are_refused_on_every_rank(local_rank: int, folder: Path) -> None:
    """Stands against an error that only those without a card see, of which none speaks."""
    place = Place(rank=local_rank, world_size=2, local_rank=local_rank, local_size=2)
    with emulated_card():
        with pytest.raises(UserError, match="each of the 2 ranks of this host, and 1 are here"):
            pick_device(topology(folder, 2, device="cuda"), place)
        assert pick_device(topology(folder, 2, device="cuda", link={"transport": "host"}), place) == CARD


def test_recordings_keep_the_priority_of_the_thread_that_makes_them() -> None:
    """Stands against a drafter in the gaps of a card that goes as first as the rank it is beside, and a rank that is
    recorded with the drafter's own priority."""
    with emulated_card():
        made = []
        for begin in (go_first, go_last):
            begin(CUDA)
            made.append(CardRecorder())
        for recorder in made:
            recorder.record(lambda: torch.zeros(1, device=CUDA))
        first, last = (recorder._graphs[0].priority for recorder in made)
        assert first < last == 0  # CUDA's lowest number goes first
