"""How a run ends: signals, hangs, steps that are skipped, and what the status file says of each."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

import pretrain_gpt
from smp.config import ConfigError
from smp.layers.heads.head import ModelOutput
from smp.training.entry import lasting_output
from smp.training.process import Process
from smp.training.reporting.sinks import JsonlSink
from smp.training.runtime import Watchdog, library_settings, note_on_restarts
from tests.training.flag_runs import TINY, Hook, Run, Runs, Watched, clean_process, proves
from tests.training.preloaded import python_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("runtime"))


def evaluation_gets(action: Hook) -> Hook:
    """``action`` before the third forward pass of an evaluation."""
    passes: list[None] = []

    def watch(run: Watched) -> None:
        def before(model: torch.nn.Module, args: object) -> None:
            passes.extend([] if model.training else [None])
            if len(passes) == 3:
                action(run)

        if run.trainer.progress.iteration == 0:
            run.trainer.model.register_forward_pre_hook(before)

    return watch


def at_iteration(numbers: set[int], action: Hook) -> Hook:
    """``action`` before each forward pass of these iterations, which count from 1."""

    def hook(run: Watched) -> None:
        if run.trainer.progress.iteration + 1 in numbers:
            action(run)

    return hook


def send(number: int, times: int = 1) -> Hook:
    def action(run: Watched) -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return action


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_finishes_the_step_saves_and_asks_to_be_requeued(runs: Runs, name: str) -> None:
    stop = at_iteration({2}, send(getattr(signal, name)) if name == "SIGTERM" else send_once(signal.SIGINT))
    run = runs.fresh("--train-iters 9 --save ck", each_step=stop)
    assert run.code == 0 and len(run.grads) == 2
    assert run.status == {"status": "requeue", "reason": f"stopped by {name}", "iteration": 2}
    resumed = runs(f"--train-iters 9 --load {run.folder}/ck")
    assert run.losses + resumed.losses == runs("--train-iters 9").losses


def test_a_signal_ends_an_evaluation(runs: Runs) -> None:
    """It may take longer than a launcher waits. What was trained is saved."""
    flags = "--train-iters 9 --micro-batch-size 4 --eval-interval 2 --eval-iters 1000 --save ck"
    run = runs.fresh(flags, each_step=evaluation_gets(send(signal.SIGTERM)))
    assert run.code == 0 and run.eval_passes == 3 and not run.records("validation loss")
    assert run.status == {"status": "requeue", "reason": "stopped by SIGTERM", "iteration": 2}
    assert (run.folder / "ck/latest").read_text() == "iter_0000002\n"


def send_once(number: int) -> Hook:
    """Once in all: a second SIGINT would be somebody at the keyboard."""
    left = [number]
    return lambda run: os.kill(os.getpid(), left.pop()) if left else None


def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    """As after Ctrl-C in "... | tee log": it is to save, and say so where it can."""
    flags = f"{TINY} --exit-interval 2 --train-iters 9 --save {tmp_path}/ck --log-dir {tmp_path}/logs"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe, (tmp_path / "err").open("w") as error, clean_process():
        with contextlib.redirect_stdout(pipe), contextlib.redirect_stderr(error):
            assert pretrain_gpt.main(flags.split()) == 0
    assert json.loads((tmp_path / "logs/status.json").read_text())["status"] == "requeue"
    assert (tmp_path / "ck/latest").read_text() == "iter_0000002\n"
    said = (tmp_path / "err").read_text()
    assert f"saved {tmp_path}/ck/iter_0000002" in said and "requeue: --exit-interval 2 reached" in said


@pytest.mark.parametrize("unbuffered", [True, False])
def test_no_line_is_lost_when_the_reader_goes(tmp_path: Path, unbuffered: bool) -> None:
    read, write = os.pipe()
    pipe = io.TextIOWrapper(os.fdopen(write, "wb", 0 if unbuffered else -1), write_through=unbuffered)
    with pipe, (tmp_path / "err").open("w") as error:
        with contextlib.redirect_stdout(pipe), contextlib.redirect_stderr(error), lasting_output():
            print("seen")
            assert os.read(read, 100) == b"seen\n", "at once"
            os.close(read)
            print("one\ntwo")
            print("three")
    assert (tmp_path / "err").read_text() == "one\ntwo\nthree\n"


class Tee:
    """As people write it: of a stream it has what print needs."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("closed", ["stderr", "both"])
