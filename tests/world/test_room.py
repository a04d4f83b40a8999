"""`cache.tokens: auto`, and what rounds take of a card beside weights and caches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from tests.checkpoints import tiny
from tests.draft.heads import eagle, medusa, mtp
from tests.draft.kits import KITS, draft_section
from tests.emulated_card import CARD, MEMORY, PROPERTIES, emulated_card
from tests.worlds import serve, topology
from tpspec.comm.communicator import OneRank
from tpspec.comm.gap import SWITCH
from tpspec.model.batch import Span
from tpspec.published.shape import known_models
from tpspec.request import Request, Sampling
from tpspec.roles import agree, memory
from tpspec.roles.build import build_engine
from tpspec.roles.build_drafter import build_ahead, taps_elsewhere
from tpspec.roles.fit import draft_bytes, shard_bytes
from tpspec.roles.room import (
    GRAIN,
    LEAST_LEFT,
    LEAST_TOKENS,
    LEFT,
    MOST_TOKENS,
    PROCESS,
    most_tokens,
    num_cached,
    with_tokens,
)
from tpspec.roles.weights import capacity
from tpspec.topology.balance import Capacity
from tpspec.topology.caches import FUTURES
from tpspec.topology.config import Topology, from_json, to_json
from tpspec.topology.report import memories
from tpspec.topology.working import most_blocks, recorded_bytes
from tpspec.verify.shards import tell_candidates

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its config: of weights nobody here reads a byte."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(known_models()[LLAMA]))
    (folder / "model.safetensors").touch()
    return folder


def box(model: Path, num_ranks: int = 1, **keys: Any) -> Topology:
    """A topology that says nothing of its cache, or of numbers."""
    target = {"model": str(model), "ranks": tuple(range(num_ranks))}
    return Topology.model_validate({"name": "a box", "target": target, "device": "cuda"} | keys)


def held(made: Topology, tokens: int, *ranks: int) -> int:
    """Bytes of these ranks with such a cache."""
    sized = with_tokens(made, tokens)
    drafting = draft_bytes(sized, on_card=True) * sum(map(sized.drafts_on, ranks))
    return drafting + sum(shard_bytes(sized, on_card=True)[rank] for rank in ranks)


@given(room=st.integers(0, 40 * GIB), num_ranks=st.integers(1, 5), page=st.sampled_from([1, 16, 4096]))
def test_a_cache_is_as_large_as_there_is_room_for(llama: Path, room: int, num_ranks: int, page: int) -> None:
    """To a page or to 1,024 tokens, and down to the least, of which whoever loads a shard finds whether it fits."""
    made = box(llama, num_ranks, cache={"page": page}, draft={"source": "ngram"})
    tokens, grain = most_tokens(made, [0], room), max(GRAIN, page)
    assert tokens == LEAST_TOKENS or (tokens % grain == 0 and held(made, tokens, 0) <= room)
    assert held(made, max(tokens, grain) + grain, 0) > room or tokens == MOST_TOKENS


def test_ranks_of_one_card_and_a_draft_model_beside_them_share_its_room(llama: Path) -> None:
    """Stands against a second shard, or a drafter, that finds no memory left."""
    alone, two = box(llama, 1), box(llama, 2)
    assert most_tokens(two, [0, 1], 20 * GIB) <= most_tokens(alone, [0], 20 * GIB) < most_tokens(two, [0], 20 * GIB)
    drafting = box(llama, 2, draft={"source": "model", "model": str(llama)})
    looking_up = box(llama, 2, draft={"source": "ngram"})
    assert most_tokens(drafting, [1], 30 * GIB) == most_tokens(looking_up, [1], 30 * GIB)  # the lead drafts for both
    tokens = most_tokens(drafting, [0], 30 * GIB)
    assert held(drafting, tokens, 0) <= 30 * GIB < held(drafting, tokens + GRAIN, 0)


def test_a_small_model_on_a_large_card_does_not_take_all_of_it(tmp_path: Path) -> None:
    made = box(tiny("smollm2", tmp_path))
    assert most_tokens(made, [0], 80 * GIB) == 64 * 512
    assert most_tokens(box(tmp_path, serve={"max_running": 100}), [0], 80 * GIB) == 100 * 512 // GRAIN * GRAIN


def test_a_card_keeps_some_memory_for_what_is_not_counted(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's buffers, graphs, and CUDA in the process of a drafter that is beside the shard, if it is one."""
    with emulated_card():
        free, left = MEMORY[0], max(LEAST_LEFT, int(LEFT * PROPERTIES.total_memory))
        made = box(llama, 2, draft={"source": "ngram"})
        tokens = num_cached(made, CARD, [1])
        assert tokens == most_tokens(made, [1], free - left)
        draft = {"source": "model", "model": str(tiny("smollm2", llama / "draft")), "placement": {"gaps": 1}}
        beside = box(llama, 2, draft=draft, pipeline={"policy": "fan_out"})
        assert num_cached(beside, CARD, [1]) == most_tokens(beside, [1], free - left)
        monkeypatch.setenv(SWITCH, "process")
        assert num_cached(beside, CARD, [1]) == most_tokens(beside, [1], free - left - PROCESS)
        assert num_cached(beside, CARD, [0]) == tokens
        assert num_cached(beside, CARD, [0, 1]) == most_tokens(beside, [0, 1], free - 2 * left - PROCESS)


