"""Write tables (settings, named sizes, predictions, Megatron's flags) and pictures into the documentation, from the
repository's root.

    python tools/write_docs.py

Each page keeps its text; what stands between two markers is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from smp.config import ModelConfig
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.command_line.entry_points import FINETUNE, PRETRAIN, EntryPoint
from smp.config.command_line.fields import Setting, as_text, settings, title_of
from smp.config.megatron.rows import Row
from smp.config.megatron.table import ROWS, TABLE, fate_of
from smp.layers.context_parallel import mask_picture
from smp.models.arithmetic import count_parameters
from smp.models.presets import PRESETS
from smp.parallel.network import collective_picture

BEGIN = "<!-- table: written by python tools/write_docs.py -->"
END = "<!-- end of table -->"


def settings_tables(entry: EntryPoint = PRETRAIN) -> str:
    """One Markdown table per group: flag, values, default and what it does. Of another entry point than pretraining's
    what differs from that."""
    known = {} if entry is PRETRAIN else settings(PRETRAIN)
    new = [setting for name, setting in settings(entry).items() if known.get(name) != setting]
    groups = {group: [setting for setting in new if setting.group == group] for group in entry.groups}
    return "\n\n".join(_group_table(group, title_of(entry, group), rows) for group, rows in groups.items() if rows)


def _group_table(group: str, title: str, rows: list[Setting]) -> str:
    header = ["| Flag | Value | Default | |", "|---|---|---|---|"]
    return "\n".join([f"### {group}", "", title.replace("``", "`"), "", *header, *map(_setting_row, rows)])


def _setting_row(setting: Setting) -> str:
    kind = "switch" if setting.type is bool else "words" if setting.many else setting.type.__name__
    values = " ".join(f"`{choice}`" for choice in setting.choices) or kind
    return f"| `{setting.flag}` | {values} | `{as_text(setting.default)}` | {_escape(setting.text)} |"


def _escape(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def presets_table() -> str:
    """One Markdown row per named size."""
    header = ["| `--model` | Parameters | Layers | Hidden | Heads / kv | Vocabulary | Context |"]
    return "\n".join([*header, "|---|---:|---:|---:|---:|---:|---:|", *map(_preset_row, PRESETS)])


def _preset_row(name: str) -> str:
    model = ModelConfig(model=name, **PRESETS[name])
    heads = f"{model.num_attention_heads} / {model.num_query_groups}"
    vocabulary = f"{model.vocab_size:,}" if model.vocab_size else "the tokenizer's"
    sizes = f"{model.num_layers} | {model.hidden_size:,} | {heads} | {vocabulary} | {model.max_position_embeddings:,}"
    return f"| `{name}` | {_parameters(model)} | {sizes} |"


def _parameters(model: ModelConfig) -> str:
    if model.vocab_size is not None:
        return f"{count_parameters(model, model.vocab_size).total:,}"
    return f"{count_parameters(model, 1).non_embedding:,} + embedding"


def megatron_table() -> str:
    """What becomes of each of Megatron's flags, those with one answer in a row."""
    alike = [flag for flag in ROWS if fate_of(flag) == "same"]
    titles = {
        ("becomes", "derived"): "Other words here",
        ("left out",): "Accepted by --from-megatron, and without an effect here",
        ("refused",): "Refused, but for values that are named",
    }
    parts = [f"### The same\n\n{_flags(alike)}."]
    for fates, title in titles.items():
        rows = [
            f"| {_flags(flags)} | {_escape(_becomes(row))} |"
            for row in TABLE
            if (flags := [flag for flag in row.arities if fate_of(flag) in fates])
        ]
        parts.append("\n".join([f"### {title}", "", "| Megatron | here |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _flags(flags: list[str]) -> str:
    return ", ".join(f"`{flag}`" for flag in flags)


def _becomes(row: Row) -> str:
    """The answer, and the values that have one of their own."""
    text = row.answer or f"`{row.words.format('N')}`"
    taken = [f"`{value}` {f'is `{words}`' if words else 'is accepted'}" for value, words in row.values.items()]
    return f"{text} ({', '.join(taken)})" if taken else text


def tables() -> dict[Path, str]:
    """What each page is to hold."""
    return {
        Path("docs/configuration.md"): settings_tables(),
        Path("docs/finetuning.md"): settings_tables(FINETUNE),
        Path("docs/models.md"): presets_table(),
        Path("docs/differences-from-megatron.md"): megatron_table(),
        Path("docs/collectives.md"): collective_picture.pictures(),
        Path("docs/context-parallelism.md"): mask_picture.pictures(),
    }


def with_table(page: str, table: str) -> str:
    """``page`` with everything between its two markers replaced."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def run(argv: Sequence[str] | None) -> None:
    """Write all pages."""
    CommandParser(description=__doc__).parse_args(argv)
    for page, table in tables().items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), table), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 when there are no such pages here."""
    return run_tool(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
