"""SIGKILL at any moment of a save, to any rank and any writer: the newest committed checkpoint is what comes back.

Each crash is followed by a start in the same folder, which must find at least what it was told to be committed, load it
whole, and go on to be the next victim.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from smp.checkpoint import read_manifest, verify
from smp.checkpoint.folders.latest import complete

HERE = Path(__file__).parent / "crash"
REPOSITORY = Path(__file__).parents[2]
KEEP = ["--keep-last-k", "3"]


class Chain:
    """Runs of two ranks in one folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.root, self.runs = folder / "ck", 0
        self.fired = 0

    def run(self, steps: int, flags: list[str], crash: str | None, after: float | None = None) -> str:
        """One run; returns what it said.

        Args:
            steps: training steps, each with a save.
            flags: of the run.
            crash: role:rank:count of the victim.
            after: kill all processes so many seconds after the first step began instead.
        """
        self.runs += 1
        if crash is not None:
            Path(f"{self.root}.fired").unlink(missing_ok=True)
        ranks, outputs = self._start(steps, flags, {} if crash is None else {"CRASH": f"{crash}:{self.root}"})
        self._see_to_the_end(ranks, outputs, after)
        return self._judge(ranks, outputs, after)

    def _start(
        self, steps: int, flags: list[str], more: dict[str, str]
    ) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
        """Both ranks, and the files with what they say."""
        store = self.root.with_name(f"store{self.runs}")
        outputs = [self.root.with_name(f"out{self.runs}.{rank}") for rank in (0, 1)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "STORE": str(store), "WORLD_SIZE": "2", **more}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(REPOSITORY)])
        ranks = []
        for rank, output in enumerate(outputs):
            command = [sys.executable, str(HERE / "trainer.py"), str(self.root), str(steps), *flags]
            with output.open("w") as out:
                environment["RANK"] = str(rank)
                ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=self.root.parent))
        return ranks, outputs

    def _judge(self, ranks: list[subprocess.Popen[bytes]], outputs: list[Path], after: float | None) -> str:
        said = "\n".join(output.read_text() for output in outputs)
        codes = [rank.wait() for rank in ranks]
        self.fired += Path(f"{self.root}.fired").exists() or after is not None
        died = -9 in codes
        assert died or codes == [0, 0], said
        assert "AssertionError" not in said, said
        return said

    def run_and_kill_one(self, flags: list[str], victim: str, after: float) -> None:
        """One run; so many seconds after its first step began ``victim`` is killed, and nobody else.

        Who is left must end without help: with all that is to do after a writer died, with an error after a rank died.
        """
        self.runs += 1
        stop = Path(f"{self.root}.stop")
        stop.unlink(missing_ok=True)
        ranks, outputs = self._start(10**6, flags, {})
        role, number = victim.split(":")
        try:
            wait_for(lambda: all("started from" in output.read_text() for output in outputs))
            time.sleep(after)
            trainer = ranks[int(number)].pid
            pid = trainer if role == "trainer" else writer_of(trainer)
            if pid is not None and ranks[int(number)].poll() is None:
                os.kill(pid, signal.SIGKILL)
                self.fired += 1
            stop.touch()
            wait_for(lambda: all(rank.poll() is not None for rank in ranks))
        finally:
            for rank in ranks:
                rank.kill()
            stop.unlink(missing_ok=True)
        codes, said = [rank.wait() for rank in ranks], "\n".join(output.read_text() for output in outputs)
        assert "AssertionError" not in said, said
        assert codes == [0, 0] if role == "writer" else codes[int(number)] in (0, -signal.SIGKILL), (codes, said)

    def _see_to_the_end(self, ranks: list[subprocess.Popen[bytes]], outputs: list[Path], after: float | None) -> None:
        """As a launcher does: when one rank has died, the others are killed too."""
        deadline, to_kill = time.monotonic() + 120, False
        while any(rank.poll() is None for rank in ranks):
            started = "started from" in outputs[0].read_text()
            if after is not None and started and not to_kill:
                time.sleep(after)
                to_kill = True
            if to_kill or any(rank.poll() not in (None, 0) for rank in ranks) or time.monotonic() > deadline:
                time.sleep(0.2)
                for rank in ranks:
                    rank.kill()
            time.sleep(0.02)
        assert time.monotonic() < deadline, "\n".join(output.read_text() for output in outputs)

    def check(self) -> None:
        """After a run to its end: nothing but whole checkpoints, of which `latest` names the newest."""
        names = complete(self.root)
        assert sorted(path.name for path in self.root.iterdir()) == sorted([*names, "latest"])
        assert (self.root / "latest").read_text().strip() == names[0]
        for name in names:
            assert verify(self.root / name) == []
            files = set(read_manifest(self.root / name).files) | {"manifest.json"}
            assert files == {path.name for path in (self.root / name).iterdir()}


