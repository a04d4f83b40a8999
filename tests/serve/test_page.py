"""The status page: as text, and in a real browser where one is installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.browser import CHROMIUM, Browser
from tests.serve.conftest import wait_until
from tpspec.topology import config

browser_needed = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

ANSWER = "The bus is slow, naïve 日本 and 👩‍🚀 fly on; the end."
TOPOLOGY = """
name: a box <b>of</b> tests
target: {model: tiny/talker, ranks: [0, 1, 2, 3, 4]}
draft: {source: model, model: tiny/drafter, placement: {dedicated: 5}}
pipeline: {policy: fan_out}
link: {table: rtx3090x8_2socket_stock}
"""


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("topology") / "box.yaml"
    path.write_text(TOPOLOGY)
    return config.to_json(config.load(path))


@pytest.fixture(scope="module")
def shown(start_front, topology: str) -> Any:
    front = start_front("--topology", topology)
    front.start_engine()
    return front


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(opened: Browser, shown: Any) -> Browser:
    shown.engine.reset()
    opened.events.clear()
    opened.resize(1200, 900)
    opened.open(shown.url)
    opened.until("document.querySelectorAll('rect.target').length === 5 && location.pathname === '/'")
    return opened


def _ask(page: Browser, prompt: str, kind: str = "chat") -> None:
    page.value(f"$('prompt').value = {json.dumps(prompt)}; $('kind').value = '{kind}'; $('send').click()")


def test_the_page_is_served_with_a_policy_that_lets_nothing_else_in(shown: Any) -> None:
    """A page that fetches a font or a script tells a stranger who runs what; one that takes markup runs it."""
    answer = shown.client.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert all(policy[kind].startswith("'sha256-") for kind in ("script-src", "style-src"))
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert set(re.findall(r"https?://[^'\"]*", answer.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\son\w+=|\sstyle=", answer.text)


def test_the_server_says_what_it_runs(shown: Any, topology: str) -> None:
    info = shown.client.get("/server_info").json()
    assert info["topology"] == json.loads(topology)
    assert (info["model"], info["max_model_len"], info["health"]["status"]) == ("tiny/talker", 256, "ready")
    assert shown.client.get("/version").json() == {"version": info["version"]}


@browser_needed
def test_the_page_draws_the_topology_and_asks_nobody_else(page: Browser, shown: Any) -> None:
    assert page.value("$('model').textContent") == "tiny/talker"
    assert page.value("$('name').textContent") == "a box <b>of</b> tests"
    assert page.value("document.querySelectorAll('b').length") == 4  # the tiles' own
    assert page.value("document.querySelectorAll('rect.drafter').length") == 1
    assert page.value("document.querySelectorAll('path.bus').length") >= 6
    assert page.value("document.querySelectorAll('path.drafts').length") == 1
    assert "rank 0 · lead" in page.value("$('drawing').textContent")
    assert "rtx3090x8_2socket_stock" in page.value("$('facts').textContent")
    assert page.until("$('phase').textContent") == "ready"
    assert page.complaints() == []
    assert all(url.startswith((shown.url, "data:")) for url in page.requested())


@browser_needed
@pytest.mark.parametrize(
    ("draft", "drafters", "shards"),
    [
        ("{source: 'none', placement: 'inline'}", 0, "rank 1shard, 20%rank 2"),
        ("{source: ['ngram', 'model'], placement: 'inline'}", 0, "rank 1shard, 20%drafts: ngram, modelrank 2"),
        ("{source: 'model', placement: {gaps: 1}}", 0, "rank 1shard, 20%drafter in its gapsrank 2"),
        ("{source: 'model', placement: {dedicated: 5}}", 1, "rank 1shard, 20%rank 2"),
    ],
)
def test_every_placement_is_drawn_where_it_is(page: Browser, draft: str, drafters: int, shards: str) -> None:
    """The hints of the boxes repeat their words, so they are left out."""
    page.value(f"info.topology.draft = {draft}; draw()")
    page.value("document.querySelectorAll('svg title').forEach((title) => title.remove())")
    assert page.value("document.querySelectorAll('rect.drafter').length") == drafters
    assert shards in page.value("$('drawing').textContent")


@browser_needed
@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_a_prompt_is_answered_and_the_tiles_move(page: Browser, shown: Any, kind: str) -> None:
    shown.engine.round_s = 0.02
    _ask(page, "the bus", kind)
    page.until(f"$('answer').textContent === {json.dumps(ANSWER)}")
    page.until("/^\\d+ tokens in \\d+ rounds/.test($('cost').textContent)")
    assert page.value("$('stop').disabled") is True
    page.until("Number($('speed').textContent) > 0 && $('per-round').textContent !== '–'")
    collectives, tokens = (
        float(page.value("$('per-token').textContent")),
        float(page.value("$('per-round').textContent")),
    )
    assert collectives * tokens == pytest.approx(30, rel=0.05)  # the engine of these tests runs 30 a round
    assert re.fullmatch(r"\d+%", page.value("$('acceptance').textContent"))
    assert page.complaints() == []


@browser_needed
def test_what_a_model_writes_is_text_and_a_refusal_is_shown(page: Browser, shown: Any) -> None:
    """A model that writes markup would otherwise run a script with the reader's API key."""
    markup = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    shown.engine.answer = lambda _: shown.engine.tokenizer.encode(markup).ids
    _ask(page, "the bus")
    page.until(f"$('answer').textContent === {json.dumps(markup)}")
    assert page.value("$('answer').children.length") == 0
    assert page.complaints() == []
    page.value("$('tokens').value = 100000; $('send').click()")
    page.until("$('answer').className === 'error' && $('answer').textContent.includes('100000')")


