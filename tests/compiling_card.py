"""An emulated card that compiles for a real one what it is asked to launch, and launches nothing: which kernels rounds
take, and with which arguments, is what rounds do. What they compute is nothing (zeros, unless torch makes them), so
what follows from it may fail.

Triton keeps what it compiled (TRITON_CACHE_DIR), where a process on a card finds it, by the same Triton and sources: as
a plugin of pytest (`-p tests.compiling_card`, scripts/test-gpu) this is for machines on which a card is at hand for
minutes. Tests fail, then, for nothing is computed; what Triton's compiler did not take is told, and the exit code is
another than that of tests that fail. Needs no card, and Triton without its interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests import emulated_card
from tests.emulated_card import OnCard
from tpspec.model.card import tiles as card_tiles

VARIABLE, USUAL = "TPSPEC_COMPILE_FOR", "9.0"
NOT_COMPILED, EXIT_CODE = "not compiled", 6  # a property of reports, which come from workers; pytest's own are less
PROPERTIES = SimpleNamespace(
    **vars(emulated_card.PROPERTIES)
    | {"name": "a card to compile for", "multi_processor_count": 132, "total_memory": 80 << 30}
)
MEMORY = (78 << 30, 80 << 30)


refused: list[str] = []  # by Triton's compiler, since the last report


class Address:
    """In place of a tensor that a card can reach: what Triton asks of one."""

    def __init__(self, x: torch.Tensor) -> None:
        self.dtype, self._at = x.dtype, (x.inside if isinstance(x, OnCard) else x).data_ptr()

    def data_ptr(self) -> int:
        return self._at


class Absent:
    """In place of the driver of a card."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling_card(capability: tuple[int, int]) -> Iterator[list[str]]:
    """The names of kernels that have been compiled, or found where Triton keeps them, each variant once."""
    found: dict[str, str] = {}
    launched = JITFunction.run

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        card = emulated_card.running
        assert card is not None, "the card has gone"
        assert card.is_reached([*args, *kwargs.values()]), "it cannot be accessed"
        given, named = tree_map(lambda x: Address(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        with _disable_current_modes():
            try:
                made = launched(kernel, *given, grid=grid, warmup=True, **named)
            except (TritonError, RuntimeError) as error:  # of its own compiler; of a pass, or what makes machine code
                refused.append(_innermost(error))
                raise
        if made.hash not in found:
            found[made.hash] = kernel.__name__
            names.append(kernel.__name__)
        card.launches += 1
        if card.recording is not None:
            card.recording.work.append(lambda: None)
            card.recording.kernels.append(kernel.__name__)
        return made

    names: list[str] = []
    driver.set_active(Absent(capability))
    with ExitStack() as stack:
        for name, value in (("CAPABILITY", capability), ("PROPERTIES", PROPERTIES), ("MEMORY", MEMORY)):
            stack.enter_context(patch.object(emulated_card, name, value))
        stack.enter_context(patch.object(JITFunction, "run", launch))
        stack.enter_context(patch.object(card_tiles, "seconds", lambda works, device: [1.0] * len(works)))
        stack.enter_context(emulated_card.emulated_card(computes=False))
        yield names


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before conftest.py, which asks whether there is a card."""
    major, _, minor = os.environ.get(VARIABLE, USUAL).partition(".")
    early_config.add_cleanup(_for_all_tests(int(major), int(minor)).close)


def _for_all_tests(major: int, minor: int) -> ExitStack:
    stack = ExitStack()
    names = stack.enter_context(compiling_card((major, minor)))
    stack.callback(lambda: names and print(f"{len(names)} kernels are compiled for {major}.{minor}"))  # noqa: T201
    return stack


def _innermost(error: BaseException) -> str:
    """A function that was called, not the lines of its caller."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.user_properties += [(NOT_COMPILED, why) for why in refused]  # also where a test goes on without the kernel
    refused.clear()
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name, why in _not_compiled(terminalreporter):
        terminalreporter.write_line(f"{name} was not compiled: {why}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and _not_compiled(reporter):
        session.exitstatus = EXIT_CODE


def _not_compiled(reporter: Any) -> list[tuple[str, str]]:
    """Tests, and what the compiler said."""
    reports = [one for kind in reporter.stats.values() for one in kind if isinstance(one, pytest.TestReport)]
    return [(one.nodeid, why) for one in reports for name, why in one.user_properties if name == NOT_COMPILED]
