"""Run a function in a training process: start it, report how it ended, and return the exit code."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from smp.checkpoint import CheckpointError
from smp.config import Config, ConfigError
from smp.config.command_line.command import DamageError, exit_code, lacks_memory
from smp.config.command_line.credentials import without_credentials
from smp.convert.convert import ERRORS
from smp.parallel.agree import on_all_or_none
from smp.parallel.network.group import CollectiveError
from smp.pipeline.failure import PipelineError, naming
from smp.training.checkpoints.hf_export import ExportStore, export_hugging_face, require_exportable
from smp.training.cost.describe import describe
from smp.training.errors import TrainingError
from smp.training.faults.copies import EndedError
from smp.training.faults.members import ended_for_spares, exit_code_of, members, require_room, wait_as_spare
from smp.training.faults.silence import SignsOfLife
from smp.training.inprocess.again import Alone, Generation, LostRunError, run_again
from smp.training.inprocess.link import REPLACE
from smp.training.kind import RunKind
from smp.training.process import Process, Status, ended, leave_status, status_path, write_status
from smp.training.reporting.goodput import summary
from smp.training.run import Outcome, Run
from smp.training.runtime import StopSignal, Watchdog, report_once, start_process_group
from smp.training.settings import report, report_own

LAST_WORDS = 5.0
"""Seconds that a process which ends itself has for a status file and a line on stderr."""
# An interpreter that ends looks for garbage among all that torch has brought, for most of a second; the system takes
# back all of it at once.
atexit.register(gc.freeze)
_CODES: dict[Status, int] = {"done": 0, "requeue": 0, "failed": 1, "bad_config": 2}


def launch(config: Config, process: Process, make_kind: Callable[[], RunKind], notes: Sequence[str] = ()) -> int:
    """Run, report why it ended, and return the exit code: 0, 1 when it failed or found damage, 2 when what was asked
    cannot be done.

    Args:
        make_kind: makes the parts of the run; may read files.
        notes: what --dry-run says besides the settings.
    """
    if process.link is not None:
        # Imports are done. What they made is for ever: a collection after a loss looks at the lost run alone.
        gc.freeze()
        process.link.wait()  # until the keeper needs it
    process = members(config, process)
    if process.is_spare:
        return wait_as_spare(config, process)
    if config.training.dry_run:
        if process.rank == 0:
            print(_shown("\n".join([describe(config, process.world_size), *(f"# {line}" for line in notes)])))
        return 0
    name = f"rank {process.rank} on {socket.gethostname()}"
    timeout = config.parallel.distributed_timeout_minutes
    watchdog = Watchdog(process, timeout, lambda why: _end(f"{name}: {why}", config, process))
    # Until the end: what a process is stuck in while it ends is reported as well.
    with contextlib.closing(watchdog), _signs_of_life(config, process):
        if process.link is None:
            return _train(config, make_kind, name, watchdog, StopSignal, Alone(process))
        stop = StopSignal()
        # The signal handler is installed once, for all tries.
        train = partial(_train, config, make_kind, name, watchdog, lambda: stop)
        return run_again(config.parallel, process, lambda: stop.name is not None, train)


def _signs_of_life(config: Config, process: Process) -> contextlib.AbstractContextManager[object]:
    """Context in which this process is killed where it is stopped for longer than the others wait for it, in runs that
    go on without it. A keeper sees to that for its own."""
    parallel, copies = config.parallel, config.checkpoint.peer_snapshot_interval
    if process.link is not None or process.world_size == 1 or (parallel.max_nodes is None and copies is None):
        return contextlib.nullcontext()
    return contextlib.closing(SignsOfLife(f"rank {process.rank}", 60 * parallel.distributed_timeout_minutes))


def _train(
    config: Config,
    make_kind: Callable[[], RunKind],
    name: str,
    watchdog: Watchdog,
    stop: Callable[[], StopSignal],
    generation: Generation | Alone,
) -> int:
    timeout, deterministic = config.parallel.distributed_timeout_minutes, config.training.deterministic_mode
    process = generation.process
    run: Run | None = None
    try:
        with generation.guarded((PipelineError, CollectiveError)), naming(name, wrap=CollectiveError):
            # Nodes that a file names may be on one machine, and what goes between them is to be gloo's.
            shares = config.parallel.cpu_collectives == "auto" and config.parallel.network_topology is None
            device = start_process_group(process, timeout, deterministic, watchdog, shares_memory=shares)
            # Before the model is built: minutes of work would be lost to a setting.
            require_exportable(config)
            require_room(config, process)
            run = Run(make_kind(), process, device, stop(), watchdog)
            # Before the first step: a file that cannot be written is said now, and not when training is over.
            path, iteration = status_path(config.logging), _iteration(run)
            spent = summary(run.goodput.account)
            running = partial(write_status, path, "running", "", iteration, spent)
            on_all_or_none(running if process.rank == 0 else lambda: None, ConfigError, f"--status-file {path}")
            generation.began(iteration)
            outcome = run.run()
    except LostRunError as error:
        # Raised again to ``run_again`` after groups and connections are released.
        outcome = Outcome("failed", str(error), _iteration(run))
        generation.let_go()
        raise
    except EndedError as error:
        outcome = Outcome("done", str(error), error.iteration)
        if process.rank == 0:  # there is no run that would
            leave_status(status_path(config.logging), "done", str(error), error.iteration)
            print(f"done: {error}", flush=True)
    # What this rank alone knows: it says it at once, in its own words, for another rank is gone and cannot agree.
    except (PipelineError, CollectiveError) as error:
        report_own(str(error), process.rank)
        outcome = Outcome("failed", str(error), _iteration(run))
        _write_outcome(config, process, outcome, run, instead=True)
    # What all ranks raise alike: rank 0 says it, the others only where their words differ.
    except (ConfigError, CheckpointError, DamageError, TrainingError) as error:
        answered = report_once(str(error), process.rank)
        # Once there is a run, the settings were good.
        asked = run is None and exit_code(error) == 2
        outcome = Outcome("bad_config" if asked else "failed", str(error), _iteration(run))
        if not answered:
            # The grace period of the watchdog starts again for what is left to do.
            watchdog.progress()
            _leave(config, process, outcome, run)
    except BaseException as error:
        memory = _out_of_memory(error, config)
        outcome = Outcome("failed", memory or f"{type(error).__name__}: {error}", _iteration(run))
        if memory is not None:
            (report if process.world_size == 1 else report_own)(memory, process.rank)
            # Twice: rank 0 may be lost, so another rank writes in its place, and then rank 0 over that.
            _write_outcome(config, process, outcome, run, instead=True)
        _write_outcome(config, process, outcome, run)
        if memory is not None:
            return 1  # without the others, who may wait in a collective
        raise
    finally:
        # Closing may write files: it counts as progress when it begins.
        watchdog.progress()
        if run is not None:
            generation.close(partial(run.close, failed=outcome.status == "failed"))
    watchdog.progress()
    return _end_of_run(config, process, name, watchdog, outcome, run)


def _end_of_run(
    config: Config, process: Process, name: str, watchdog: Watchdog, outcome: Outcome, run: Run | None
) -> int:
    """What follows a run whose files are closed: the outcome, spares, groups and the export; returns the exit code."""
    exports = outcome.status == "done" and config.checkpoint.save_hf
    if not exports:
        _write_outcome(config, process, outcome, run)
    if outcome.status == "requeue" and config.checkpoint.save_hf and process.rank == 0:
        print("note: --save-hf: no Hugging Face folder yet, the run that continues it writes it at its end", flush=True)
    # A signalled elastic run is started again: spares go on waiting.
    if outcome.status in ("done", "requeue") and not outcome.signalled:
        ended_for_spares(process)
    if outcome.status in ("done", "requeue") and (lost := _last_barrier(name)):
        report_own(lost, process.rank)  # its own exit code says it failed; the work is done
    store = ExportStore.of_this_run() if exports else None
    if dist.is_initialized():
        dist.destroy_process_group()
    # After the groups are gone: it takes minutes, in which other ranks would run into a timeout.
    if store is not None and process.rank == 0:
        with store.telling():
            outcome = _exported(config, outcome, watchdog)
            _write_outcome(config, process, outcome, run)
    elif store is not None and process.local_rank == 0:
        store.wait(watchdog.progress)
    return exit_code_of(config, outcome.signalled, _CODES[outcome.status])


def _exported(config: Config, outcome: Outcome, watchdog: Watchdog) -> Outcome:
    """The outcome of the run after the export of its Hugging Face folder."""
    try:
        folder = export_hugging_face(config, outcome.iteration, watchdog.progress)
    except ERRORS as error:
        report(str(error), 0)
        return Outcome("failed", str(error), outcome.iteration)
    print(f"Hugging Face folder: {folder}", flush=True)
    return outcome


def _leave(config: Config, process: Process, outcome: Outcome, run: Run | None) -> NoReturn:
    """End this process while torch's store does not answer. The process group is not destroyed: its threads wait for
    that store, too."""
    code = _CODES[outcome.status]
    # Closing a run asks no store, and a background save is worth the wait; but file systems and trackers may be cut off
    # as well, so no longer than torch would have waited.
    limit = threading.Timer(60 * config.parallel.distributed_timeout_minutes, os._exit, (code,))
    limit.daemon = True
    limit.start()
    try:
        _write_outcome(config, process, outcome, run)
        if run is not None:
            run.close(failed=True)
        print(end="", flush=True)  # there may be no sys.stdout
    except Exception as error:  # a last background save that failed, say
        report_own(f"{type(error).__name__}: {error}", process.rank)
    finally:
        os._exit(code)


def _end(why: str, config: Config, process: Process) -> None:
    """Report why and end the process, from the watchdog's thread: the main thread is stuck in torch, and nothing else
    would end it."""
    code = 1 if process.link is None else REPLACE
    # Whatever becomes of the words: a full pipe that nobody reads blocks who writes to it, and so may a disk.
    limit = threading.Timer(LAST_WORDS, os._exit, (code,))
    limit.daemon = True
    limit.start()
    speaking = threading.Thread(target=report_own, args=(why, process.rank), daemon=True)
    speaking.start()
    try:
        _write_outcome(config, process, Outcome("failed", why, 0), None, instead=process.rank != 0)
        sys.stdout.flush()
    finally:  # nobody may read what it says any more
        speaking.join()
        os._exit(code)


def _last_barrier(name: str) -> str:
    """Wait for the other ranks: gloo may still be delivering the last result, and aborts a process that exits
    meanwhile. Returns a line to report if one is lost, or ""."""
    try:
        with naming(f"{name}: the last barrier", function=False, wrap=CollectiveError):
            dist.barrier()
    except CollectiveError as error:
        return str(error)
    return ""


def _shown(recipe: str) -> str:
    """What --dry-run prints: without credentials, and still a recipe."""
    shown = str(without_credentials(recipe))
    return (
        shown if shown == recipe else f"{shown}\n# *** stands for credentials in URLs: put them in to train with this"
    )


def _out_of_memory(error: BaseException, config: Config) -> str | None:
    """Advice for the user if ``error`` is a lack of memory, else None."""
    if not (lacks_memory(error) or isinstance(error, torch.OutOfMemoryError)):
        return None
    # torch has the number in its text only.
    asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
    size, parallel = config.data.micro_batch_size, config.parallel
    advice = [
        *([f"--micro-batch-size below {size}"] if size > 1 else []),
        *(["--recompute-granularity full"] if parallel.recompute_granularity != "full" else []),
        *(["--hybrid-shard-degree 0"] if parallel.hybrid_shard_degree else []),
        "more processes",
        "--tensor-model-parallel-size or --pipeline-model-parallel-size",
    ]
    return (
        f"out of memory{'' if asked is None else f', at a request for {asked[1]}'}: try {', '.join(advice)}; "
        "--dry-run estimates what a rank needs"
    )


def _iteration(run: Run | None) -> int:
    return 0 if run is None else run.iteration


def _write_outcome(
    config: Config, process: Process, outcome: Outcome, run: Run | None, *, instead: bool = False
) -> None:
    """Rank 0 writes the status file. A run that never started (None) writes one only where it was asked to.

    Rank 0 may be the one that is lost, so ``instead`` of it the first of the others writes the file. If rank 0 is there
    it writes its own word over that.
    """
    path = status_path(config.logging)
    unasked = config.logging.status_file is None and run is None
    if unasked or (process.rank == 0) == instead or (instead and ended(path)):
        return
    # The account of the whole job is rank 0's.
    spent = {} if run is None or instead else summary(run.goodput.account)
    leave_status(path, outcome.status, outcome.reason, outcome.iteration, spent)
    if not instead:
        print(without_credentials(f"{outcome.status}: {outcome.reason}"), flush=True)