@browser_needed
def test_stop_ends_the_engine_s_work(page: Browser, shown: Any) -> None:
    shown.engine.answer, shown.engine.round_s = (lambda _: [5] * 250), 0.1
    _ask(page, "the bus")
    page.until("$('answer').textContent.length > 3")
    page.value("$('stop').click()")
    page.until("$('stop').disabled")
    request = shown.engine.requests[-1].id
    wait_until(lambda: request in shown.engine.cancelled)


@browser_needed
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_narrow_and_wide_in_light_and_dark(page: Browser, width: int) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        page.resize(width, 900, scheme=scheme)
        page.until(f"innerWidth === {width} && $('drawing').viewBox.baseVal.width <= {width}")
        assert page.value("document.documentElement.scrollWidth") <= width
        boxes = "[...document.querySelectorAll('rect')].map((r) => r.getBoundingClientRect().right)"
        assert page.value(f"Math.max(...{boxes})") <= width
        grounds.add(page.value("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


@browser_needed
def test_a_server_that_goes_away_is_said_to_be_gone(opened: Browser, start_front, topology: str) -> None:
    front = start_front("--topology", topology)
    front.start_engine()
    opened.open(front.url)
    opened.until("location.port && document.readyState === 'complete' && $('phase').textContent === 'ready'")
    front.process.terminate()
    opened.until("$('phase').textContent === 'not reachable'")
    with pytest.raises(httpx.TransportError):
        front.client.get("/")


@browser_needed
def test_the_page_asks_for_a_key_and_uses_it(
    opened: Browser, start_front, topology: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-tests\n")
    front = start_front("--topology", topology, "--api-key-file", str(keys))
    front.start_engine()
    opened.open(front.url)
    opened.until("location.port && document.readyState === 'complete' && $('unlock').hidden === false")
    assert opened.value("document.querySelectorAll('rect').length") == 0
    _ask(opened, "the bus")
    opened.until("$('answer').textContent.includes('API key')")
    opened.value("$('key').value = 'sk-tests'; $('unlock').requestSubmit()")
    opened.until("document.querySelectorAll('rect.target').length === 5 && $('unlock').hidden")
    _ask(opened, "the bus")
    opened.until(f"$('answer').textContent === {json.dumps(ANSWER)}")
