"""The end of a run with --save-hf: the trained model as a Hugging Face folder, next to its checkpoints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from smp.checkpoint import CheckpointError
from smp.checkpoint.folders.latest import iteration_name
from smp.config import Config
from smp.convert.convert import write
from smp.convert.formats import Opened, make_target, open_checkpoint
from smp.convert.peft.adapters import MergedWeights, family_for
from smp.convert.weights import Weights
from smp.training.tuning.adapter_files import ADAPTER, companions_of, open_adapters, reference_config

HF_MODEL = "hf_model"
"""Folder next to the checkpoints of a run with the model of its end."""
# Files that are read and written at the same time.
_WORKERS = 2
_EXPORTED = "smp/exported"


class ExportStore:
    """Where rank 0 tells the first processes of the other nodes that its export has ended. A torchrun whose processes
    have all ended leaves after five minutes, and if it kept the rendezvous, that of rank 0 would fail and kill it.

    Args:
        store: torch's, which outlives the process groups; None: there is one process.
    """

    def __init__(self, store: dist.Store | None) -> None:
        self._store = store

    @staticmethod
    def of_this_run() -> ExportStore:
        """While there are process groups."""
        return ExportStore(distributed_c10d._get_default_store() if dist.is_initialized() else None)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Context of the export."""
        try:
            yield
        finally:
            with suppress(RuntimeError):  # the process that kept the store has ended, and so have all that wait
                if self._store is not None:
                    self._store.set(_EXPORTED, "")

    def wait(self, progress: Callable[[], None]) -> None:
        """Wait for the end of the export, however long it takes; ``progress`` is called all the time."""
        # Rank 0, which may keep the store, ends at once after it has told.
        with suppress(RuntimeError):
            while self._store is not None and not self._store.check([_EXPORTED]):
                progress()
                time.sleep(0.5)


def require_exportable(config: Config) -> None:
    """Raise ConfigError where --save-hf would fail when the run has ended: no Hugging Face architecture computes what
    the model does."""
    if config.checkpoint.save_hf and not config.model.is_foreign:
        family_for(config.model, reference_config(config))


def export_hugging_face(config: Config, iteration: int, progress: Callable[[], None]) -> Path:
    """Write the model of the checkpoint of ``iteration`` to ``<save>/hf_model``; returns where that is. On one rank.

    Tensors are read, merged with adapters and written one after the other, as by tools/merge_lora.py and
    tools/convert_checkpoint.py. All weights of a run with --bf16 are rounded to bf16 once; merged ones keep the dtype
    of the model's files.

    Args:
        config: of the run.
        iteration: of its last checkpoint.
        progress: called when it has come further.

    Raises:
        ConfigError, CheckpointError, OSError: the checkpoint cannot be read, or the folder not be written.
    """
    checkpoint = config.checkpoint
    assert checkpoint.save is not None, "checked before"
    save = Path(checkpoint.save)
    # Adapter checkpoints hold the adapters only: the model's weights are still in --load.
    source = Path(str(checkpoint.load)) if config.has_adapters else save / iteration_name(iteration)
    opened = open_checkpoint(source)
    opened = replace(opened, reference=companions_of(save) or opened.reference)
    folder, fresh = save / HF_MODEL, save / f"{HF_MODEL}.new"
    with opened.weights as weights:
        if config.has_adapters:
            weights = MergedWeights(weights, open_adapters(save / ADAPTER, opened), None)
        # Merged weights keep the dtype of the files of --load, so that an untouched tensor stays
        # equal to the bit.
        rounded = config.parallel.bf16 and not config.has_adapters
        if config.model.is_foreign:
            _write_foreign(opened, weights, fresh, torch.bfloat16 if rounded else None)
            return _in_place(folder, fresh)
        target = make_target("hf", replace(opened, weights=weights), dtype=torch.bfloat16 if rounded else None)
        # What a half-written folder has to agree with, for ``write`` to go on in it.
        options = [iteration, config.has_adapters, rounded]
        if fresh.exists():  # complete, and not in its place yet
            shutil.rmtree(fresh)
        write(weights, target, fresh, options=options, workers=_WORKERS, progress=lambda count: progress())
    return _in_place(folder, fresh)


def _write_foreign(opened: Opened, weights: Weights, fresh: Path, dtype: torch.dtype | None) -> None:
    # Here, because a model of this project's own needs none of that room.
    from smp.hf.run.export import write_folder

    if fresh.exists():  # of a run that ended while it wrote
        shutil.rmtree(fresh)
    write_folder(weights, fresh, opened.reference, dtype)


def _in_place(folder: Path, fresh: Path) -> Path:
    """Give ``fresh``, which is complete, its name."""
    try:
        # A folder cannot be renamed onto one that is not empty.
        if folder.exists():  # of an earlier end of this run
            shutil.rmtree(folder)
        fresh.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None
    return folder
