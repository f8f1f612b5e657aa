"""Every setting of loading and keeping checkpoints: what is loaded, what is left, what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smp.checkpoint import save
from smp.checkpoint.background.writer_process import WriterProcess
from smp.checkpoint.folders.lock import Holder
from smp.training.trainer import Trainer
from tests.checkpoint.test_folder import rewrite
from tests.training.flag_runs import Hook, Run, Runs, Watched, proves


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def saved(runs: Runs) -> Run:
    """Checkpoints of iterations 2, 4 and 5."""
    return runs("--train-iters 5 --save ck --save-interval 2")


@pytest.fixture
def ck(saved: Run, tmp_path: Path) -> Path:
    """A copy of them to spoil."""
    return Path(shutil.copytree(saved.folder / "ck", tmp_path / "ck"))


def lines(run: Run, text: str) -> list[str]:
    return [line for line in run.out.splitlines() if text in line]


def folders(root: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in root.glob("iter_*/manifest.json"))


def same(one: Run, other: Run) -> bool:
    return all(torch.equal(p, other.final[name]) for name, p in one.final.items())


@proves("ckpt_step")
def test_ckpt_step_loads_an_older_one(runs: Runs, saved: Run) -> None:
    run = runs(f"--train-iters 5 --load {saved.folder}/ck --ckpt-step 2")
    assert "at iteration 2" in lines(run, "resumed from")[0]
    assert run.losses == saved.losses[2:] and same(run, saved)
    missing = runs.fresh(f"--load {saved.folder}/ck --ckpt-step 3")
    assert missing.code == 2 and "--ckpt-step 3" in missing.errors[0] and "iter_0000005, iter_0000004" in missing.err
    one = runs.fresh(f"--load {saved.folder}/ck/iter_0000004 --ckpt-step 4")
    assert one.code == 2 and "is one checkpoint already" in one.errors[0]


@proves("finetune")
def test_finetune_takes_only_the_weights(runs: Runs, saved: Run) -> None:
    run = runs(f"--train-iters 2 --load {saved.folder}/ck --finetune --save new")
    assert all(torch.equal(p, saved.final[name]) for name, p in run.initial.items())
    assert run.records("iteration") == [1, 2] and run.records("consumed samples") == [4, 8]
    assert all(int(step) == 2 for step in run.state["step"].values())
    assert torch.equal(run.tokens[0], saved.tokens[0])
    assert folders(run.folder / "new") == [2]


@proves("load_optim")
def test_no_load_optim_starts_the_optimizer_afresh(runs: Runs, saved: Run) -> None:
    run = runs(f"--train-iters 7 --load {saved.folder}/ck --no-load-optim")
    assert run.records("iteration") == [6, 7] and run.records("consumed samples") == [24, 28]
    assert all(int(step) == 2 for step in run.state["step"].values())
    whole = runs(f"--train-iters 7 --load {saved.folder}/ck")
    assert run.losses[0] == whole.losses[0] and not same(run, whole)
    assert all(int(step) == 7 for step in whole.state["step"].values())


def test_state_of_another_optimizer_is_refused_in_one_line(runs: Runs, saved: Run) -> None:
    run = runs.fresh(f"--train-iters 7 --load {saved.folder}/ck --optimizer sgd")
    message = "holds the optimizer state of --optimizer adam, this run has --optimizer sgd without --sgd-momentum"
    assert run.code == 2 and len(run.errors) == 1 and message in run.errors[0]
    assert runs(f"--train-iters 7 --load {saved.folder}/ck --optimizer sgd --no-load-optim").code == 0


def test_another_batch_size_is_said(runs: Runs, saved: Run) -> None:
    run = runs(f"--train-iters 7 --load {saved.folder}/ck --global-batch-size 8")
    assert "note: global_batch_size was 4 in the checkpoint and is 8 now" in run.out
    assert run.records("consumed samples") == [28, 36]


def test_another_ramp_of_the_batch_is_said(runs: Runs, saved: Run) -> None:
    run = runs(f"--train-iters 7 --load {saved.folder}/ck --rampup-batch-size 2 2 40")
    assert lines(run, "note: ramp") == ["note: rampup_batch_size was None in the checkpoint and is 2 2 40 now"]


def test_every_setting_that_changes_the_course_of_a_resumed_run_is_said(runs: Runs, saved: Run) -> None:
    run = runs(f"--train-iters 7 --load {saved.folder}/ck --lr 1e-4 --clip-grad 0 --bf16")
    changed = [("lr", 0.01, 0.0001), ("lr_decay_iters", 5, 7), ("clip_grad", 1.0, 0.0), ("bf16", False, True)]
    assert lines(run, "note: ") == [f"note: {name} was {a} in the checkpoint and is {b} now" for name, a, b in changed]


@proves("exit_on_missing_checkpoint")
def test_a_missing_checkpoint_is_an_error_unless_it_may_be_missing(runs: Runs, tmp_path: Path) -> None:
    for load in (tmp_path / "absent", tmp_path):
        assert runs.fresh(f"--load {load}").code == 2
        run = runs.fresh(f"--load {load} --no-exit-on-missing-checkpoint")
        assert run.losses == runs().losses and "starting from scratch" in lines(run, "WARNING")[0]


@proves("async_save")
def test_async_save_writes_what_a_plain_save_writes(runs: Runs, saved: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process: this one never submits more than the state, and there is one writer from start to end."""
    pids: list[int] = []
    submit = WriterProcess.submit
    monkeypatch.setattr(WriterProcess, "submit", lambda self, *a: (pids.append(self.pid), submit(self, *a))[1])
    run = runs.fresh("--train-iters 5 --save ck --save-interval 2 --async-save")
    assert run.code == 0 and len(pids) == 3 and len(set(pids)) == 1
    assert len(lines(run, "saved ck/iter_")) == 3 and run.losses == saved.losses
    for name in ("latest", *(f"iter_000000{i}/shard_00000.safetensors" for i in (2, 4, 5))):
        assert (run.folder / "ck" / name).read_bytes() == (saved.folder / "ck" / name).read_bytes()
    assert run.files >= {"ck/iter_0000005/manifest.json"} and not [f for f in run.files if "lock" in f or "tmp" in f]


