"""Flags and YAML to a ``Config``, and back to YAML.

Precedence, weakest first: dataclass default, preset of ``--model`` (or the model that ``--load`` describes), YAML file
of ``--config``, flags. YAML scalars and flag values are both parsed as text by ``Setting.parse``: YAML 1.1 on its own
reads ``3e-4`` as a string, ``010`` as 8 and ``2024-01-01`` as a date, and then a recipe would not mean what the same
words mean on the command line.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from smp.config.command_line.command import CommandParser
from smp.config.command_line.entry_points import PRETRAIN, EntryPoint
from smp.config.command_line.fields import (
    Setting,
    as_text,
    did_you_mean,
    entry_point_of,
    group_classes,
    require,
    settings,
    title_of,
)
from smp.config.command_line.hub import with_folders
from smp.config.layers import effective
from smp.config.rules.foreign import refuse_architecture
from smp.config.schema import Config, ConfigError

FROM_MEGATRON = "--from-megatron"
"""Marks the rest of a line as Megatron-LM's; see ``smp.config.megatron.translate``."""

Presets = Mapping[str, Mapping[str, Any]]
Describe = Callable[[Mapping[str, Any]], dict[str, Any] | None]


def load_config(argv: Sequence[str], presets: Presets, described: Describe = lambda values: None) -> Config:
    """Parse a command line (without the program's name) into an unresolved ``Config``.

    Args:
        argv: flags; ``--help`` prints the settings and exits with 0.
        presets: named size -> ``ModelConfig`` field -> value.
        described: what was given, --load among it -> the ``ModelConfig`` fields that what lies there states, or None.
            They replace the preset when no ``--model`` is given.

    Raises:
        ConfigError: an unknown flag, key, preset or value; one line with the nearest valid name.
    """
    values = read_values(argv, PRETRAIN, f"Named sizes: {', '.join(presets)}.")
    model = None
    config_file = values.get("model_config")
    require(
        config_file is None or "model" not in values,
        f"--model {values.get('model')} and --model-config {config_file}: give one",
    )
    # "auto" is a folder of this run, whose settings were given when it began.
    if config_file is not None or ("model" not in values and values.get("load") not in (None, "auto")):
        model = described(values)
    if model is None:
        model = _preset(values.get("model"), presets)
    # The description of a model has fields that are no flags: they are put in after the tree is
    # built.
    no_flags = {name: model.pop(name) for name in list(model) if name not in settings(PRETRAIN)}
    config = build_tree(PRETRAIN, model | values)
    # a reward model's head, the configuration of a model of transformers'
    config = replace(config, model=replace(config.model, **no_flags))
    if config.model.is_foreign:
        refuse_architecture(values, model | no_flags)
    # what else of a named size has no effect with the flags goes with it
    return replace(config, model=effective(config.model, keep=values.keys()))


def read_values(argv: Sequence[str], entry: EntryPoint, epilog: str) -> dict[str, Any]:
    """The settings that a command line of ``entry`` and its --config give, by name. Errors as in ``load_config``."""
    require(FROM_MEGATRON not in argv or "--help" in argv, f"{FROM_MEGATRON} is for pretrain_gpt.py")
    parser = _parser(entry)
    parser.epilog = epilog
    given, extras = parser.parse_known_args(argv)
    _refuse_extras(extras, entry)
    texts = vars(given)
    files = texts.pop("config", [])
    if len(files) > 1:
        raise ConfigError(f"--config is given {len(files)} times: {', '.join(files)}; flags may override one file")
    values = read_yaml(files[0], entry) if files else {}
    # Flags win over the file.
    return with_folders(values | {name: _flag_value(settings(entry)[name], text) for name, text in texts.items()})


def build_tree(entry: EntryPoint, values: Mapping[str, Any]) -> Config:
    """The settings of a run with these values; others get the defaults of ``entry``."""
    by_group: dict[str, dict[str, Any]] = {group: {} for group in entry.groups}
    for name, setting in settings(entry).items():
        by_group[setting.group][name] = values.get(name, setting.default)
    assert values.keys() <= settings(entry).keys()
    return Config(**{group: cls(**by_group[group]) for group, cls in group_classes(entry).items()})


