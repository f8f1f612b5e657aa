"""The page about Megatron's settings says what the schema says."""

import re
from pathlib import Path

import pytest

from smp.config.command_line.fields import as_text, settings
from smp.config.megatron.table import DEFAULTS

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


def test_megatrons_defaults_on_the_page_are_those_of_a_translated_line():
    page = {row[0].strip("`").removeprefix("--").replace("-", "_"): row[1] for row in rows("Defaults")}
    said = {name: page[name] for name in DEFAULTS if name not in ("sgd_momentum", "log_format")}
    off = {"false": "off", "learned_absolute": "learned_absolute"}
    assert all(said[name].startswith(off.get(DEFAULTS[name], DEFAULTS[name])) for name in said)
