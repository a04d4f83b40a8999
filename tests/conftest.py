"""What all tests share: property tests do not fail because the machine is busy, and where there is no card, its kernels
run in Triton's interpreter (which must be said before they are imported)."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.interpreter import hurry

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        hurry()

settings.register_profile("tpspec", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tpspec")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs the real model comes first: where two files run at a time, the longest must not be the last."""
    items.sort(key=lambda item: item.get_closest_marker("real") is None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What tests import takes seconds: where those that run alone are chosen, files without any are not read."""
    if collection_path.suffix != ".py" or not str(config.option.markexpr).startswith("alone and"):
        return None
    return True if "mark.alone" not in collection_path.read_text(encoding="utf-8") else None
