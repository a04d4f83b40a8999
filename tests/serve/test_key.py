"""API keys: every way that was found past somebody's, and every route of ours."""

from __future__ import annotations

import socket
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serve.conftest import command_line
from tpspec.serve.key import OPEN

KEY = "sk-tests-1"


@pytest.fixture(scope="module")
def locked(start_front, tmp_path_factory: pytest.TempPathFactory) -> Any:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# of tests\nsk-other\n\n{KEY}\n")
    front = start_front("--api-key-file", str(keys))
    front.start_engine()
    return front


def _status(url: str, request: bytes) -> bytes:
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(4096).split(b" ", 2)[1]


@pytest.mark.parametrize("key", [KEY, "sk-other"])
def test_whoever_has_a_key_is_served(locked: Any, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    answer = locked.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200
    assert locked.client.get("/metrics", headers=headers).status_code == 200


ASKED = {
    "completions": {"prompt": "a", "max_tokens": 1},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "responses": {"input": "a", "max_output_tokens": 16},
}


@pytest.mark.parametrize("kind", ASKED)
def test_texts_of_two_keys_share_nothing_of_the_prefix_cache(locked: Any, kind: str) -> None:
    """Stands against reading off the clock what another user sent (CVE-2025-46570), and keys that reach the ranks."""

    def salt(key: str, **fields: str) -> str:
        headers = {"authorization": f"Bearer {key}"}
        answer = locked.client.post(f"/v1/{kind}", json=ASKED[kind] | fields, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(locked.engine.requests[-1].salt)

    salts = [salt(key, **fields) for key in (KEY, "sk-other") for fields in ({}, {"cache_salt": "mine"})]
    assert len(set(salts)) == 4
    assert salt(KEY) == salts[0]
    assert all(sha256(key.encode()).hexdigest() not in salts for key in (KEY, "sk-other"))


def test_every_route_but_the_open_ones_is_locked(locked: Any) -> None:
    """vLLM guards a list of prefixes, and /tokenize and others are not on it."""
    posts = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
    gets = ["/v1/models", "/v1/models/x", "/metrics", "/version", "/server_info", "/nowhere", "/docs", "/openapi.json"]
    for method, path in [("POST", path) for path in posts] + [("GET", path) for path in gets]:
        answer = locked.client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert answer.headers["www-authenticate"] == "Bearer"
    assert {path: locked.client.get(path).status_code for path in OPEN} == dict.fromkeys(OPEN, 200)


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer sk-wrong")],
        [("authorization", KEY)],
        [("authorization", f"Basic {KEY}")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer # of tests")],
        [("authorization", f"Bearer {KEY}x")],
        [("authorization", f"Bearer {KEY[:-1]}")],
        [("authorization", "Bearer x"), ("authorization", f"Bearer {KEY}")],
        [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
        [("x-api-key", KEY)],
        [("host", "a/health?")],
        [("x-forwarded-prefix", "/health")],
        [("x-original-url", "/health")],
    ],
    ids=str,
)
def test_what_is_not_a_key_is_none(locked: Any, headers: list[tuple[str, str]]) -> None:
    assert locked.client.get("/v1/models", headers=httpx.Headers(headers)).status_code == 401


@pytest.mark.parametrize(
    "target",
    [
        *(
            "//v1/models",
            "/v1/../health",
            "/health/../v1/models",
            "/%2e%2e/v1/models",
            "/health/",
            "/health%2f",
            "/health;a",
        ),
        *(
            "http://a/v1/models",
            "http://a/health",
            "*",
            "/v1/models?/health",
            "/v1/models%3f/health",
            "/HEALTH",
            "/ready/x",
        ),
    ],
)
def test_no_way_of_writing_a_path_goes_past_the_guard(locked: Any, target: str) -> None:
    """A path that is not spelled as an open one is locked, whatever a proxy or a framework would make of it."""
    request = f"GET {target} HTTP/1.1\r\nhost: x/health?\r\nconnection: close\r\n\r\n".encode()
    assert _status(locked.url, request) == b"401"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("# none\n\n", "holds no API key"), ("schlüssel\n", "should be ASCII")],
)
def test_a_file_without_keys_is_one_line_and_exit_code_2(
    model_folder: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    """A server that began without a guard because its file was empty would look like one that has it."""
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_text(content)
    command = command_line(model_folder, "--api-key-file", str(keys))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