def test_a_run_goes_on_where_an_output_was_closed_before(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ">&-": Python has None for it. The other one is an object of the user's."""
    tee = Tee()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None if closed in (name, "both") else tee)
    with clean_process():
        assert pretrain_gpt.main([*TINY.split(), "--train-iters", "1", "--log-dir", f"{tmp_path}/logs"]) == 0
    assert json.loads((tmp_path / "logs/status.json").read_text())["status"] == "done"
    assert ("done: 1 iterations trained" in tee.text) == (closed == "stderr")
    assert pretrain_gpt.main([*TINY.split(), "--dry-run"]) == 0


def test_a_line_goes_on_past_a_stream_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the standard output any more, and the error output is no file: then nobody hears it."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stderr", Tee())
    with os.fdopen(write, "w") as pipe, contextlib.redirect_stdout(pipe), lasting_output():
        print("lost")
        print("seen", file=sys.stderr)
    assert isinstance(sys.stderr, Tee) and sys.stderr.text == "seen\n"


def test_descriptors_of_outputs_that_were_closed_are_no_other_file(tmp_path: Path) -> None:
    """To which C++ would write its warnings."""
    code = f"""
import os
from smp.training.entry import lasting_output
with lasting_output(), open({str(tmp_path / "first")!r}, "w") as first:
    print(*(os.readlink(f"/proc/self/fd/{{n}}") for n in (1, 2)), file=first)
"""
    words = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", code]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (tmp_path / "first").read_text() == "/dev/null /dev/null\n"


def test_many_sigterms_are_one(runs: Runs) -> None:
    run = runs.fresh("--train-iters 9 --save ck", each_step=at_iteration({2}, send(signal.SIGTERM, 3)))
    assert run.code == 0 and run.status["status"] == "requeue" and run.status["iteration"] == 2


def test_a_second_sigint_ends_at_once_and_saves_nothing(runs: Runs, tmp_path: Path) -> None:
    flags = f"--train-iters 9 --save {tmp_path}/ck --status-file {tmp_path}/why.json"
    with pytest.raises(SystemExit) as stopped:
        runs.fresh(flags, each_step=at_iteration({2}, send(signal.SIGINT, 2)))
    assert stopped.value.code == 128 + signal.SIGINT
    assert not (tmp_path / "ck").exists()
    status = json.loads((tmp_path / "why.json").read_text())
    assert (status["status"], status["iteration"]) == ("failed", 1)


def test_a_signal_without_a_place_to_save_is_a_failure(runs: Runs) -> None:
    """Requeued it would start over, again and again."""
    run = runs.fresh("--train-iters 9", each_step=at_iteration({2}, send(signal.SIGTERM)))
    assert run.code == 1 and run.status["status"] == "failed"
    assert "SIGTERM" in run.status["reason"] and "--save" in run.status["reason"]


def poison(value: float) -> Hook:
    """Makes the loss of a forward pass ``value``: infinity with gradients that are fine, NaN with NaNs."""

    def action(run: Watched) -> None:
        def spoil(module: torch.nn.Module, args: object, output: ModelOutput) -> ModelOutput:
            handle.remove()
            assert output.loss is not None
            return output._replace(loss=output.loss + value if math.isinf(value) else output.loss * value)

        handle = run.trainer.model.register_forward_hook(spoil)

    return action


@pytest.mark.parametrize(("value", "nans"), [(math.nan, 1), (math.inf, 0)])
def test_a_bad_step_is_skipped_and_counted(runs: Runs, value: float, nans: int) -> None:
    """The weights stay as they were, the data move on, and the next step is a good one."""
    run = runs.fresh("--train-iters 4 --lr-decay-style constant", each_step=at_iteration({2}, poison(value)))
    assert run.code == 0 and run.status["status"] == "done"
    assert run.records("skipped iterations") == [0, 1, 1, 1]
    assert run.records("nan iterations") == [0, nans, nans, nans]
    assert run.records("consumed samples") == [4, 8, 12, 16]
    assert [math.isfinite(loss or math.nan) for loss in run.losses] == [True, False, True, True]
    assert len(run.grads) == 3 and float(run.state["step"]["head.weight"]) == 3
    assert (
        len([line for line in run.out.splitlines() if line.startswith("iteration 2:") and "step skipped" in line]) == 1
    )
    alone = runs("--train-iters 1 --lr-decay-style constant")
    stopped = runs.fresh("--train-iters 2 --lr-decay-style constant", each_step=at_iteration({2}, poison(value)))
    assert all(torch.equal(p, alone.final[name]) for name, p in stopped.final.items())


