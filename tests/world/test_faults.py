"""Faults of the machine that a whole world meets: memory that ends, and interpreters that hash differently."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import tiny
from tests.slow import slowly
from tests.world.test_bad_input import ENV, SOON_S, WORLDS, torchrun
from tests.world.test_serving import Server, Stream
from tpspec.errors import OutOfMemory, UserError, WorldFailure

pytestmark = pytest.mark.alone

PROMPTS = ["the cat and the hat, the end of the cat", "there, then, and again"]


@pytest.fixture(scope="module")
def topology_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    folder = tmp_path_factory.mktemp("faults")
    model = tiny("smollm2", folder / "model", num_hidden_layers=2, max_position_embeddings=32768)

    def write(num_ranks: int) -> str:
        target = {"model": str(model), "ranks": list(range(num_ranks)), "dtype": "float32"}
        draft = {"source": "suffix", "tokens": 4}
        made = {"name": "a test", "target": target, "device": "cpu", "cache": {"tokens": 256}, "draft": draft}
        path = folder / f"topology-{num_ranks}.yaml"
        path.write_text(json.dumps(made))
        return str(path)

    return write


@pytest.mark.parametrize(("when", "says", "cure", "error"), [
    ("loading", "rank 1: loading ran out of memory", "use more ranks, a smaller cache.tokens or", OutOfMemory),
    ("a round", "rank 1 is out of memory", "use a smaller cache.tokens or engine.max_rows", WorldFailure),
    *slowly(("preparing", "rank 1 is out of memory", "use a smaller cache.tokens or engine.max_rows", WorldFailure)),
])  # fmt: skip
def test_a_rank_that_runs_out_of_memory_ends_the_world_by_name(
    when: str, says: str, cure: str, error: type[UserError], topology_file: Callable[[int], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Against the others in a collective until its time limit, and against a traceback of torch's allocator."""
    monkeypatch.setitem(ENV, "WHEN", when)
    ended, seconds = torchrun(2, str(WORLDS / "out_of_memory.py"), topology_file(2), "--prompt", PROMPTS[0])
    assert ended.returncode != 0
    assert seconds < 2 * SOON_S  # a collective waits for 60 s
    said = [line for line in ended.stderr.splitlines() if line.startswith(f"tpspec: error: {says}")]
    assert len(said) == 1, ended.stderr
    assert f"Tried to allocate 2.00 GiB.); {cure}" in said[0]
    assert f"exitcode  : {error.exit_code}" in ended.stderr
    assert "OutOfMemoryError" not in ended.stderr


@pytest.mark.slow
def test_a_second_sigterm_does_not_wait_for_anybody(topology_file: Callable[[int], str]) -> None:
    """Against a launcher that leaves its ranks behind when it is told twice; who reads is told that it is over."""
    server = Server(Path(topology_file(2)), "--set", "cache.tokens=32768").ready()
    try:
        stream = Stream(server, 30000)
        server.launcher.terminate()
        time.sleep(1.2)  # sooner it counts as the same signal
        server.launcher.terminate()
        stream.has_ended(10)
        assert '"finish_reason":"abort"' in stream.lines[-2]
        assert server.has_ended(10) == 1
    finally:
        server.kill()


def test_texts_do_not_depend_on_the_seed_of_hashes(topology_file: Callable[[int], str]) -> None:
    """Against the order of a set that decides what is drafted, or by which rank: interpreters differ in it."""
    options = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    options += ["--temperature", "0.8", "--seed", "5", "--max-tokens", "30", "--ignore-eos", "--json"]
    command = [sys.executable, "-m", "tpspec.generate", topology_file(1), *options]
    running = [
        subprocess.Popen(command, env=ENV | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("0", "4242")
    ]
    said = [[json.loads(line) for line in world.communicate(timeout=120)[0].splitlines()] for world in running]
    texts, rounds = ([[one[key] for one in world] for world in said] for key in ("text", "rounds"))
    assert texts[0] == texts[1]
    assert rounds[0] == rounds[1]
    assert len(texts[0]) == len(PROMPTS)
