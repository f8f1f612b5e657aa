"""Write the table of named sizes into the documentation: ``python -m smp.models.docs`` from the repository's root."""

from __future__ import annotations

from pathlib import Path

from smp.config import ModelConfig
from smp.models.arithmetic import count_parameters
from smp.models.presets import PRESETS

PAGE = Path("docs/models.md")
BEGIN = "<!-- presets: written by python -m smp.models.docs -->"
END = "<!-- end of presets -->"


def presets_table() -> str:
    """One Markdown row per named size."""
    header = ["| `--model` | Parameters | Layers | Hidden | Heads / kv | Vocabulary | Context |"]
    return "\n".join([*header, "|---|---:|---:|---:|---:|---:|---:|", *map(_row, PRESETS)])


def _row(name: str) -> str:
    model = ModelConfig(model=name, **PRESETS[name])
    heads = f"{model.num_attention_heads} / {model.num_query_groups}"
    vocabulary = f"{model.vocab_size:,}" if model.vocab_size else "the tokenizer's"
    sizes = f"{model.num_layers} | {model.hidden_size:,} | {heads} | {vocabulary} | {model.max_position_embeddings:,}"
    return f"| `{name}` | {_parameters(model)} | {sizes} |"


def _parameters(model: ModelConfig) -> str:
    if model.vocab_size is not None:
        return f"{count_parameters(model, model.vocab_size).total:,}"
    return f"{count_parameters(model, 1).non_embedding:,} + embedding"


def with_table(page: str) -> str:
    """``page`` with everything between its two markers replaced by today's table."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{presets_table()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