@proves("keep_last_k")
def test_keep_last_k(runs: Runs) -> None:
    run = runs("--train-iters 7 --save ck --save-interval 1 --keep-last-k 3")
    assert folders(run.folder / "ck") == [5, 6, 7] and len(lines(run, "removed ck/iter_")) == 4
    background = runs("--train-iters 7 --save ck --save-interval 1 --keep-last-k 3 --async-save")
    assert folders(background.folder / "ck") == [5, 6, 7]
    assert {path.name for path in (background.folder / "ck").iterdir()} == {
        *("latest", "iter_0000005", "iter_0000006", "iter_0000007")
    }


@proves("save_hf")
def test_save_hf(runs: Runs) -> None:
    run = runs("--train-iters 2 --save ck --save-hf")
    weights = load_file(run.folder / "ck/hf_model/model.safetensors")
    assert torch.equal(weights["model.norm.weight"], run.final["final_norm.weight"])
    assert len(lines(run, "Hugging Face folder: ")) == 1
    assert not (runs("--train-iters 2 --save ck").folder / "ck/hf_model").exists()
    stopped = runs("--train-iters 2 --save ck --save-hf --exit-interval 1")
    assert len(lines(stopped, "note: --save-hf: no Hugging Face folder yet")) == 1
    assert not (stopped.folder / "ck/hf_model").exists()
    refused = runs.fresh("--train-iters 2 --save ck --save-hf --parallel-residual --norm-placement sandwich")
    assert refused.code == 2 and not refused.losses, "before it trains"


@proves("save_retain_interval")
def test_save_retain_interval(runs: Runs) -> None:
    run = runs("--train-iters 8 --save ck --save-interval 1 --save-retain-interval 3")
    assert folders(run.folder / "ck") == [3, 6, 7, 8]


@proves("keep_best_k")
def test_keep_best_k_by_validation_loss(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [4.0, 1.0, 3.0, 2.0, 6.0, 5.0]
    monkeypatch.setattr(Trainer, "evaluate", lambda self, *_: losses[self.progress.iteration - 1])
    run = runs.fresh("--train-iters 6 --save ck --save-interval 1 --keep-best-k 2 --eval-interval 1")
    assert run.code == 0 and folders(run.folder / "ck") == [2, 4, 5, 6]
    extra = json.loads((run.folder / "ck/iter_0000002/manifest.json").read_text())["extra"]
    assert extra["validation_loss"] == 1.0


@proves("save_mtbf_hours")
def test_save_mtbf_hours_saves_after_the_first_iteration_and_then_by_the_clock(runs: Runs) -> None:
    rarely = runs("--train-iters 6 --save ck --save-mtbf-hours 1e6")
    assert folders(rarely.folder / "ck") == [1, 6]
    often = runs("--train-iters 6 --save ck --save-mtbf-hours 1e-9")
    assert folders(often.folder / "ck") == [1, 2, 3, 4, 5, 6]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["--load auto", "--load {ck}"])