def test_a_mean_over_several_steps_leaves_bad_ones_out(runs: Runs) -> None:
    run = runs.fresh("--train-iters 2 --log-interval 2", each_step=at_iteration({2}, poison(math.nan)))
    assert run.losses == runs("--train-iters 2").losses[:1]


def test_only_bad_steps_in_a_row_end_the_run(runs: Runs) -> None:
    bad = at_iteration({1, 2, 4, 5, 7, 8, 9}, poison(math.nan))
    run = runs.fresh("--train-iters 20 --max-skipped-steps 3 --save ck", each_step=bad)
    assert run.code == 1 and run.errors == [f"error: {run.status['reason']}"]
    assert run.status["status"] == "failed" and run.status["iteration"] == 9
    assert "3 steps in a row" in run.errors[0] and "--max-skipped-steps 3" in run.errors[0]
    assert runs.fresh("--train-iters 8 --max-skipped-steps 3", each_step=bad).status["status"] == "done"


def test_no_checkpoint_is_saved_in_a_row_of_bad_steps(runs: Runs) -> None:
    """They would push out those from before the row, which one wants if it ends the run."""
    run = runs.fresh("--train-iters 6 --save ck --save-interval 1", each_step=at_iteration({3, 4}, poison(math.nan)))
    assert {path.name for path in (run.folder / "ck").glob("iter_*")} == {f"iter_{i:07d}" for i in (1, 2, 5, 6)}


def test_skips_are_counted_on_after_a_resume(runs: Runs) -> None:
    first = runs.fresh("--exit-interval 2 --save ck", each_step=at_iteration({1}, poison(math.nan)))
    assert runs(f"--load {first.folder}/ck").records("skipped iterations") == [1]


def test_an_unexpected_error_is_in_the_status_file_too(runs: Runs, tmp_path: Path) -> None:
    def fail(run: Watched) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        runs.fresh(f"--status-file {tmp_path}/why.json", each_step=at_iteration({3}, fail))
    expected = {"status": "failed", "reason": "OSError: the disk is gone", "iteration": 2}
    said = json.loads((tmp_path / "why.json").read_text())
    assert said.items() >= expected.items() and set(said) - set(expected) == {"goodput", "seconds", "starts"}


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_out_of_memory_is_one_line_with_what_to_try(runs: Runs, kind: str) -> None:
    def fail(run: Watched) -> None:
        if kind == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total of")
        torch.empty(2**60, dtype=torch.uint8)

    run = runs.fresh(each_step=at_iteration({2}, fail))
    size = "20.00 MiB" if kind == "cuda" else f"{2**60} bytes"
    assert run.code == 1 and "Traceback" not in run.err
    assert run.errors == [
        f"error: out of memory, at a request for {size}: try --micro-batch-size below 2, --recompute-granularity full, "
        "more processes, --tensor-model-parallel-size or --pipeline-model-parallel-size; --dry-run estimates what a "
        "rank needs"
    ]
    assert run.status == {"status": "failed", "reason": run.errors[0].removeprefix("error: "), "iteration": 1}


def test_a_checkpoint_that_cannot_be_written_stops_only_the_end(runs: Runs, tmp_path: Path) -> None:
    """Training goes on, loudly; that the last state of all is nowhere makes the run a failure."""

    def replace_by_a_file(_: object) -> None:
        if (tmp_path / "ck").is_dir():  # once: there are two micro-batches
            shutil.rmtree(tmp_path / "ck")
            (tmp_path / "ck").touch()

    flags = f"--train-iters 5 --save {tmp_path}/ck --save-interval 2"
    run = runs.fresh(flags, each_step=at_iteration({2}, replace_by_a_file))
    assert run.code == 1 and len(run.errors) == 1 and "the last checkpoint could not be saved" in run.errors[0]
    assert (run.status["status"], run.status["iteration"]) == ("failed", 5)
    loud = [line for line in run.out.splitlines() if line.startswith("ERROR: cannot save")]
    assert len(loud) == 2 and all("training continues" in line for line in loud)


