"""The checkpoint folder of a run: locked for this run, loaded from at the start, saved to during training."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from smp import checkpoint
from smp.checkpoint import CheckpointError, Retention
from smp.checkpoint.folders.folder import Folder, open_folder, same_folder
from smp.checkpoint.folders.latest import complete, iteration_name, iteration_of
from smp.checkpoint.folders.lock import LockLostError, RunLock
from smp.checkpoint.folders.retention import publish
from smp.checkpoint.format.entries import Manifest
from smp.checkpoint.format.manifest import MANIFEST, read_manifest
from smp.checkpoint.peer_files import PeerFolder
from smp.checkpoint.recovery import clean, load_newest, load_step
from smp.config import CheckpointConfig, Config, ConfigError
from smp.config.command_line.command import in_one_line
from smp.config.command_line.fields import flag_of
from smp.config.resolve import first_start
from smp.convert.changes import changes_of_files, other_than_trained
from smp.convert.describe import described_model
from smp.convert.huggingface.config import is_hf_folder
from smp.convert.huggingface.foreign import implementation
from smp.models.protocol import Model
from smp.parallel.agree import gather, on_rank_zero
from smp.training.checkpoints.foreign_weights import fill_from_folder
from smp.training.checkpoints.origin import Origin, has_begun, resuming
from smp.training.checkpoints.persistence import Kept, load_training, run_state, what_is_trained
from smp.training.stopping import SaveClock
from smp.training.trainer import Progress

Loaded = TypeVar("Loaded")
_NOTHING: Mapping[str, torch.Tensor] = {}
_NOTHING_ELSE = Kept()


class RunCheckpoints:
    """Loads, saves and prunes a run's checkpoints. Every rank has one and calls the same methods in the same order.

    Args:
        in_memory: what this run has left in memory when it was started before, if it has.
        in_memory_again: what it has without files that turn out to be damaged; nothing, if none is.

    Raises:
        ConfigError: --save cannot be written, or another job uses it.
    """

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None],
        in_memory: tuple[PeerFolder, Manifest] | None = None,
        in_memory_again: Callable[[], tuple[PeerFolder, Manifest] | None] = lambda: None,
    ) -> None:
        self.config, self.say, self._in_memory, self._in_memory_again = config, say, in_memory, in_memory_again
        self.from_memory = False
        self._origin = Origin.asked(config)
        self.root = None if config.checkpoint.save is None else open_folder(config.checkpoint.save)
        # Iteration of the newest checkpoint that --save holds of this state; -1: none.
        self.saved_at = -1
        self._lock: RunLock | None = None
        # ``_made_root``: a run that fails at the start removes the folder again, if it is empty.
        self._made_root = self._goes_on = False
        self._saver: checkpoint.AsyncSaver | None = None
        self._clock = SaveClock(config.checkpoint)
        self._failure, self._is_last, self._told_size = "", False, False
        self._kept = _NOTHING_ELSE
        self.carried: dict[str, torch.Tensor] = {}
        """The state of what makes batches, from the checkpoint that was loaded."""
        if self.root is None:
            return
        # Rank 0 takes the lock and cleans up; an error there is raised on all ranks.
        try:
            for line in on_rank_zero(self._take_root, CheckpointError):
                say(line)
        # What is wrong with the folder before training is a matter of the settings.
        except CheckpointError as error:
            raise ConfigError(f"--save {error}") from error
        try:
            self._goes_on = self._has_begun()
            if self._goes_on:
                self.config = resuming(config)
            # A copy in memory means that the job was started before: what is in --save is its own.
            if in_memory is None:
                self._refuse_what_is_there()
        except BaseException:
            self.close()
            raise
        if config.checkpoint.async_save:
            # Made before training: starting the process takes seconds.
            self._saver = checkpoint.AsyncSaver()

    def _take_root(self) -> list[str]:
        assert self.root is not None
        try:
            self._made_root = not self.root.exists()
            self.root.make()
            # Before cleaning up: what looks like the remains of a crash may be another job's save.
            self._lock = RunLock(self.root, self.say)
            try:
                return clean(self.root)
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise CheckpointError(f"{self.root}: {error}") from error

    def _has_begun(self) -> bool:
        """Whether this command was started before and has saved: it then continues from there.

        Raises:
            ConfigError: what was saved began at the same place, and trains something else.
        """
        root, origin = self.root, self._origin
        if root is None or origin is None or self.config.resume_from == "auto":
            return False
        trained = what_is_trained(self.config)
        # One rank lists, so that all decide the same: a network file system may show nodes different listings.
        other = on_rank_zero(lambda: has_begun(root, origin, trained), CheckpointError)
        if other:
            flags = ", ".join(map(flag_of, other))
            raise ConfigError(
                f"--save {root} holds checkpoints of a run that began from the same --load {origin.load} with other "
                f"{flags}: {self._how_to_resume} continues from there; otherwise give another --save"
            )
        return other is not None

    @property
    def _how_to_resume(self) -> str:
        return "--load auto" if self.config.objective is None else "--resume"

    def load(self, model: Model, optimizer: torch.optim.Optimizer, kept: Kept = _NOTHING_ELSE) -> Progress:
        """Fill model, optimizer and the ``kept`` tensors, which are saved from now on, from what --load names; returns
        the progress to start from.

        Raises:
            ConfigError: there is no such checkpoint, it is of another architecture, or --save holds newer ones.
            CheckpointError: it cannot be read, or all that there are are damaged.
        """

        # Called for one checkpoint after the other, newest first, until one is not damaged.
        def restore(folder: Folder, manifest: Manifest) -> tuple[Progress, list[str]]:
            self.carried.clear()  # of one that turned out to be damaged
            loaded = load_training(folder, manifest, self.config, model, optimizer, self.carried, kept)
            if self.config.resume_from == "auto" or self._origin is None:  # its own checkpoints know where it began
                self._origin = Origin.noted(manifest.extra) or self._origin
            return loaded

        self._kept = kept
        if (progress := self._load_from_memory(model, optimizer)) is not None:
            return progress
        load = self.config.resume_from
        if self._goes_on:
            assert self._origin is not None
            self.say(f"--save {self.root} holds this run, which started from --load {self._origin.load}: continuing")
        if load is not None and self._is_hf(load):
            return self._load_hf(load, model)
        found = self._load(restore)
        progress, notes = found[1] if found is not None else (Progress(), [])
        if found is not None and self.config.checkpoint.finetune:
            self.say(f"weights from {found[0]}; optimizer and counters start afresh")
        elif found is not None:
            self.say(f"resumed from {found[0]} at iteration {progress.iteration}")
        for line in notes:
            self.say(line)
        # After loading: only now is the iteration known that --save is compared with.
        self._look_for_newer(progress.iteration)
        return progress

    def _load_from_memory(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress | None:
        """Load the newest copy in the nodes' memory, unless --save has a newer checkpoint; None where no copy is
        complete."""
        if self._in_memory is None:
            return None
        folder, manifest = self._in_memory
        root, iteration = self.root, int(manifest.extra["progress"]["iteration"])
        # complete() lists the newest first.
        newest = [] if root is None else on_rank_zero(lambda: complete(root)[:1], CheckpointError)
        if newest and iteration_of(newest[0]) > iteration:
            self.say(f"--save {root} holds {newest[0]}, newer than the copy in memory of iteration {iteration}")
            self.config = resuming(self.config)  # what is there is this job's: its copy says that it was started before
            return None
        # With optimizer and counters, also where the first start took only weights from --load.
        settings = replace(self.config.checkpoint, finetune=False, load_optim=True)
        try:
            config = replace(self.config, checkpoint=settings)
            progress, notes = load_training(folder, manifest, config, model, optimizer, self.carried)
        except CheckpointError as error:
            self.carried.clear()
            self.say(f"WARNING: the copy in memory cannot be read: {error}")
            # Each file has a twin on the next node.
            if (again := self._in_memory_again()) is not None:
                self._in_memory = again
                return self._load_from_memory(model, optimizer)
            if newest:
                self.config = resuming(self.config)
            # Back to the ordinary way: --load, or what --save holds.
            return None
        self._origin, self.from_memory = Origin.noted(manifest.extra) or self._origin, True
        if newest and iteration_of(newest[0]) == iteration:
            self.saved_at = iteration
        for line in [f"resumed from the memory of the nodes at iteration {iteration}", *notes]:
            self.say(line)
        return progress

    def _load_hf(self, load: str, model: Model) -> Progress:
        """Weights of a Hugging Face folder: there is nothing else in it to continue from."""
        if self.config.checkpoint.ckpt_step is not None:
            raise ConfigError(f"--ckpt-step {self.config.checkpoint.ckpt_step}: --load {load} is a Hugging Face folder")
        notes = fill_from_folder(model, load)
        self.say(f"weights from the Hugging Face folder {load}; optimizer and counters start afresh")
        if changed := changes_of_files(described_model(load, implementation(self.config.model)), self.config.model):
            notes.append(other_than_trained(load, changed))
        for line in notes:
            self.say(f"note: {line}")
        self._look_for_newer(0)
        return Progress()

    def _load(self, restore: Callable[[Folder, Manifest], Loaded]) -> tuple[Folder, Loaded] | None:
        settings, load = self.config.checkpoint, self.config.resume_from
        if load is None:
            return None
        step = None if load == "auto" else settings.ckpt_step  # a fine-tuning run's is that of the model in --load
        root = self.root if load == "auto" else open_folder(load)
        assert root is not None
        # A manifest lies in a checkpoint's own folder; a run's folder has one folder per iteration.
        if on_rank_zero(lambda: root.size(MANIFEST) is not None, CheckpointError):
            if step is not None:
                raise ConfigError(f"--ckpt-step {step}: --load {load} is one checkpoint already")
            return root, restore(root, on_rank_zero(lambda: read_manifest(root), CheckpointError))
        if step is not None:
            try:
                return load_step(root, iteration_name(step), restore)
            except CheckpointError as error:
                raise ConfigError(f"--ckpt-step {step}: {error}") from error
        # Damaged ones are renamed in the own folder only: another run's is read and left alone.
        own = self.root is not None and same_folder(root, self.root)
        found = load_newest(root, restore, may_rename=own, say=self.say)
        if found is None and load != "auto":
            if settings.exit_on_missing_checkpoint:
                raise ConfigError(f"--load {load} holds no complete checkpoint{first_start(self.config)}")
            self.say(f"WARNING: --load {load} holds no complete checkpoint: starting from scratch")
        return found

    def _is_hf(self, load: str) -> bool:
        return load != "auto" and on_rank_zero(lambda: is_hf_folder(load), CheckpointError)

    def _refuse_what_is_there(self) -> None:
        """Refuse checkpoints in --save that this run would mix with its own, as far as they tell before one is loaded:
        building a large model takes minutes."""
        load = self.config.resume_from
        if load == "auto":
            return
        foreign = load is not None and self._is_hf(load)
        if load is not None and not foreign:
            self._refuse_another_history(open_folder(load))
        if load is None or foreign or self.config.checkpoint.finetune:
            self._look_for_newer(0)

    def _refuse_another_history(self, source: Folder) -> None:
        """Raise ConfigError if a run that starts from ``source`` finds other checkpoints in --save."""
        if self.root is None or same_folder(source, self.root) or same_folder(source, self.root.child(source.name)):
            return
        root = self.root
        if names := on_rank_zero(lambda: complete(root), CheckpointError):
            raise ConfigError(
                f"--save {root} holds {names[0]} of another run than --load {source}: --load auto continues from "
                "there; otherwise give another --save"
            )

    def _look_for_newer(self, iteration: int) -> None:
        """Remember whether --save holds this iteration. Newer checkpoints are refused: two histories in one folder
        would be mixed up by the next restart."""
        if self.root is None:
            return
        root = self.root
        # One rank looks, so that all decide the same: listings of a network file system may differ between nodes.
        newest = on_rank_zero(lambda: complete(root)[:1], CheckpointError)
        if newest and iteration_of(newest[0]) == iteration:
            self.saved_at = iteration
        if newest and iteration_of(newest[0]) > iteration:
            raise ConfigError(
                f"--save {root} holds {newest[0]}, which is newer than where this run starts, iteration {iteration}: "
                f"{self._how_to_resume} continues from there; otherwise give another --save or move it away"
            )

    def due(self, iteration: int) -> bool:
        """Whether it is time to save, the same on all ranks."""
        return self._clock.due(iteration, self._saver is not None and self._saver.busy)

    def poll(self) -> None:
        """After each step: hear of a background save. A failed one is said; training continues without it."""
        if self._saver is not None and self._saver.busy:
            self._attempt(self._saver.poll)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        validation_loss: float | None,
        carried: Mapping[str, torch.Tensor] = _NOTHING,
    ) -> None:
        """Save, or begin to. A failure is said; training continues without that checkpoint.

        Raises:
            LockLostError: another job has taken the folder.
        """
        # At most one save is under way.
        self._wait()
        if (root := self.root) is None:
            return
        arguments = run_state(self.config, model, optimizer, progress, validation_loss, self._origin)
        arguments["state"] |= {**carried, **self._kept.tensors}
        arguments["logical_rows"] |= self._kept.logical_rows
        iteration = progress.iteration
        self._tell_size(root, arguments["state"])
        # Noted before it is known to succeed; a failure takes it back.
        started, self.saved_at = time.perf_counter(), iteration
        self._attempt(lambda: self._write(root, root.child(iteration_name(iteration)), arguments))
        self._clock.saved(time.perf_counter() - started)

    def _tell_size(self, root: Folder, state: Mapping[str, torch.Tensor]) -> None:
        """Before the first save, tell how large a checkpoint is and how much space there is."""
        if self._told_size:
            return
        self._told_size = True
        # Before the first one is written, so that a disk that is too small shows early.
        own = {name: tensor.numel() * tensor.itemsize for name, tensor in state.items()}  # of a DTensor all of it
        sizes = {name: size for part in gather(own) for name, size in part.items()}  # pipeline ranks hold parts
        free = "" if root.local is None else f"; {shutil.disk_usage(root.local).free / 1e9:,.3f} GB are free there"
        self.say(f"a checkpoint in {root} takes {sum(sizes.values()) / 1e9:,.3f} GB{free}")

    def finish(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        validation_loss: float | None,
        carried: Mapping[str, torch.Tensor] = _NOTHING,
    ) -> None:
        """Return when the last iteration is saved, or raise CheckpointError."""
        self._wait()
        # The last step was saved already, by --save-interval.
        if self.root is None or self.saved_at == progress.iteration:
            return
        self._is_last = True
        self.save(model, optimizer, progress, validation_loss, carried)
        self._wait()
        if self.saved_at != progress.iteration:
            raise CheckpointError(f"the last checkpoint could not be saved: {self._failure}")

    def _wait(self) -> None:
        if self._saver is not None:
            self._attempt(self._saver.wait)

    def _write(self, root: Folder, folder: Folder, arguments: dict[str, Any]) -> checkpoint.Saved | None:
        started = time.perf_counter()
        keep, lock = _retention(self.config.checkpoint), self._lock
        check = (lambda: None) if lock is None else lock.check
        # Before anything is written: another job may have the folder by now.
        on_rank_zero(check, CheckpointError)
        # Async: the folder is published, and old ones pruned, by the writer once the files are
        # complete.
        if self._saver is not None:
            arguments |= {"latest_in": root, "retention": keep}
            checkpoint.async_save(folder=folder, saver=self._saver, lock=lock, **arguments)
            return None
        notes = checkpoint.save(folder=folder, lock=lock, **arguments)
        # Rank 0 alone publishes, after ``save`` has returned on all ranks: every file is there.
        notes = on_rank_zero(lambda: notes + publish(root, folder, keep, check), CheckpointError)
        return checkpoint.Saved(folder, time.perf_counter() - started, tuple(notes))

    def _attempt(self, action: Callable[[], checkpoint.Saved | None]) -> None:
        try:
            saved = action()
        except LockLostError:
            # Two jobs in one folder would destroy each other's checkpoints: this one ends.
            raise
        except CheckpointError as error:
            # -1: ``finish`` tries the last iteration again.
            self._failure, self.saved_at = str(error), -1
            if not self._is_last:  # which is an error of the run
                self.say(f"ERROR: {error}; training continues without this checkpoint")
            return
        if saved is not None:
            self.say(f"saved {saved.folder} in {saved.seconds:.1f} s")
            for line in saved.notes:
                self.say(line)

    def close(self) -> None:
        """Wait for a background save without the other ranks, and release the folder. A run that could not start
        removes the folder it has made."""
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            if self._lock is not None:
                self._lock.release()
            # Only an empty folder, and best effort: the run is over either way.
            with contextlib.suppress(OSError):
                if self._made_root and self.root is not None and not self.root.names():
                    self.root.remove()


def try_save(config: Config, say: Callable[[str], None]) -> None:
    """Take the folder of --save and give it back, in one process before there is a group of them: what refuses the run
    is found before the data are read. Arguments and errors as of :class:`RunCheckpoints`."""
    # Without the writer process, which takes seconds to start.
    no_writer = replace(config, checkpoint=replace(config.checkpoint, async_save=False))
    try:
        RunCheckpoints(no_writer, say).close()
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"--save {config.checkpoint.save}: {in_one_line(error)}") from error


def _retention(settings: CheckpointConfig) -> Retention | None:
    last, every, best = settings.keep_last_k, settings.save_retain_interval, settings.keep_best_k
    # --keep-best-k or an interval alone still keeps the newest two: with one, a damaged newest
    # would leave none.
    return None if last is every is best is None else Retention(last or 2, every, best)