def test_on_a_cpu_a_cache_is_as_it_ever_was(llama: Path) -> None:
    """Stands against a laptop whose memory fills up for a demo."""
    assert num_cached(box(llama), CPU, [0]) == 8192


def test_what_a_head_goes_on_from_has_to_find_room_on_the_host(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against the OOM killer, hours after the start: of every token that others may begin with, rows of three
    layers stay in host memory, 24 KiB here."""
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    memory.MEMINFO.write_text(f"MemAvailable: {2**20} kB\n")
    head = {"source": "mtp"}
    with emulated_card():
        assert num_cached(box(llama, 2, draft=head), CARD, [1]) == GIB // 2 // (24 << 10) // GRAIN * GRAIN
        without = box(llama, 2, draft=head, cache={"prefix": False})
        looking_up = box(llama, 2, draft={"source": "ngram"})
        assert num_cached(without, CARD, [1]) == num_cached(looking_up, CARD, [1]) > 40_000


@pytest.mark.parametrize("kind", ["smollm2", "gemma3", "gpt_oss", "qwen3_5", "deepseek_v3"])
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real card, whose allocator has the say")
def test_rounds_take_no_more_of_a_card_than_is_asked_for(kind: str, tmp_path: Path) -> None:
    """Of two prompts that fill a round whose every row is drawn from. Stands against a start that fits and a round that
    ends the world; and against half of what is asked for being of nothing."""
    pytest.importorskip("triton")
    rows, vocab = 96, 8192
    folder = tiny(kind, tmp_path, vocab_size=vocab)
    made = topology(folder, engine={"max_rows": rows}, cache={"tokens": 2 * rows}, device="cuda")
    spans = [Span(seq, 0, (5,) * 48, ((48 * seq, 48),), 48) for seq in range(2)]
    asked, unrecorded = memories(made)[0], recorded_bytes(vocab, "float32")  # for there are no recordings here
    with emulated_card(computes=False) as card:
        built = build_engine(made, OneRank(), CARD)
        loaded = card.held
        with torch.inference_mode():
            tell_candidates(built.own.target.logits(spans).logits_TV.float(), 0)
        assert asked.weights + asked.kv <= 1.05 * loaded
        assert loaded < card.most_held <= asked.total(on_card=True) - unrecorded
        assert asked.rounds - unrecorded < 2 * (card.most_held - asked.weights - asked.kv)
        built.close()


def eagle_head(target: Path, folder: Path, *, third: bool = False, pickled: bool = False) -> None:
    if third:
        eagle.third(eagle.Target.read(target), folder, eagle_aux_hidden_state_layer_ids=[2, 1, 0])
    else:
        eagle.first(eagle.Target.read(target), folder, pickled=pickled)


def without_a_table(target: Path, folder: Path) -> None:
    eagle_head(target, folder, pickled=True)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    del tensors["embed_tokens.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")


def medusa_heads(target: Path, folder: Path, kind: str) -> None:
    heads = medusa.drawn(target, 1)
    if kind == "of vLLM":
        medusa.vllm(target, folder, medusa.vllm_names(heads, num_outputs=0, mapped=False), original_lm_head=True)
    elif kind.startswith("in a model"):
        medusa.in_model(target, folder, medusa.original_names(heads))
        if kind.endswith("pickled"):
            torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()
    else:
        medusa.original(folder, medusa.original_names(heads), pickled=kind == "pickled")


MEDUSA = "of vLLM", "in a model", "in a model, pickled", "alone", "pickled"
HEADS: dict[str, Callable[[Path, Path], None]] = {
    "eagle 3": partial(eagle_head, third=True),
    "eagle 1": eagle_head,
    "eagle 1, pickled": partial(eagle_head, pickled=True),
    "eagle 1, pickled without a table": without_a_table,
    **{f"medusa, {kind}": partial(medusa_heads, kind=kind) for kind in MEDUSA},
    "mtp": lambda target, folder: mtp.deepseek(target) and None,
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real card, whose allocator has the say")
def test_a_head_takes_no_more_of_a_card_than_is_asked_for(head: str, tmp_path: Path) -> None:
    """Stands against a cache that leaves no room for the target's output, which a head without one brings once more (1
    GB for Llama 3.1 8B), or for heads in a whole model's files; and against tables, which stay on the host."""
    pytest.importorskip("triton")
    target, folder = tiny("smollm2", tmp_path / "target", vocab_size=8192, num_hidden_layers=5), tmp_path / "head"
    HEADS[head](target, folder)
    source = head.split(",")[0].split()[0]
    draft = {"source": source} | ({} if source == "mtp" else {"model": str(folder)})
    made = topology(target, draft=draft, cache={"tokens": 256}, device="cuda", serve={"max_running": 4})
    asked = memories(made)[0]
    with emulated_card(computes=False) as card:
        built = build_engine(made, OneRank(), CARD)
        assert asked.weights + asked.kv <= (2 if head.endswith("in a model, pickled") else 1.15) * card.held
        assert card.held <= asked.total(on_card=True)
        unrecorded = 2 * recorded_bytes(8192, "float32")  # of the target's rounds and the head's
        assert card.held <= asked.total(on_card=True) - unrecorded * (source != "medusa")
        built.close()


