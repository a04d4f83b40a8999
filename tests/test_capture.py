"""What may not happen while work on a card is recorded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tpspec.capture import captured


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_in_a_recording_even_one_that_fails(
    was_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against memory of a card that is freed in the middle of a recording, which ends it; and against a process
    that collects no garbage ever after. Other threads may use the card: the recording minds its own thread alone."""
    seen: list[tuple[bool, dict[str, Any]]] = []

    @contextmanager
    def graph(_: object, **options: Any) -> Iterator[None]:
        seen.append((gc.isenabled(), options))
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)

    def fails() -> None:
        made: Any = object()
        with captured(made, pool=7):
            seen.append((gc.isenabled(), {}))
            raise ZeroDivisionError

    enabled = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError):
            fails()
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if enabled else gc.disable)()
    assert seen == [(False, {"pool": 7, "capture_error_mode": "thread_local"}), (False, {})]
