"""Recorded rounds on a CUDA card: the text of plain ones, one replay and one wait each. Run with: pytest -m gpu."""

from __future__ import annotations

import ctypes
import json
import subprocess
import warnings
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile

from scripts import serving
from tests.checkpoints import KINDS, tiny
from tests.draft.heads.assistant import assistant
from tests.draft.kits import KITS, draft_section
from tests.rounds import tree_and_chain
from tests.worlds import drafting_beside, once_it_drafts, serve, topology
from tpspec.comm.communicator import OneRank
from tpspec.comm.messages import News, Submit, ToLead
from tpspec.engine.engine import Engine
from tpspec.model.batch import Span
from tpspec.model.graphs import Forward
from tpspec.model.loader import Loader
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.roles.build import build_engine
from tpspec.staged import Fetched
from tpspec.topology.shards import split

pytest.importorskip("triton")
from tpspec.model.card import norms as card_norms, overlap as card_overlap, products as card_products
from tpspec.model.card.attention import attend, join
from tpspec.model.card.flash import Flash
from tpspec.model.card.heads import place

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")]
CUDA = torch.device("cuda")
CROWD = [Request(i, (5, 6, 7, 8, 9 + i) * 4, 24, Sampling(temperature=0.8 * (i % 2), seed=i)) for i in range(16)]
ASKS = CROWD[:4]
GREEDY = Sampling()
EDITED = Sampling(temperature=0.8, repetition_penalty=1.2, logit_bias={5: 1.0}, min_tokens=100, withheld=frozenset({2}))
WORLD_S = 90.0  # that it may take
NUM_TEXTS = 8  # of one, by chance, ours were 1.4 times as far, and of all of a kind from 0.87 to 1.08
IDS = tuple(torch.randint(3, 263, (90,), generator=torch.Generator().manual_seed(0)).tolist())


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
@pytest.mark.parametrize(("kind", "num_asks"), [*product(["smollm2", "qwen3_5"], [1, 4, 16]), ("qwen3_moe", 16)])
def test_texts_are_those_of_plain_rounds(kind: str, num_asks: int, tree: str, tmp_path: Path) -> None:
    """The law on a card, in float32, of models that draft for themselves; the 96 rows of sixteen texts are a
    replay, too. Stands against a recording that replays another round's rows, or takes drafts into a state."""
    folder = tiny(kind, tmp_path)
    plain = serve(topology(folder, device="cuda"), CROWD[:num_asks], device=CUDA)
    draft = {"source": "model", "model": str(folder), "tokens": 5, "tree": tree}
    told = serve(topology(folder, device="cuda", draft=draft), CROWD[:num_asks], device=CUDA)
    assert told.texts() == plain.texts()
    assert told.stats[-1].accepted > 0


def test_texts_begin_with_states_that_others_left(tmp_path: Path) -> None:
    """In float32. Stands against a state that is copied before the round that makes it has ended, or after the next has
    begun: texts that begin alike come together, while one runs, and when all have ended."""
    folder, told = tiny("qwen3_5", tmp_path), []
    asks = [Request(i, IDS[: 90 - i] * 2, 24, Sampling(temperature=0.8 * (i % 2), seed=i)) for i in range(5)]
    for prefix in (True, False):
        messages: dict[int, list[ToLead]] = {1: [*map(Submit, asks[:2])], 8: [Submit(asks[2])]}
        messages[60] = [*map(Submit, asks[3:])]
        draft, cache = {"source": "ngram", "tokens": 3}, {"prefix": prefix}
        told.append(serve(topology(folder, device="cuda", draft=draft, cache=cache), messages=messages, device=CUDA))
    assert told[0].texts() == told[1].texts()
    assert told[0].stats[-1].prefix_found > 300


@pytest.mark.parametrize("source", KITS)
def test_every_source_leaves_the_text_as_it_is(source: str, tmp_path: Path) -> None:
    """Each with its own recordings. Stands against what only the emulated card has been shown to do."""
    target = tiny("smollm2", tmp_path / "target")
    section = draft_section(source, target, tmp_path / "head") | ({} if source == "none" else {"tokens": 3})
    told = serve(topology(target, device="cuda", draft=section), ASKS, device=CUDA)
    assert told.texts() == serve(topology(target, device="cuda"), ASKS, device=CUDA).texts()
    assert told.stats[-1].drafted > 0 or source == "none"


