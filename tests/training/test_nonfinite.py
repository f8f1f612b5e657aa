"""A number that is not finite is named: its module, its micro-batch, its samples; or the weight or gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.flag_runs import Run, Watched, run_here


def told(run: Run) -> list[str]:
    return [line for line in run.out.splitlines() if "not finite on rank 0 on " in line]


def in_forward(name: str, sample: int, value: float) -> Any:
    """One token's output of a module becomes ``value`` where ``sample`` is in the micro-batch."""

    def hook(run: Watched) -> None:
        if "hooked" in run.__dict__:
            return
        run.hooked, state = True, {}
        model = run.trainer.model

        def before(module: Any, args: Any) -> None:
            index = args[0].token_index[:, 0] // args[0].input_ids.shape[1]
            state["row"] = [i for i, number in enumerate(index.tolist()) if number == sample]
            state["length"] = args[0].input_ids.shape[1]

        def after(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            if not state.get("row"):
                return output
            spoiled = output.clone()
            spoiled[state["row"][0] * state["length"] + 3, 1] = value
            return spoiled

        model.register_forward_pre_hook(before)
        model.get_submodule(name).register_forward_hook(after)

    return hook


@pytest.mark.parametrize(("name", "value"), [("layers.1.mlp.down", float("nan")), ("layers.0.attention", float("inf"))])
def test_module_micro_batch_and_sample_are_named(tmp_path: Path, name: str, value: float) -> None:
    """Sample 7 is the last one of the second step: row 1 of micro-batch 1."""
    clean = run_here(tmp_path / "names", "--train-iters 1")
    assert name in dict(clean_modules(tmp_path)), clean.out
    run = run_here(tmp_path / "a", "--train-iters 3", each_step=in_forward(name, 7, value))
    assert run.code == 0, run.err
    (line,) = told(run)
    assert line.startswith("iteration 2: ") and line.endswith(f"the output of {name} in micro-batch 1, samples 7"), line


def clean_modules(folder: Path) -> list[tuple[str, Any]]:
    found = run_here(folder / "probe", "--train-iters 1", probe=lambda run: list(run.trainer.model.named_modules()))
    return found.probed


def test_a_gradient_in_fp8_is_named_and_leaves_no_maxima(tmp_path: Path) -> None:
    """The step behind the one that was skipped is not skipped as well."""

    def hook(run: Watched) -> None:
        if "hooked" in run.__dict__:
            return
        run.hooked, model, first = True, run.trainer.model, [0]

        def before(module: Any, args: Any) -> None:
            first[0] = int(args[0].token_index[0, 0]) // args[0].input_ids.shape[1]

        def after(module: Any, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad and 8 <= first[0] < 12:  # samples of the third step
                output.register_hook(lambda gradient: gradient * float("inf"))

        model.register_forward_pre_hook(before)
        model.get_submodule("layers.1").register_forward_hook(after)

    fp8 = "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-emulate --train-iters 5"
    run = run_here(tmp_path, fp8, each_step=hook)
    (line,) = told(run)
    assert line.startswith("iteration 3: ") and "all outputs are finite" in line
    assert run.records("skipped iterations")[-1] == 1


def test_weights_and_gradients_are_named(tmp_path: Path) -> None:
    def weight(run: Watched) -> None:
        if run.trainer.progress.iteration == 1:
            with torch.no_grad():
                next(iter(run.trainer.model.parameters()))[0, 0] = float("nan")

    spoiled = run_here(tmp_path / "a", "--train-iters 3 --max-skipped-steps 9", each_step=weight)
    first = next(iter(spoiled.initial))
    (line,) = told(spoiled)  # once for a row of steps
    assert f"the weights of {first} (1 tensors)" in line and line.startswith("iteration 2: ")

    def gradient(run: Watched) -> None:
        if run.trainer.progress.iteration == 0 and "hooked" not in run.__dict__:
            run.hooked = True
            parameter = run.trainer.model.get_parameter(first)
            parameter.register_hook(lambda grad: grad * float("inf") if run.trainer.progress.iteration >= 1 else grad)

    spoiled = run_here(tmp_path / "b", "--train-iters 2", each_step=gradient)
    (line,) = told(spoiled)
    assert f"the gradient of {first} (" in line and line.endswith("all outputs are finite")
