"""The log of requests: a line of JSON for each, under the id that its answer carries, and nothing of what was said."""

from __future__ import annotations

import json
from typing import Any

import pytest

SECRET = "the bus to Llandudno"


def _lines(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def test_every_request_leaves_one_line_that_says_what_it_cost(start_front: Any) -> None:
    """Against lines that cannot be told apart, prompts and keys in a log, and probes that drown all else."""
    front = start_front("--log-requests")
    front.start_engine()
    whole = front.client.post(
        "/v1/completions", json={"prompt": SECRET, "max_tokens": 5}, headers={"x-request-id": "a-1"}
    )
    front.client.get("/ready")
    refused = front.post(prompt=3)
    num_chunks = len(front.stream(prompt=SECRET, max_tokens=5, stream_options={"include_usage": True}))
    lost = front.client.get("/nowhere" + "x" * 500, headers={"authorization": "Bearer sk-secret"})
    said = front.close()
    assert SECRET not in said
    assert "sk-secret" not in said
    lines = [line for line in _lines(said) if line["path"] != "/ready"]
    assert {line["status"] for line in _lines(said) if line not in lines} <= {503}, "it was asked before it was ready"
    first, second, third, fourth = sorted(lines, key=lambda line: line["time"])  # written as they end
    assert whole.headers["x-request-id"] == "a-1" == first["request_id"]
    assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/completions", 200)
    assert first["tokens"] == whole.json()["usage"]["completion_tokens"]
    assert first["rounds"] == whole.json()["usage"]["speculation"]["rounds"] > 0
    assert (second["status"], second["request_id"]) == (400, refused.headers["x-request-id"])
    assert "tokens" not in second
    assert third["tokens"] > 0 < num_chunks
    assert (fourth["status"], len(fourth["path"])) == (404, 200)
    assert len({line["request_id"] for line in lines}) == 4
    assert fourth["request_id"] == lost.headers["x-request-id"]


@pytest.mark.parametrize("given", ["", "two words", "x" * 65, 'a"b', "a/../b"])
def test_an_id_that_is_not_fit_for_a_log_is_replaced(shared_front: Any, given: str) -> None:
    """Against lines and fields that a client writes into somebody's log."""
    answer = shared_front.client.get("/health", headers={"x-request-id": given})
    assert answer.headers["x-request-id"] not in ("", given)


def test_nothing_is_written_unless_it_is_asked_for(start_front: Any) -> None:
    front = start_front()
    front.start_engine()
    assert front.complete(max_tokens=3)["usage"]["completion_tokens"] > 0
    assert _lines(front.close()) == []
