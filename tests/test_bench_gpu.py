"""The script that measures a card, where it can be tried without one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from scripts.serving import ROOT, environment
from tests.checkpoints import tiny
from tests.emulated_card import CARD, emulated_card
from tests.processes import lives
from tests.worlds import serve, topology
from tpspec.model import graphs, runner
from tpspec.request import Request

# A rank that hangs, and takes no notice of torchrun's first signal.
RANK = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""
WORKER = "import subprocess, sys; subprocess.run(sys.argv[1:], capture_output=True)"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import scripts.bench_gpu

    return scripts.bench_gpu


def test_a_section_that_hangs_leaves_no_rank_behind(script: ModuleType, tmp_path: Path) -> None:
    """Stands against ranks that keep the card: torchrun starts each in a session of its own, so that a signal to the
    group of who started torchrun does not reach them."""
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(rank)]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *launch, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(),
    )
    try:
        deadline = time.monotonic() + 60
        while not all((told := tmp_path / number).exists() and told.read_text() for number in "01"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started = psutil.Process(worker.pid).children(recursive=True)
        assert {int((tmp_path / number).read_text()) for number in "01"} <= {process.pid for process in started}
    finally:
        script.end(worker)
    assert worker.returncode is not None
    assert not any(map(lives, started))


SHAPE: dict[str, Any] = {"model_type": "llama", "vocab_size": 1009, "hidden_size": 256, "intermediate_size": 512,
                         "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2}  # fmt: skip
SHAPES = {
    "target": SHAPE | {"tie_word_embeddings": False},
    "draft": SHAPE | {"num_hidden_layers": 2, "hidden_size": 128, "tie_word_embeddings": True},
}


def test_every_draft_for_a_model_that_repeats_is_right(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against models of unrelated random weights, whose drafts are never right: nothing could be drafted ahead
    in gaps then, whatever the code does."""
    monkeypatch.setattr("tpspec.published.shape.known_models", lambda: SHAPES)
    for name in SHAPES:
        script.write(name, tmp_path / name, repeats=True)
    draft = {"source": "model", "model": str(tmp_path / "draft"), "tokens": 4}
    told = serve(topology(tmp_path / "target", draft=draft), [Request(0, (17, 900, 5, 444), 20)])
    assert told.texts() == [[444] * 20]
    drafted, accepted = (sum(sum(getattr(delta, what)) for delta in told.deltas) for what in ("drafted", "accepted"))
    assert drafted >= 12
    assert accepted == drafted


