"""All commands of an installation: ``python -m smp NAME``, or ``smp-NAME``.

python -m smp convert --load Llama-3.2-1B --save checkpoint
torchrun --nproc-per-node 2 -m smp finetune --load checkpoint --data-path chats.jsonl --train-epochs 1
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from smp.config.command_line.commands import CHECKOUT, COMMANDS, DISTRIBUTION, ENTRY_POINTS, TOOLS, in_checkout
from smp.config.command_line.fields import did_you_mean


def main_of(name: str) -> Callable[[list[str]], int]:
    """The main function of a command of ``COMMANDS``."""
    if name == "launch":
        module = "smp.launch.cli"
    elif in_checkout():
        sys.path.insert(0, str(CHECKOUT))  # of an editable installation only the package is on it for sure
        module = ENTRY_POINTS.get(name) or f"tools.{TOOLS[name]}"
    else:
        module = ENTRY_POINTS.get(name) or f"smp.tools.{TOOLS[name]}"
    main: Callable[[list[str]], int] = import_module(module).main
    return main


def console() -> int:
    """The console scripts: the name of the program says which command."""
    return main_of(Path(sys.argv[0]).stem.removeprefix("smp-"))(sys.argv[1:])


def main(argv: list[str]) -> int:
    """``python -m smp``: the first word is the command."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        print(f"Commands of {DISTRIBUTION}, each with --help:\n  {', '.join(COMMANDS)}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        print(f"error: {name}: there is no such command{did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    sys.argv = [f"smp {name}", *argv[1:]]  # what --help calls itself
    return main_of(name)(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
