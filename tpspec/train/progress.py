"""How far a long command is: a bar on a terminal, a line now and then elsewhere. Must not know what is counted."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn

EVERY_S = 30.0  # between lines in a log


class Progress:
    """done: steps of an earlier run. Numbers given to `step` are shown; `tokens` is summed, and its rate shown."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done = what, total, done
        self._began = self._said = time.monotonic()
        self._tokens = 0
        shown = sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Bar(*columns, console=self._console, disable=not shown)
        self._bar.start()
        self._task = self._bar.add_task(what, total=total, completed=done)

    def step(self, *, tokens: int = 0, **numbers: float) -> None:
        self._done += 1
        self._tokens += tokens
        now = time.monotonic()
        shown = "".join(f", {name} {value:.3f}" for name, value in numbers.items())
        line = f"{self._what} {self._done}/{self._total}, {self._tokens / (now - self._began):.0f} tokens/s{shown}"
        self._bar.update(self._task, completed=self._done, description=line)
        if self._bar.disable and (now - self._said > EVERY_S or self._done == self._total):
            self._said = now
            self._console.print(line)

    def end(self) -> None:
        self._bar.stop()
