"""What users are told to type: commands and packages, for a checkout and for an installed wheel.

In a checkout the tools are files under tools/. A wheel has them next to this package, as ``smp-NAME`` and
``python -m smp NAME``. Imports nothing but the standard library: setup.py reads the table of names from here.
"""

from __future__ import annotations

import re
from pathlib import Path

DISTRIBUTION = "smp-training"
"""The name by which pip lists this package. ``smp`` on the package index is another project; no hint installs either of
them from an index, since the reader has this package already."""

ENTRY_POINTS = {"pretrain": "pretrain_gpt", "finetune": "finetune"}
"""Name of a command -> module at the top of a checkout and of a wheel."""

_SCRIPTS = {"main": "smp-launch", **{module: f"smp-{name}" for name, module in ENTRY_POINTS.items()}}

TOOLS = {
    "checkpoint": "checkpoint",
    "convert": "convert_checkpoint",
    "data": "data",
    "evaluate": "evaluate",
    "generate": "generate",
    "merge-lora": "merge_lora",
    "plan": "plan",
    "plan-collectives": "plan_collectives",
    "plot-loss": "plot_loss",
    "plot-pipeline": "plot_pipeline",
    "preprocess": "preprocess_data",
    "report": "report",
    "train-tokenizer": "train_tokenizer",
}
"""Name of a command -> file in tools/ without its suffix. Files that are not listed are useful in a checkout only."""

COMMANDS = ("launch", *ENTRY_POINTS, *TOOLS)
"""All command names: ``smp-NAME`` and ``python -m smp NAME``."""

CHECKOUT = Path(__file__).resolve().parents[3]


def in_checkout() -> bool:
    """Whether this package is part of a clone of the repository, where tools/ are files."""
    return (CHECKOUT / "tools" / "convert_checkpoint.py").is_file()


def tool(name: str) -> str:
    """The command that calls one of ``TOOLS`` here: ``python tools/convert_checkpoint.py``, or ``smp-convert``."""
    return f"python tools/{TOOLS[name]}.py" if in_checkout() else f"smp-{name}"


def as_called_here(text: str) -> str:
    """The text, such as a --help, with every ``python tools/FILE.py`` written as it is called here."""
    if in_checkout():
        return text
    for name, file in TOOLS.items():
        text = re.sub(rf"(python )?\btools/{file}\.py\b", f"smp-{name}", text)
    return re.sub(r"\bpython (pretrain_gpt|finetune|main)\.py\b", lambda match: _SCRIPTS[match[1]], text)


def pip_install(*packages: str) -> str:
    """The command that installs missing libraries by their own names, which works in a checkout and for a wheel. A test
    compares them with what setup.py declares."""
    return f"pip install {' '.join(packages)}"
