"""A composed recipe, in either dialect, as settings of an entry point and where they run.

Ours: keys at the top of the file are settings, under the flags' own names; ``run`` and ``trainer`` say where.
HyperPod's: all else is translated by :mod:`smp.launch.hyperpod`. Settings at the top work there too, and win.
``training_cfg`` makes it a job of a script of the user's own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from smp.config import Config, ConfigError, Layout, resolve
from smp.config.command_line.cli import build_tree
from smp.config.command_line.entry_points import FINETUNE, PRETRAIN, EntryPoint
from smp.config.command_line.fields import Setting, as_text, did_you_mean, settings
from smp.config.rollouts import ONLINE
from smp.config.rules.finetune import fill_in
from smp.config.rules.online import check_reward_names
from smp.launch.hyperpod import COMMON, KEYS, OWN_MODEL, Form, Translated, flatten, form_of, override, translate, unread
from smp.models.presets import PRESETS

Task = Literal["pretrain", "finetune", "custom"]
_WHERE = {
    "run": ("name", "time_limit", "task", "base_model"),
    "trainer": ("num_nodes", "devices"),
}
"""Keys of both dialects."""
_ALTERNATIVES = (
    ("train_iters", "train_samples", "train_epochs"),
    ("eval_interval", "eval_epochs"),
    ("eval_iters", "full_validation"),
    ("split", "valid_data_path"),
    ("data_path", "train_data_path", "data_args_path", "mock_data"),
    ("save_interval", "save_epochs", "save_mtbf_hours"),
    ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
    ("lora_rank", "load_adapter"),
)
"""Groups of settings of which a run has one: a recipe's own setting replaces any other one of its group that came from
a key of HyperPod's."""
_SCRIPT = ("entry_script", "entry_module", "script_args", "run")
_VOCABULARY = 32000  # for checks, where only the tokenizer or the model's folder tells it
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Recipe:
    """What to run, and on how many processes.

    Attributes:
        name: of the job.
        task: which entry point, or a script of the user's own.
        num_nodes, devices: nodes, and processes on each.
        time_limit: as sbatch takes it.
        settings: of the entry point, by name.
        script: words after ``torchrun`` of a script of the user's own.
        config: the settings resolved, as far as a head node can; None for a script.
        missing: settings that have to be given before the job can run.
        notes: keys that change nothing here, and why.
        form: of HyperPod's that it was translated from; None: it is one of this project's.
        unread: what finetune.py does not do yet with its model; None: nothing is known against it.
        instance_types: machines that HyperPod names for it; empty: any.
    """

    name: str
    task: Task
    num_nodes: int
    devices: int
    time_limit: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    script: tuple[str, ...] = ()
    config: Config | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    form: str | None = None
    unread: str | None = None
    instance_types: tuple[str, ...] = ()

    @property
    def spare_nodes(self) -> int:
        """Nodes beyond ``max_nodes``, which wait to take the place of lost ones."""
        most = self.settings.get("max_nodes")
        return 0 if most is None else max(self.num_nodes - most, 0)

    @property
    def world_size(self) -> int:
        """Number of processes that train."""
        return (self.num_nodes - self.spare_nodes) * self.devices

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds as sbatch reads it: [days-]hours[:minutes[:seconds]] with days, minutes[:seconds]
        without."""
        if self.time_limit is None:
            return None
        days, dash, clock = self.time_limit.rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        # "12:00:00" are hours, "12:00" and "12" minutes.
        if dash or len(parts) == 3:
            hours, minutes, rest = [*parts, 0, 0][:3]
        else:
            hours, (minutes, rest) = 0, [*parts, 0][:2]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def read_recipe(tree: Mapping[str, Any], stem: str) -> Recipe:
    """Read a composed recipe.

    Args:
        tree: its keys, interpolations resolved.
        stem: name of the job if it gives none.

    Raises:
        ConfigError: one line that names the key.
    """
    if "training_cfg" in tree:
        return _read_script(_section(tree, "training_cfg"), stem)
    form = form_of(tree)
    where = {name: _section(tree, name) for name in _WHERE}
    own, leaves = _split(tree, where, form)
    others = {f"{name}.{key}": value for name, section in where.items() for key, value in section.items()}
    # verl's sections may give the sizes where the recipe's trainer does not.
    for name, key in (form.sizes if form is not None else {}).items():
        if name not in where["trainer"] and leaves.get(key) is not None:
            where["trainer"][name] = others[f"trainer.{name}"] = leaves[key]
    num_nodes, devices = _count(where["trainer"], "num_nodes"), _count(where["trainer"], "devices")
    translated = Translated(finetune=False) if form is None else translate(leaves, form, others)
    # A setting that pretrain_gpt.py lacks tells a recipe for finetune.py.
    tuned = translated.finetune if form is not None else not own.keys() <= settings(PRETRAIN).keys()
    task = where["run"].get("task") or ("finetune" if tuned else "pretrain")
    if task not in ("pretrain", "finetune"):
        raise ConfigError(f"run.task: {task} is neither pretrain nor finetune")
    base = where["run"].get("base_model")
    if base is not None and task == "pretrain":
        raise ConfigError(f"run.base_model: {base} says what is fine-tuned; for pretraining give model")
    recipe = Recipe(
        name=_name(where["run"].get("name") or stem),
        task=cast(Task, task),
        num_nodes=num_nodes,
        devices=devices,
        time_limit=_time(where["run"].get("time_limit")),
    )
    recipe = _with_settings(recipe, own, leaves, form, translated, base)
    machines = tree.get("instance_types")
    return replace(recipe, instance_types=tuple(map(str, machines)) if isinstance(machines, list) else ())


def _with_settings(
    recipe: Recipe,
    own: Mapping[str, Any],
    leaves: Mapping[str, Any],
    form: Form | None,
    translated: Translated,
    base: Any,
) -> Recipe:
    """``recipe`` with its settings, from this project's names and from HyperPod's keys."""
    values = _parsed(own, recipe)
    if form is not None and "model" in own:  # the named size replaces the shape in the recipe's keys
        without = {name: value for name, value in translated.values.items() if name not in translated.shape}
        translated = replace(translated, values=without, shape={})
    said = {name: key for name, key in translated.said.items() if name not in own}
    # This project's own settings win over translated ones.
    with _keys_named(said):
        values = _parsed(_without_alternatives(translated.values, values), recipe, translated=True) | values
    if leaves and form is None:
        # HyperPod's keys on a recipe of this project's are overrides of it.
        translated = _overridden(values, leaves, recipe)
        said = translated.said
        values = {name: value for name, value in values.items() if name not in translated.gone}
        with _keys_named(said):
            values |= _parsed(translated.values, recipe, translated=True)
    missing = _missing(recipe, values)
    # Checks need a save folder: the job provides one.
    saved = {"save": "the job's folder", **values}
    with _keys_named(said):
        shape = _parsed(translated.shape, replace(recipe, task="pretrain"), translated=True)
        if values.get("model_implementation") == "transformers":  # its architecture is in its folder
            shape = {}
        config = _checked(
            replace(recipe, settings=values), saved, shape or _preset("run.base_model", base), bool(missing)
        )
    return replace(
        recipe,
        settings=values,
        config=config,
        missing=missing,
        notes=tuple(translated.notes),
        form=None if form is None else form.name,
        unread=unread(values) if recipe.task == "finetune" else None,
    )


@contextmanager
def _keys_named(said: Mapping[str, str]) -> Iterator[None]:
    """Errors about settings that came from HyperPod's keys are extended by these keys."""
    try:
        yield
    except ConfigError as error:
        if keys := _keys_of(str(error), said):
            raise ConfigError(f"{error} ({', '.join(keys)})") from None
        raise


