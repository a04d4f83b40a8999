"""The life of the HTTP process: its port, its phases, its signals, and its end when its parent's comes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import tpspec.serve.__main__ as serve
from tpspec.serve.http import parse_options
from tpspec.topology.config import load


def _until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def _command(model_folder: Path, *options: str) -> list[str]:
    fixed = ["--model-folder", str(model_folder), "--model-name", "m", "--port", "0"]
    return [sys.executable, "-m", "tpspec.serve.http", *fixed, *options]


def test_a_port_in_use_is_one_line_and_exit_code_2(model_folder: Path) -> None:
    """Before anything slow: weights of a large model load for minutes, and then the port was taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(_command(model_folder, "--port", str(port)), capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tpspec: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "..", "192.0.2.1"])
def test_a_host_that_is_not_ours_is_one_line_and_exit_code_2(model_folder: Path, host: str) -> None:
    done = subprocess.run(_command(model_folder, "--host", host), capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tpspec: cannot listen on {host}:0: ")
    assert done.stderr.count("\n") == 1


def test_whatever_a_topology_may_say_of_serving_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A time limit above an hour was refused, and in words of an option that nobody had given."""
    most = ["engine.timeout_s=86400", "serve.max_queued=1048576", "serve.port=65535"]
    topology = load(Path(__file__).parents[2] / "topologies" / "cpu-2.yaml", most)
    monkeypatch.setattr(serve, "find", lambda _: tmp_path)
    command = serve._command(topology, Namespace(api_key_file=None, log_requests=False), None)
    options = parse_options(command[3:])
    assert (options.stall_s, options.max_queued, options.port) == (86400, 1048576, 65535)


def test_a_folder_without_a_tokenizer_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(_command(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "cannot read the tokenizer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stop_while_loading_waits_for_nobody(start_front) -> None:
    """There may be no lead yet to hear of it, and an import under way cannot be stopped."""
    front = start_front()
    front.process.terminate()
    assert front.process.wait(8) == 0
    assert "Traceback" not in front.close()


def test_what_is_no_http_leaves_no_line_in_the_log(start_front) -> None:
    """Stands against a log that strangers fill, and against the advice to install a library for WebSockets."""
    front = start_front()
    wanted = "GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    for words in ("GARBAGE\r\n\r\n", wanted):
        with socket.create_connection(("127.0.0.1", httpx.URL(front.url).port)) as stranger:
            stranger.sendall(words.encode())
            assert stranger.recv(100).startswith(b"HTTP/1.1 ")
    said = front.close()
    assert said.startswith("tpspec: listening on ")
    assert "Invalid" not in said
    assert "WebSocket" not in said


def test_from_loading_to_stalled_to_a_drained_stop(start_front) -> None:
    """Health means progress: an engine that hangs was answered with 200 for hours. SIGTERM finishes what is open."""
    front = start_front("--stall-s", "0.3")
    health = front.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "loading")
    refused = front.post(prompt="a")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert front.client.get("/v1/models").status_code == front.client.get("/metrics").status_code == 200

    front.start_engine()
    front.engine.places = 0
    front.engine.round_s = 0.1
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(front.complete, max_tokens=30)
        stream = pool.submit(front.stream, prompt="the bus", max_tokens=30)
        _until(lambda: front.client.get("/health").json()["status"] == "stalled")
        assert front.client.get("/health").status_code == 503

        front.process.send_signal(signal.SIGTERM)
        front.process.send_signal(signal.SIGINT)  # a launcher passes on what the terminal already sent
        _until(lambda: front.client.get("/health").json()["status"] == "stopping")
        assert front.post(prompt="a").json()["error"]["code"] == "stopping"
        assert not front.engine.stopped.is_set()
        front.engine.places = 64
        assert whole.result()["usage"]["completion_tokens"] == 30
        assert stream.result()[-1]["choices"][0]["finish_reason"] == "length"
    assert front.engine.stopped.wait(5)
    assert front.process.wait(10) == 0
    assert front.close().count("\n") == 3  # listening, ready, stopping: and no traceback


@pytest.mark.parametrize("hasten", ["second signal", "time is up"])
def test_a_stop_that_cannot_wait_ends_open_streams_with_abort(start_front, hasten: str) -> None:
    front = start_front("--drain-s", "30" if hasten == "second signal" else "0.2")
    front.start_engine()
    front.engine.answer, front.engine.round_s = (lambda _: [5] * 250), 0.1
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(front.stream, prompt="a", max_tokens=250)
        _until(lambda: front.client.get("/health").json()["running"] == 1)
        front.process.terminate()
        if hasten == "second signal":
            time.sleep(1.1)
            front.process.terminate()
            assert front.process.wait(5) == 0
            assert stream.exception() is None or isinstance(stream.exception(), httpx.RemoteProtocolError)
        else:
            assert stream.result()[-1]["choices"][0]["finish_reason"] == "abort"
            assert front.process.wait(10) == 0
    assert front.engine.stopped.wait(5)


def test_it_ends_when_its_parent_does_and_says_so_to_its_readers(make_engine, model_folder: Path) -> None:
    """A server that outlives its ranks holds the port, and the next start fails."""
    script = f"{shlex.join(_command(model_folder))} & wait"
    parent = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    place = json.loads(parent.stdout.readline())
    engine = make_engine(place["endpoint"])
    engine.answer, engine.round_s = (lambda _: [5] * 250), 0.05
    engine.start()
    with httpx.Client(base_url=place["url"]) as client:
        _until(lambda: client.get("/ready").status_code == 200)
        body = {"prompt": "a", "max_tokens": 250, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(parent.pid, signal.SIGKILL)
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert "the engine stopped" in rest[-2]
    engine.leave.set()
    assert "the engine's process is gone" in parent.communicate(timeout=10)[1]  # the pipe closes when the child ends
    folder = Path(place["endpoint"]).parent
    assert not folder.exists()


def test_who_started_it_may_be_gone_before_it_listens(model_folder: Path) -> None:
    """Stands against a traceback where a server is stopped while it starts."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(_command(model_folder), stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writes)
    assert done.stderr.startswith("tpspec: listening on ")
    assert done.stderr.count("\n") == 1


def test_the_server_runs_without_torch(model_folder: Path) -> None:
    """It never sees a tensor; torch would cost it 200 MB and seconds before the first answer."""
    script = (
        "import sys, pathlib; from tpspec.serve import http; "
        "http.Text.load(pathlib.Path(sys.argv[1])).encode_chat([{'role': 'user', 'content': 'a'}]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(model_folder)], timeout=60).returncode == 0


def test_a_parent_that_is_already_gone_is_exit_code_4(model_folder: Path) -> None:
    gone = str(2**22 + 1)  # above any
    done = subprocess.run(_command(model_folder, "--parent", gone), capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
