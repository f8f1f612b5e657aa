"""Failures of a real run, one after the other, and what they cost: steps trained again, silent differences, hangs.

    python -m benchmarks.failures FOLDER --minutes 60 --seed 1
    python -m benchmarks.failures FOLDER --minutes 60 --seed 2 --inprocess-restart
    python -m benchmarks.failure_checks FOLDER

Three nodes (torchruns) of one process each on this machine, with a copy in memory after every step and a checkpoint
every 5. Drawn at random: what happens (a worker gets SIGKILL or SIGSTOP, a node loses worker and torchrun, a file is
refused as on a full disk or memory), in which part of a step or of a start, and to how many at once. Rank 0 keeps the
store of the process group, so its death is that of the store. Every loss and gradient norm that any start
has logged is compared with those of one process that nobody disturbs. Workers are forked from a process that has
imported everything, so that many failures fit into an hour.

With --inprocess-restart processes that are lost are replaced while the others stay. Then a node may lose its torchrun
alone, or the process between torchrun and worker, too: that of rank 0 keeps the store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.failure_checks import FLAGS, LONG, NODES, RECORDS, Record
from tests.training.cut_lab import CUT, CutJob
from tests.training.elastic_lab import Job, children_of
from tests.training.preloaded import STAND_IN, TORCHRUN, forked_of, preloaded

PATIENCE = 300.0
STACKS = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1)
"""
"""Lines of a program that tells its stacks when it is asked to."""
ELASTIC = (
    f"--max-nodes {NODES} --min-nodes 1 --peer-snapshot-interval 1 --save ck --load auto --save-interval 5 "
    "--distributed-timeout-minutes 0.4"
)
PROGRAM = (
    f"""{STAND_IN}{CUT}"""
    + """
import faulthandler, os, signal, sys, time
from pathlib import Path
faulthandler.register(signal.SIGUSR1)
if "--inprocess-restart" in sys.argv and "SMP_KEEPER" not in os.environ:  # it keeps one that trains
    import pretrain_gpt
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
from smp.checkpoint import peers
from smp.training import trainer
from smp.training.checkpoints import saving

def kill(what):
    parent = os.getppid()  # torchrun, or the keeper, whose word says which process torchrun is
    torchrun = int(os.environ.get("SMP_LAUNCHER") or parent)
    for pid in {"kill": [], "agent": [torchrun], "keeper": [parent], "node": [torchrun, parent]}[what]:
        os.kill(pid, signal.SIGKILL)
    if what in ("kill", "node"):
        os.kill(os.getpid(), signal.SIGKILL)

def strike(part):
    for what in ("kill", "stop", "full", "cut", "agent", "keeper", "node"):
        order = Path(f"{what}-{part}-{os.environ['RANK']}")
        if order.exists():
            order.unlink(missing_ok=True)
            if what == "full":
                raise OSError(28, "No space left on device")
            if what == "cut":
                return cut()
            os.kill(os.getpid(), signal.SIGSTOP) if what == "stop" else kill(what)

def before(module, name, part):
    inner = getattr(module, name)
    def outer(*args, **more):
        strike(part)
        return inner(*args, **more)
    setattr(module, name, outer)

before(trainer, "clip_gradients", "collective")
before(trainer, "step_if", "update")
before(peers.PeerCopies, "_write", "snapshot")
before(saving.RunCheckpoints, "_write", "save")
before(saving, "load_training", "recovery")

start_step = trainer.Trainer.start_step
def hooked(self, *args):
    if "struck" not in self.__dict__:
        self.struck = True
        self.model.register_forward_pre_hook(lambda *_: strike("forward"))
        # Under FSDP nobody calls hooks of parameters.
        last = self.model.get_submodule("layers.1")
        last.register_forward_hook(lambda module, args, x: x.register_hook(lambda _: strike("backward")) and None)
    time.sleep(0.4)  # processor time is for recoveries
    return start_step(self, *args)
trainer.Trainer.start_step = hooked
import pretrain_gpt
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""
)
INSIDE = "--inprocess-restart --inprocess-heartbeat-timeout 8 --inprocess-barrier-timeout 45"
PARTS = ("forward", "backward", "collective", "update", "snapshot", "save", "recovery")


@dataclass(frozen=True)
class Failure:
    """What happens, where, and to which ranks (of a node: which nodes)."""

    what: str
    part: str
    victims: tuple[int, ...]

    @staticmethod
    def drawn(rng: random.Random, inside: bool, cut: bool) -> Failure:
        """Any of them; ``cut``: a link, and nothing else."""
        if cut:
            return Failure("cut", rng.choice(PARTS), (rng.randrange(NODES),))
        whats = ("kill", "kill", "kill", "kill", "stop", "full", "node", "agent", "keeper")
        what = rng.choice(whats if inside else ("kill", "kill", "stop", "full", "node"))
        part = rng.choice(("snapshot", "save")) if what == "full" else rng.choice(PARTS)
        # Where all are stopped nobody is left who could find out.
        most = {"full": 1, "kill": NODES}.get(what, NODES - 1)
        count = min(rng.choice((1, 1, 2, NODES)), most)
        return Failure(what, part, tuple(sorted(rng.sample(range(NODES), count))))


@dataclass
class Struck:
    """How a failure went.

    Attributes:
        mark: how much each node had printed before.
        seconds: from the last victim's loss to the first new step.
        still: the longest time in which no step was logged, that in which the nodes were made complete again included.
        starved: seconds of it in which this process got no processor: nobody else did either.
        again: steps that were trained again.
        lost: torchruns that are gone.
    """

    mark: dict[Path, int] = field(default_factory=dict)
    seconds: float = 0.0
    still: float = 0.0
    starved: float = 0.0
    again: int = 0
    lost: int = 0


class Watch(threading.Thread):
    """Measures how long no step is logged, and asks processes for their stacks where that lasts."""

    def __init__(self, job: Job, struck: Struck) -> None:
        super().__init__(daemon=True)
        self._job, self._struck, self._over = job, struck, threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        since, seen, asked, starved, looked = time.monotonic(), 0, 0, 0.0, time.monotonic()
        while not self._over.wait(0.1):
            late = time.monotonic() - looked - 0.1
            starved, looked = starved + (late if late > 0.5 else 0.0), time.monotonic()
            size = sum(path.stat().st_size for path in self._job.folder.glob("logs/metrics*.jsonl"))
            if size != seen:
                since, seen, asked, starved = time.monotonic(), size, 0, 0.0
            still = time.monotonic() - since
            if still > self._struck.still:
                self._struck.still, self._struck.starved = still, starved
            if still > 30 * (asked + 1):
                asked += 1
                ask_for_stacks(self._job)


def ask_for_stacks(job: Job) -> None:
    """Let all processes of a job write their Python stacks to the logs of their nodes."""
    for number, node in enumerate(job.nodes):
        with contextlib.suppress(OSError, IndexError):
            log = job.logs()[number]
            pids = [forked_of(node.pid)]
            for child in job.workers(number):
                pids += [forked_of(child), *map(forked_of, children_of(forked_of(child)))]
            with log.open("a") as file:
                file.write(f"\n{time.strftime('%H:%M:%S')}: stacks of {pids}\n")
            for pid in pids:
                status = Path(f"/proc/{pid}/status").read_text()
                caught = int(status.split("SigCgt:")[1].split()[0], 16)
                if caught >> (signal.SIGUSR1 - 1) & 1:
                    os.kill(pid, signal.SIGUSR1)


def strike(job: Job, failure: Failure, struck: Struck) -> None:
    """Let it happen, wait until all nodes train again behind it.

    Raises:
        TimeoutError: they do not.
    """
    struck.mark = job.mark()
    orders = [job.folder / f"{failure.what}-{failure.part}-{rank}" for rank in failure.victims]
    before, gone = job.iteration, [node for node in job.nodes if node.poll() is not None]

    def all_struck() -> bool:
        """A node that is lost is replaced at once."""
        lost = [node for node in job.nodes if node.poll() is not None and node not in gone]
        gone.extend(lost)
        struck.lost += len(lost)
        job.start(len(lost))
        there = failure.what not in ("node", "agent") or struck.lost >= len(failure.victims)
        return there and not any(order.exists() for order in orders)

    for order in orders:
        order.touch()
    if failure.part == "recovery":
        (job.folder / "kill-forward-0").touch()  # or there would be none
    with Watch(job, struck):
        job.until(all_struck, PATIENCE)
        began, before = time.monotonic(), max(job.iteration, before)
        off = job.cut_off() if isinstance(job, CutJob) else None
        if failure.what == "full":
            job.until(lambda: job.iteration > before + 2, PATIENCE)
            return
        # A failure is over when the job trains behind what it had reached, on all nodes.
        job.until(lambda: "resumed from" in job.since(struck.mark), PATIENCE)
        job.until(lambda: job.iteration > before, PATIENCE)
        struck.seconds = time.monotonic() - began
        if isinstance(job, CutJob) and off is not None:
            job.until(lambda: f"{NODES - 1} nodes" in job.now(), PATIENCE)
            with contextlib.suppress(OSError):  # it may have ended
                job.kill(off)  # torchrun waits for a store that it has lost for minutes
            job.nodes[off].wait()
            job.mend(off)
            job.start()
        job.until(lambda: f"{NODES} nodes" in job.now(), PATIENCE)
        job.until(lambda: job.iteration > before + 2, PATIENCE)
    at = [int(line.rsplit(" ", 1)[1]) for line in job.since(struck.mark).splitlines() if "resumed from" in line]
    struck.again = max(before - min(at), 0)


@dataclass
class Jobs:
    """Jobs that failures were injected into, and where it is written down.

    Attributes:
        made: how many.
    """

    folder: Path
    asked: argparse.Namespace
    deadline: float
    made: int = 0

    def strike_often(self, number: int) -> None:
        """One failure after the other, to job after job where one does not go on."""
        rng = random.Random(1000 * self.asked.seed + number)
        while time.monotonic() < self.deadline:
            job = self._job(number)
            failure, struck = None, Struck()
            try:
                job.start(NODES)
                # A checkpoint and a copy are there.
                job.until(lambda job=job: f"{NODES} nodes" in job.now() and job.iteration > 6, PATIENCE)
                while time.monotonic() < self.deadline:
                    failure, struck = self._drawn(rng), Struck()
                    strike(job, failure, struck)
                    self._note(job, number, failure, struck)
            except (TimeoutError, RuntimeError) as error:
                self._note(job, number, failure, struck, f"{type(error).__name__} {str(error).splitlines()[0]}")
            finally:
                job.close()

    def _job(self, number: int) -> Job:
        folder = self.folder / f"{number}-{self.made}"
        self.made += 1
        flags = f"{FLAGS} {ELASTIC} {INSIDE if self.asked.inprocess_restart else ''} --train-iters 1000000"
        job = (CutJob if self.asked.cut else Job)(folder, flags, 1, NODES)
        (job.folder / "program.py").write_text(PROGRAM)
        (job.folder / "torchrun.py").write_text(TORCHRUN.replace("runpy.run", f"{STACKS}runpy.run"))
        return job

    def _drawn(self, rng: random.Random) -> Failure:
        while True:
            failure = Failure.drawn(rng, self.asked.inprocess_restart, self.asked.cut)
            if self.asked.only is None or failure.what in self.asked.only.split(","):
                return failure

    def _note(self, job: Job, number: int, failure: Failure | None, struck: Struck, error: str = "") -> None:
        kind = "in process" if self.asked.inprocess_restart else "restart"
        failure = failure or Failure("start", "start", ())
        cost = struck.seconds, struck.still, struck.starved, struck.again
        record = Record(kind, job.folder.name, failure.what, failure.part, failure.victims, *cost, error)
        print(f"{number}: {record}", flush=True)
        with (self.folder / RECORDS).open("a") as file:
            file.write(f"{json.dumps(asdict(record))}\n")
        if error or struck.still > LONG:
            said = [path.read_bytes()[struck.mark.get(path, 0) :].decode() for path in job.logs()]
            path = self.folder / f"long-{job.folder.name}-{job.iteration}.txt"
            path.write_text("\n--- next node\n".join([str(record), *said]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the jobs and what is found")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="at once")
    parser.add_argument("--inprocess-restart", action="store_true", help="replace processes that are lost")
    parser.add_argument("--only", help="these failures, such as stop,node")
    parser.add_argument("--cut", action="store_true", help="cut a node's link, and nothing else (needs root)")
    asked = parser.parse_args()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")  # a process that was stopped hears no SIGTERM
    folder = asked.folder / str(asked.seed)
    folder.mkdir(parents=True)
    with preloaded(folder):
        jobs = Jobs(folder, asked, time.monotonic() + 60 * asked.minutes)
        with ThreadPoolExecutor(asked.jobs) as pool:
            for one in [pool.submit(jobs.strike_often, n) for n in range(asked.jobs)]:
                one.result()


if __name__ == "__main__":
    main()
