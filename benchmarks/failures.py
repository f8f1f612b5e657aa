"""Failures of a real run, one after the other, and what they cost: steps trained again, silent differences, hangs.

    python -m benchmarks.failures --minutes 60 --seed 1
    python -m benchmarks.failures --minutes 60 --inprocess-restart

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
import math
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.training.cut_lab import CUT, CutJob
from tests.training.elastic_lab import Job
from tests.training.preloaded import STAND_IN, preloaded

NODES, BOUND, PATIENCE, LONG = 3, 1e-6, 300.0, 60.0
Logged = tuple[int, float, float]
"""Iteration, loss and gradient norm."""
FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 97 --mock-data "
    "--seq-length 17 --init-method-std 0.2 --hidden-dropout 0.1 --global-batch-size 4 --micro-batch-size 1 "
    "--log-interval 1 --lr 0.001 --lr-decay-style constant --no-tensorboard --no-progress-bar --log-dir logs"
)
ELASTIC = (
    f"--max-nodes {NODES} --min-nodes 1 --peer-snapshot-interval 1 --save ck --load auto --save-interval 5 "
    "--keep-last-k 2 --distributed-timeout-minutes 0.4"
)
PROGRAM = (
    f"""{STAND_IN}{CUT}"""
    + """
import os, signal, sys, time
from pathlib import Path
if "--inprocess-restart" in sys.argv and "SMP_KEEPER" not in os.environ:  # it keeps one that trains
    import pretrain_gpt
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
from smp.checkpoint import peers
from smp.training import trainer
from smp.training.checkpoints import saving

def strike(part):
    for what in ("kill", "stop", "full", "cut"):
        order = Path(f"{what}-{part}-{os.environ['RANK']}")
        if order.exists():
            order.unlink(missing_ok=True)
            if what == "full":
                raise OSError(28, "No space left on device")
            if what == "cut":
                return cut()
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

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


@dataclass(frozen=True)
class Cost:
    """Seconds to the first step that was new, and steps that were trained again."""

    seconds: float
    again: int


def every_step(folder: Path) -> list[Logged]:
    """Of all starts; steps that were trained twice are there twice."""
    found = []
    for path in folder.glob("logs/metrics*.jsonl"):  # of steps that were lost, too
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut off by a kill
                record = json.loads(line)
                if "lm loss" in record:
                    found.append((record["iteration"], record["lm loss"], record["grad norm"]))
    return found


def compare(logged: list[Logged], want: dict[int, dict[str, float]]) -> str:
    """Losses and gradient norms against those of one process, in words."""
    words = []
    for what, found in (
        ("lm loss", [(i, loss) for i, loss, _ in logged]),
        ("grad norm", [(i, norm) for i, _, norm in logged]),
    ):
        worst = max(abs(value - want[i][what]) / abs(want[i][what]) for i, value in found)
        different = sum(not math.isclose(value, want[i][what], rel_tol=BOUND) for i, value in found)
        words.append(f"{what} of {len(found)} steps: {different} different, worst {worst:.1e}")
    return "; ".join(words)


def strike(job: Job, failure: Failure) -> Cost:
    """Let it happen, wait until all nodes train again behind it.

    Raises:
        TimeoutError: they do not.
    """
    began, before, mark = time.monotonic(), job.iteration, job.mark()
    orders = [job.folder / f"{failure.what}-{failure.part}-{rank}" for rank in failure.victims]
    live = [number for number, node in enumerate(job.nodes) if node.poll() is None]
    if failure.what in ("node", "agent"):
        for victim in failure.victims:
            if failure.what == "node":
                job.kill(live[victim])
            else:
                job.nodes[live[victim]].kill()
        job.start(len(failure.victims))
    elif failure.what == "keeper":
        for victim in failure.victims:
            job.kill_worker(live[victim])
    else:
        for order in orders:
            order.touch()
        if failure.part == "recovery":
            (job.folder / "kill-forward-0").touch()  # or there would be none
        began += job.until(lambda: not any(order.exists() for order in orders), PATIENCE)
        before = job.iteration
    off = job.cut_off() if isinstance(job, CutJob) else None
    if failure.what == "full":
        job.until(lambda: job.iteration > before + 2, PATIENCE)
        return Cost(0.0, 0)
    # A failure is over when the job trains behind what it had reached, on all nodes.
    job.until(lambda: "resumed from" in job.since(mark), PATIENCE)
    job.until(lambda: job.iteration > before, PATIENCE)
    seconds = time.monotonic() - began
    if isinstance(job, CutJob) and off is not None:
        job.until(lambda: f"{NODES - 1} nodes" in job.now(), PATIENCE)
        with contextlib.suppress(OSError):  # it may have ended
            job.kill(off)  # torchrun waits for a store that it has lost for minutes
        job.nodes[off].wait()
        job.mend(off)
        job.start()
    job.until(lambda: f"{NODES} nodes" in job.now(), PATIENCE)
    job.until(lambda: job.iteration > before + 2, PATIENCE)
    at = [int(line.rsplit(" ", 1)[1]) for line in job.since(mark).splitlines() if "resumed from" in line]
    return Cost(seconds, max(before - min(at), 0))


