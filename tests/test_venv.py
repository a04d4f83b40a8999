"""The environment that scripts find: whose it is. Only asked, nothing is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def is_anothers(venv: Path, checkout: Path) -> bool:
    words = f"source {ROOT}/scripts/venv && belongs_elsewhere"
    environment = {"VIRTUAL_ENV": str(venv), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(["bash", "-c", words], cwd=checkout, env=environment, capture_output=True, check=False)
    assert ended.stderr == b""
    return ended.returncode == 0


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "venv/lib/python3.12/site-packages/tpspec-0.1.dist-info").mkdir(parents=True)
    return tmp_path / "venv"


def install(checkout: Path, venv: Path) -> None:
    """What pip notes of an editable installation."""
    checkout.mkdir(exist_ok=True)
    note = next(venv.glob("lib/*/site-packages/*")) / "direct_url.json"
    note.write_text(f'{{"dir_info": {{"editable": true}}, "url": "{checkout.as_uri()}"}}')


def test_the_active_environment_of_another_checkout_is_its_own(tmp_path: Path, venv: Path) -> None:
    """Stands against a second checkout that takes over the installation of the first, whose ranks then run its code."""
    (tmp_path / "second").mkdir()
    assert not is_anothers(venv, tmp_path / "second"), "nobody's is installed there"
    install(tmp_path / "first", venv)
    assert is_anothers(venv, tmp_path / "second")
    install(tmp_path / "second more", venv)
    assert is_anothers(venv, tmp_path / "second")


@pytest.mark.parametrize("name", ["plain", "with spaces", "100%", "\u00fc"])
def test_the_active_environment_of_this_checkout_is_used(tmp_path: Path, venv: Path, name: str) -> None:
    """Stands against a second environment for a checkout whose path pip spells as a URL, or is reached by a link."""
    install(tmp_path / name, venv)
    (tmp_path / "link").symlink_to(tmp_path / name)
    assert not is_anothers(venv, tmp_path / name)
    assert not is_anothers(venv, tmp_path / "link")