def _keys_of(message: str, said: Mapping[str, str]) -> list[str]:
    """HyperPod's keys for the settings that a message names, as --lr or with lr: in front."""
    named = {flag.replace("-", "_") or name for flag, name in re.findall(r"--([a-z][\w-]*)|^(\w+):", message)}
    return [key for setting, key in said.items() if setting in named and key not in message]


def _split(
    tree: Mapping[str, Any], where: Mapping[str, Mapping[str, Any]], form: Form | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings under their own names, HyperPod's keys)."""
    known = settings(PRETRAIN).keys() | settings(FINETUNE).keys()
    # Names that both dialects have are the form's.
    if form is not None:
        known -= form.keys.keys()
    own = {str(key): value for key, value in tree.items() if key in known and not isinstance(value, Mapping)}
    # first those that others refer to: of two errors of one typed value the first is said
    rest: dict[str, Any] = {
        name: {key: value for key, value in section.items() if key not in _WHERE[name]}
        for name, section in where.items()
    }
    rest |= {key: value for key, value in tree.items() if key not in own and key not in where}
    if OWN_MODEL in rest:
        own["model"] = rest.pop(OWN_MODEL)
    leaves = flatten({key: value for key, value in rest.items() if value != {}})
    sections = {name.partition(".")[0] for name in (KEYS if form is None else form.keys)}
    for name in leaves:
        if name.partition(".")[0] not in sections:
            raise ConfigError(
                f"{name}: there is no such key{did_you_mean(name, [*known, *sections, *COMMON, 'training_cfg'])}"
            )
    return own, leaves


def _without_alternatives(translated: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Translated settings, without those for which this project's own settings give an alternative."""
    given = {name for name, value in own.items() if value is not None and value is not False}
    taken = [group for group in _ALTERNATIVES if given & set(group)]
    return {name: value for name, value in translated.items() if not any(name in group for group in taken)}


def _overridden(values: Mapping[str, Any], leaves: Mapping[str, Any], recipe: Recipe) -> Translated:
    """What HyperPod's keys change in a recipe of this project."""
    changed = override(values, leaves, recipe.task == "finetune")
    if changed.finetune != (recipe.task == "finetune"):
        name = next(name for name in ("model.do_finetune", "model.multi_modal") if name in leaves)
        raise ConfigError(f"{name}: {as_text(leaves[name])} in a recipe for {_script_of(recipe)}")
    return changed


def _section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name}: expected keys and values, not {section!r}")
    return {str(key): value for key, value in section.items()}


def _count(section: Mapping[str, Any], name: str) -> int:
    value = section.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"trainer.{name}: {value!r} is not a number of {name.removeprefix('num_')} above 0")
    return value


