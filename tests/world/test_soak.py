"""The soak of scripts/soak.py, seconds long: a crowd of clients of a tiny model, then four times as many."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from scripts.serving import Server, complete
from scripts.soak import Seen, jobs, room_for, soak
from tests.checkpoints import tiny

pytestmark = pytest.mark.alone

CLIENTS, PLACES = 24, 4
LOOSE_HEALTH_S, LOOSE_GROWTH = 0.5, 64 << 20  # other tests may run beside this one, and seconds show no leak
TOPOLOGY = """
name: a soak
target: {{model: {model}, ranks: [0, 1], dtype: float32}}
draft: {{source: ngram}}
device: cpu
cache: {{tokens: 1024, page: 16}}
serve: {{max_running: {places}, max_queued: {queued}}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("soak")
    model = tiny("smollm2", folder / "model")
    path = folder / "topology.yaml"
    path.write_text(TOPOLOGY.format(model=model, places=PLACES, queued=room_for(CLIENTS)))
    with Server(str(path), 2) as running:
        yield running


def test_a_crowd_gets_the_texts_that_each_would_get_alone(server: Server) -> None:
    """Stands against texts that depend on who is served beside them, pages and files that a client who leaves takes
    along, and an overload that is answered with anything but 429 and a time to come back."""
    found = soak(server, jobs(40, 32), seconds=8, clients=CLIENTS, limit=room_for(CLIENTS), places=PLACES)
    assert found.faults(LOOSE_HEALTH_S, LOOSE_GROWTH) == [], "\n".join(found.lines())
    assert found.steady.statuses[200] > CLIENTS
    assert found.steady.left + found.overload.left > 0


def test_another_text_is_noticed(server: Server) -> None:
    """A soak that compares nothing passes whatever the server says."""
    answer = asyncio.run(complete(server.port, **jobs(40, 32)[1]))
    seen = Seen()
    seen.add(answer, answer.text)
    assert not seen.faults
    seen.add(answer, answer.text + "x")
    assert seen.faults == Counter({"another text than alone": 1})