def test_folders_that_cannot_be_written_are_found_at_the_start(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for flag in ("--save", "--log-dir"):
        run = runs.fresh(f"--train-iters 9 --status-file why.json {flag} {tmp_path}/file/x")
        assert run.code == 2 and len(run.errors) == 1 and run.errors[0].startswith(f"error: {flag} {tmp_path}/file/x")


def test_a_status_file_that_cannot_be_written_is_found_at_the_start(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file/why.json"
    run = runs.fresh(f"--status-file {path}")
    assert run.code == 2 and len(run.errors) == 1 and not run.grads
    assert run.errors[0].startswith(f"error: --status-file {path}: ")
    wrong = runs.fresh(f"--hiden-size 8 --status-file {path}")
    assert wrong.code == 2 and len(wrong.errors) == 2 and "unknown flag" in wrong.errors[0]
    assert wrong.errors[1].startswith(f"error: --status-file {path}: ")


def test_the_status_file_says_running_until_the_end(runs: Runs) -> None:
    """A launcher that finds it after the process is gone knows that it was killed."""
    seen = []
    runs.fresh("--train-iters 2", each_step=lambda run: seen.append(Path("logs/status.json").read_text()))
    assert {json.loads(text)["status"] for text in seen} == {"running"}


@pytest.mark.parametrize("flags", ["--hiden-size 8", "--load ."])
def test_what_an_earlier_run_said_does_not_outlive_it(runs: Runs, flags: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "status.json").write_text('{"status": "requeue", "reason": "", "iteration": 3}')
    run = bad_config(runs, f"{flags} --log-dir {logs}")
    assert not run.files
    path = logs / "status.json"
    assert not path.exists() or json.loads(path.read_text())["status"] == "bad_config"


def test_one_run_at_a_time_logs_into_a_folder(runs: Runs, tmp_path: Path) -> None:
    first = runs.fresh(f"--train-iters 2 --log-dir {tmp_path}/logs")
    before = (tmp_path / "logs/metrics.jsonl").read_text()

    def second(run: Watched) -> None:
        with pytest.raises(ConfigError, match="is in use by another run"):
            JsonlSink(tmp_path / "logs/metrics.jsonl", 0)

    runs.fresh(f"--train-iters 2 --log-dir {tmp_path}/logs", each_step=second)
    assert (tmp_path / "logs/metrics.superseded.jsonl").read_text() == before and first.code == 0


def test_without_a_launcher_nobody_waits_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for size, message in (("2", "no launcher started this process"), ("two", "WORLD_SIZE=two")):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert pretrain_gpt.main(TINY.split()) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def bad_config(runs: Runs, flags: str) -> Run:
    run = runs.fresh(flags)
    assert run.code == 2 and len(run.errors) == 1
    return run


@pytest.mark.parametrize(
    "flags",
    [
        *("--hiden-size 8", "--num-attention-heads 5", "--load .", "--optimizer apex-adam"),
        "--load . --save ck",
        "--wandb-project x --save ck/deep",
    ],
)
def test_bad_config_is_in_the_status_file_only_where_it_was_asked_for(runs: Runs, flags: str) -> None:
    """Those from --load on are found after the process group exists, the last ones when --save is made already."""
    if "wandb" in flags and importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    assert not bad_config(runs, flags).files
    run = bad_config(runs, flags + " --status-file why.json")
    assert run.files == {"why.json"}
    status = json.loads((run.folder / "why.json").read_text())
    assert status == {"status": "bad_config", "reason": run.errors[0].removeprefix("error: "), "iteration": 0}


def test_the_watchdog_dumps_all_stacks_once_per_hang(capfd: pytest.CaptureFixture[str]) -> None:
    watchdog = Watchdog(Process(3, 8, 0), 1 / 54)  # 0.9 x 60 x 1/54: a limit of one second
    seen = ""

    def dumps(at_least: int = 0) -> int:
        """Their number so far, once there are so many."""
        nonlocal seen
        deadline = time.monotonic() + 60
        while True:
            seen += capfd.readouterr().err
            if (count := seen.count("rank 3 of 8 has made no progress for 1 s")) >= at_least:
                return count
            assert time.monotonic() < deadline
            time.sleep(0.05)

    for _ in range(12):
        time.sleep(0.1)
        watchdog.progress()
    assert dumps() == 0
    assert dumps(at_least=1) == 1
    time.sleep(0.5)
    assert dumps() == 1
    assert "test_the_watchdog_dumps_all_stacks_once_per_hang" in seen and "in _watch" in seen
    watchdog.progress()
    assert dumps(at_least=2) == 2
    watchdog.progress()
    watchdog.close()
    time.sleep(1.5)
    assert dumps() == 2


HANGS = """
import os, sys, time
import pretrain_gpt
from smp.training import trainer

step = trainer.Trainer.start_step

def start_step(self, *arguments):
    if self.progress.iteration == 2 and os.environ["RANK"] == "1":
        hang()
    return step(self, *arguments)

def hang():
    time.sleep(100)

trainer.Trainer.start_step = start_step
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""


@pytest.mark.usefixtures("forked")
@proves("distributed_timeout_minutes")
def test_a_rank_that_hangs_ends_the_run_and_the_stacks_say_which(tmp_path: Path) -> None:
    """Rank 0 waits in a collective for rank 1, which sleeps: both dump their stacks, rank 0 says who has not come to
    what and where it is instead, and then gives up."""
    flags = f"{TINY} --train-iters 9 --distributed-timeout-minutes 0.1"
    (tmp_path / "hangs.py").write_text(HANGS)
    # The store that torchrun gives its ranks: a free port that one of them opens later may be taken by then.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {**os.environ, "PYTHONPATH": python_path(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = []
    for rank in ("0", "1"):
        environment = {**common, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        with (tmp_path / f"err{rank}").open("w") as err:
            words = [sys.executable, "hangs.py", *flags.split()]
            ranks.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=err, stdout=subprocess.DEVNULL))
    try:
        assert ranks[0].wait(timeout=120) == 1
        errors = [(tmp_path / f"err{rank}").read_text() for rank in (0, 1)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    dumps = [text.partition("of 2 has made no progress for")[2].partition("hang: ")[0] for text in errors]
    assert "in all_reduce" in dumps[0] and "in start_step" in dumps[0] and "in hang" not in dumps[0]
    assert "in hang" in dumps[1] and "in all_reduce" not in dumps[1]
    said = [line for line in errors[0].splitlines() if line.startswith("hang: ")]
    assert said[0] == "hang: rank 0 is in all_reduce of Trainer._counts", said
    assert re.fullmatch(r"hang: rank 1 on \S+ has not arrived: it is in hang \(hangs.py:\d+\); its stack:", said[1])
    assert "time.sleep(100)" in errors[0].partition("its stack:\n  ")[2] and "hang: " not in errors[1]
    status = json.loads((tmp_path / "logs/status.json").read_text())
    assert status["status"] == "failed" and status["iteration"] == 2 and "6000ms" in status["reason"]


def test_settings_of_libraries_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("CUDA_", "NCCL_", "CUBLAS_"))]:
        monkeypatch.delenv(name)
    assert library_settings() == "environment: nothing about CUDA"
    for name, value in (("NCCL_DEBUG", "INFO"), ("PYTORCH_ALLOC_CONF", "backend:native"), ("HOME", "/nowhere")):
        monkeypatch.setenv(name, value)
    assert library_settings() == "environment: NCCL_DEBUG=INFO, PYTORCH_ALLOC_CONF=backend:native"


def test_several_nodes_are_told_what_starting_again_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert "with --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in note_on_restarts()
    for name, value in (*((name, "0") for name in list(told)[1:]), ("GROUP_WORLD_SIZE", "1")):
        with monkeypatch.context() as other:
            other.setenv(name, value)
            assert note_on_restarts() == ""
    monkeypatch.delenv("GROUP_WORLD_SIZE")
    assert note_on_restarts() == "", "without torchrun"
