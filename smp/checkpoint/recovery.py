"""Recovery of a checkpoint folder: clean up after a crash, load the newest checkpoint that is whole.

A checkpoint that turns out to be damaged is set aside under another name, with the reason inside, and the next older
one is loaded. Nothing that could be a checkpoint is ever deleted here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from smp.checkpoint.commit import discard_unfinished
from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.folders.latest import DAMAGED, ITERATION, LATEST, commit_latest, complete, set_aside_names
from smp.checkpoint.folders.lock import LEFT_BY_TAKERS
from smp.checkpoint.format.entries import CheckpointError, DamagedError, Manifest
from smp.checkpoint.format.manifest import MANIFEST, read_manifest
from smp.parallel.agree import on_rank_zero

REASON = "DAMAGED.txt"
_LEFT_IN_ROOT = re.compile(rf"{LATEST}(\.[0-9a-f]+)?\.tmp|{LEFT_BY_TAKERS.pattern}")
_LEFT_ASIDE = re.compile(rf"{re.escape(REASON)}(\.[0-9a-f]+)?\.tmp")
Loaded = TypeVar("Loaded")


def clean(root: Folder) -> list[str]:
    """Remove what crashed saves left in ``root`` and let ``latest`` name the newest; call on one rank, under the lock.
    Returns a line for each thing that was done."""
    lines = []
    for name in (name for name in root.names() if ITERATION.fullmatch(name)):
        # Under the lock of the run no save can be under way, so what has no manifest is of a crash.
        if left := discard_unfinished(root.child(name)):
            lines.append(f"{root.child(name)}: removed {len(left)} files of a save that did not finish")
        others = root.child(name).names()
        if others and MANIFEST not in others:
            lines.append(f"{root.child(name)} is not a checkpoint and holds files of others ({others[0]}, ...)")
    # Names of set-aside checkpoints do not match ITERATION.
    for name in set_aside_names(root):
        _delete_matching(root.child(name), _LEFT_ASIDE)
    _delete_matching(root, _LEFT_IN_ROOT)
    if (newest := _point_at_newest(root)) is not None:
        lines.append(f"{root}/{LATEST} now names {newest}, the newest complete checkpoint")
    return lines


def _delete_matching(folder: Folder, pattern: re.Pattern[str]) -> None:
    for name in filter(pattern.fullmatch, folder.names()):
        folder.delete(name)


def _point_at_newest(root: Folder) -> str | None:
    """Let ``latest`` name the newest complete checkpoint; returns its name if ``latest`` was changed."""
    newest = complete(root)[:1]
    if newest and _latest_name(root) != newest[0]:
        commit_latest(root, root.child(newest[0]))
        return newest[0]
    # A ``latest`` that names nothing would be an error for programs that read it.
    if not newest and _latest_name(root):
        root.delete(LATEST)
    return None


def _latest_name(root: Folder) -> str:
    try:
        return root.read(LATEST).decode(errors="replace").strip()
    except OSError:
        return ""


def set_aside(root: Folder, name: str, reason: str) -> str:
    """Rename a damaged checkpoint so that nothing takes it for one, and write the reason into it; call on one rank.

    Returns:
        What was done, for the user. On a disk without any room the name is changed and nothing is written.
    """
    new = DAMAGED + name
    # The same iteration may have been damaged before.
    while new in root.names():
        new += "+"
    root.rename(name, new)
    said = f"it is set aside as {root.child(new)}"
    try:
        # The name is what counts: a disk without room for the text must not stop the next older
        # checkpoint from being loaded.
        root.child(new).replace(REASON, f"{reason}\n".encode())
        _point_at_newest(root)
    except OSError as error:
        said += f"; {REASON} or '{LATEST}' could not be written: {error}"
    return said


def load_newest(
    root: Folder, load: Callable[[Folder, Manifest], Loaded], *, may_rename: bool, say: Callable[[str], None]
) -> tuple[Folder, Loaded] | None:
    """Load the newest checkpoint in ``root`` that is whole. Every rank calls it, and all load the same one.

    Args:
        root: folder of ``iter_NNNNNNN`` folders.
        load: loads one checkpoint; raises the same kind of error on every rank.
        may_rename: whether a damaged checkpoint may be set aside, or is passed over only (of another run's folder).
        say: told about each damaged checkpoint.

    Returns:
        The checkpoint's folder and what ``load`` returned; None when there is no checkpoint at all.

    Raises:
        DamagedError: there are checkpoints and none is whole: starting from nothing would hide a loss.
        CheckpointError: what ``load`` raised; only a DamagedError leads on to the next older one.
    """
    names = on_rank_zero(lambda: complete(root), CheckpointError)
    problems = []
    # All ranks go through the same names, and ``load`` raises the same error on all: none tries another checkpoint.
    for name in names:
        folder = root.child(name)
        try:
            manifest = on_rank_zero(lambda folder=folder: read_manifest(folder), CheckpointError)  # type: ignore[misc]
            return folder, load(folder, manifest)
        except DamagedError as error:
            problems.append(f"{name} ({error})")
            say(f"WARNING: {folder} is damaged: {error}")
            put_away = partial(set_aside, root, name, str(error))
            said = on_rank_zero(put_away, CheckpointError) if may_rename else f"{folder} is passed over"
            say(f"WARNING: {said}")
    aside = on_rank_zero(lambda: set_aside_names(root), CheckpointError)
    # What was set aside by an earlier start counts as well: training anew would hide that something was lost.
    if problems or aside:
        listed = "; ".join(problems) or ", ".join(aside)
        raise DamagedError(f"{root} holds no checkpoint that is whole, only damaged ones: {listed}")
    return None


def load_step(root: Folder, name: str, load: Callable[[Folder, Manifest], Loaded]) -> tuple[Folder, Loaded]:
    """Load the checkpoint ``name`` of ``root`` and no other.

    Raises:
        CheckpointError: it does not exist, or is not complete.
    """
    folder = root.child(name)
    if not on_rank_zero(lambda: folder.size(MANIFEST) is not None, CheckpointError):
        found = ", ".join(on_rank_zero(lambda: complete(root), CheckpointError)[:5]) or "none"
        raise CheckpointError(f"{root} has no complete checkpoint {name} (newest first: {found})")
    return folder, load(folder, on_rank_zero(lambda: read_manifest(folder), CheckpointError))
