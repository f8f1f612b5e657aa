"""A rank is killed, or a node's uplink cut, at each moment of a run with hierarchical collectives: all ranks that are
left end, each with one line that says which it is and where, and the same command continues to the same bits."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel import fault_lab as lab
from tests.parallel.netlab import netlab


def check_words(done: subprocess.CompletedProcess[str], moment: str, speaking: list[int]) -> list[float]:
    """Those ranks, and no others, have ended by themselves, each with the one line that it owes; after how many
    seconds."""
    text = re.sub(r"^\[node\d\.\d\] ", "", done.stdout + done.stderr, flags=re.MULTILINE)
    own = [float(seconds) for seconds in re.findall(r"^ended with 1 after ([\d.]+) s$", text, flags=re.MULTILINE)]
    assert done.returncode not in (0, 124) and len(own) == len(speaking), text
    assert "Traceback" not in text, text
    lines = sorted(line for line in text.splitlines() if line.startswith("error: "))
    assert len(lines) == len(speaking), text
    words, what, _ = lab.MOMENTS[moment]
    for rank, line in zip(speaking, lines, strict=True):
        assert re.match(f"error: rank {rank}: {words.format(what, rank)}", line), line
    if words == lab.IN_EITHER:
        assert any(f": {what} of " in line for line in lines), "one at least stands at the moment itself"
    return own


Whole = Callable[[str], dict[str, bytes]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """(flags) -> the last checkpoint of a run to which nothing happens."""

    @functools.cache
    def run(flags: str) -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp("whole")
        done = lab.on_one_machine(folder, flags)
        assert done.returncode == 0, done.stdout + done.stderr
        found = lab.last_checkpoint(folder)
        assert found, "it has data files"
        return found

    return run


def test_the_others_say_where_they_stand_and_new_starts_end_in_the_same_bits(tmp_path: Path, whole: Whole) -> None:
    """One start after the other, each ended at another moment, and one that nothing ends."""
    saved = 0
    for moment in ("choice", "measurement", "gather", "reduction", "evaluation", "save"):
        done = lab.on_one_machine(tmp_path, lab.MOMENTS[moment][2], moment)
        check_words(done, moment, [0, 1, 2])
        assert done.returncode == -9 and (f"at iteration {saved}" in done.stdout) == (saved > 0), done.stdout
        # A start that is ended in its second step, or after it, has saved its first.
        saved += f"saved saved/iter_{saved + 1:07}" in done.stdout
    assert saved == lab.ITERATIONS - 1
    done = lab.on_one_machine(tmp_path, "")
    assert done.returncode == 0 and f"at iteration {saved}" in done.stdout, done.stdout + done.stderr
    assert lab.last_checkpoint(tmp_path) == whole("")


@pytest.mark.slow
@pytest.mark.parametrize("victim, moment", [(3, "rendezvous"), (3, "replicas' sum"), (0, "gather"), (0, "save")])
def test_other_moments_and_rank_zero(victim: int, moment: str, tmp_path: Path, whole: Whole) -> None:
    flags = lab.MOMENTS[moment][2]
    check_words(lab.on_one_machine(tmp_path, flags, moment, victim), moment, sorted({0, 1, 2, 3} - {victim}))
    done = lab.on_one_machine(tmp_path, flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lab.last_checkpoint(tmp_path) == whole(flags)


@pytest.mark.slow
@pytest.mark.parametrize("moment", lab.MOMENTS)
def test_a_cut_uplink_ends_all_ranks_with_the_place_and_a_new_start_goes_on(
    moment: str, tmp_path: Path, whole: Whole
) -> None:
    """Needs a network of namespaces, see ``tests.parallel.netlab``; skipped where there is none."""
    netlab()
    flags = lab.MOMENTS[moment][2]
    done = lab.on_two_nodes(tmp_path, flags, moment)
    ends = check_words(done, moment, [0, 1, 2, 3])
    assert max(ends) - min(ends) < lab.LIMIT, ends
    said = done.stdout + done.stderr
    waited = [float(seconds) for seconds in re.findall(r"failed after ([\d.]+) s on rank", said)]
    assert all(seconds < lab.LIMIT + 3 for seconds in waited), waited
    assert "] cut" in said and f"iter_{lab.ITERATIONS:07}" not in said
    for rank, node, place in re.findall(r"on rank (\d) \(node(\d)\): rank \d on node(\d) has not", said):
        assert int(node) == int(rank) // 2 and node != place, "each waits for the other side"
    flags = flags.replace(lab.MEASURED, "")  # whose choice may differ between two starts
    again = lab.on_two_nodes(tmp_path, flags)
    assert again.returncode == 0, again.stdout + again.stderr
    assert lab.last_checkpoint(tmp_path) == whole(flags)


@pytest.mark.slow
def test_torchrun_ends_and_goes_on(tmp_path: Path) -> None:
    """It sends SIGTERM to the others, who have something to say all the same."""
    done = lab.by_torchrun(tmp_path, "gather")
    assert done.returncode == 1 and "SIGKILL" in done.stderr, done.stderr
    logs = [log.read_text() for log in sorted(tmp_path.glob("ranks/*/attempt_0/*/stderr.log"))]
    errors = [line for log in logs for line in log.splitlines() if line.startswith("error: ")]
    assert any("over 2 nodes of 2 ranks failed after" in line and "rank 3 on node1" in line for line in errors), errors
    assert len(logs) == 4 and not any("Traceback" in log for log in logs)
    again = lab.by_torchrun(tmp_path)
    assert again.returncode == 0, again.stderr
