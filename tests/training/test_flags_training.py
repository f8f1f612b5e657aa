"""Every setting of the training, its checkpoints and its logs: steps made, files left, lines printed."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from smp.data.loader import BatchLoader
from tests.training.flag_runs import Run, Runs, Watched, proves


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("training"))


def lines(run: Run, text: str) -> list[str]:
    return [line for line in run.out.splitlines() if text in line]


@proves("train_iters")
def test_train_iters(runs: Runs) -> None:
    run = runs("--train-iters 2")
    assert len(run.losses) == len(run.grads) == 2
    assert run.status == {"status": "done", "reason": "2 iterations trained", "iteration": 2}


@proves("train_samples")
def test_train_samples_are_rounded_up_to_whole_steps(runs: Runs) -> None:
    run = runs("--train-iters none --train-samples 5")
    assert run.records("consumed samples") == [4, 8] and run.status["iteration"] == 2
    assert run.losses == runs("--train-iters 2").losses


@proves("seed")
def test_the_seed_gives_weights_data_and_dropout(runs: Runs) -> None:
    base, again, other = (runs.fresh(f"--hidden-dropout 0.1 --seed {seed}") for seed in (1, 1, 2))
    assert base.losses == again.losses
    assert all(torch.equal(p, again.final[name]) for name, p in base.final.items())
    assert not torch.equal(base.initial["embedding.weight"], other.initial["embedding.weight"])
    assert not torch.equal(base.tokens[0], other.tokens[0])


@proves("eval_interval", "eval_iters")
def test_evaluation(runs: Runs) -> None:
    """Every so many iterations and at the end, on so many global batches of two micro-batches each."""
    run = runs("--train-iters 5 --eval-interval 2 --eval-iters 3")
    assert [line.split("|")[0].split()[-1] for line in lines(run, "validation loss at")] == ["2", "4", "5"]
    assert len(run.records("validation loss")) == 3 and run.eval_passes == 3 * 3 * 2
    fewer = runs("--train-iters 5 --eval-interval 5 --eval-iters 1")
    assert len(fewer.records("validation loss")) == 1 and fewer.eval_passes == 2
    assert run.losses == fewer.losses == runs("--train-iters 5").losses  # looking changes nothing
    assert runs("--train-iters 5").eval_passes == 0


@proves("exit_interval")
def test_exit_interval_saves_and_stops_at_its_multiple(runs: Runs) -> None:
    run = runs("--train-iters 9 --exit-interval 4 --save ck")
    assert len(run.grads) == 4
    assert run.status == {"status": "requeue", "reason": "--exit-interval 4 reached", "iteration": 4}
    assert (run.folder / "ck/latest").read_text() == "iter_0000004\n"
    assert runs("--train-iters 4 --exit-interval 4 --save ck").status["status"] == "done"


@proves("exit_duration_in_mins")
def test_exit_duration_saves_and_stops_when_time_is_up(runs: Runs) -> None:
    """0.03 minutes are over after the third step, because each begins with a pause."""
    run = runs.fresh("--train-iters 99 --exit-duration-in-mins 0.03 --save ck", each_step=lambda _: time.sleep(0.4))
    iteration = len(run.grads)
    assert run.code == 0 and 1 <= iteration <= 3
    reason = "--exit-duration-in-mins 0.03 reached"
    assert run.status == {"status": "requeue", "reason": reason, "iteration": iteration}
    assert (run.folder / "ck/latest").read_text() == f"iter_{iteration:07d}\n"
    assert runs("--exit-duration-in-mins 99 --save ck").status["status"] == "done"


@proves("max_skipped_steps")
def test_max_skipped_steps(runs: Runs) -> None:
    for limit in (1, 3):
        run = runs.fresh(f"--train-iters 9 --lr 1e30 --max-skipped-steps {limit}")
        assert run.code == 1 and run.status["status"] == "failed"
        assert run.status["reason"].startswith(f"{limit} steps in a row")
        assert run.status["iteration"] == 1 + limit  # the first step is the one that spoils the weights
        assert len(run.grads) == 1


def put_in_any_order(run: Watched) -> None:
    """An operation that has no deterministic form."""
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))


@proves("deterministic_mode")
def test_deterministic_mode_refuses_what_is_not(runs: Runs) -> None:
    assert runs.fresh(each_step=put_in_any_order).code == 0
    with pytest.raises(RuntimeError, match="deterministic"):
        runs.fresh("--deterministic-mode", each_step=put_in_any_order)
    assert runs("--deterministic-mode").losses == runs().losses


@proves("profile", "profile_step_start", "profile_step_end")
@pytest.mark.parametrize(("start", "end"), [(1, 2), (2, 4)])
def test_profile_records_the_steps_from_start_to_before_end(runs: Runs, start: int, end: int) -> None:
    run = runs(f"--train-iters 6 --profile --profile-step-start {start} --profile-step-end {end}")
    trace = json.loads((run.folder / "logs/profile/rank_00000.trace.json").read_text())
    steps = [event for event in trace["traceEvents"] if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(steps) == end - start
    snapshot = "pickle" if torch.cuda.is_available() else "txt"
    assert f"logs/profile/rank_00000.memory.{snapshot}" in run.files
    assert not [name for name in runs().files if "profile" in name]


def test_profile_after_a_resume_records_its_first_steps(runs: Runs) -> None:
    saved = runs("--train-iters 9 --exit-interval 5 --save ck")
    run = runs(f"--train-iters 9 --load {saved.folder}/ck --profile --profile-step-start 2 --profile-step-end 4")
    trace = json.loads((run.folder / "logs/profile/rank_00000.trace.json").read_text())
    steps = [event for event in trace["traceEvents"] if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(steps) == 2


@proves("dry_run")
def test_a_dry_run_says_and_does_nothing_more(runs: Runs) -> None:
    run = runs("--dry-run --hidden-size 48 --save ck")
    assert "hidden_size: 48" in run.out and "mesh: 1 process\n" in run.out
    assert not run.files and not run.grads


def folders(run: Run, root: str = "ck") -> set[str]:
    return {path.name for path in (run.folder / root).glob("iter_*")}


@proves("save", "save_interval")
def test_checkpoints_are_saved_when_and_where_was_said(runs: Runs) -> None:
    assert folders(runs("--save ck")) == {"iter_0000003"}
    run = runs("--train-iters 5 --save other/ck --save-interval 2")
    assert folders(run, "other/ck") == {f"iter_{i:07d}" for i in (2, 4, 5)}
    assert (run.folder / "other/ck/latest").read_text() == "iter_0000005\n"
    assert runs().files == {f"logs/{name}" for name in ("goodput.json", "metrics.jsonl", "starts.jsonl", "status.json")}


@proves("load")
def test_load_goes_on_where_the_checkpoint_ended(runs: Runs) -> None:
    whole = runs("--train-iters 5")
    saved = runs("--train-iters 5 --exit-interval 3 --save ck")
    newest = runs(f"--train-iters 5 --load {saved.folder}/ck")
    named = runs(f"--train-iters 5 --load {saved.folder}/ck/iter_0000003")
    for run in (newest, named):
        assert run.losses == whole.losses[3:]
        assert all(torch.equal(p, whole.final[name]) for name, p in run.final.items())
        assert "at iteration 3" in lines(run, "resumed from")[0]
    moved = runs(f"--train-iters 3 --load {saved.folder}/ck --save elsewhere")  # with nothing to train it is copied
    assert folders(moved, "elsewhere") == {"iter_0000003"}
    assert runs("--train-iters 5 --load auto --save empty").losses == whole.losses  # auto: nothing there, a fresh start


@proves("log_dir")
def test_everything_but_checkpoints_goes_to_the_log_dir(runs: Runs) -> None:
    run = runs("--log-dir a/b --tensorboard --profile --profile-step-start 1 --profile-step-end 2")
    assert run.files and all(name.startswith("a/b/") for name in run.files)


def test_the_last_steps_are_reported_at_the_end(runs: Runs) -> None:
    run = runs("--train-iters 5 --log-interval 3")
    assert run.records("iteration") == [3, 5] and run.records("consumed samples") == [12, 20]
    each = runs("--train-iters 5").losses
    assert run.losses == pytest.approx([sum(each[:3]) / 3, sum(each[3:]) / 2])


def test_the_time_of_a_step_holds_the_wait_for_its_data(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = BatchLoader.__next__

    def slowly(loader: BatchLoader) -> object:
        time.sleep(0.3)
        return fetch(loader)

    monkeypatch.setattr(BatchLoader, "__next__", slowly)
    run = runs.fresh("--train-iters 2")
    assert all(waited >= 0.3 for waited in run.records("seconds waiting for data"))
    names = ("seconds per iteration", "seconds waiting for data", "tokens/s")
    for seconds, waited, rate in zip(*map(run.records, names), strict=True):
        assert seconds > waited and rate == pytest.approx(4 * 17 / seconds)


@proves("log_interval")
def test_log_interval_and_the_mean_over_it(runs: Runs) -> None:
    run, base = runs("--train-iters 4 --log-interval 2"), runs("--train-iters 4")
    assert len(lines(run, "lm loss: ")) == 2 and len(lines(base, "lm loss: ")) == 4
    mean = [(a + b) / 2 for a, b in zip(base.losses[::2], base.losses[1::2], strict=True)]
    assert run.losses == pytest.approx(mean)
    assert run.records("iteration") == [2, 4]


@proves("tensorboard")
def test_tensorboard_gets_what_the_metrics_file_gets(runs: Runs) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = runs("--tensorboard")
    events = accumulator.EventAccumulator(str(run.folder / "logs/tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("lm loss")]
    assert points == list(zip([1, 2, 3], run.losses, strict=True))
    assert not (runs().folder / "logs/tensorboard").exists()


@proves("wandb_project", "wandb_exp_name")
def test_wandb_gets_what_the_metrics_file_gets(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []
    run_of_theirs = types.SimpleNamespace(
        id="x",
        define_metric=lambda *a, **k: None,
        config=types.SimpleNamespace(update=lambda *a, **k: None),
        log=logged.append,
        finish=lambda: None,
    )
    module = types.ModuleType("wandb")
    module.init = lambda **options: started.append(options) or run_of_theirs  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert runs.fresh().code == 0 and not started
    run = runs.fresh("--wandb-project p --wandb-exp-name n")
    assert [(options["project"], options["name"]) for options in started] == [("p", "n")]
    assert [record["lm loss"] for record in logged] == run.losses


@proves("mlflow_experiment", "mlflow_run_name", "mlflow_tracking_uri")
def test_mlflow_gets_settings_and_what_the_metrics_file_gets(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    logged: list[Any] = []
    client = types.SimpleNamespace(
        get_experiment_by_name=lambda name: types.SimpleNamespace(experiment_id=f"of {name}"),
        create_run=lambda *a, **k: said.append((a, k)) or types.SimpleNamespace(info=types.SimpleNamespace(run_id="x")),
        get_run=lambda run: types.SimpleNamespace(data=types.SimpleNamespace(params={})),
        log_batch=lambda run, **values: logged.extend(entry for entries in values.values() for entry in entries),
        set_terminated=lambda run, status: said.append((run, status)),
    )
    module = types.ModuleType("mlflow")
    module.MlflowClient = lambda **options: said.append(options) or client  # type: ignore[attr-defined, func-returns-value]
    kinds = {kind: lambda *values: values for kind in ("Param", "Metric", "RunTag")}
    module.entities = types.SimpleNamespace(**kinds)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    assert runs.fresh().code == 0 and not said
    run = runs.fresh("--mlflow-experiment e --mlflow-run-name n --mlflow-tracking-uri file:u")
    assert said == [{"tracking_uri": "file:u"}, (("of e",), {"run_name": "n"}), ("x", "FINISHED")]
    assert ("num_layers", "2") in logged
    assert [entry[1] for entry in logged if entry[0] == "lm loss"] == run.losses


@proves("progress_bar")
def test_the_progress_bar_is_on_stderr(runs: Runs) -> None:
    run = runs("--progress-bar")
    assert "training: " in run.err and "3/3" in run.err and "training: " not in run.out
    assert "training: " not in runs().err


@proves("status_file")
def test_the_status_file_is_where_it_was_asked_for(runs: Runs) -> None:
    run = runs("--status-file elsewhere/why.json")
    assert json.loads((run.folder / "elsewhere/why.json").read_text())["status"] == "done"
    assert "logs/status.json" not in run.files
