"""Grammars that clients ask for: within limits, and compiled in a process that may be killed, before any rank does.

`json_schema` and its like make a grammar's text of what a body holds; `Grammars.checked` says whether it can be used.
Must not know bodies of requests or the engine.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from asyncio.subprocess import PIPE
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from tpspec import grammar
from tpspec.serve.errors import ApiError, bad_request

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

MAX_CHARS, MAX_TOOLS_CHARS = 1 << 16, 1 << 19  # of a grammar; of one that binds calls of up to 128 functions
MAX_DEPTH = 32
MAX_CHOICES = 1000
START_S = 60.0  # for a worker to read the tokenizer
COMPILE_S = 2.0  # every rank will take as long, and all requests wait for it
FAULT_S = 10.0  # for which a grammar that took too much is not tried again: it costs COMPILE_S and a worker
MAX_WAITING = 16  # different ones, for the one worker
MAX_KEPT = 256
WORKER = "tpspec.serve.grammar_worker"
Part = dict[str, Any]  # one of the grammars of a text


def json_schema(schema: Mapping[str, Any], param: str = "response_format") -> str:
    """The grammar of JSON that a schema accepts. Raises ApiError (400), naming `param`, for one beyond the limits."""
    check_size(schema, param)
    return _short(grammar.json_schema(schema), param)


def arguments_schema(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """As json_schema, of a function's arguments or one of them."""
    check_size(schema, "tools")
    return _short(grammar.json_schema(schema, is_lenient=not is_strict), "tools")


def regex(pattern: str, param: str) -> str:
    return _short(grammar.regex(pattern), param)


def choice(choices: Sequence[str], param: str) -> str:
    if not 0 < len(choices) <= MAX_CHOICES:
        raise bad_request(f"{param}: should be 1 to {MAX_CHOICES} choices", param, "invalid_value")
    return _short(grammar.choice(choices), param)


def lark(text: str, param: str) -> str:
    """Lark in llguidance's dialect, or GBNF."""
    if not text.strip():
        raise bad_request(f"{param}: the grammar should not be empty", param, "invalid_value")
    return _short(text, param)


def _short(text: str, param: str) -> str:
    if param == "tools":
        check_tools(len(text))
    elif len(text) > MAX_CHARS:
        raise bad_request(f"{param}: should be at most {MAX_CHARS} characters", param, "invalid_value")
    return text


def check_tools(num_chars: int) -> None:
    """Of the grammar of all calls. Raises ApiError."""
    if num_chars > MAX_TOOLS_CHARS:
        message = f"tools: the grammar of their calls would be longer than {MAX_TOOLS_CHARS} characters"
        raise bad_request(message, "tools", "invalid_value")