def test_a_card_whose_memory_is_the_hosts_leaves_half_of_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a small computer whose programs make way for a cache."""
    with emulated_card():
        own = num_cached(box(llama), CARD, [0])
        monkeypatch.setattr(PROPERTIES, "is_integrated", 1)
        assert num_cached(box(llama), CARD, [0]) < own


@pytest.mark.parametrize("name", [*KITS])
def test_a_text_may_have_as_many_tokens_as_the_model_in_whatever_cache(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rope is made for the positions of a text, not for as many as there are slots. Stands against drafts that look
    further than that, at the end of a text as long as any: a drafter that fails is left alone, and told of."""
    target = tiny("smollm2", tmp_path / "target", max_position_embeddings=40)
    section = draft_section(name, target, tmp_path / "draft")
    requests = [Request(i, (5 + i, 6, 7) * 8, 16, Sampling()) for i in range(2)]
    roomy, tight = (
        serve(topology(target, draft=draft, cache={"tokens": tokens}, engine={"max_rows": 64}), requests)
        for draft, tokens in ((section, 4096), ({"source": "none"}, 96))
    )
    assert roomy.texts() == tight.texts()
    assert all(len(text) == 16 for text in roomy.texts())
    assert not [one.message for one in caplog.records if one.name.startswith("tpspec")]


def test_a_drafter_looks_no_further_than_the_text_may_go(tmp_path: Path) -> None:
    """Stands against one that drafts ahead with a model for longer texts than the target's: a request that wants very
    long drafts led it beyond its rope, on a card to somebody else's memory."""
    target = tiny("smollm2", tmp_path / "target", max_position_embeddings=40)
    draft = tiny("smollm2", tmp_path / "draft", num_hidden_layers=1, max_position_embeddings=512)
    section = {"source": "model", "model": str(draft), "placement": {"dedicated": 1}}
    made = topology(target, draft=section, pipeline={"policy": "fan_out"}, cache={"tokens": 4096})
    assert build_ahead(made, CPU).run.max_positions == 40 + FUTURES


