"""What the pages of documentation point at, and which tests a script names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("[!.]*/**/README.md"))]


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub makes names of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    """Stands against pages that were moved, and headings that were renamed under their links."""
    for link in re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
        name, _, anchor = (link[0] or link[1]).partition("#")
        if "://" in name:
            continue
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), link


def test_every_script_is_named_beside_what_it_measures() -> None:
    """Stands against a benchmark nobody finds, and a page that names one that is gone."""
    text = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    imported = {"__init__.py", "serving.py"}
    scripts = {path.name for path in (ROOT / "scripts").glob("*.py")} - imported
    assert set(re.findall(r"`(\w+\.py)`", text)) | set(re.findall(r"scripts/(\w+\.py)", text)) == scripts


def test_every_file_with_tests_of_a_card_is_run_by_test_gpu() -> None:
    """Stands against three files that were written after its list, and never ran on a card."""
    listed = re.findall(r"^tests=\(.*?\)$", (ROOT / "scripts" / "test-gpu").read_text(encoding="utf-8"), re.M | re.S)
    words = f'{listed[0]}; printf "%s\\n" "${{tests[@]}}"'
    run = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = {path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.gpu", path.read_text("utf-8"))}
    assert files <= {path for name in run for path in (ROOT / name, *(ROOT / name).rglob("*.py"))}
    assert all((ROOT / name).exists() for name in run)
