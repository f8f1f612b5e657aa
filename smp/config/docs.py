"""Write the table of settings into the documentation: ``python -m smp.config.docs`` from the root of the repository."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp.config.fields import Setting, as_text, docstrings, group_classes, settings
from smp.config.finetune import FinetuneConfig
from smp.config.schema import Config

PAGE = Path("docs/configuration.md")
FINETUNING_PAGE = Path("docs/finetuning.md")
BEGIN = "<!-- settings: written by python -m smp.config.docs -->"
END = "<!-- end of settings -->"


def settings_tables(tree: type = Config) -> str:
    """One Markdown table per group: flag, values, default and what it does. Of another tree than pretraining's what
    differs from that."""
    known = {} if tree is Config else {**settings(), **docstrings_of(Config)}
    tables = (_group_table(group, cls, tree, known) for group, cls in group_classes(tree).items())
    return "\n\n".join(table for table in tables if table)


def docstrings_of(tree: type) -> dict[str, str]:
    """Name of a setting, prefixed by a dot -> its text."""
    return {f".{name}": text for cls in group_classes(tree).values() for name, text in docstrings(cls).items()}


def _group_table(group: str, cls: type, tree: type, known: Mapping[str, Any]) -> str:
    texts = docstrings(cls)
    of_group = [setting for setting in settings(tree).values() if setting.group == group]
    rows = [
        _row(setting, texts[setting.name])
        for setting in of_group
        if known.get(setting.name) != setting or known.get(f".{setting.name}") != texts[setting.name]
    ]
    if not rows:
        return ""
    header = ["| Flag | Value | Default | |", "|---|---|---|---|"]
    return "\n".join([f"### {group}", "", (cls.__doc__ or "").replace("``", "`"), "", *header, *rows])


def _row(setting: Setting, text: str) -> str:
    kind = "switch" if setting.type is bool else "words" if setting.many else setting.type.__name__
    values = " ".join(f"`{choice}`" for choice in setting.choices) or kind
    default = f"`{as_text(setting.default)}`"
    return f"| `{setting.flag}` | {values} | {default} | {_escape(text)} |"


def _escape(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def with_tables(page: str, tree: type = Config) -> str:
    """``page`` with everything between its two markers replaced by the tables of today's schema."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{settings_tables(tree)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    for page, tree in ((PAGE, Config), (FINETUNING_PAGE, FinetuneConfig)):
        page.write_text(with_tables(page.read_text(encoding="utf-8"), tree), encoding="utf-8")


if __name__ == "__main__":
    main()