def test_transformers_has_one_cache_for_every_text(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against a compilation in the time of the longer texts: a static cache never gets shorter, and a longer one
    is compiled for anew."""
    asked = []

    class Model:
        generation_config = SimpleNamespace()

        def generate(self, ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
            asked.append(max_new_tokens)
            return torch.zeros(1, ids.shape[1] + max_new_tokens)

        def to(self, _: str) -> Model:
            return self

        def eval(self) -> Model:
            return self

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: Model())
    script.generating_s(Namespace(device="cpu", model="m", to=tmp_path, tokens=8))
    assert asked[0] == max(asked) == 8
    assert asked.count(2) == 5


def test_a_round_takes_what_lies_between_two_of_them(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against a link that takes no time, drafts in gaps that never come, and rounds that share the time of the
    one that reads the prompt, or of the answer before it."""
    monkeypatch.setattr("tpspec.published.shape.known_models", lambda: SHAPES)
    for name in SHAPES:
        script.write(name, tmp_path / name, repeats=True)
    options = Namespace(device="cpu", model="target", draft="draft", to=tmp_path, tokens=40)
    monkeypatch.setattr(script, "prompt", lambda: (17, 900, 5, 444) * 50)
    found = script.gaps(options)
    waits_ms = found["of which it waits for the link, ms"]
    assert waits_ms == pytest.approx(6 * 2 * (58 + 4) / 1000, rel=0.1)
    assert found["plain round, ms"] > waits_ms
    assert found["drafts of a round"] > 0
    assert found["n-gram drafts of a round"] > 1
    assert found["drafting alone, ms"] > 0


TELLING = """
import sys
print("from a library", file=sys.stderr)
print("bench_gpu: collectives go through gloo", file=sys.stderr)
print("bench_gpu: collectives go through gloo", file=sys.stderr)
print('{"ms": 1.5}')
"""


@pytest.mark.parametrize(
    ("worker", "limit", "found"),
    [
        (TELLING, 60.0, {"ms": 1.5, "said": ["bench_gpu: collectives go through gloo"]}),
        ("import sys; sys.exit('no memory')", 60.0, {"failed": ["no memory"]}),
        ("import time; time.sleep(600)", 1.0, {"failed": ["it took longer than 1 s (--limit, --within)"]}),
        (TELLING, 0.0, {"failed": ["no time was left for it (--within)"]}),
    ],
    ids=["tells", "fails", "hangs", "comes too late"],
)
def test_a_section_tells_what_it_found_or_what_went_wrong(
    worker: str, limit: float, found: object, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against figures of slow collectives that look like those of fast ones: nobody sees a worker's errors."""
    fake = tmp_path / "worker.py"
    fake.write_text(worker)
    monkeypatch.setattr(script, "__file__", str(fake))
    options = Namespace(device="cpu", model="m", draft="d", mixture="x", tokens=4)
    assert script.section("decode", options, tmp_path, limit) == found


def test_kernels_are_told_by_what_they_stand_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against time that is counted twice where kernels overlap, and products of one name that are told as one.
    Ends, in no order: two calls of norm, product, place, product."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from scripts import kernel_times

    monkeypatch.setattr(kernel_times, "CALLS", 2)
    call = [(2.0, "norm"), (12.0, "product<16>(float)"), (13.0, "place"), (20.0, "product<16>(float)")]
    ended = [(100.0 * turn + end, name) for turn in range(2) for end, name in reversed(call)]
    assert kernel_times.behind_the_last(ended) == {
        "product, between norm and place, 1 x, us": 10.0,
        "place, between product and product, 1 x, us": 1.0,
    }


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one, which the script asks itself")
def test_memory_is_told_beside_what_a_start_asks_for(script: ModuleType, tmp_path: Path) -> None:
    """The numbers by which the estimates are to be judged once a card is at hand: stands against a script that stumbles
    over them then."""
    options = Namespace(model=tiny("smollm2", tmp_path / "model").name, to=tmp_path, device="cuda")
    with emulated_card() as card:
        weights = torch.zeros(1 << 20, device=CARD)
        found = script.memory(options)
        assert found["GiB allocated at most"] == card.most_held / 2**30 == weights.nbytes / 2**30
    assert 0 < found["of it for rounds"] < found["GiB asked for"]
    assert found["GiB of CUDA, kernels and graphs"] == pytest.approx(4, abs=0.1)  # the emulated card says so


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one, which the script asks itself")
def test_rounds_of_many_texts_are_timed_recorded_and_launched(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And chunks of prompts launched alone; nothing behind more tokens than the model has positions for. Stands against
    a ratio of a replay to itself."""
    pytest.importorskip("triton")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    folder = tiny("smollm2", tmp_path / "model", max_position_embeddings=128, **sizes)
    for name, value in (("MANY_ROWS", 96), ("MANY_TEXTS", 12), ("BEHIND", (0, 100)), ("at", lambda *of: folder)):
        monkeypatch.setattr(script, name, value)
    for room in (graphs, runner):
        monkeypatch.setattr(room, "ROW_COUNTS", (1,))  # the interpreter takes its time
    with emulated_card() as card:

        def counted(ways: dict[int, Callable[[], object]], **_: int) -> dict[int, float]:
            replays = {}
            for name, work in ways.items():
                before = card.replays
                work()
                replays[name] = 1.0 + card.replays - before
            return replays

        monkeypatch.setattr(script, "in_turns", counted)
        found = script.prompts(Namespace(model="model", to=tmp_path, device="cuda"))
    assert found == {
        "FlashInfer attends": False,
        "96 rows behind 0, rows/s": 96,
        "96 rows behind 0, to torch's steps": 1,
        "12 texts of 8 rows, rows/s": 48,
        "12 texts of 8 rows, to torch's steps": 2,
        "12 texts of 8 rows, recorded to launched": 2,
    }


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one, which the script asks itself")
def test_what_the_host_does_in_a_round_is_told_in_the_order_of_the_round(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against parts that leave some of a round out, or have some of it twice; and against rounds that read
    prompts, which have others. And how often it waits, which leaves nothing running."""
    pytest.importorskip("triton")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    folder, took_s = tiny("smollm2", tmp_path / "model", **sizes), list[float]()
    monkeypatch.setattr(script, "at", lambda *of: folder)
    monkeypatch.setattr(script, "prompt", lambda: tuple(range(5, 75)))
    monkeypatch.setattr(script, "WARM_UP", 0)
    for room in (graphs, runner):
        monkeypatch.setattr(room, "ROW_COUNTS", (1,))  # the interpreter takes its time
    rounds = script.rounds

    def noted(*of: Any) -> Iterator[float]:
        for took in rounds(*of):
            took_s.append(took)
            yield took

    monkeypatch.setattr(script, "rounds", noted)
    with emulated_card():
        engine = script.open_engine(Namespace(model="model", to=tmp_path, device="cuda")).engine
        assert script.waits(engine, 2) == 1
        took_s.clear()
        found = script.host_parts(engine, 4)
    assert list(found) == list(script.HOST_PARTS)
    assert all(us > 0 for us in found.values())
    _, _, in_between, _ = took_s  # whose forward, and whose next one, was launched before a verdict
    assert sum(found.values()) == pytest.approx(1e6 * in_between, rel=1e-3)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one, which the script asks itself")
def test_how_late_a_host_is_told_is_measured_in_every_way(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a script that stumbles once a card is at hand, and a wait that has the card's time in it."""
    for name, value in (("COPY_BYTES", 1 << 24), ("COPIES", (1, 4)), ("WAITS", 3)):
        monkeypatch.setattr(script, name, value)
    with emulated_card():
        found = script.waiting(Namespace(device="cuda"))
        _, card_s = script.late(lambda: time.sleep(0.02), lambda: None)
        late_s, _ = script.late(lambda: None, lambda: time.sleep(0.02))
    assert [name.split(",")[0] for name in found] == ["by torch", "by an event", "by asking"] * 2
    assert card_s >= 0.02
    assert late_s >= 0.02


@pytest.mark.slow
def test_what_it_launches_is_compiled_on_a_machine_without_a_card(tmp_path: Path) -> None:
    """Stands against minutes of a card that go for a compiler."""
    pytest.importorskip("triton")
    model = ["--model", "smollm2-135m", "--draft", "smollm2-135m", "--only", "gaps"]
    command = [sys.executable, str(ROOT / "scripts" / "compile_bench.py"), *model]
    env = environment() | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr[-3000:]
    made = {cubin.stem for cubin in tmp_path.glob("*/*.cubin")}
    assert {"add_norm", "place", "attend", "join", "_few_rows", "linger"} <= made