def _preset(name: str | None, presets: Presets) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in presets:
        raise ConfigError(f"unknown --model {name}" + did_you_mean(name, presets, f" ({', '.join(presets)})"))
    assert all(settings()[key].group == "model" for key in presets[name]), f"preset {name}: not a ModelConfig field"
    return dict(presets[name])


def _flag_value(setting: Setting, given: str | bool | list[str]) -> Any:
    if isinstance(given, bool):
        return given
    if isinstance(given, list):
        given = given[0] if len(given) == 1 else shlex.join(given)  # one word may be a whole quoted line
    return setting.parse(given, setting.flag)


class _SettingsParser(CommandParser):
    """A parser with a flag for each setting. Help texts are read from the schema's source where they are printed: a run
    needs none of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.flags: list[tuple[argparse.Action, Setting]] = []

    def format_help(self) -> str:
        for action, setting in self.flags:
            action.help = _help(setting)
        return super().format_help()


@cache  # hundreds of flags: made once where many command lines are read
def _parser(entry: EntryPoint) -> CommandParser:
    """A parser with every setting as a flag; flags that are not given are absent from the namespace."""
    parser = _SettingsParser(
        usage="%(prog)s [--config recipe.yaml] [--flag value ...]",
        description="A flag overrides --config, which overrides the named size of --model. 'none' unsets a value.",
        # SUPPRESS: whether a flag was given must be known, since YAML is weaker than flags but
        # stronger than defaults.
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
    )
    parser.add_argument(
        "--config", metavar="FILE", action="append", help="YAML file of settings, one 'name: value' a line"
    )
    if entry is PRETRAIN:
        parser.add_argument(
            FROM_MEGATRON,
            action="store_true",
            help="take the rest as a line of Megatron-LM's, with Megatron's defaults, and print it in these flags",
        )
    sections = {g: parser.add_argument_group(g, title_of(entry, g).replace("``", "")) for g in entry.groups}
    for setting in settings(entry).values():
        action = sections[setting.group].add_argument(setting.flag, **_argument(setting))
        parser.flags.append((action, setting))
    return parser


def _argument(setting: Setting) -> dict[str, Any]:
    if setting.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if setting.many:
        return {"metavar": "WORD", "nargs": "+"}
    return {"metavar": "{" + ",".join(setting.choices) + "}" if setting.choices else setting.type.__name__.upper()}


def _help(setting: Setting) -> str:
    """The help text: the docstring and the default, unless the docstring describes the default itself."""
    in_words = setting.default is None and "Default:" in setting.text
    default = "" if in_words else f" (default: {as_text(setting.default)})"
    return (setting.text + default).replace("%", "%%")


ELSEWHERE = {
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--epochs": "--train-epochs",
    "--output": "--save",
    "--spare-nodes": "--max-nodes (nodes beyond it are spare: docs/elastic.md)",
    # transformers' TrainingArguments, TRL and peft
    "--model-name-or-path": "--load",
    "--dataset-name": "--data-path",
    "--output-dir": "--save",
    "--learning-rate": "--lr",
    "--num-train-epochs": "--train-epochs",
    "--max-steps": "--train-iters",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--gradient-accumulation-steps": "--global-batch-size",
    "--gradient-checkpointing": "--recompute-granularity",
    "--max-length": "--seq-length",
    "--max-seq-length": "--seq-length",
    "--max-grad-norm": "--clip-grad",
    "--warmup-ratio": "--lr-warmup-fraction",
    "--warmup-steps": "--lr-warmup-iters",
    "--lr-scheduler-type": "--lr-decay-style",
    "--logging-steps": "--log-interval",
    "--save-steps": "--save-interval",
    "--eval-steps": "--eval-interval",
    "--resume-from-checkpoint": "--resume",
    "--lora-r": "--lora-rank",
    "--attn-implementation": "--attention-backend",
    "--torch-compile": "--compile",
    # torchtitan
    "--training.steps": "--train-iters",
    "--training.seq-len": "--seq-length",
    "--training.local-batch-size": "--micro-batch-size",
    "--training.global-batch-size": "--global-batch-size",
    "--training.dataset-path": "--data-path",
    "--optimizer.lr": "--lr",
    "--model.flavor": "--model",
    "--parallelism.tensor-parallel-degree": "--tensor-model-parallel-size",
    "--parallelism.pipeline-parallel-degree": "--pipeline-model-parallel-size",
    "--parallelism.context-parallel-degree": "--context-parallel-size",
    "--parallelism.expert-parallel-degree": "--expert-model-parallel-size",
    "--parallelism.data-parallel-shard-degree": "--hybrid-shard-degree",
    "--activation-checkpoint.mode": "--recompute-granularity",
    "--checkpoint.folder": "--save",
    "--checkpoint.interval": "--save-interval",
    "--compile.enable": "--compile",
}
"""Other programs' names of flags, for hints; in parentheses what else one has to know."""


