"""Texts of the target alone, many at once: the model's prompt or a given one, then its answer, written as they end.

Runs the serving engine in this process, without drafts. Must not know what the texts are for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import torch

from tpspec.comm.communicator import OneRank
from tpspec.comm.messages import News
from tpspec.errors import UserError
from tpspec.published.checkpoint import find, read_config
from tpspec.published.shape import shape_of
from tpspec.request import Request, Sampling
from tpspec.roles.build import build_engine
from tpspec.roles.fit import check_fits
from tpspec.topology.config import automatic
from tpspec.train.prompts import INVENTING
from tpspec.train.texts import Told

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpspec.engine.engine import Engine
    from tpspec.train.prompts import Prompts, Start

NUM_RUNNING = 32  # texts at once: as many rows as the compiled steps take
LEAST = 8  # tokens of an answer that there must be room for


@dataclass(slots=True)
class _Writing:
    """A text under way. prompt: None while the model still writes it."""

    number: int
    start: Start
    prompt: tuple[int, ...] | None = None
    ids: list[int] = field(default_factory=list)


class Author:
    """Writes texts with one engine. max_tokens: of an answer; stop_ids end it, and the prompt the model invents."""

    def __init__(
        self, engine: Engine, prompts: Prompts, max_tokens: int, longest: int, stop_ids: frozenset[int], seed: int
    ) -> None:
        self._engine, self._prompts, self._seed = engine, prompts, seed
        self._max_tokens, self._longest, self._stop_ids = max_tokens, longest, stop_ids
        self._requests, self._writing = count(), dict[int, _Writing]()
        self.num_passed_over = 0

    def write(self, numbers: Iterable[int]) -> Iterator[Told]:
        """The texts of these numbers, in the order they end; those whose prompt leaves no room are passed over."""
        waiting = iter(numbers)
        requests = self._begin(waiting, NUM_RUNNING)
        for round in count(1):
            deltas = self._engine.hear(News(round=round, requests=tuple(requests)))
            if not self._writing:
                return
            requests = []
            for delta in deltas + self._engine.step():
                self._writing[delta.id].ids += delta.tokens
                if delta.finish is not None:
                    writing = self._writing.pop(delta.id)
                    if writing.prompt is None:
                        requests += self._answer(writing, tuple(writing.ids))
                    else:
                        yield self._told(writing)
            requests += self._begin(waiting, NUM_RUNNING - len(self._writing))

    def _begin(self, waiting: Iterator[int], free: int) -> list[Request]:
        requests: list[Request] = []
        while len(requests) < free and (number := next(waiting, None)) is not None:
            start = self._prompts.start(number)
            writing = _Writing(number, start)
            if start.invents:
                requests.append(self._request(writing, start.ids, start.invents, INVENTING))
            else:
                requests += self._answer(writing, ())
        return requests

    def _answer(self, writing: _Writing, invented: tuple[int, ...]) -> list[Request]:
        """The request for the answer; none where the prompt leaves no room for one."""
        prompt = self._prompts.finished(writing.start, invented)
        room = min(self._max_tokens, self._longest - len(prompt))
        if room < min(LEAST, self._max_tokens):
            self.num_passed_over += 1
            return []
        writing = _Writing(writing.number, writing.start, prompt)
        sampling = Sampling(temperature=self._prompts.temperature(writing.number))
        return [self._request(writing, prompt, room, sampling)]

    def _request(self, writing: _Writing, ids: tuple[int, ...], num_tokens: int, sampling: Sampling) -> Request:
        id = next(self._requests)
        self._writing[id] = writing
        seed = hash((self._seed, writing.number, writing.prompt is None))
        return Request(id, ids, num_tokens, msgspec.structs.replace(sampling, seed=seed), self._stop_ids)

    def _told(self, writing: _Writing) -> Told:
        assert writing.prompt is not None
        temperature = self._prompts.temperature(writing.number)
        return Told(writing.number, writing.start.kind, temperature, writing.prompt, tuple(writing.ids))


def open_engine(model: str, longest: int, *, cuda: bool) -> Engine:
    """A whole model, as precise as its checkpoint, for NUM_RUNNING texts of `longest` tokens at most.

    UserError where it was not made for texts of that length; OutOfMemory where there is no room for them.
    """
    config = read_config(find(model))
    most = shape_of(model).max_positions
    if most is not None and longest > most:
        raise UserError(f"--longest {longest}: should be at most {most}, for which {model} was made")
    settings = {
        "target.dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        "draft.source": "none",
        "cache.tokens": NUM_RUNNING * longest,
        "serve.max_running": NUM_RUNNING,
    }
    topology = automatic(1, model, cuda=cuda, overrides=[f"{key}={value}" for key, value in settings.items()])
    device = torch.device("cuda" if cuda else "cpu")
    check_fits(topology, 0, device, [0])
    built = build_engine(topology, OneRank(), device)
    built.own.prepare()
    return built.engine
