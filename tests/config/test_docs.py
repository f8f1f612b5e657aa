"""The page about Megatron's settings says what the schema says."""

import re
from pathlib import Path

import pytest

from smp.config.fields import as_text, settings

DOCS = Path(__file__).parents[2] / "docs"


def rows(section: str) -> list[list[str]]:
    """Cells of the table under a heading of the page about Megatron."""
    page = (DOCS / "differences-from-megatron.md").read_text(encoding="utf-8")
    body = re.split(r"^## ", page, flags=re.MULTILINE)
    table = next(part for part in body if part.startswith(section))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:3] == "| `"]


@pytest.mark.parametrize("row", rows("Defaults"), ids=lambda row: row[0])
def test_defaults_beside_megatrons_are_the_schemas(row):
    flag, _, ours, reason = row
    setting = settings()[flag.strip("`").removeprefix("--").replace("-", "_")]
    assert ours == f"`{as_text(setting.default)}`"
    assert reason


@pytest.mark.parametrize("row", rows("Names"), ids=lambda row: row[0])
def test_names_given_for_megatrons_exist_and_megatrons_do_not(row):
    flags = {setting.flag for setting in settings().values()} | {"--config"}
    assert set(re.findall(r"--[a-z0-9-]+", row[1])) <= flags
    assert not set(re.findall(r"--[a-z0-9-]+", row[0])) & flags