def _name(value: Any) -> str:
    """A name that Kubernetes, SageMaker and Slurm all accept."""
    name = re.sub(r"[._]", "-", str(value))
    if not _NAME.fullmatch(name):
        raise ConfigError(f"run.name: {value!r} must be of a-z, 0-9 and -, at most 63 of them")
    return name


def _time(value: Any) -> str | None:
    if value is None or _TIME.fullmatch(str(value)):
        return None if value is None else str(value)
    raise ConfigError(f"run.time_limit: {value!r} is no time, such as 6-00:00:00, 12:00:00 or 90 (minutes)")


def _read_script(section: Mapping[str, Any], stem: str) -> Recipe:
    for key in section:
        if key not in _SCRIPT:
            raise ConfigError(f"training_cfg.{key}: there is no such key{did_you_mean(key, _SCRIPT)}")
    if not isinstance(section.get("run"), Mapping | None):
        raise ConfigError(f"training_cfg.run: expected keys and values, not {section['run']!r}")
    run = _section(section, "run")
    for key in run:
        if key not in ("name", "nodes", "ntasks_per_node", "time_limit"):
            raise ConfigError(f"training_cfg.run.{key}: there is no such key; there are name, nodes, ntasks_per_node")
    script, module = section.get("entry_script"), section.get("entry_module")
    # Equal: neither is given, or both are.
    if (script is None) == (module is None):
        raise ConfigError("training_cfg: give one of entry_script and entry_module")
    for key, value in (("entry_script", script), ("entry_module", module)):
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise ConfigError(f"training_cfg.{key}: {value!r} is no name of a script or module")
    sizes = {"num_nodes": run.get("nodes", 1), "devices": run.get("ntasks_per_node", 1)}
    return Recipe(
        name=_name(run.get("name") or stem),
        task="custom",
        num_nodes=_count(sizes, "num_nodes"),
        devices=_count(sizes, "devices"),
        time_limit=_time(run.get("time_limit")),
        script=(*((str(script),) if script else ("-m", str(module))), *_script_words(section.get("script_args"))),
    )


def _script_words(arguments: Any) -> list[str]:
    """Words of script_args: HyperPod writes a list of ``--flag: value``; a list of words or a line of them works,
    too."""
    if arguments is None:
        return []
    if isinstance(arguments, str):
        try:
            return shlex.split(arguments)
        except ValueError as error:
            raise ConfigError(f"training_cfg.script_args: {error} in {arguments!r}") from None
    words: list[Any] = []
    for item in arguments if isinstance(arguments, list) else [arguments]:
        # ``- --flag: value`` is a mapping; ``--flag: null`` is a flag without a value.
        pairs = item.items() if isinstance(item, Mapping) else [(item, None)]
        words += [word for pair in pairs for word in pair if word is not None]
    if nested := [word for word in words if isinstance(word, Mapping | list)]:
        raise ConfigError(f"training_cfg.script_args: {nested[0]!r} is no word of a command line")
    return [str(word) for word in words]


