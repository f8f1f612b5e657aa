"""Which checkpoints to keep, and how often to save."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from smp.checkpoint.commit import discard_unfinished
from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.folders.latest import ITERATION, commit_latest, complete, iteration_of
from smp.checkpoint.format.entries import CheckpointError, DamagedError
from smp.checkpoint.format.manifest import MANIFEST, read_manifest

VALIDATION_LOSS = "validation_loss"
"""Key of a checkpoint's ``extra``: its validation loss, or null."""


@dataclass(frozen=True)
class Retention:
    """Rules for which checkpoints stay: one that any rule wants stays."""

    last: int
    """Keeps this many of the newest. At least 2, or nothing is left to fall back to when the newest is damaged."""
    every: int | None = None
    """Keeps checkpoints whose iteration is a multiple of this."""
    best: int | None = None
    """Keeps this many with the lowest validation loss; a checkpoint without a loss is never among them."""

    def __post_init__(self) -> None:
        if self.last < 2:
            raise ValueError(f"at least the last 2 checkpoints must stay, not {self.last}")

    def doomed(self, losses: Mapping[int, float | None]) -> list[int]:
        """Iterations to delete, oldest first, given the validation losses of all there are."""
        # A union: each rule keeps what it wants, whatever the others say.
        kept = set(sorted(losses)[-self.last :])
        if self.every is not None:
            kept |= {iteration for iteration in losses if iteration % self.every == 0}
        # Of equal losses the earlier iteration is kept.
        known = sorted((loss, iteration) for iteration, loss in losses.items() if loss is not None)
        kept |= {iteration for _, iteration in known[: self.best or 0]}
        return sorted(set(losses) - kept)


def doomed(root: Folder, retention: Retention, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Names of the checkpoints in ``root`` that ``retention`` does not want, oldest first.

    Only folders named ``iter_NNNNNNN`` are looked at, so renaming one keeps it for ever. One whose manifest is damaged
    is told to ``say``, and neither deleted nor among the last: a whole one would go for it.

    Raises:
        CheckpointError: a manifest cannot be read, and that may be for a while only.
    """
    losses: dict[int, float | None] = {}
    names = {iteration_of(name): name for name in complete(root)}
    for iteration, name in names.items():
        try:
            loss = read_manifest(root.child(name)).extra.get(VALIDATION_LOSS)
            losses[iteration] = loss if isinstance(loss, float) else None
        except DamagedError as error:
            say(f"WARNING: {error}; it does not count among the checkpoints that stay, and is not removed")
    return [names[iteration] for iteration in retention.doomed(losses)]


def prune(root: Folder, retention: Retention, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Delete the checkpoints that are :func:`doomed`; call on one rank. Returns their names.

    The manifest goes first: a crash in the middle leaves the remains of a save, which the next start removes.
    """
    removed = doomed(root, retention, say)
    for name in removed:
        # A last look before something is deleted: only folders of iterations.
        assert ITERATION.fullmatch(name)
        folder = root.child(name)
        if folder.local is not None and folder.local.is_symlink():
            folder.remove()  # the link alone
            continue
        folder.delete(MANIFEST)
        # The manifest's deletion is durable before the files go: no crash leaves a manifest without
        # its data.
        folder.sync()
        discard_unfinished(folder)
    return removed


def publish(root: Folder, folder: Folder, retention: Retention | None, check: Callable[[], None]) -> list[str]:
    """After a commit: let ``latest`` name the checkpoint, and prune old ones; call on one rank.

    ``check`` raises when another job has ``root``; it is called before anything is changed. Returns lines for the user:
    what cannot be done is one of them, for the checkpoint is complete all the same.
    """
    # Two attempts, so that a failed removal does not hide that ``latest`` moved, nor the other way round.
    try:
        check()
        commit_latest(root, folder)
    except (OSError, CheckpointError) as error:
        return [f"WARNING: {folder} is complete, but 'latest' does not name it: {error}"]
    lines: list[str] = []
    try:
        removed = prune(root, retention, lines.append) if retention is not None else []
    except (OSError, CheckpointError) as error:
        return [*lines, f"WARNING: no old checkpoints are removed from {root} now: {error}"]
    return [*lines, *(f"removed {root.child(name)}" for name in removed)]


def best_interval(cost: float, mtbf: float) -> float:
    """Time between saves that loses least to saving and to repeating what a failure undid: sqrt(2 x cost x MTBF).

    Young, "A first order approximation to the optimum checkpoint interval" (1974). In the units of the arguments:
    ``cost`` is how long a save stops the training, 0 or more, ``mtbf`` the mean time between failures, above 0.
    """
    return math.sqrt(2 * cost * mtbf)