@pytest.mark.parametrize(("told", "agreed"), [((8192, 5120), 5120), ((4096, 5120), 4096)])
def test_every_rank_holds_what_the_one_with_the_least_room_does(
    told: tuple[int, int], agreed: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against ranks whose pages differ, and against one that has more than its memory."""
    monkeypatch.setattr(agree, "num_cached", lambda made, device, on_device: told[device.index])
    for rank in range(2):

        def announce(note: str | None, lead: int, own: int = rank) -> str:
            assert (note is not None) == (lead == own)
            return str(told[lead]) if note != "" else ""

        place = SimpleNamespace(ranks_here=(0, 1), restarts=0)
        world = SimpleNamespace(rank=rank, size=2, device=torch.device("cuda", rank), place=place, announce=announce)
        monkeypatch.setattr(agree, "agreed", lambda world, work: work())
        with emulated_card():
            made = agree.settled(box(llama, 2), world)  # type: ignore[arg-type]
            assert made.cache.tokens == agreed
            assert agree.settled(box(llama, 2), world, fills=False).cache.tokens == 8192  # type: ignore[arg-type]


def test_weights_leave_a_cache_the_room_that_it_leaves(llama: Path) -> None:
    """Stands against a small card filled to the last byte by weights, whose cache of the least size all others have."""
    with emulated_card():
        filling, fixed = (
            capacity(box(llama, 2, cache={"tokens": tokens}), 0, CARD, [0]).room for tokens in ("auto", 8192)
        )
        assert fixed - filling == max(LEAST_LEFT, int(LEFT * PROPERTIES.total_memory))


def test_a_page_is_the_least_that_a_cache_holds(llama: Path) -> None:
    """Stands against a number that the drafter's process refuses when it reads the topology."""
    made = with_tokens(box(llama, cache={"page": 4096}), LEAST_TOKENS)
    assert from_json(to_json(made)) == made


def test_a_world_that_starts_again_waits_for_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a smaller cache after a rank's death, in which requests that come again find no place."""
    free = iter([1, 1, 2, 5, *[5] * 20])
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "sleep", lambda _: memory.MEMINFO.write_text(f"MemAvailable: {next(free)} kB\n"))
    memory.MEMINFO.write_text("MemAvailable: 1 kB\n")
    memory.wait_for_memory(CPU)
    assert memory.free_bytes(CPU) == 5 * 1024
    assert len([*free]) == 20 - memory.STEADY_LOOKS


@pytest.mark.parametrize("keys", [{"cache": {"tokens": 4096}}, {}], ids=["weights", "weights and cache"])
def test_nothing_is_settled_by_memory_before_that_has_come_back(
    keys: dict[str, Any], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against other weights than before, or a fault, after a rank's death: shards are as large as there was room
    for while a drafter still held its own."""
    events: list[str] = []

    def measured(topology: Topology, *where: Any) -> Capacity:
        events.append("measured")
        return Capacity(20 * GIB, 1e11)

    monkeypatch.setattr(agree, "wait_for_memory", lambda device: events.append("waited"))
    monkeypatch.setattr(agree, "capacity", measured)
    monkeypatch.setattr(agree, "num_cached", lambda *of_a_rank: events.append("counted") or 4096)
    monkeypatch.setattr(agree, "agreed", lambda world, work: work())
    place = SimpleNamespace(ranks_here=(0,), restarts=1)
    world = SimpleNamespace(rank=0, size=1, device=CARD, place=place, announce=lambda note, lead: note)
    target = {"model": str(llama), "ranks": (0,), "weights": "auto"}
    with emulated_card():
        agree.settled(box(llama, target=target, **keys), world)  # type: ignore[arg-type]
    assert events == ["waited", "measured", *([] if keys else ["counted"])]


def test_who_asks_what_a_head_elsewhere_reads_keeps_no_cache_for_it(tmp_path: Path) -> None:
    """Stands against gigabytes of the host's memory, as many as a cache on a card has, for a list of layers."""
    target = tiny("smollm2", tmp_path / "target")
    draft = draft_section("eagle", target, tmp_path / "head") | {"placement": {"dedicated": 1}}
    made = topology(target, draft=draft, pipeline={"policy": "fan_out"}, cache={"tokens": 1 << 44})
    assert taps_elsewhere(made) == (2, 1, 0)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real card, whose allocator has the say")
def test_rounds_of_fixed_rows_behind_a_long_text_are_counted(tmp_path: Path) -> None:
    """They are torch's, whose masks and scores grow with the text, and keys and values are gathered."""
    tokens = 4096
    folder = tiny("smollm2", tmp_path, max_position_embeddings=tokens)
    made = topology(folder, deterministic=True, cache={"tokens": tokens}, device="cuda")
    halves = ((tokens // 2, tokens // 2), (0, tokens // 2))  # to be gathered
    asked, spans = memories(made)[0], [Span(0, tokens - 16, (5,) * 16, halves, 16)]
    with emulated_card() as card:
        built = build_engine(made, OneRank(), CARD)
        with torch.inference_mode():
            built.own.target.logits(spans)
        assert card.most_held <= asked.total(on_card=True)
        assert asked.rounds < 2 * (card.most_held - asked.weights - asked.kv)


@given(num_slots=st.integers(1, 1 << 24))
def test_tables_of_a_large_cache_are_not_as_large(num_slots: int) -> None:
    """Stands against 48 bytes of every slot on the card and on the host, where a block of keys is 64 slots."""
    blocks = most_blocks(num_slots)
    assert blocks == 2 * num_slots or blocks >= num_slots // 4 >= 16 * (num_slots // 64)
    assert 24 * blocks <= max(24 << 16, 6 * num_slots)
