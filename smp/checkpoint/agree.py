"""Small agreements between all ranks of the default process group; without one, a process agrees with itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from smp.checkpoint.entries import CheckpointError

Answer = TypeVar("Answer")


def rank() -> int:
    """Of this process; 0 when it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is set on some rank."""
    if not dist.is_initialized():
        return flag
    # a group that has gloo exchanges small messages without the GPU; one with NCCL alone cannot
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    box = torch.tensor(int(flag), device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return bool(box.item())


def every_rank(flag: bool) -> bool:
    """Whether ``flag`` is set on all ranks."""
    return not any_rank(not flag)


def gather(value: Answer) -> list[Answer]:
    """The values of all ranks, in their order."""
    if not dist.is_initialized():
        return [value]
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def on_rank_zero(action: Callable[[], Answer]) -> Answer:
    """What ``action`` returns on rank 0, on all ranks; or its error, so that they agree about that too.

    Raises:
        CheckpointError: as ``action`` did; any other error becomes one, and its cause.
    """
    if not dist.is_initialized():
        return action()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = action()
        except CheckpointError as error:
            box[1] = error
        except Exception as error:  # storage raises what it likes, and the other ranks are waiting
            box[1] = CheckpointError(f"{type(error).__name__}: {error}")
            box[1].__cause__ = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]
