"""Point-to-point messages between neighbours of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp.parallel.mailboxes import Channel, Mailboxes, open_mailboxes
from smp.parallel.node_group import CompletedWork


class Links:
    """Messages around a ring of ranks, in both directions.

    Messages of one channel, from a rank to a neighbour, arrive in the order in which they were sent. Channels do not
    wait for each other: a communicator runs what it is given in one order, in which a send can stand in front of a
    receive that it depends on, so no two channels of a rank share a process group. Four groups are enough, or six for
    an odd ring: neighbouring edges alternate between them, and so do directions.

    Making links connects every channel. NCCL builds a communicator at the first message between two ranks, and the host
    of each waits there for the other: left to a schedule, rank 0 would wait to receive its first gradient before it has
    sent what that depends on.

    Args:
        mesh: the 1-D pipeline dimension of the run's mesh.
        channels: those that will be used, between neighbours on the ring; the same on every rank.
        timeout: of messages; by default torch's.
        progress: called when one more group has been made, and when one more channel is connected.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        channels: Iterable[Channel],
        timeout: timedelta | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size, self._progress = mesh.get_local_rank(), mesh.size(), progress
        group = mesh.get_group()
        self._ranks = dist.get_process_group_ranks(group)
        # Sorted, so that all ranks go along the channels in the same order.
        ordered = sorted(set(channels))
        self._groups: dict[tuple[int, bool], dist.ProcessGroup] = {}
        for lane in sorted({_lane(channel, self.size) for channel in ordered}):
            # torch names a group made by its members alone after how many groups they are in: the same on all, so far
            # gloo where ranks share memory, for what there is no room for: it delivers while this rank computes.
            self._groups[lane] = dist.new_group(
                self._ranks,
                timeout=timeout,
                backend="gloo" if hasattr(group, "memory") else None,
                use_local_synchronization=True,
            )
            self._progress()
        # On the device: it is NCCL's communicator that has to be there. CPU tensors would connect gloo alone.
        self.mailboxes: Mailboxes | None = None
        self._connect(ordered, torch.zeros(1, device=mesh.device_type))
        self.mailboxes = open_mailboxes(group, ordered, timeout)

    def _connect(self, channels: Sequence[Channel], element: torch.Tensor) -> None:
        """Send one element through each channel. All ranks go through the channels in one order, so there is no
        deadlock: both ends of the first channel that is not connected yet come to it."""
        for source, destination in channels:
            if self.rank == source:
                self.send(element, destination).wait()
            elif self.rank == destination:
                self.receive(element, source).wait()
            self._progress()

    def global_rank(self, rank: int) -> int:
        """The number in the whole run of a pipeline rank."""
        return self._ranks[rank]

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Begin to send; the tensor must stay as it is until the work is done. It may be done only once the other rank
        waits for the message: wait for what this rank receives first."""
        if self.mailboxes is None:
            return self.send_over_group(tensor, to, 0)
        tag = self.mailboxes.send(tensor, to)
        return CompletedWork([tensor]) if tag is None else self.send_over_group(tensor, to, tag)

    def send_over_group(self, tensor: torch.Tensor, to: int, tag: int) -> dist.Work:
        """Begin to send through the channel's process group."""
        group = self._groups[_lane((self.rank, to), self.size)]
        # Global numbers, also for a message within a group.
        work = dist.isend(tensor, self._ranks[to], group=group, tag=tag)
        assert work is not None, "this rank is in the group"
        return work

    def receive(self, into: torch.Tensor, source: int) -> dist.Work:
        """Begin to receive; ``into`` is filled once the work is waited for."""
        if self.mailboxes is not None:
            return self.mailboxes.receive(into, source, lambda tag: self._over_group(into, source, tag))
        return self._over_group(into, source, 0)

    def _over_group(self, into: torch.Tensor, source: int, tag: int) -> dist.Work:
        """Begin to receive through the channel's process group."""
        group = self._groups[_lane((source, self.rank), self.size)]
        work = dist.irecv(into, self._ranks[source], group=group, tag=tag)
        assert work is not None, "this rank is in the group"
        return work


def _lane(channel: Channel, size: int) -> tuple[int, bool]:
    """(colour of the ring's edge, direction along it): different for all channels of one rank.

    Raises:
        ValueError: the two ranks are not neighbours on the ring.
    """
    source, destination = channel
    onward = (source + 1) % size == destination
    if not onward and (destination + 1) % size != source:
        raise ValueError(f"ranks {source} and {destination} are no neighbours on a ring of {size}")
    edge = source if onward else destination  # from rank ``edge`` to the next
    # Two colours for an even ring, a third for the odd one's last edge. In a ring of two each
    # channel leads onward: that of rank 1 counts as the way back.
    return (2 if size % 2 and edge == size - 1 else edge % 2), onward and not (size == 2 and source == 1)
