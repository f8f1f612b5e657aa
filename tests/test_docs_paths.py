"""The pages that follow a token and a weight name files and things that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("smp", "tools", "tests", "benchmarks", "recipes_collection")


def in_code(page: Path) -> set[str]:
    """What a page has between backquotes, blocks of commands left out."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`\n]+)`", text))


@pytest.fixture(scope="module")
def words() -> set[str]:
    """All words of the sources, each once."""
    files = [*ROOT.glob("*.py"), *(path for folder in CODE[:2] for path in (ROOT / folder).rglob("*.py"))]
    return {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", ["following.md", "architecture.md"])
def test_every_file_and_name_of_the_page_exists(page: str, words: set[str]) -> None:
    said = in_code(ROOT / "docs" / page)
    files = {text for text in said if "/" in text and text.startswith(CODE)}
    assert len(files) > 15  # it does read them
    assert not [path for path in sorted(files) if not any(ROOT.glob(path.rstrip("/")))]
    names = {text: re.findall(r"[A-Za-z_]\w+", text) for text in said - files}
    assert not {text: parts for text, parts in names.items() if not words.issuperset(parts)}


def test_the_index_has_every_page_and_links_lead_somewhere() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in docs.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index]
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs.rglob("*.md")):
        links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        assert not [link for link in links if not (page.parent / link).exists()], page.name
