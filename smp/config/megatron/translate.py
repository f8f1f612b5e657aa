"""A Megatron-LM command line in this project's flags: what ``--from-megatron`` does.

Flags that mean the same stay, flags with a counterpart become it, Megatron's defaults are spelled out, what changes
nothing is left out, and all that does not exist is refused at once. What a flag becomes is data, in ``table``, but for
those that depend on others: these are functions, in ``model_flags`` and ``run_flags``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from smp.config.command_line.cli import FROM_MEGATRON, build_tree, read_values
from smp.config.command_line.entry_points import PRETRAIN
from smp.config.command_line.fields import did_you_mean, settings, without_effect
from smp.config.megatron import model_flags, run_flags
from smp.config.megatron.line import Line, leave, setting_of
from smp.config.megatron.table import DEFAULTS, REQUIRED, ROWS, fate_of
from smp.config.schema import ConfigError


@dataclass(frozen=True)
class Translation:
    """Attributes: the line in this project's flags, and what to tell the user of it."""

    argv: list[str]
    notes: list[str]


def translate(argv: Sequence[str], processes: int) -> Translation:
    """Translate ``argv``, a line of Megatron's with or without flags of this project, for this number of processes.

    Raises:
        ConfigError: flags that are not known or ask for what does not exist, all of them in one line.
    """
    line = Line(processes)
    _read(line, [word for word in argv if word != FROM_MEGATRON])
    for flag, values in line.given.items():
        _take(line, flag, values)
    # Before the defaults: functions that look at what was given. After them: those that need the
    # complete line.
    for derive in (*model_flags.BEFORE_DEFAULTS, *run_flags.BEFORE_DEFAULTS):
        derive(line)
    # The project's own flags win over translated ones.
    line.put(*line.own)
    _defaults(line)
    for derive in (*model_flags.AFTER_DEFAULTS, *run_flags.AFTER_DEFAULTS):
        derive(line)
    _requirements(line)
    # All problems are reported at once: a long line is corrected in one go.
    clauses = [f"{', '.join(flags)}: {answer}" for answer, flags in line.refused.items()] + line.problems
    if clauses:
        raise ConfigError(f"{FROM_MEGATRON}: " + "; ".join(clauses))
    _drop_what_is_idle(line)
    # In the order of --help, whatever the order of the line.
    ordered = [word for name in settings() for word in line.words.get(name, ())]
    return Translation(ordered, _said(line, ordered))


def _said(line: Line, ordered: list[str]) -> list[str]:
    count = len(line.left_out)
    left = [f"note: {count} flags of Megatron's change nothing here and are left out: {', '.join(line.left_out)}"]
    return [*(left if count else []), *line.notes, f"in this project's flags: {shlex.join(ordered)}"]


def _read(line: Line, argv: list[str]) -> None:
    """Split the line into Megatron's flags with their values, and flags of this project."""
    known = settings()
    while argv:
        flag, equals, value = argv.pop(0).partition("=")
        # --x=value and --x value are both argparse's forms.
        if not flag.startswith("--"):
            why = "leave out the launcher and the script" if flag.endswith(".py") else "a value follows its flag"
            line.problems.append(f"unexpected {flag!r}: {why}")
            continue
        values = [value] if equals else []
        while argv and not argv[0].startswith("--") and not equals:
            values.append(argv.pop(0))
        setting = known.get(setting_of(flag))
        # --from-megatron has no named sizes: a preset would contradict the flags.
        if flag in ("--model", "--config"):
            line.problems.append(f"{flag}: the sizes are Megatron's flags; leave it out")
            continue
        if flag in ROWS:
            arity = ROWS[flag].arities[flag]
        elif setting is not None:
            arity = "" if setting.type is bool else "+" if setting.many else "1"
        else:
            near = did_you_mean(flag, [*ROWS, *(s.flag for s in known.values())], ": is it Megatron's?")
            line.problems.append(f"unknown flag {flag}{near}")
            continue
        # arity "" or "1" has the length 0 or 1, the number of values.
        if arity != "+" and len(values) != len(arity):
            line.problems.append(f"{flag} takes {'one value' if arity else 'no value'}, not {len(values)}")
        elif flag in ROWS:
            line.given[flag] = values
        else:
            line.own += [flag, *values]


def _take(line: Line, flag: str, values: list[str]) -> None:
    """Apply the table's row to one flag."""
    row, fate, value = ROWS[flag], fate_of(flag), " ".join(values)
    # Values with an answer of their own come first.
    if value in row.values or fate == "left out":
        words = row.values.get(value, "")
        if words:
            line.put(*words.split())
        else:
            line.left_out.append(" ".join([flag, *values]))
    elif fate == "same":
        line.put(flag, *values)
    elif fate == "becomes":
        line.put(*(word if word != "{}" else value for word in row.words.split()))
        if flag == "--fp16":
            line.notes.append("note: --fp16 becomes --bf16, another number format: there is no fp16 with a loss scale")
    elif fate == "refused":
        line.refused.setdefault(row.answer, []).append(" ".join([flag, *values]))


def _defaults(line: Line) -> None:
    """Add Megatron's defaults as flags, except those of the model where a checkpoint describes it."""
    for name, value in DEFAULTS.items():
        setting = settings()[name]
        # A flag of the line wins; a described model has its own values.
        if name in line.words or (setting.group == "model" and "--use-checkpoint-args" in line.given):
            continue
        if setting.type is bool:
            line.put(setting.flag if value == "true" else "--no-" + setting.flag[2:])
        else:
            line.put(setting.flag, value)


def _requirements(line: Line) -> None:
    """Report missing settings that Megatron requires, too."""
    described = "--use-checkpoint-args" in line.given
    names = [*(() if described else REQUIRED), "micro_batch_size", "lr"]
    missing = [settings()[name].flag for name in names if name not in line.words]
    if missing:
        line.problems.append(f"missing, as for Megatron: {', '.join(missing)}")


def _drop_what_is_idle(line: Line) -> None:
    """Leave out settings that have no effect with the others: Megatron ignores them, this project refuses them."""
    defaults = [name for name in line.words if name in DEFAULTS]
    # Repeated: leaving one out may make another one idle.
    while True:
        values = read_values([word for words in line.words.values() for word in words], PRETRAIN, "")
        idle = [s.name for s in without_effect(build_tree(PRETRAIN, values)) if not s.noted]
        if not idle:
            return
        # Told are settings that the line gave; of defaults that were filled in above nobody asked.
        given = [name for name in idle if line.given.get(line.words[name][0]) == line.words[name][1:]]
        told = [name for name in idle if name not in defaults or name in given]
        leave(line, told, "without effect with the rest")
        for name in idle:
            line.words.pop(name, None)
