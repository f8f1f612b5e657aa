"""Runs cases many at a time, because starting processes costs more than running a case."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.parity import reference
from tests.parity.cases import Case
from tests.parity.result import Result, assemble
from tests.parity.worker import run_cases

CASES_PER_START = {1: 40, 2: 20, 4: 12, 8: 8}
"""So that one start stays well within a test's time limit on a slow machine."""


def asked(request: pytest.FixtureRequest) -> list[Case]:
    """The cases of the tests of this file that are selected."""
    items = [item for item in request.session.items if item.path == request.path]
    values = [
        value
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        for value in item.callspec.params.values()
    ]
    return [value for value in values if isinstance(value, Case)]


class Lab:
    """Results of cases, made when the first case of a start is asked for.

    Args:
        cases: all that will be asked for.
        folder: an empty folder for what the ranks write.
        device: cpu, cuda with a GPU for each rank, or one card for all of them.
    """

    def __init__(self, cases: Iterable[Case], folder: Path, device: str = "cpu") -> None:
        self.folder, self.device = folder, device
        self.starts = _group(cases)
        self.place = {case: (i, j) for i, start in enumerate(self.starts) for j, case in enumerate(start)}
        self.failures: dict[int, str] = {}
        self.references: dict[Case, Result] = {}

    def result(self, case: Case) -> Result:
        """The result of a case.

        Raises:
            RuntimeError: the case, or one before it in its start, failed; with every rank's traceback.
        """
        start, number = self.place[case]
        folder = self.folder / str(start)
        if not folder.exists():
            self._run(start, folder)
        paths = [folder / f"{number}.{rank}" for rank in range(case.spread.world_size)]
        if not all(path.exists() for path in paths):
            raise RuntimeError(self.failures[start])
        return assemble(paths)

    def reference(self, case: Case) -> Result:
        """The result of plain torch, from the initial weights of the one-rank run."""
        one_rank = case.one_rank_fp32
        if one_rank not in self.references:
            self.references[one_rank] = reference.train(one_rank, self.result(one_rank).initial)
        return self.references[one_rank]

    def _run(self, start: int, folder: Path) -> None:
        folder.mkdir()
        cases = self.starts[start]
        try:
            arguments = cases, str(folder), self.device
            run_distributed(run_cases, cases[0].spread.world_size, *arguments, device=self.device)
        except RuntimeError as error:
            self.failures[start] = str(error)


def _group(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that can share a start: same world size, and not too many. What is compiled is slow and goes alone."""
    groups: dict[tuple[int, bool], list[Case]] = defaultdict(list)
    for case in dict.fromkeys(cases):
        groups[case.spread.world_size, case.spread.compile].append(case)
    starts = []
    for (world_size, compiled), group in sorted(groups.items()):
        size = 1 if compiled else CASES_PER_START.get(world_size, 8)
        starts += [group[i : i + size] for i in range(0, len(group), size)]
    return starts
