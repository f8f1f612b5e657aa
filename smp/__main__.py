"""All commands of an installation: ``python -m smp NAME``, or ``smp-NAME``.

python -m smp convert --load Llama-3.2-1B --save checkpoint
torchrun --nproc-per-node 2 -m smp finetune --load checkpoint --data-path chats.jsonl --train-epochs 1

A module of your own that registers something (smp.models.mixers.register_mixer) is imported before the command:

python -m smp --import my_mixers generate --load checkpoint --prompt "Once"
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
    if argv[0] == "--import":
        if len(argv) < 3:
            return _error("--import takes a module and a command: python -m smp --import my_mixers generate ...")
        if (message := _import(argv[1])) is not None:
            return _error(message)
        argv = argv[2:]
    name = argv[0]
    if name not in COMMANDS:
        return _error(f"{name}: there is no such command{did_you_mean(name, COMMANDS)}")
    sys.argv = [f"smp {name}", *argv[1:]]  # what --help calls itself
    return main_of(name)(argv[1:])


def _error(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _import(module: str) -> str | None:
    """Import it, or say why it cannot be found. What fails inside of it keeps its traceback."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        # The module itself or a package of its name, and not something that it imports.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        hint = f"; write {module.removesuffix('.py').replace('/', '.')}" if module.endswith(".py") else ""
        return f"--import {module}: there is no such module here or on PYTHONPATH{hint}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
