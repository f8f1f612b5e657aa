"""SMP v2's queue of checkpoints written in the background. It does not import ``smp.state``, which has one."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from smp.checkpoint import AsyncSaver


@dataclass
class AsyncCallsQueue:
    """The saves of a script in progress: one at a time, numbered from 0."""

    saver: AsyncSaver | None = None
    number: int = -1

    def maybe_finalize_async_calls(
        self, blocking: bool = True, process_group: dist.ProcessGroup | None = None, skip_sync: bool = False
    ) -> list[int]:
        """The number of the save that was under way, if it is complete now. Every rank that saves calls this (others
        may); with ``blocking`` it waits. ``process_group`` and ``skip_sync``, of SMP v2, change nothing.

        Raises:
            CheckpointError: it failed on some rank.
        """
        if self.saver is None or not self.saver.busy:
            return []
        done = self.saver.wait() if blocking else self.saver.poll()
        return [] if done is None else [self.number]
