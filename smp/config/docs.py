"""Write the table of settings into the documentation: ``python -m smp.config.docs`` from the root of the repository."""

from __future__ import annotations

from pathlib import Path

from smp.config.fields import Setting, as_text, docstrings, group_classes, settings

PAGE = Path("docs/configuration.md")
BEGIN = "<!-- settings: written by python -m smp.config.docs -->"
END = "<!-- end of settings -->"


def settings_tables() -> str:
    """One Markdown table per group: flag, values, default and what it does."""
    return "\n\n".join(_group_table(group, cls) for group, cls in group_classes().items())


def _group_table(group: str, cls: type) -> str:
    texts = docstrings(cls)
    rows = [_row(setting, texts[setting.name]) for setting in settings().values() if setting.group == group]
    header = ["| Flag | Value | Default | |", "|---|---|---|---|"]
    return "\n".join([f"### {group}", "", (cls.__doc__ or "").replace("``", "`"), "", *header, *rows])


def _row(setting: Setting, text: str) -> str:
    kind = "switch" if setting.type is bool else "words" if setting.many else setting.type.__name__
    values = " ".join(f"`{choice}`" for choice in setting.choices) or kind
    default = f"`{as_text(setting.default)}`"
    return f"| `{setting.flag}` | {values} | {default} | {_escape(text)} |"


def _escape(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def with_tables(page: str) -> str:
    """``page`` with everything between its two markers replaced by the tables of today's schema."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{settings_tables()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
