"""The names of Megatron-LM's own parser, recorded from a checkout of it (there, with its requirements):

    PYTHONPATH=CHECKOUT:. python -m tests.config.record_megatron_parser

writes ``megatron_parser.json``: of each flag the number of its values ("", "1" or "+"), their type, its choices and the
default, as text (of a switch whether what it says holds without it). The
one that is there is of commit d98e8a64 (August 2026).
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("megatron_parser.json")


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module("megatron.training.arguments").add_megatron_arguments(parser)
    flags = {flag: of(action) for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    lines = ",\n".join(f"{json.dumps(flag)}: {json.dumps(flags[flag])}" for flag in sorted(flags))
    FILE.write_text(f"{{\n{lines}\n}}\n")


def of(action: Any) -> list[Any]:
    if action.nargs == 0:
        return ["", "", [], str(action.default == action.const)]
    many = action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 1)
    kind, choices = getattr(action.type, "__name__", "str"), [str(choice) for choice in action.choices or ()]
    return ["+" if many else "1", kind, choices, str(action.default)]


if __name__ == "__main__":
    main()
