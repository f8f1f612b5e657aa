"""The pages about settings say what the schema says."""

import re
from pathlib import Path

import pytest

from smp.config.docs import BEGIN, END, main, settings_tables, with_tables
from smp.config.entry_points import FINETUNE, PRETRAIN
from smp.config.fields import as_text, settings

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("name", "entry"), [("configuration.md", PRETRAIN), ("finetuning.md", FINETUNE)])
def test_the_committed_tables_are_current(name, entry):
    page = (DOCS / name).read_text(encoding="utf-8")
    assert with_tables(page, entry) == page, "run: python -m smp.config.docs"


def test_the_tables_of_fine_tuning_hold_what_pretraining_does_not_have():
    tables = settings_tables(FINETUNE)
    new = [s for name, s in settings(FINETUNE).items() if name not in settings()]
    assert new and all(f"| `{setting.flag}` |" in tables for setting in new)
    assert "| `--lr` |" in tables, "its default differs"
    assert "| `--hidden-size` |" not in tables and "| `--tensor-model-parallel-size` |" not in tables


def test_a_stale_table_is_replaced_and_the_text_around_it_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "configuration.md"
    for name in ("configuration.md", "finetuning.md"):
        text = f"before\n\n{BEGIN}\nstale\n{END}\n\nafter\n"
        page.with_name(name).write_text(text, encoding="utf-8")
    main()
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\n\nafter\n") and "stale" not in text
    assert all(f"| `{setting.flag}` |" in text for setting in settings().values())


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