@pytest.mark.slow
def test_a_run_without_a_crash(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.run(3, ["--async-save"], None)
    assert "rank 1 started from 3" in chain.run(2, KEEP, None)
    chain.check()
    assert complete(chain.root) == ["iter_0000005", "iter_0000004", "iter_0000003"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def writer_of(trainer: int) -> int | None:
    """The process that writes for a trainer."""
    for pid in Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split():
        if b"smp.checkpoint.background.writer" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    return None


@pytest.mark.slow  # test_async has a killed rank and a killed writer too
@pytest.mark.parametrize("victim", ["trainer:1", "writer:0"])
def test_who_is_left_ends_without_help(tmp_path: Path, victim: str) -> None:
    chain = Chain(tmp_path)
    chain.run_and_kill_one(["--async-save", *KEEP], victim, 0.1)
    assert chain.fired == 1
    chain.run(1, KEEP, None)
    chain.check()


@pytest.mark.parametrize(
    ("victim", "flags"), [("writer:0:24", ["--async-save"]), pytest.param("trainer:1:6", [], marks=pytest.mark.slow)]
)
def test_killed_at_a_chosen_call(tmp_path: Path, victim: str, flags: list[str]) -> None:
    """A sample; the slow tests go through many more."""
    chain = Chain(tmp_path)
    chain.run(2, flags, victim)
    assert chain.fired == 1
    chain.run(1, KEEP, None)
    chain.check()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["writer:0", "writer:1", "trainer:0", "trainer:1"])
def test_killed_at_every_call_of_a_background_save(tmp_path: Path, victim: str) -> None:
    """Every call in which a process touches the folder, through a start and two saves (the second one prunes)."""
    chain = Chain(tmp_path)
    for count in range(1, 200):
        before = chain.fired
        chain.run(2, ["--async-save", *KEEP], f"{victim}:{count}")
        if chain.fired == before:
            break
    assert chain.fired >= (10 if victim.endswith("1") else 25)
    chain.run(1, KEEP, None)
    chain.check()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["trainer:0", "trainer:1"])
def test_killed_at_every_call_of_a_plain_save(tmp_path: Path, victim: str) -> None:
    chain = Chain(tmp_path)
    for count in range(1, 200):
        before = chain.fired
        chain.run(2, KEEP, f"{victim}:{count}")
        if chain.fired == before:
            break
    assert chain.fired >= 10
    chain.run(1, KEEP, None)
    chain.check()


AT_RANDOM = [
    *[("all", flags, 12, seed) for flags in ("--async-save", "") for seed in (1, 2)],
    *[(victim, "--async-save", 10, 3) for victim in ("trainer:0", "trainer:1", "writer:0", "writer:1")],
    *[(victim, "", 10, 4) for victim in ("trainer:0", "trainer:1")],
]


def test_there_are_a_hundred_random_moments() -> None:
    assert sum(moments for _, _, moments, _ in AT_RANDOM) >= 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("victim", "flags", "moments", "seed"), AT_RANDOM)
def test_killed_at_random_moments(tmp_path: Path, victim: str, flags: str, moments: int, seed: int) -> None:
    """All at once as a machine dies, or a single process of them."""
    chain, chance = Chain(tmp_path), random.Random(seed)
    for _ in range(moments):
        after = chance.uniform(0, 0.5)
        if victim == "all":
            chain.run(60, [*flags.split(), *KEEP], None, after)
        else:
            chain.run_and_kill_one([*flags.split(), *KEEP], victim, after)
    assert chain.fired == moments
    chain.run(1, KEEP, None)
    chain.check()
