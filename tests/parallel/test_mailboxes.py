"""Messages of a pipeline's links through memory that ranks share, and over gloo where there is no room."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp.parallel import mailboxes, node_group
from smp.parallel.links import Links
from smp.parallel.shared_memory import AbsentRankError
from tests.distributed import run_distributed

LIMIT = 2.0


def ring(world: int, seconds: float = 60, group: dist.ProcessGroup | None = None) -> Links:
    mesh = DeviceMesh.from_group(group or dist.new_group(backend=node_group.NAME), "cpu", mesh_dim_names=("pp",))
    around = {(rank, (rank + step) % world) for rank in range(world) for step in (1, -1)}
    return Links(mesh, around, timedelta(seconds=seconds))


def content(source: int, to: int, number: int) -> torch.Tensor:
    """What the message with this number is; its size and dtype too."""
    drawn = random.Random(f"{source} {to} {number}")
    dtype = drawn.choice((torch.float32, torch.bfloat16, torch.int64, torch.complex32))
    generator = torch.Generator().manual_seed(drawn.randrange(1 << 30))
    return torch.randint(0, 100, (drawn.randrange(4), drawn.randrange(1, 200)), generator=generator).to(dtype)


def talk(rank: int, world: int, rooms: int) -> tuple[int, int]:
    """All send to both neighbours, ahead of what they receive by up to 20 messages; large ones and dtypes that memory
    does not know go over gloo. All arrive, in their order."""
    mailboxes.ROOM, mailboxes.ROOMS, mailboxes._GLOO = 1 << 9, rooms, rooms
    links: Any = ring(world)
    over_gloo, sent, messages = [], [], 60
    group_receive = links._over_group
    links._over_group = lambda *given: over_gloo.append(given) or group_receive(*given)
    received: list[tuple[torch.Tensor, torch.Tensor, dist.Work]] = []
    neighbours = (rank + 1) % world, (rank - 1) % world
    for number in range(messages):
        for other in neighbours:
            x = content(rank, other, number)
            sent.append((links.send(x, other), x))
            into = torch.empty_like(content(other, rank, number))
            received.append((into, content(other, rank, number), links.receive(into, other)))
        while len(received) > random.Random(f"{rank} {number}").randrange(40):
            into, expected, work = received.pop(0)
            assert not work.is_completed() and work.wait() and work.is_completed()
            assert torch.equal(into.view(torch.uint8), expected.view(torch.uint8))
    for into, expected, work in received:
        work.wait()
        assert torch.equal(into.view(torch.uint8), expected.view(torch.uint8))
    for work, _ in sent:
        work.wait()
    return len(over_gloo), 2 * messages


@pytest.mark.parametrize("rooms", [8, 1])
def test_messages_arrive_in_their_order_whatever_room_there_is(rooms: int) -> None:
    found = run_distributed(talk, 3, rooms)
    assert all(0 < over_gloo < messages for over_gloo, messages in found)


def refuse() -> float:
    raise ValueError("a limit")


def lose(rank: int, world: int, how: str) -> str:
    """Rank 1 ends, leaves its groups, is interrupted in a collective, or is late. What it sent before arrives."""
    group: Any = dist.new_group(backend=node_group.NAME)
    links = ring(world, LIMIT if how == "late" else 600, group)
    store = dist.distributed_c10d._get_default_store()
    x = torch.full((10,), 7.0)
    if rank == 1:
        links.send(x, 0)
        store.set("process", str(os.getpid()))
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "left":
            dist.destroy_process_group(group)
        if how == "interrupted":
            with pytest.raises(ValueError, match="a limit"):
                group.memory.barrier(refuse)
        store.wait(["gave up"])
        return ""
    store.wait(["process"])
    time.sleep(0.1)
    into = torch.zeros(10)
    links.receive(into, 1).wait()
    assert torch.equal(into, x)
    with pytest.raises(AbsentRankError) as caught:
        links.receive(into, 1).wait()
    store.set("gave up", "")
    return str(caught.value)


def test_a_message_that_does_not_come_is_an_error_that_names_the_rank() -> None:
    for how, why in (
        ("late", "it is late"),
        ("left", "its process ended, or it left the group"),
        ("interrupted", "a collective of the group failed or was interrupted there"),
    ):
        said = run_distributed(lose, 2, how)[0]
        assert f"rank 1 of the group has not sent: {why}" in said
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9") as caught:
        run_distributed(lose, 2, "killed")
    assert "rank 0:" not in str(caught.value)  # it got its error, long before its timeout of 600 seconds


def other_sizes(rank: int, world: int) -> str:
    links = ring(world)
    if rank == 0:
        links.send(torch.ones(3), 1)
    else:
        with pytest.raises(RuntimeError, match=r"message from rank 0 of 12 bytes \(torch.float32\) for .* 16 bytes"):
            links.receive(torch.ones(4), 0).wait()
    dist.barrier()
    return without_room(rank)


def without_room(rank: int) -> str:
    """A message where the system gives no memory; what is said."""
    mailboxes.share = lambda *_: None
    with contextlib.redirect_stderr(io.StringIO()) as said:
        links = ring(2)
    x = torch.zeros(3)
    if rank == 0:
        links.send(torch.ones(3), 1).wait()
    else:
        links.receive(x, 0).wait()
    assert x.tolist() == [float(rank)] * 3
    return said.getvalue()


def test_a_message_of_another_size_is_an_error_and_one_without_memory_goes_by_gloo() -> None:
    said = run_distributed(other_sizes, 2)
    assert said[0].startswith("note: messages of the pipeline go by gloo") and not said[1]


def both_ways(rank: int, world: int, size: int) -> None:
    """Both send at once; who waits first for what it sends still gets what the other one sends."""
    mailboxes.ROOM = 1 << 9
    links, into = ring(world, LIMIT), torch.zeros(size)
    sent, received = links.send(torch.full((size,), float(rank)), 1 - rank), links.receive(into, 1 - rank)
    sent.wait()
    received.wait()
    assert into.unique().tolist() == [1.0 - rank]
    dist.barrier()


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_large_messages_in_both_directions_do_not_wait_for_each_other(size: int) -> None:
    run_distributed(both_ways, 2, size)
