"""No setting is without effect in silence: what a run never reads is refused beside it, or the user is told.

The contexts come from the schema: a run for each value of each switch and each choice. What a run reads is recorded
from its settings themselves; what only becomes another setting (a fraction of iterations, say) has that one's effect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import finetune
import pretrain_gpt
from smp.config import Config, ConfigError, as_flat_dict
from smp.config.command_line.entry_points import FINETUNE, PRETRAIN, EntryPoint
from smp.config.command_line.fields import Setting, as_text, group_classes, settings
from smp.config.rules.checks import notes_on_effects
from smp.models.presets import PRESETS
from smp.training.settings import read_settings
from smp.training.tuning.settings import read_finetune_settings
from tests.training.flag_runs import TINY, clean_process
from tests.training.tiny_hf import WORDS, write_model, write_samples, write_tokenizer

WITHOUT_MEANING = {
    "dataclasses",
    "copy",
    "smp.config.command_line.cli",
    "smp.config.command_line.fields",
    "smp.config.rules.checks",
}
"""Modules that read settings to compare, copy or write them."""
BECOMES_ANOTHER = {"smp.config.resolve", "smp.training.tuning.settings"}
SKIPPED = {
    "model": "stands for other settings",
    "max_position_embeddings": "a bound, and written into checkpoints",
    "dry_run": "nothing runs",
    "preview": "nothing runs",
    "distributed_timeout_minutes": "of groups; one process in a test waits for nobody",
}
ALONE = "--num-layers 1 --train-iters 2 --micro-batch-size 2 --log-interval 1"
TUNED = (
    "--load {0}/llama --seq-length 48 --train-iters 2 --global-batch-size 2 --no-tensorboard --no-progress-bar "
    "--log-dir logs"
)
TEXTS = (
    "--no-mock-data --data-path {0}/texts.jsonl --tokenizer-model {0}/llama/tokenizer.json --vocab-size 300 "
    "--reset-attention-mask"
)
ONLINE = (
    "--data-path {0}/sft.jsonl --reward-funcs exact_match --num-generations 2 --max-completion-length 4 "
    "--eval-interval 2 --split 50,50"
)
BASES: dict[str, tuple[EntryPoint, str]] = {
    "pretraining": (PRETRAIN, f"{TINY} {ALONE}"),
    "pretraining with experts": (PRETRAIN, f"{TINY} {ALONE} --num-experts 4 --moe-aux-loss-coeff 0.01"),
    "pretraining on texts": (PRETRAIN, f"{TINY} {ALONE} {TEXTS}"),
    "pretraining on texts, no positions": (PRETRAIN, f"{TINY} {ALONE} {TEXTS} --position-embedding-type none"),
    "pretraining without attention": (
        PRETRAIN,
        f"{TINY} {ALONE} --num-query-groups 4 --linear-attention-type gated_delta_net",
    ),
    "SFT": (FINETUNE, f"{TUNED} --data-path {{0}}/sft.jsonl"),
    "LoRA": (FINETUNE, f"{TUNED} --data-path {{0}}/sft.jsonl --lora-rank 2"),
    "DPO": (FINETUNE, f"{TUNED} --data-path {{0}}/dpo.jsonl --objective dpo"),
    "ORPO": (FINETUNE, f"{TUNED} --data-path {{0}}/dpo.jsonl --objective orpo"),
    "GRPO": (FINETUNE, f"{TUNED} {ONLINE} --objective grpo"),
    "GRPO, LoRA, reference": (FINETUNE, f"{TUNED} {ONLINE} --objective grpo --lora-rank 2 --beta 0.1"),
    "RLOO, ahead": (FINETUNE, f"{TUNED} {ONLINE} --objective rloo --one-step-off-policy"),
    "distillation": (FINETUNE, f"{TUNED} --data-path {{0}}/sft.jsonl --objective distill --teacher {{0}}/llama"),
    "distillation on policy": (
        FINETUNE,
        f"{TUNED} --data-path {{0}}/sft.jsonl --objective distill --teacher {{0}}/llama --lmbda 0.5 "
        "--max-completion-length 4",
    ),
    "DPO, LoRA": (FINETUNE, f"{TUNED} --data-path {{0}}/dpo.jsonl --objective dpo --lora-rank 2"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_tokenizer(folder / "llama")
    write_model(folder / "llama", layers=1)
    write_samples(folder, count=12)
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "{word}"}}\n' for word in WORDS * 20))
    return folder


def flags_of(setting: Setting, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [setting.flag if value else "--no-" + setting.flag[2:]]
    return [setting.flag, as_text(value)]


def others(setting: Setting, value: Any) -> list[Any]:
    """Values that are not ``value``."""
    if setting.type is bool:
        return [not value]
    if setting.choices:
        return [choice for choice in setting.choices if choice != value]
    if setting.type is str:
        return ["x"] if setting.needs else []  # names of files
    tried = [0.25, 0.5] if value in (None, 0.0) and setting.type is float else [2, 3] if value is None else []
    return tried or [value + 1, value * 2, value / 2 if setting.type is float else 1]


def read(entry: EntryPoint, words: list[str]) -> Config:
    if entry is PRETRAIN:
        return read_settings(words, PRESETS, 1)
    return read_finetune_settings(words, 1)[0]


@contextmanager
def recorded(into: set[str]) -> Iterator[None]:
    """Inside, names of the settings that are read to do something."""
    with pytest.MonkeyPatch.context() as patch:
        for entry in (PRETRAIN, FINETUNE):
            for cls in group_classes(entry).values():
                patch.setattr(cls, "__getattribute__", _noting(into, {item.name for item in fields(cls)}))
        yield


def _noting(into: set[str], names: set[str]) -> Callable[[Any, str], Any]:
    def get(self: Any, name: str) -> Any:
        if name in names and sys._getframe(1).f_globals["__name__"] not in WITHOUT_MEANING | BECOMES_ANOTHER:
            into.add(name)
        return object.__getattribute__(self, name)

    return get


def read_by(entry: EntryPoint, words: list[str], folder: Path) -> set[str] | None:
    """Settings that a real run reads; None: it lacks something here, such as apex."""
    names: set[str] = set()
    main = pretrain_gpt.main if entry is PRETRAIN else finetune.main
    folder.mkdir(parents=True)
    out, err = StringIO(), StringIO()
    with clean_process(), pytest.MonkeyPatch.context() as patch, recorded(names):
        patch.chdir(folder)
        with redirect_stdout(out), redirect_stderr(err):
            code = main(words)
    assert code in (0, 2), err.getvalue()
    return names if code == 0 else None


def contexts(base: str, inputs: Path) -> Iterator[list[str]]:
    """Command lines: the base, and of pretraining also with each other value of each switch and choice, where that can
    be given."""
    entry, flags = BASES[base]
    words = flags.format(inputs).split()
    yield words
    config = read(entry, words)
    for setting in settings(entry).values() if base == "pretraining" else ():
        if setting.group == "logging" or setting.name in SLOW or (setting.type is not bool and not setting.choices):
            continue
        for value in others(setting, getattr(getattr(config, setting.group), setting.name)):
            changed = [*words, *flags_of(setting, value)]
            try:
                read(entry, changed)
            except ConfigError:
                continue
            yield changed


SLOW = {*SKIPPED, "compile", "profile", "kernels", "attention_backend", "deterministic_mode", "finetune"}
"""Contexts that add nothing: what is read is the same."""


@pytest.mark.parametrize(
    ("base", "every"), [*((base, 4) for base in BASES), pytest.param("pretraining", 1, marks=pytest.mark.slow)]
)
def test_what_a_run_does_not_read_is_refused_or_told(base: str, every: int, inputs: Path, tmp_path: Path) -> None:
    """Beside each ``every``-th of the contexts, the base among them."""
    entry = BASES[base][0]
    silent = {}
    for number, words in enumerate(islice(contexts(base, inputs), 0, None, every)):
        used = read_by(entry, words, tmp_path / str(number))
        if used is None:
            assert number > 0
            continue
        config = read(entry, words)
        for setting in settings(entry).values():
            given = {setting.flag, "--no-" + setting.flag[2:]} & set(words)
            if setting.name in used or given or setting.name in SKIPPED:
                continue
            if is_silent(entry, words, config, setting, used):
                silent.setdefault(setting.flag, []).append(" ".join(words[-2:]))
    assert silent == {}


def is_silent(entry: EntryPoint, words: list[str], config: Config, setting: Setting, used: set[str]) -> bool:
    """Whether values of ``setting`` are taken beside ``words``, change nothing that is read and nobody says so."""
    for other in others(setting, getattr(getattr(config, setting.group), setting.name)):
        try:
            changed = read(entry, [*words, *flags_of(setting, other)])
        except ConfigError as error:
            if setting.flag in str(error) or "--no-" + setting.flag[2:] in str(error):
                return False
            continue  # too large or too small a value
        before, after = as_flat_dict(config, entry), as_flat_dict(changed, entry)
        became = {name for name in after if after[name] != before[name]} - {setting.name}
        if became & used or any(setting.flag in line for line in notes_on_effects(changed)):
            return False
    return bool(others(setting, getattr(getattr(config, setting.group), setting.name)))