def test_a_damaged_checkpoint_is_set_aside_and_the_run_ends_the_same(
    runs: Runs, saved: Run, ck: Path, how: str
) -> None:
    flip(ck / "iter_0000005/shard_00000.safetensors")
    flip(ck / "iter_0000004/manifest.json")
    run = runs.fresh(f"--train-iters 5 --save {ck} {how.format(ck=ck)}")
    assert run.code == 0 and run.losses == saved.losses[2:] and same(run, saved)
    assert len(lines(run, "is damaged")) == 2 and folders(ck) == [2, 5]
    assert len(list(ck.glob("damaged_iter_*/DAMAGED.txt"))) == 2


def test_a_damaged_checkpoint_of_another_run_is_passed_over(runs: Runs, saved: Run, ck: Path) -> None:
    flip(ck / "iter_0000005/shard_00000.safetensors")
    run = runs.fresh(f"--train-iters 5 --load {ck} --save new")
    assert run.code == 0 and run.losses == saved.losses[4:] and folders(run.folder / "new") == [5]
    assert lines(run, "iter_0000005 is passed over") and folders(ck) == [2, 4, 5]


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(runs: Runs, ck: Path) -> None:
    flip(ck / "iter_0000004/shard_00000.safetensors")
    for flags in (f"--load {ck} --ckpt-step 4", f"--load {ck}/iter_0000004"):
        run = runs.fresh(f"{flags} --status-file why.json")
        assert run.code == 1 and "checksum" in run.errors[0] and folders(ck) == [2, 4, 5]
        reason = run.errors[0].removeprefix("error: ")
        status = json.loads((run.folder / "why.json").read_text())
        assert status == {"status": "failed", "reason": reason, "iteration": 0}, "no other command would help"


def test_two_histories_do_not_share_a_folder(runs: Runs, ck: Path) -> None:
    for flags in ("", f"--load {ck} --ckpt-step 2"):
        run = runs.fresh(f"--train-iters 9 --save {ck} {flags}")
        assert run.code == 2 and "iter_0000005, which is newer than where this run starts" in run.errors[0]
        assert flags or "kernels" not in run.out, "found before the model is built"
    assert folders(ck) == [2, 4, 5] and not (ck / "lock").exists()


def test_a_folder_in_use_is_refused(runs: Runs, ck: Path) -> None:
    refused: list[Run] = []

    def second(run: Watched) -> None:
        held = json.loads((ck / "lock").read_text())
        refused.append(held)

    assert runs.fresh(f"--train-iters 6 --save {ck} --load auto", each_step=second).code == 0 and refused
    (ck / "lock").write_text(json.dumps(refused[0]))  # this process is alive: the lock is that of a running job
    run = runs.fresh(f"--save {ck} --load auto")
    assert run.code == 2 and f"--save {ck} is in use by process" in run.errors[0]


def test_leftovers_of_a_crash_are_removed_at_the_start(runs: Runs, ck: Path) -> None:
    shutil.copytree(ck / "iter_0000004", ck / "iter_0000006")
    (ck / "iter_0000006/manifest.json").unlink()
    run = runs.fresh(f"--train-iters 5 --save {ck} --load auto")
    assert run.code == 0 and "removed 1 files" in lines(run, "iter_0000006")[0] and not (ck / "iter_0000006").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ckpt-step 3", "--ckpt-step 3 says how to load: give --load"),
        ("--save file:///x", "--save file:///x: give the path alone, without file://"),
        ("--load file:///x", "--load file:///x: give the path alone, without file://"),
        ("--finetune", "--finetune says how to load: give --load"),
        ("--no-load-optim", "--no-load-optim says how to load: give --load"),
        ("--save x --load auto --finetune", "--finetune would undo the progress at every restart"),
        ("--save x --load auto --no-load-optim", "--no-load-optim would undo the progress at every restart"),
        ("--save x --load auto --ckpt-step 3", "--ckpt-step 3 would undo the progress at every restart"),
        ("--save . --load . --finetune", "--finetune starts at iteration 0"),
        ("--async-save", "--async-save needs --save"),
        ("--keep-last-k 3", "--keep-last-k 3 needs --save"),
        ("--keep-last-k 1 --save x", "--keep-last-k 1 leaves nothing to fall back to"),
        ("--keep-best-k 1 --save x", "needs --eval-interval"),
        ("--save-interval 2 --save-mtbf-hours 3 --save x", "are both given"),
    ],
)
def test_flags_that_cannot_work_together(runs: Runs, flags: str, message: str) -> None:
    run = runs.fresh(flags)
    assert run.code == 2 and len(run.errors) == 1 and message in run.errors[0] and not run.files


