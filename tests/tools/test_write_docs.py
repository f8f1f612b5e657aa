"""The generated tables of the documentation are those of today's schema and presets."""

from pathlib import Path

import pytest

from smp.config.command_line.entry_points import FINETUNE
from smp.config.command_line.fields import settings
from tools.write_docs import BEGIN, END, main, settings_tables, tables, with_table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", tables(), ids=lambda page: page.stem)
def test_the_committed_tables_are_current(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert with_table(text, tables()[page]) == text, "run: python tools/write_docs.py"


def test_the_tables_of_fine_tuning_hold_what_pretraining_does_not_have() -> None:
    found = settings_tables(FINETUNE)
    new = [s for name, s in settings(FINETUNE).items() if name not in settings()]
    assert new and all(f"| `{setting.flag}` |" in found for setting in new)
    assert "| `--lr` |" in found, "its default differs"
    assert "| `--hidden-size` |" not in found and "| `--tensor-model-parallel-size` |" not in found


def test_stale_tables_are_replaced_and_the_text_around_them_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for page in tables():
        page.write_text(f"before\n\n{BEGIN}\nstale\n{END}\n\nafter\n", encoding="utf-8")
    assert main([]) == 0
    texts = {page.stem: page.read_text(encoding="utf-8") for page in tables()}
    for text in texts.values():
        assert text.startswith("before\n") and text.endswith("\n\nafter\n") and "stale" not in text
    assert all(f"| `{setting.flag}` |" in texts["configuration"] for setting in settings().values())
    assert "| `qwen2.5-7b` | 7,615,616,512 | 28 | 3,584 | 28 / 4 | 152,064 | 131,072 |" in texts["models"]