def _hint(flag: str, known: Sequence[str]) -> str:
    ours = ELSEWHERE.get(flag.lower().replace("_", "-"), "")
    found = ours.partition(" ")[0] in known
    return f": did you mean {ours}?" if found else did_you_mean(flag, known, " (--help lists them all)")


def _refuse_extras(extras: Sequence[str], entry: EntryPoint) -> None:
    """Raise ConfigError that names all unknown flags. Switches take no value, so ``--bf16 true`` ends here."""
    if not extras:
        return
    if not extras[0].startswith("-"):
        raise ConfigError(
            f"unexpected {extras[0]!r}: a value follows its flag, and a switch (--x or --no-x) takes none"
        )
    from smp.config.megatron.table import answer_of  # a table of all its flags, which only a mistake needs

    flags = list(dict.fromkeys(word.partition("=")[0] for word in extras if word.startswith("-")))
    megatrons = {flag: answer for flag in flags if (answer := answer_of(flag)) is not None}
    switches = [s for s in settings(entry).values() if s.type is bool]
    known = [s.flag for s in settings(entry).values()] + ["--config"] + ["--no" + s.flag[1:] for s in switches]
    clauses = [
        f"{flag} is Megatron's: {megatrons[flag]}" if flag in megatrons else f"{flag}{_hint(flag, known)}"
        for flag in flags
    ]
    whole = f"; {FROM_MEGATRON} takes a whole line of Megatron's" if megatrons and entry is PRETRAIN else ""
    raise ConfigError(f"unknown flag{'s' if len(flags) > 1 else ''} {'; '.join(clauses)}{whole}")


def read_yaml(path: str, entry: EntryPoint = PRETRAIN) -> dict[str, Any]:
    """Settings of a flat YAML file, parsed and checked by the rules of flags.

    Raises:
        ConfigError: the file cannot be read, or holds an unknown or repeated key or a bad value (with its line number).
    """
    import yaml  # 20 ms that a run without a recipe does not spend

    try:
        # compose, not load: the nodes keep their text and line, and no YAML type is guessed.
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config {path}: expected lines of 'name: value'")
    values: dict[str, Any] = {}
    for key, node in root.value:
        where = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where}: expected a name, not a list or group, before the colon")
        name = str(key.value)
        # yaml would silently keep the last of two equal keys.
        if name in values:
            raise ConfigError(f"{where}: {name} is given twice")
        values[name] = _yaml_value(name, node, where, settings(entry))
    return values


def _yaml_value(name: str, node: Any, where: str, known: Mapping[str, Setting]) -> Any:
    """The value of one YAML node, parsed by the setting's own rule from the node's text."""
    if name not in known:
        raise ConfigError(f"{where}: unknown key {name}{did_you_mean(name, known)}")
    if not isinstance(node.value, str):
        raise ConfigError(f"{where}: {name}: expected one value; keys are flat, without groups or lists")
    # From the text: YAML itself takes ``off`` for false and ``1e-4`` for a text.
    setting = known[name]
    if node.tag == "tag:yaml.org,2002:null":
        if setting.optional:
            return None
        raise ConfigError(f"{where}: {name} needs a value")
    return setting.parse(node.value, f"{where}: {name}")


def as_flat_dict(config: Config, entry: EntryPoint | None = None) -> dict[str, Any]:
    """Every setting of an entry point (default: that of the run) by its name, in the order of --help."""
    table = settings(entry or entry_point_of(config))
    return {name: getattr(getattr(config, setting.group), name) for name, setting in table.items()}


def to_yaml(config: Config) -> str:
    """Flat YAML that ``--config`` reads back to an equal tree."""
    import yaml

    # escapes outside of ASCII: PyYAML writes some line separators as they are and reads them back as line ends
    return str(yaml.safe_dump(as_flat_dict(config), sort_keys=False, allow_unicode=False))
