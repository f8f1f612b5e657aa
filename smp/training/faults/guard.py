"""Wrong numbers in a run: name where they come from, compare replicas, go back after a spike.

Every rank has one and calls the same methods at the same places.
"""

from __future__ import annotations

import dataclasses

from smp import checkpoint
from smp.training.errors import TrainingError
from smp.training.faults import replicas, snapshot
from smp.training.faults.nonfinite import find_origin
from smp.training.reporting.console import Console
from smp.training.reporting.goodput import Goodput
from smp.training.stopping import due
from smp.training.trainer import Step, StepResult, Trainer


class Guard:
    """Looks at finished steps and at the state, for one run.

    Args:
        console: tells the user, and keeps records.
        goodput: hears of steps that are taken back.
    """

    def __init__(self, trainer: Trainer, console: Console, goodput: Goodput) -> None:
        self._trainer, self._console, self._goodput = trainer, console, goodput
        self._settings = trainer.config.training
        self._rewinds = self._settings.spike_policy == "rewind"
        self._snapshot: snapshot.Snapshot | None = None
        self._compared = -1
        self._finished: list[tuple[Step, StepResult]] = []
        # A spike in the first steps needs a state to go back to.
        self.take_snapshot()

    @property
    def waits(self) -> bool:
        """Whether each step has to be finished before the next one is issued, because it may have to be taken back."""
        return self._rewinds or self._trainer.rerun is not None

    def finished(self, step: Step, result: StepResult) -> None:
        """Note a step that this rank has finished; ranks may be at different ones."""
        self._finished.append((step, result))

    def look(self, before: int) -> None:
        """Look at the steps that all ranks have finished, those up to iteration ``before``. (The checks are
        collective.)

        Raises:
            TrainingError: too many in a row were skipped.
        """
        ready = [one for one in self._finished if one[1].iteration <= before]
        self._finished = self._finished[len(ready) :]
        for step, result in ready:
            self._say_reruns()
            if not result.finite:
                self._name_origin(step, result)
            elif result.spike:
                self._on_spike(result)
            self._trainer.check_skipped(result)

    def after(self, iteration: int) -> None:
        """The periodic checks after the step of an iteration, once all steps before have been looked at."""
        if due(iteration, self._settings.check_replicas_interval):
            self.compare(iteration)
        if self._rewinds and due(iteration, self._settings.spike_rewind_steps):
            self.take_snapshot()

    def before_save(self, iteration: int) -> None:
        """Before a checkpoint: replicas are compared, and it becomes the state that a spike goes back to, as a resumed
        run has none older."""
        if self._settings.check_replicas_interval is not None and self._compared != iteration:
            self.compare(iteration)
        self.take_snapshot()
        if self._trainer.spikes is not None:
            self._trainer.progress.spikes = self._trainer.spikes.state()

    def take_snapshot(self) -> None:
        """Copy the state as it is now."""
        if not self._rewinds:
            return
        trainer, iteration = self._trainer, self._trainer.progress.iteration
        assert trainer.spikes is not None
        self._snapshot = snapshot.take(trainer.model, trainer.optimizer, iteration, trainer.spikes.state())
        self._goodput.snapshot()

    def compare(self, iteration: int) -> None:
        """Compare the replicas of the model and optimizer state.

        Raises:
            TrainingError: they differ, and there is no majority.
        """
        self._compared = iteration
        # Parameters and optimizer state, under the names of a checkpoint.
        tensors, _ = checkpoint.training_state(self._trainer.model, self._trainer.optimizer)
        with self._goodput.during("rerun"):
            found = replicas.differences(tensors)
        if not found:
            return
        lines = replicas.describe(found, iteration)
        # No majority of equal replicas to copy from.
        if any(one.source is None for one in found):
            raise TrainingError("; ".join(lines))
        replicas.repair(found, tensors)
        for line in lines:
            self._console.note(iteration, {"repaired tensors": float(len(found))}, f"ERROR: {line}")

    def _say_reruns(self) -> None:
        if (rerun := self._trainer.rerun) is not None:
            for line in rerun.said:
                self._console.say(f"ERROR: {line}; two of three passes agree, and their result is taken")
            rerun.said.clear()

    def _name_origin(self, step: Step, result: StepResult) -> None:
        """Name the origin of the first of several steps in a row that are not finite; the next likely have the same
        cause."""
        if result.skipped_in_a_row > 1 or step.batch is None:
            return
        # Collective: it runs the micro-batches once more.
        with self._goodput.during("rerun"):
            for line in find_origin(self._trainer, step.batch, step.num_valid):
                self._console.say(f"iteration {result.iteration}: {line}")

    def _on_spike(self, result: StepResult) -> None:
        policy, iteration = self._settings.spike_policy, result.iteration
        begin = (
            f"iteration {iteration}: spike: loss {result.loss:.4f}, grad norm {result.grad_norm:.3f}, "
            f"{result.spike:.1f} standard deviations above the last {self._settings.spike_window} steps"
        )
        done = {"warn": "trained on", "skip": "its update is dropped"}.get(str(policy)) or self._rewind(iteration)
        self._console.note(iteration, {"spike": result.spike}, f"WARNING: {begin}; {done}")

    def _rewind(self, iteration: int) -> str:
        trainer, kept = self._trainer, self._snapshot
        assert kept is not None and trainer.spikes is not None
        with self._goodput.during("rerun"):
            snapshot.restore(kept, trainer.model, trainer.optimizer)
        trainer.spikes.restore(kept.spikes)
        # The step of the spike itself was skipped and has been counted.
        trainer.progress.skipped_iterations += iteration - 1 - kept.iteration
        self._goodput.rewound(kept.iteration, iteration)
        # Iterations and data are not repeated: the restored state counts as that of the spike's iteration.
        self._snapshot = dataclasses.replace(kept, iteration=iteration)
        self._goodput.snapshot()
        return f"back to the weights of iteration {kept.iteration}, without the data since then"