def check_size(schema: Mapping[str, Any], param: str) -> None:
    """Depth, and how much stands side by side anywhere in it. Raises ApiError."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH + 1):
        if any(len(_inside(value)) > MAX_CHOICES for value in level):
            message = f"{param}: lists and objects should have at most {MAX_CHOICES} entries"
            raise bad_request(message, param, "invalid_value")
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise bad_request(f"{param}: should be nested at most {MAX_DEPTH} levels deep", param, "invalid_value")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


class Outcome(NamedTuple):
    """text: as ranks read it. fault: why there is none. until: the time after which it may be otherwise. part: what the
    grammar is called that has the fault, where it is one of several; empty where nobody knows which."""

    text: str
    fault: str | None
    until: float = math.inf
    part: str = ""


class Grammars:
    """What became of the grammars that were asked for last. folder: of the model, with its tokenizer.

    refuse: told of each request that is turned away because too many different grammars wait.
    """

    def __init__(self, folder: Path, refuse: Callable[[], None] = lambda: None) -> None:
        self._folder, self._refuse = folder, refuse
        self._worker: Process | None = None
        self._turn = asyncio.Lock()
        self._known: dict[bytes, Outcome] = {}  # by hash, the latest last
        self._pending: dict[bytes, asyncio.Task[Outcome]] = {}  # by hash

    async def checked(self, text: str, field_of: Callable[[str], str | None] = lambda _: None) -> str:
        """A grammar that can be used, as ranks are to read it; ApiError (400) in the compiler's words for another.

        field_of: what asks for a part of it, by its name as of an Outcome.
        """
        key = sha256(text.encode()).digest()
        outcome = self._remembered(key) or await self._awaited(key, text)
        if outcome.fault is not None:
            raise bad_request(outcome.fault, field_of(outcome.part), "invalid_grammar")
        return outcome.text

    def close(self) -> None:
        if self._worker is not None and self._worker.returncode is None:
            self._worker.kill()
        self._worker = None

    async def end(self) -> None:
        """Returns when nothing is left of the worker that would speak to an event loop that is gone."""
        worker = self._worker
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        self.close()
        if worker is not None:
            await worker.wait()
            await asyncio.sleep(0)

    async def _awaited(self, key: bytes, text: str) -> Outcome:
        """Of one compilation for all who ask meanwhile; it goes on though some of them leave."""
        task = self._pending.get(key)
        if task is None:
            if len(self._pending) >= MAX_WAITING:
                self._refuse()
                raise ApiError(429, "too many grammars wait to be compiled", code="queue_full", retry_after=1)
            task = self._pending[key] = asyncio.create_task(self._compiled(key, text))
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    def _forget(self, key: bytes, task: asyncio.Task[Outcome]) -> None:
        del self._pending[key]
        if not task.cancelled():
            task.exception()  # has been told to whoever waited, which may be nobody

    async def _compiled(self, key: bytes, text: str) -> Outcome:
        async with self._turn:
            outcome = await self._ask(text)
            if outcome.fault is not None and outcome.until == math.inf:
                outcome = await self._again(outcome, text)
            self._known[key] = outcome
        if len(self._known) > MAX_KEPT:
            del self._known[next(iter(self._known))]
        return outcome

    async def _again(self, outcome: Outcome, text: str) -> Outcome:
        """Of a text with a fault: the same with nothing bound by those of its schemas that have one and are lenient.

        Where another has it the fault, with the name of that: compilers do not say.
        """
        deadline = time.monotonic() + COMPILE_S  # for all of them: others wait
        parts, is_other = _parts(text), False
        for number, part in enumerate(parts):
            if "name" not in part or time.monotonic() > deadline:
                continue
            own = (await self._ask(_text_of([part]))).fault
            if own is not None and not _is_lenient(part):
                return outcome._replace(fault=f"{part['name']}: {own}", part=part["name"])
            if own is not None:
                parts[number], is_other = _unbound(part), True
        return await self._ask(_text_of(parts)) if is_other else outcome

    def _remembered(self, key: bytes) -> Outcome | None:
        outcome = self._known.pop(key, None)
        if outcome is None or outcome.until < time.monotonic():
            return None
        self._known[key] = outcome
        return outcome

    async def _ask(self, text: str) -> Outcome:
        if self._worker is not None and self._worker.returncode is not None:
            self._worker = None  # somebody ended it
        worker = self._worker or await self._start()
        try:
            async with asyncio.timeout(COMPILE_S):
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(text).encode() + b"\n")
                await worker.stdin.drain()
                answer = await _answer(worker)
        except (TimeoutError, OSError):
            self.close()
            return _failed(f"the grammar takes more than {COMPILE_S:g} s to compile")
        except BaseException:  # half a conversation is none
            self.close()
            raise
        if answer is None:
            self.close()
            return _failed("the grammar takes more memory to compile than there is for it")
        return Outcome(answer.get("grammar", ""), answer.get("fault"))

    async def _start(self) -> Process:
        command = (sys.executable, "-m", WORKER, str(self._folder))
        worker = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=1 << 22)
        self._worker = worker
        try:
            async with asyncio.timeout(START_S):
                answer = await _answer(worker)
        except TimeoutError:
            answer = None
        except BaseException:
            self.close()
            raise
        if answer is None or answer["fault"] is not None:
            self.close()
            raise ApiError(501, "this model has no tokenizer that grammars can be read with", code="no_grammars")
        return worker


def _parts(text: str) -> list[Part]:
    """The grammars that a text holds, of which the first refers to the others by name."""
    try:
        parts = json.loads(text)["grammars"]
        return [{**one} for one in parts]
    except (ValueError, TypeError, KeyError, RecursionError):  # Lark, or what a client made up
        return []


def _text_of(parts: list[Part]) -> str:
    return json.dumps({"grammars": parts})


def _is_lenient(part: Part) -> bool:
    try:
        return part["json_schema"]["x-guidance"]["lenient"] is True
    except (TypeError, KeyError):
        return False


def _unbound(part: Part) -> Part:
    """Of any JSON of the type that its schema names."""
    schema = part["json_schema"]
    return {**part, "json_schema": {key: schema[key] for key in ("type", "x-guidance") if key in schema}}


def _failed(fault: str) -> Outcome:
    return Outcome("", fault, time.monotonic() + FAULT_S)


async def _answer(worker: Process) -> dict[str, Any] | None:
    """The next line of a worker, None where it has ended."""
    assert worker.stdout is not None
    line = await worker.stdout.readline()
    return json.loads(line) if line else None
