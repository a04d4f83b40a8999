"""Finding a model: three forms of name, and one readable error for each way to fail."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from tpspec.errors import UserError
from tpspec.published.checkpoint import HEADS, cache_root, find, local, read_config, tensors


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSPEC_CACHE", str(tmp_path / "cache"))


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against models written where the user asked not to."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root().name == "cache"
    monkeypatch.delenv("TPSPEC_CACHE")
    assert cache_root() == Path("/xdg/tpspec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "tpspec"


def test_a_cache_of_a_user_who_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a traceback of pathlib for a slip in the environment."""
    monkeypatch.setenv("TPSPEC_CACHE", "~nobody-here/cache")
    with pytest.raises(UserError, match=r"TPSPEC_CACHE is '~nobody-here/cache'; should be a folder"):
        cache_root()


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """Against a folder called org/name being looked for on the hub."""
    assert find(str(tmp_path)) == tmp_path


def test_a_missing_demo_model_says_how_to_make_it() -> None:
    """Against a first run that ends without the next step."""
    with pytest.raises(UserError, match=r"python -m tpspec\.model\.demo smollm2-135m"):
        find("smollm2-135m")


@pytest.mark.parametrize(
    "model",
    [
        "smollm3",
        "/no/such/folder",
        "./here",
        "a/b/c",
        "",
        "org/",
        "org/" + 97 * "n",
        "org/name.git",
        "org/a..b",
    ],
)
def test_another_name_is_told_the_three_forms(model: str) -> None:
    """Against a misspelt folder sent to the hub as a repository."""
    with pytest.raises(UserError, match=r"a folder that exists, a demo model \(smollm2-135m\), or a hub id"):
        find(model)


RESPONSE = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co/org/name"))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached"),
        (httpx.ConnectError("no route"), "cannot be reached"),
        (GatedRepoError("gated", response=RESPONSE), "accept its licence"),
    ],
)
def test_a_download_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, why: str) -> None:
    """Against forty lines of HTTP traceback for a cable that is not plugged in."""

    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=f"model org/name .*{why}") as caught:
        find("org/name")
    assert "\n" not in str(caught.value)


def test_a_download_cut_short_is_not_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against loading the half of the weights that arrived."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    (tmp_path / "1.safetensors").touch()
    assert local("org/name") is None
    (tmp_path / "2.safetensors").touch()
    assert local("org/name") == tmp_path


def test_a_head_may_be_in_a_file_of_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a download without its weights: most Medusa heads and many EAGLE heads are nothing else."""
    asked: list[list[str]] = []
    copies: list[list[str]] = []

    def download(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        copies.append(ignore_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    find("org/head", head=True)
    find("org/model")
    assert "*.pt" in asked[0]
    assert "*.pt" not in asked[1]  # a model is there as safetensors: its other copies would be fetched for nothing
    for copy in ("consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors"):
        assert all(any(fnmatch(copy, pattern) for pattern in ignored) for ignored in copies)
    assert not any(fnmatch("model-00001-of-00002.safetensors", pattern) for pattern in copies[1])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.pt").touch()
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    assert local("org/head", head=True) == tmp_path
    assert local("org/head") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "holds no config.json"), ("{", "readable JSON"), ("[" * 100_000, "readable JSON"), ("[]", "JSON object")],
    ids=["none", "cut", "deep", "list"],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, why: str) -> None:
    """Against a traceback out of the JSON reader."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=why):
        read_config(tmp_path)


def test_a_header_too_deep_to_read_counts_as_none(tmp_path: Path) -> None:
    """Against a traceback: of other headers that cannot be read, loading tells."""
    header = b'{"a":' * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert tensors(tmp_path) == {}


def test_a_head_that_ships_is_found_as_a_head_alone() -> None:
    """Stands against a head that is taken for a model of one layer, and checked clean as the target."""
    assert find("smollm2-135m-eagle3", head=True) == HEADS / "smollm2-135m-eagle3"
    with pytest.raises(UserError, match="is a draft head, not a model"):
        find("smollm2-135m-eagle3")
    with pytest.raises(UserError, match=r"\(smollm2-135m, smollm2-135m-eagle3\)"):
        find("smollm2-135m-eagle4", head=True)
