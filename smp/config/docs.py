"""Write the table of settings into the documentation: ``python -m smp.config.docs`` from the root of the repository."""

from __future__ import annotations

from pathlib import Path

from smp.config.entry_points import FINETUNE, PRETRAIN, EntryPoint
from smp.config.fields import Setting, as_text, settings, title_of

PAGE = Path("docs/configuration.md")
FINETUNING_PAGE = Path("docs/finetuning.md")
BEGIN = "<!-- settings: written by python -m smp.config.docs -->"
END = "<!-- end of settings -->"


def settings_tables(entry: EntryPoint = PRETRAIN) -> str:
    """One Markdown table per group: flag, values, default and what it does. Of another entry point than pretraining's
    what differs from that."""
    known = {} if entry is PRETRAIN else settings(PRETRAIN)
    new = [setting for name, setting in settings(entry).items() if known.get(name) != setting]
    groups = {group: [setting for setting in new if setting.group == group] for group in entry.groups}
    return "\n\n".join(_group_table(group, title_of(entry, group), rows) for group, rows in groups.items() if rows)


def _group_table(group: str, title: str, rows: list[Setting]) -> str:
    header = ["| Flag | Value | Default | |", "|---|---|---|---|"]
    return "\n".join([f"### {group}", "", title.replace("``", "`"), "", *header, *map(_row, rows)])


def _row(setting: Setting) -> str:
    kind = "switch" if setting.type is bool else "words" if setting.many else setting.type.__name__
    values = " ".join(f"`{choice}`" for choice in setting.choices) or kind
    return f"| `{setting.flag}` | {values} | `{as_text(setting.default)}` | {_escape(setting.text)} |"


def _escape(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def with_tables(page: str, entry: EntryPoint = PRETRAIN) -> str:
    """``page`` with everything between its two markers replaced by the tables of today's schema."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{settings_tables(entry)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    for page, entry in ((PAGE, PRETRAIN), (FINETUNING_PAGE, FINETUNE)):
        page.write_text(with_tables(page.read_text(encoding="utf-8"), entry), encoding="utf-8")


if __name__ == "__main__":
    main()