@pytest.mark.parametrize("policy", ["serial", "fan_out"])
def test_a_drafter_in_the_gaps_of_a_card_leaves_the_text_as_it_is(policy: str, tmp_path: Path) -> None:
    """A thread with a stream of its own, which goes last. Stands against recordings of two threads that disturb each
    other, numbers that both keep in one place, and drafts that never come."""
    target = tiny("smollm2", tmp_path)
    section = {"source": "model", "model": str(target), "tokens": 3, "placement": {"gaps": 0}}
    made = topology(target, device="cuda", draft=section, pipeline={"policy": policy})
    asks = [replace(ask, max_tokens=100) for ask in ASKS]
    card = torch.device("cuda", 0)
    with drafting_beside(made, card) as (link, _):
        told = serve(made, asks, device=card, link=link, begin=once_it_drafts, launches=False)
    assert told.texts() == serve(topology(target, device="cuda"), asks, device=card).texts()
    assert told.stats[-1].accepted > 0


def test_an_assistant_leaves_the_text_as_it_is(tmp_path: Path) -> None:
    """The same of one that attends to what the target keeps."""
    target = tiny("gemma4", tmp_path / "target")
    section = {"source": "eagle", "model": str(assistant(target, tmp_path / "head")), "tokens": 3}
    told = serve(topology(target, device="cuda", draft=section), ASKS, device=CUDA)
    assert told.texts() == serve(topology(target, device="cuda"), ASKS, device=CUDA).texts()
    assert told.stats[-1].drafted > 0


# Of a mixture the last bit of what its router reads may send a row elsewhere: tests/model/test_card_experts.py has what
# experts make of rows in fewer bits.
MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite",
            "qwen3_5_moe", "qwen3_next", "gemma4_moe", "nemotron_h", "cohere2_moe", "flint",
            "granite_hybrid", "kimi_linear", "lfm2_moe", "llama4", "step3p5")  # fmt: skip
IN_HALVES = [kind for kind in KINDS if kind not in MIXTURES]
CASES = [(kind, torch.float32) for kind in KINDS] + [(kind, torch.bfloat16) for kind in IN_HALVES]
TOO_LARGE = ("gemma", "granite")  # their hidden states, for float16
CASES += [(kind, torch.float16) for kind in IN_HALVES if not kind.startswith(TOO_LARGE)]


