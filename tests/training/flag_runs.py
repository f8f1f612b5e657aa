"""Real runs of ``pretrain_gpt.main`` in this process, observed: what the tests of the flags compare.

Nothing of the path from the command line to the last file is replaced; a subclass of the run only looks on. A
run of this size takes a tenth of a second, and one that was asked for twice is made once.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain_gpt
import smp.training.launch as launch_module
from smp.config import Config
from smp.training.run import Run as TrainingRun

TINY = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --vocab-size 97 "
    "--mock-data --seq-length 17 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --log-interval 1 "
    "--init-method-std 0.2 --lr 0.01 --no-tensorboard --no-progress-bar --log-dir logs"
)
"""The baseline. Initial weights are large, so that what happens inside of a block shows in the loss at once."""

Tensors = dict[str, torch.Tensor]
Hook = Callable[["Watched"], Any]
Test = TypeVar("Test", bound=Callable[..., Any])


def proves(*names: str) -> Callable[[Test], Test]:
    """Mark a test as the proof that these settings change a run."""

    def mark(test: Test) -> Test:
        test.proves = names  # type: ignore[attr-defined]
        return test

    return mark


@dataclass
class Run:
    """What one run did and left behind.

    Attributes:
        code: what ``main`` returned.
        folder: where it ran; ``files`` are relative to it.
        tokens: of each forward pass in training, in order; ``eval_passes`` counts the others.
        initial, final: parameters; ``grads`` are those of each optimizer step, after clipping.
        state: the optimizer's, by state key and parameter name.
        ops: operators that ran, where they were counted.
        probed: what the probe returned, called after the last step.
    """

    folder: Path
    code: int = -1
    out: str = ""
    err: str = ""
    config: Config = field(default_factory=Config)
    initial: Tensors = field(default_factory=dict)
    final: Tensors = field(default_factory=dict)
    grads: list[Tensors] = field(default_factory=list)
    state: dict[str, Tensors] = field(default_factory=dict)
    tokens: list[torch.Tensor] = field(default_factory=list)
    eval_passes: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    probed: Any = None

    def records(self, name: str) -> list[Any]:
        """The values of one name in metrics.jsonl, in order."""
        path = self.folder / self.config.logging.log_dir / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row[name] for row in rows if name in row]

    @property
    def losses(self) -> list[float]:
        return self.records("lm loss")

    @property
    def rates(self) -> list[float]:
        return self.records("learning rate")

    @property
    def status(self) -> dict[str, Any]:
        """How it ended, without where its time went."""
        path = self.config.logging.status_file or self.config.logging.log_dir + "/status.json"
        said = json.loads((self.folder / path).read_text())
        return {name: said[name] for name in ("status", "reason", "iteration")}

    @property
    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self.initial.items()}

    @property
    def errors(self) -> list[str]:
        """The lines that say what was wrong."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class CountOps(TorchDispatchMode):
    """Counts operators, those of the backward pass and of a replay too."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part; alone that is the whole."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach().clone()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Of a frozen one there is none."""
    if not parameter.requires_grad:
        return torch.zeros_like(parameter)
    assert parameter.grad is not None
    return parameter.grad


class Watched(TrainingRun):
    """A run that notes what it does. Every test gets a subclass of its own with these three set."""

    notes: Run
    each_step: Hook | None
    probe: Hook | None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.notes.config = self.config
        self.notes.initial = self._each(lambda p: p)
        self.trainer.model.register_forward_pre_hook(self._forward)
        self.trainer.optimizer.register_step_pre_hook(lambda *_: self.notes.grads.append(self._each(_gradient)))

    def _each(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
        return {name: local(pick(p)) for name, p in self.trainer.model.named_parameters()}

    def _forward(self, model: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if not model.training:
            self.notes.eval_passes += 1
            return
        self.notes.tokens.append(args[0].input_ids.clone())
        if self.each_step is not None:
            self.each_step(self)

    def run(self) -> Any:
        outcome = super().run()
        self.notes.final = self._each(lambda p: p)
        for name, p in self.trainer.model.named_parameters():
            for key, value in self.trainer.optimizer.state[p].items():
                if isinstance(value, torch.Tensor):
                    self.notes.state.setdefault(key, {})[name] = local(value)
        self.notes.probed = self.probe(self) if self.probe else None
        return outcome


@contextlib.contextmanager
def clean_process() -> Iterator[None]:
    """Undo what a run leaves in its process, which otherwise ends with it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    environment, folder = dict(os.environ), os.getcwd()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.use_deterministic_algorithms(False)
        if dist.is_initialized():
            dist.destroy_process_group()


def run_here(
    folder: Path,
    flags: str = "",
    *,
    base: str = TINY,
    each_step: Hook | None = None,
    probe: Hook | None = None,
    count_ops: bool = False,
) -> Run:
    """``pretrain_gpt.py base flags`` in ``folder``.

    Args:
        folder: where it runs, made if it is not there.
        flags: after the baseline's; a later flag wins over an earlier one.
        base: flags of the baseline.
        each_step: called before each forward pass in training.
        probe: called after the last step; its result is in ``probed``.
        count_ops: fill ``ops`` (which takes its time).
    """
    notes = Run(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kind = type("WatchedHere", (Watched,), {"notes": notes, "each_step": None, "probe": None})
    kind.each_step, kind.probe = _unbound(each_step), _unbound(probe)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(clean_process())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(launch_module, "Run", kind)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
            patch.delenv(name, raising=False)
        os.chdir(folder)
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        if count_ops:
            stack.enter_context(CountOps(notes.ops))
        try:
            notes.code = pretrain_gpt.main([*base.split(), *flags.split()])
        finally:
            notes.out, notes.err = out.getvalue(), err.getvalue()
    return notes


def _unbound(hook: Hook | None) -> Any:
    return None if hook is None else staticmethod(hook)


class Runs:
    """Runs by their flags, each made once and in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self._known = root, dict[tuple[str, bool], Run]()

    def __call__(self, flags: str = "", *, count_ops: bool = False) -> Run:
        """A run that is to succeed."""
        key = (flags, count_ops)
        if key not in self._known:
            self._known[key] = self.fresh(flags, count_ops=count_ops)
        run = self._known[key]
        assert run.code == 0, run.err
        return run

    def fresh(self, flags: str = "", **options: Any) -> Run:
        """A run of its own, however it ends."""
        return run_here(self.root / f"run{len(list(self.root.iterdir()))}", flags, **options)