@dataclass
class Found:
    """What several jobs have found.

    Attributes:
        did_not: how often a job did not go on.
    """

    costs: list[tuple[Failure, Cost]] = field(default_factory=list)
    logged: list[Logged] = field(default_factory=list)
    jobs: int = 0
    did_not: int = 0

    def tell(self, want: dict[int, dict[str, float]]) -> None:
        """Print it; ``want``: of each iteration, what one process logs."""
        print(f"failures: {len(self.costs)} in {self.jobs} jobs, did not go on: {self.did_not}")
        for what, names in (
            ("", [failure.what for failure, _ in self.costs]),
            ("in ", [failure.part for failure, _ in self.costs]),
            ("at once: ", [str(len(failure.victims)) for failure, _ in self.costs]),
        ):
            for name in sorted(set(names)):
                found = [cost for (_, cost), of in zip(self.costs, names, strict=True) if of == name]
                seconds, again = [cost.seconds for cost in found], Counter(cost.again for cost in found)
                print(
                    f"{what}{name}: {len(found)}, median {statistics.median(seconds):.0f} s, longest "
                    f"{max(seconds):.0f} s, {sum(s > LONG for s in seconds)} above {LONG:.0f} s; steps trained again: "
                    f"{dict(sorted(again.items()))}"
                )
        print(compare(self.logged, want))


def strike_often(folder: Path, asked: argparse.Namespace, number: int, deadline: float, found: Found) -> None:
    """One failure after the other, to job after job where one does not go on."""
    rng = random.Random(1000 * asked.seed + number)
    flags = f"{FLAGS} {ELASTIC} {INSIDE if asked.inprocess_restart else ''} --train-iters 1000000"
    while time.monotonic() < deadline:
        found.jobs += 1
        job = (CutJob if asked.cut else Job)(folder / str(found.jobs), flags, 1, NODES)
        (job.folder / "program.py").write_text(PROGRAM)
        failure = None
        try:
            job.start(NODES)
            # A checkpoint and a copy are there.
            job.until(lambda job=job: f"{NODES} nodes" in job.now() and job.iteration > 8, PATIENCE)
            while time.monotonic() < deadline:
                failure = Failure.drawn(rng, asked.inprocess_restart, asked.cut)
                cost = strike(job, failure)
                found.costs.append((failure, cost))
                print(f"{number}: {failure}: {cost.seconds:.0f} s, {cost.again} steps again", flush=True)
        except (TimeoutError, RuntimeError) as error:
            found.did_not += 1
            print(f"{number}: {failure}: {type(error).__name__}\n{str(error)[-20000:]}", flush=True)
        finally:
            job.close()
        found.logged += every_step(job.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="at once")
    parser.add_argument("--inprocess-restart", action="store_true", help="replace processes that are lost")
    parser.add_argument("--cut", action="store_true", help="cut a node's link, and nothing else (needs root)")
    asked = parser.parse_args()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")  # a process that was stopped hears no SIGTERM
    deadline, found = time.monotonic() + 60 * asked.minutes, Found()
    with tempfile.TemporaryDirectory() as name, preloaded(Path(name)):
        with ThreadPoolExecutor(asked.jobs) as pool:
            for one in [pool.submit(strike_often, Path(name), asked, n, deadline, found) for n in range(asked.jobs)]:
                one.result()
        flags = f"{FLAGS} --train-iters {max(i for i, _, _ in found.logged)}"
        alone = Job(Path(name, "alone"), flags, 1, 1, step=0)
        try:
            alone.start()
            assert alone.finish(3600) == [0], alone.said()
            found.tell(alone.records())
        finally:
            alone.close()


if __name__ == "__main__":
    main()
