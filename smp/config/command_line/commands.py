"""What users are told to type, in one place: commands and packages, right in a checkout and for an installed wheel.

In a checkout the tools are files under tools/. A wheel has them next to this package, as ``smp-NAME`` and
``python -m smp NAME``. Imports nothing but the standard library: setup.py reads the table of names from here.
"""

from __future__ import annotations

import re
from pathlib import Path

DISTRIBUTION = "smp-training"
"""What pip lists this package as. The name ``smp`` on the package index is another project's. No hint installs either
of them from an index: the reader of a hint has this package already."""

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
"""Name of a command -> file in tools/ without its ending. What is not here is of use in a checkout only."""

COMMANDS = ("launch", *ENTRY_POINTS, *TOOLS)
"""All names: ``smp-NAME`` and ``python -m smp NAME``."""

CHECKOUT = Path(__file__).resolve().parents[3]


def in_checkout() -> bool:
    """Whether this package lies in a clone of the repository, where tools/ are files."""
    return (CHECKOUT / "tools" / "convert_checkpoint.py").is_file()


def tool(name: str) -> str:
    """How to call one of ``TOOLS`` here: ``python tools/convert_checkpoint.py``, or ``smp-convert``."""
    return f"python tools/{TOOLS[name]}.py" if in_checkout() else f"smp-{name}"


def as_called_here(text: str) -> str:
    """A text of this project, such as a --help, with every ``python tools/FILE.py`` as it is called here."""
    if in_checkout():
        return text
    for name, file in TOOLS.items():
        text = re.sub(rf"(python )?\btools/{file}\.py\b", f"smp-{name}", text)
    return re.sub(r"\bpython (pretrain_gpt|finetune|main)\.py\b", lambda match: _SCRIPTS[match[1]], text)


def pip_install(*packages: str) -> str:
    """The command that brings libraries which are missing, by their own names: those install from any folder, beside a
    checkout and beside a wheel. A test holds them to what setup.py declares."""
    return f"pip install {' '.join(packages)}"
