"""`/openapi.json` against the server that it describes; the whole of it by schemathesis, where that is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tests.checkpoints import tiny
from tests.serve.conftest import MODEL, TOOL_TEMPLATE, Front
from tests.serve.test_details import Server
from tpspec.serve.api import Api
from tpspec.serve.openapi import HELLO, document

ROOT = Path(__file__).parents[2]
OPERATIONS = [(path, method) for path, methods in document(MODEL)["paths"].items() for method in methods]
POSTS = [path for path, method in OPERATIONS if method == "post"]


def test_every_route_is_described_and_nothing_else() -> None:
    """A route that is added here and not there would be tested by nobody."""
    nobody = cast(Any, None)
    known_to_the_framework = Api(nobody, nobody, nobody, MODEL, {}).app().openapi()["paths"]
    assert {(path, method) for path, methods in known_to_the_framework.items() for method in methods} == set(OPERATIONS)


def test_every_reference_leads_somewhere(front: Front) -> None:
    text = front.client.get("/openapi.json").text
    assert json.loads(text) == document(MODEL)
    names = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names <= set(json.loads(text)["components"]["schemas"])


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_examples_are_served_as_what_is_promised(front: Front, path: str, stream: bool) -> None:
    operation = document(MODEL)["paths"][path]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    with front.client.stream("POST", path, json=example | {"stream": stream}) as response:
        assert response.status_code == 200, response.read()
        kind = response.headers["content-type"].partition(";")[0]
        promised = operation["responses"]["200"]["content"]
        assert kind == [*promised][-1 if stream else 0]


@pytest.mark.parametrize(
    "field",
    [
        *("suffix", "best_of", "bad_words", "allowed_token_ids", "truncate_prompt_tokens", "prompt_embeds"),
        *("chat_template", "functions", "use_beam_search", "prompt_logprobs", "web_search_options", "moderation"),
    ],
)
@pytest.mark.parametrize("path", POSTS[:3])
def test_what_is_not_supported_is_refused_unless_it_changes_nothing(front: Front, path: str, field: str) -> None:
    described = document(MODEL)
    operation = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = described["components"]["schemas"][operation["schema"]["$ref"].rpartition("/")[2]]
    for neutral in schema["properties"][field]["enum"]:
        assert front.client.post(path, json=operation["example"] | {field: neutral}).status_code == 200
    error = front.client.post(path, json=operation["example"] | {field: [2]}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_what_changes_no_answer_is_taken(front: Front) -> None:
    """Against clients of OpenAI's that are refused for what they tell it about themselves."""
    told = {"store": True, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "service_tier": "flex"}
    told |= {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}
    for path, asked in (("chat/completions", {"messages": HELLO}), ("responses", {"input": "hello"})):
        assert front.client.post(f"/v1/{path}", json=asked | told | {"max_tokens": 3}).status_code == 200
    said = {"verbosity": "medium", "modalities": ["text"], "web_search_options": None, "add_special_tokens": False}
    assert front.post("chat/completions", messages=HELLO, max_tokens=3, **said).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("schemathesis") is None, reason="schemathesis is not installed")
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """Thousands of bodies, well formed and not, to real ranks."""
    folder = tiny("smollm2", tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TOOL_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    server = Server(folder, "ngram")
    try:
        script = [sys.executable, ROOT / "scripts/check_openapi.py", str(server.client.base_url)]
        done = subprocess.run(script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        assert server.client.get("/health").json()["in_flight"] == 0
    finally:
        server.close()