def _parsed(values: Mapping[str, Any], recipe: Recipe, translated: bool = False) -> dict[str, Any]:
    """Values parsed by the rules of flags."""
    table = settings(_entry(recipe.task))
    return {
        name: _value(table, name, value, recipe)
        for name, value in values.items()
        if value is not None or not translated
    }


def _value(table: Mapping[str, Setting], name: str, value: Any, recipe: Recipe) -> Any:
    if name not in table:
        raise ConfigError(f"{name}: {_script_of(recipe)} has no such setting{did_you_mean(name, table)}")
    setting = table[name]
    if isinstance(value, list) and setting.many:
        # A list is written as a shell would write it.
        value = shlex.join(map(str, value))
    if isinstance(value, list | Mapping):
        raise ConfigError(f"{name}: expected one value, not {value!r}")
    if value is None and not setting.optional:
        raise ConfigError(f"{name} needs a value")
    return None if value is None else setting.parse(as_text(value), name)


def _entry(task: Task) -> EntryPoint:
    return FINETUNE if task == "finetune" else PRETRAIN


def _script_of(recipe: Recipe) -> str:
    return "finetune.py" if recipe.task == "finetune" else "pretrain_gpt.py"


def _preset(key: str, name: Any) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise ConfigError(f"{key}: there is no named size {name}{did_you_mean(str(name), PRESETS)}")
    return dict(PRESETS[name])


def _missing(recipe: Recipe, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings without which the run would not start and which do not affect the layout."""
    data = any(values.get(name) for name in ("data_path", "data_args_path", "train_data_path", "mock_data"))
    length = any(values.get(name) for name in ("train_iters", "train_samples", "train_epochs"))
    # What recipes leave to their user: where data and models are, and how long to train.
    gone = [] if data else ["data_path"]
    gone += ["reward_funcs"] if values.get("objective") in ONLINE and not values.get("reward_funcs") else []
    gone += [] if length else ["train_iters"]
    if recipe.task == "finetune":
        gone += [] if values.get("load") else ["load"]
    elif not any((values.get("tokenizer_model"), values.get("vocab_size"), _sized(values).get("vocab_size"))):
        gone.append("tokenizer_model")
    return tuple(gone)


def _sized(values: Mapping[str, Any]) -> dict[str, Any]:
    return _preset("model", values.get("model"))


def _checked(recipe: Recipe, values: Mapping[str, Any], shape: Mapping[str, Any], incomplete: bool) -> Config | None:
    """The settings resolved as the run would, or ConfigError; None for a fine-tuning run whose model is not known
    here."""
    world, entry = recipe.world_size, _entry(recipe.task)
    if recipe.task == "pretrain":
        guessed: dict[str, Any] = {"vocab_size": _VOCABULARY} if incomplete else {}
        known = guessed | _sized(values)
        config = build_tree(entry, {**known, **values, **_dry(values, incomplete)})
        return _planned(resolve(config, world), world)
    if "model" in values:
        raise ConfigError("model: the architecture is that of the folder in load; leave it out")
    # Placeholders: what the run reads from its folder or data is not known on a head node.
    complete = {"load": "MODEL", "data_path": "DATA", "train_iters": 1}
    given = {name: value for name, value in values.items() if value is not None}
    if values.get("objective") in ONLINE:  # files of functions are where the job runs
        check_reward_names(values.get("reward_funcs"))
        given = {name: value for name, value in given.items() if name != "reward_weights"}
        given["reward_funcs"] = "exact_match"
    if any(name in given for name in ("train_epochs", "train_samples")):
        del complete["train_iters"]
    config = fill_in(build_tree(entry, {**complete, **given}))
    if not shape:
        # Without a known model only the layout can be checked.
        Layout.from_config(config.parallel, world)
        return None
    of_folder = {"vocab_size": _VOCABULARY} | dict(shape)
    config = replace(config, model=replace(config.model, **of_folder), training=replace(config.training, dry_run=True))
    return _planned(resolve(config, world), world)


def _dry(values: Mapping[str, Any], incomplete: bool) -> dict[str, Any]:
    """Settings that let an incomplete recipe be checked."""
    return {"dry_run": True} if incomplete or values.get("dry_run") else {}


def _planned(config: Config, world: int) -> Config:
    layout = Layout.from_config(config.parallel, world)
    if layout.pp > 1:
        from smp.pipeline.stage_plan import plan_pipeline  # not needed without a pipeline

        plan_pipeline(config, layout)
    return config
