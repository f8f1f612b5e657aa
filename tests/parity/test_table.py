"""docs/parity.md lists what the tests run: a case that was added or renamed shows until ``make parity`` runs again."""

from __future__ import annotations

import re

import pytest

from tests.parity.table import FUZZ, PAGE, Section, sections


def listed() -> dict[str, list[str]]:
    """Names of cases by the title of their section; what the fuzzer wrote below them lists none."""
    page = PAGE.read_text(encoding="utf-8").partition(FUZZ)[0]
    _, *parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    names = [re.findall(r"^\| ((?:pp|tp)\d\S*) \|", part, flags=re.MULTILINE) for part in parts[1::2]]
    return dict(zip(parts[::2], names, strict=True))


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.title)
def test_the_page_lists_the_cases_that_run(section: Section) -> None:
    assert listed()[section.title] == [str(case) for case, _ in section.rows]


def test_the_page_says_of_what_it_is() -> None:
    assert list(listed()) == [section.title for section in sections()]
    assert re.search(r"^Measured \d{4}-\d\d-\d\d, commit [0-9a-f]+.*, torch \d", PAGE.read_text(), flags=re.MULTILINE)