def full_disk(numbers: set[int]) -> Hook:
    """No room for data during the saves after these iterations."""
    plain = os.posix_fallocate

    def hook(run: Watched) -> None:
        full = run.trainer.progress.iteration + 1 in numbers

        def allocate(*args: int) -> None:
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            plain(*args)

        os.posix_fallocate = allocate

    return hook


def test_training_goes_on_when_the_disk_is_full(runs: Runs, saved: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", os.posix_fallocate)  # put back at the end
    run = runs.fresh("--train-iters 5 --save ck --save-interval 2", each_step=full_disk({2}))
    assert run.code == 0 and run.losses == saved.losses and folders(run.folder / "ck") == [4, 5]
    assert "iter_0000002: rank 0: OSError: [Errno 28] No space left" in lines(run, "ERROR")[0]
    again = runs.fresh("--train-iters 5 --save ck --save-interval 2", each_step=full_disk({5}))
    assert again.code == 1 and "No space left" in again.errors[0] and again.status["status"] == "failed"
    assert folders(again.folder / "ck") == [2, 4]
    assert (again.folder / "ck/latest").read_text() == "iter_0000004\n"


def test_sigterm_waits_for_the_background_save(runs: Runs) -> None:
    def stop(run: Watched) -> None:
        if run.trainer.progress.iteration == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    run = runs.fresh("--train-iters 9 --save ck --save-interval 1 --async-save", each_step=stop)
    assert run.code == 0 and run.status["status"] == "requeue" and folders(run.folder / "ck") == [1, 2, 3]
    assert (run.folder / "ck/latest").read_text() == "iter_0000003\n" and not (run.folder / "ck/lock").exists()
    resumed = runs.fresh(f"--train-iters 9 --save {run.folder}/ck --load auto --async-save")
    assert run.losses + resumed.losses == runs("--train-iters 9").losses


def test_an_error_of_the_training_waits_for_the_background_save(runs: Runs, tmp_path: Path) -> None:
    def fail(run: Watched) -> None:
        if run.trainer.progress.iteration == 2:
            raise OSError("of the training")

    with pytest.raises(OSError, match="of the training"):
        runs.fresh(f"--train-iters 9 --save {tmp_path}/ck --save-interval 2 --async-save", each_step=fail)
    assert folders(tmp_path / "ck") == [2] and sorted(os.listdir(tmp_path / "ck")) == ["iter_0000002", "latest"]


def test_a_run_that_cannot_start_gives_the_folder_back(runs: Runs, ck: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = runs.fresh(f"--save {ck} --load auto --log-dir {tmp_path}/file/x")
    assert run.code == 2 and not (ck / "lock").exists()
    assert runs.fresh(f"--train-iters 5 --save {ck} --load auto").code == 0


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The ``extra`` of a manifest, with the right checksum."""
    rewrite(folder, lambda content: (change(content["extra"]), None)[1])


EXTRAS: dict[str, Callable[[dict[str, Any]], object]] = {
    "empty": lambda extra: extra.clear(),
    "no progress": lambda extra: extra.pop("progress"),
    "no steps": lambda extra: extra.pop("optimizer_steps"),
    "progress is a list": lambda extra: extra.update(progress=[1]),
    "progress is empty": lambda extra: extra.update(progress={}),
    "iteration is a text": lambda extra: extra["progress"].update(iteration="5"),
    "iteration is below zero": lambda extra: extra["progress"].update(iteration=-5),
    "iteration is a truth value": lambda extra: extra["progress"].update(iteration=True),
    "unknown counter": lambda extra: extra["progress"].update(epochs=3),
    "data is a text": lambda extra: extra["progress"].update(data="x"),
    "data without sources": lambda extra: extra["progress"].update(data=[{"start": 0}]),
    "data of no phase": lambda extra: extra["progress"].update(data=[]),
    "config is a text": lambda extra: extra.update(config="x"),
    "config is empty, steps are a list": lambda extra: extra.update(config={}, optimizer_steps=[1]),
    "a step is a text": lambda extra: extra["optimizer_steps"].update({"head.weight": "5"}),
    "a step is missing": lambda extra: extra["optimizer_steps"].pop("head.weight"),
}


@pytest.mark.parametrize("kind", EXTRAS)
def test_what_a_manifest_says_of_its_run_is_not_believed(runs: Runs, ck: Path, kind: str) -> None:
    one = ck / "iter_0000005"
    edit(one, EXTRAS[kind])
    run = runs.fresh(f"--train-iters 7 --load {one}")
    assert run.code == 2 and len(run.errors) == 1 and len(run.errors[0]) < 300
    assert folders(ck) == [2, 4, 5], "it is not damaged"
    tuned = runs.fresh(f"--train-iters 1 --load {one} --finetune")
    assert tuned.code == 0, tuned.err


def test_weights_that_the_library_saved_can_be_loaded(runs: Runs, saved: Run, tmp_path: Path) -> None:
    state = {f"model.{name}": tensor for name, tensor in saved.final.items()}
    rows = {name: 97 for name, tensor in state.items() if len(tensor) > 97}  # the vocabulary's padding
    save(state, tmp_path / "weights", extra={"config": 7}, logical_rows=rows)
    run = runs.fresh(f"--train-iters 2 --load {tmp_path}/weights --finetune --save new")
    assert run.code == 0, run.err
    assert all(torch.equal(p[:97], saved.final[name][:97]) for name, p in run.initial.items())
    refused = runs.fresh(f"--train-iters 2 --load {tmp_path}/weights")
    assert refused.code == 2 and "--finetune" in refused.errors[0]


def test_a_folder_with_another_runs_checkpoints_is_not_saved_into(runs: Runs, saved: Run, ck: Path) -> None:
    shutil.rmtree(ck / "iter_0000004")
    shutil.rmtree(ck / "iter_0000005")  # what is left is older than where the run would start
    for load in (f"{saved.folder}/ck", f"{saved.folder}/ck/iter_0000004"):
        run = runs.fresh(f"--train-iters 9 --save {ck} --load {load}")
        assert run.code == 2 and "holds iter_0000002 of another run than --load" in run.errors[0]
    assert folders(ck) == [2]
    assert runs.fresh(f"--train-iters 3 --save {ck} --load {ck}/iter_0000002").code == 0
    assert runs.fresh(f"--train-iters 4 --save {ck} --load auto").code == 0 and folders(ck) == [2, 3, 4]


def test_a_checkpoint_under_another_name_is_told(runs: Runs, ck: Path, tmp_path: Path) -> None:
    (ck / "iter_0000005").rename(tmp_path / "iter_0000050")
    run = runs.fresh(f"--train-iters 6 --load {tmp_path}/iter_0000050")
    assert run.code == 0 and "iter_0000050 holds iteration 5" in lines(run, "WARNING")[0]
    assert run.records("iteration") == [6]


def test_a_start_that_fails_gives_the_lock_back(runs: Runs, ck: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("smp.training.checkpoints.saving.clean", fail)
        run = runs.fresh(f"--save {ck} --load auto")
    assert run.code == 1 and "Input/output error" in run.errors[0] and not (ck / "lock").exists()


@pytest.mark.parametrize("flag", ["", "--async-save"])
def test_a_run_that_lost_its_folder_ends(runs: Runs, tmp_path: Path, flag: str) -> None:
    def steal(run: Watched) -> None:
        if run.trainer.progress.iteration == 3:
            while not (tmp_path / "ck/latest").exists():
                time.sleep(0.01)
            thief = replace(Holder.here(), pid=12345, host="elsewhere")
            (tmp_path / "ck/lock").write_text(json.dumps(asdict(thief)))

    run = runs.fresh(f"--train-iters 9 --save {tmp_path}/ck --save-interval 2 {flag}", each_step=steal)
    assert run.code == 1 and "was taken over by process 12345 on elsewhere" in run.errors[0]
    assert folders(tmp_path / "ck") == [2] and (tmp_path / "ck/lock").exists()


def test_latest_that_cannot_be_written_is_no_failure(runs: Runs, saved: Run, tmp_path: Path) -> None:
    (tmp_path / "ck/latest/x").mkdir(parents=True)
    run = runs.fresh(f"--train-iters 5 --save {tmp_path}/ck --save-interval 2")
    assert run.code == 0 and len(lines(run, "saved ")) == 3 and folders(tmp_path / "ck") == [2, 4, 5]
    assert len(lines(run, "is complete, but 'latest' does not name it")) == 3