@pytest.mark.parametrize("small", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_recorded_rows_are_what_torch_makes_of_them(kind: str, small: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Logits have a spread of 2. In 16 bits, where each of the two rounds in its own way, ours are as near to float32
    as torch's, in the mean of some texts. What is exact is the host's: a card that tests share has enough to do."""
    (whole,) = split(ModelShape.of(tiny(kind, tmp_path)), (1.0,))
    num_texts = 1 if dtype == torch.float32 else NUM_TEXTS

    def made(dtype: torch.dtype, compiled: bool, device: torch.device = CUDA) -> torch.Tensor:
        loader = Loader.open(tmp_path, whole, dtype, device)
        decoder = loader.decoder(OneRank(), 512, compiled=compiled, small_cache=small, num_states=2)
        return torch.cat([tree_and_chain(decoder, seed).cpu() for seed in range(num_texts)])

    exact = made(torch.float32, False, torch.device("cpu"))
    if dtype == torch.float32:
        assert (made(dtype, True) - exact).abs().max() < (0.3 if small else 2e-3)
        return
    ours, torchs = ((made(dtype, compiled) - exact).square().mean().sqrt() for compiled in (True, False))
    assert ours < 1.2 * torchs
    assert torchs < 0.2


@pytest.mark.parametrize("kind", ["smollm2", "mistral"])
def test_flashinfer_does_what_our_kernels_do(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With and without a window, where it is installed. Stands against parameters that mean something else than
    tests/model/test_card_flash.py takes them for."""
    pytest.importorskip("flashinfer")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 2}
    (whole,) = split(ModelShape.of(tiny(kind, tmp_path, **heads)), (1.0,))
    decoder = Loader.open(tmp_path, whole, torch.bfloat16, CUDA).decoder(OneRank(), 512)
    many, told = decoder._runner.many, []
    assert many is not None
    spans = [Span(text, 0, IDS, ((128 * text, 50), (64 + 128 * text, 40)), 3) for text in range(2)]
    for serves in (False, True):
        many._flash = Flash(many._shape, flashinfer_wrapper()) if serves else None
        told.append(decoder.forward(spans).float())
    assert (told[0] - told[1]).abs().max() < 0.3
    many.agree_on_flash(lambda holds: holds)
    assert "FlashInfer: it takes" in caplog.text or "FlashInfer" not in caplog.text


def flashinfer_wrapper() -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_a_row_in_16_bits_is_the_same_beside_others(head_dim: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """To the last bit: a round that verifies drafts says of each row what a plain round says. Stands against products
    and tiles of attention that are others for other row counts, and then turn near ties."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 8 * head_dim}
    (whole,) = split(ModelShape.of(tiny("smollm2", tmp_path, **heads)), (1.0,))
    decoder = Loader.open(tmp_path, whole, dtype, CUDA).decoder(OneRank(), 512)

    def logits(start: int, count: int) -> torch.Tensor:
        tokens = IDS[start : start + count]
        return decoder.forward([Span(0, start, tokens, ((0, start + count),), count)]).clone()

    logits(0, 60)
    alone = torch.cat([logits(60 + row, 1) for row in range(16)])
    assert torch.equal(logits(60, 16), alone)


@pytest.mark.parametrize("taps", [(), (0, 2)], ids=["untapped", "tapped"])
@pytest.mark.parametrize("small", [False, True], ids=["plain", "int8"])
def test_kernels_that_overlap_compute_what_they_do_in_turn(
    small: bool, taps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, replay after replay, weights and cache in 8 bits or not. Stands against one that reads what the
    kernel in front has not written yet, or writes what that still reads."""
    if not card_overlap.overlap(CUDA)["overlaps"]:
        pytest.skip("kernels of this card begin when the last has ended")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 1024, "intermediate_size": 4096}
    (whole,) = split(ModelShape.of(tiny("smollm2", tmp_path, num_hidden_layers=4, **sizes)), (1.0,))
    told = []
    for first in (card_overlap.OVERLAP_FROM, (99, 0)):
        monkeypatch.setattr(card_overlap, "OVERLAP_FROM", first)
        loader = Loader.open(tmp_path, whole, torch.bfloat16, CUDA, "int8" if small else None)
        decoder = loader.decoder(OneRank(), 512, small_cache=small)
        decoder.forward([Span(0, 0, IDS[:64], ((0, 64),), 0)])
        spans = [Span(0, 64 + at, IDS[at : at + 1 + at % 4], ((0, 65 + at + at % 4),), 1 + at % 4) for at in range(40)]
        told.append([x.clone() for span in spans for x in _all_of(decoder.tapped([span], taps))])
    assert all(torch.equal(*both) for both in zip(*told, strict=True))


def test_all_kernels_divide_a_processors_memory_alike(tmp_path: Path) -> None:
    """As the driver tells of those that a round of one row takes. Stands against a product that begins only when small
    kernels have left the processors, which their memory is divided anew for."""
    if not card_overlap.overlap(CUDA)["overlaps"]:
        pytest.skip("kernels of this card begin when the last has ended")
    (whole,) = split(ModelShape.of(tiny("smollm2", tmp_path)), (1.0,))
    decoder = Loader.open(tmp_path, whole, torch.bfloat16, CUDA).decoder(OneRank(), 512)
    decoder.forward([Span(0, 0, IDS[:1], ((0, 1),), 1)])
    kernels = [card_norms.add_norm, place, attend, join, card_products._few_rows]
    for kernel in kernels:
        found = kernel.device_caches[torch.cuda.current_device()][0].values()
        made = [one for one in found if one.metadata.launch_pdl]  # another test's are not, which begin in turn
        assert made
        for one in made:
            share, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
            asked = card_overlap.SHARED_MEMORY_CARVEOUT, ctypes.c_void_p(one.function)
            assert driver.cuFuncGetAttribute(ctypes.byref(share), *asked) == 0
            assert share.value == card_overlap.ALL_SHARED


def _all_of(made: Forward) -> list[torch.Tensor]:
    return [made.logits_TV, *made.tapped.values()]


def engine_with(folder: Path, sampling: Sampling = GREEDY, **keys: Any) -> Engine:
    made = topology(folder, device="cuda", target={"dtype": "bfloat16"}, **keys)
    built = build_engine(made, OneRank(), CUDA)
    built.own.prepare()
    engine = built.engine
    engine.hear(News(round=1, requests=(Request(0, IDS[:20], 200, sampling),)))
    for round in range(4):
        engine.step()
        engine.hear(News(round=round + 2))
    return engine


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8), EDITED], ids=["greedy", "warm", "edited"])
def test_the_host_waits_once_in_a_round(sampling: Sampling, tmp_path: Path) -> None:
    """For the verdict. Stands against an index or a mask that is copied while the card computes."""
    engine, here = engine_with(tiny("smollm2", tmp_path), sampling), Fetched.here
    heard: list[torch.Tensor] = []
    with (
        warnings.catch_warnings(record=True) as told,
        patch.object(Fetched, "here", lambda coming: heard.append(here(coming)) or heard[-1]),
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for round in range(10):
                engine.step()
                engine.hear(News(round=round + 6))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not any("called a synchronizing CUDA operation" in str(one.message) for one in told)
    assert len(heard) == 10


@pytest.mark.parametrize("draft", [{"source": "none"}, {"source": "ngram", "tokens": 3}], ids=["plain", "ngram"])
def test_a_round_is_one_replay_and_a_handful_of_launches(draft: dict[str, Any], tmp_path: Path) -> None:
    """Stands against a round that falls back to launching kernel by kernel: a dozen a layer."""
    engine = engine_with(tiny("smollm2", tmp_path), draft=draft)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        for round in range(10):
            engine.step()
            engine.hear(News(round=round + 6))
        torch.cuda.synchronize()
    calls = {event.key: event.count for event in seen.key_averages()}
    assert calls.get("cudaGraphLaunch") == 10  # of a plain round the next one's, and its own was before
    assert sum(count for name, count in calls.items() if "LaunchKernel" in name) <= 10 * 15


def torchrun(num_ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """What a world on this card has said, once it has ended well. One that hangs leaves nobody on the card."""
    command = serving.torchrun(num_ranks, *words)
    variables = serving.environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as world:
        try:
            out, errors = world.communicate(timeout=WORLD_S)
        except subprocess.TimeoutExpired:
            serving.end(world)
            raise
    assert world.returncode == 0, errors[-3000:]
    return subprocess.CompletedProcess(command, 0, out, errors)


def text_of(folder: Path, num_ranks: int, transport: str, source: str = "ngram") -> str:
    keys = {"target.model": folder, "target.ranks": list(range(num_ranks)), "target.dtype": "float32"}
    keys |= {"device": "cuda", "link.transport": transport, "draft.source": source}
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    words = ["--prompt", "the cat and the hat", "--max-tokens", "32", "--ignore-eos", "--json"]
    ended = torchrun(num_ranks, "-m", "tpspec.generate", *sets, *words)
    assert "do not go through peer memory" not in ended.stderr
    told = next(line for line in ended.stdout.splitlines() if line.startswith("{"))
    return str(json.loads(told)["text"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint, and what one rank writes with it."""
    folder = tiny("smollm2", tmp_path_factory.mktemp("shared"))
    return folder, text_of(folder, 1, "auto")


@pytest.mark.alone
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_collectives_by_peer_memory_are_right_also_in_a_recording(num_ranks: int, tmp_path: Path) -> None:
    """Stands against flags of an epoch that a replay does not count on, and sums in another order."""
    script = Path(__file__).parent / "worlds" / "recorded.py"
    ended = torchrun(num_ranks, str(script), str(tiny("smollm2", tmp_path)))
    assert ended.stdout.split() == ["same"] * num_ranks


@pytest.mark.alone
@pytest.mark.parametrize("transport", ["host", "peer"])
@pytest.mark.parametrize(("num_ranks", "source"), [(2, "none"), (3, "ngram")])
def test_ranks_that_share_a_card_write_the_text_of_one(
    num_ranks: int, source: str, transport: str, alone: tuple[Path, str]
) -> None:
    """A torchrun world, its collectives through the host's memory or each other's, one card for all. Without drafts
    each rank launches rounds before their tokens are known, where these are recorded."""
    folder, text = alone
    assert text_of(folder, num_ranks, transport, source) == text
