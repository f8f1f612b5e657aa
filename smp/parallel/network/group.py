"""Hierarchical collectives of one process group on a CPU: its own point-to-point messages, run by schedules.

Messages go through the gloo backend of the group itself, so there are no inner groups with a timeout of their own. Each
collective has a tag: one that a thread runs while the caller computes does not meet another one's messages.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smp.parallel.network.collective_schedule import Kind, Message, even_sizes
from smp.parallel.network.cost import Policy, Way
from smp.parallel.network.quantize import CodedBetweenNodes, Quantization, coded_bytes, decode
from smp.parallel.network.run import Execution, Posted, Transport, pieces_of
from smp.parallel.network.same_call import Call, first_and_last
from smp.parallel.network.schedules import actions_of

_TAGS = 1 << 14
_FIRST_TAG = (1 << 31) - _TAGS  # the last ones that gloo takes: callers of send and recv use small numbers
_FIRST_OF_CALLS = _FIRST_TAG - _TAGS
AT_EXIT = 10.0
"""Seconds that collectives have to end when a program does that has not destroyed its groups."""
_Jobs = queue.SimpleQueue[Callable[[], None] | None]  # None: that was all


class CollectiveError(RuntimeError):
    """A collective did not end: a rank is gone or late. The text names it and its node."""


class NetworkGroup:
    """Runs the collectives of a process group by schedules.

    Args:
        group: as messages for errors name it, its ranks in the default group.
        backend: the gloo backend of the group, or anything with ``send`` and ``recv`` as it has.
        policy: which way a collective goes, by kind and size.
        timeout: of a whole collective; None: the backend's own, which may be changed later.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, backend: Any, policy: Policy, timeout: timedelta | None = None
    ) -> None:
        self.ranks, self.rank, self.policy, self._timeout = list(ranks), rank, policy, timeout
        self.hierarchical_calls = 0
        self._backend, self._tags, self._calls = backend, itertools.count(), itertools.count()
        # not of a method: a cycle would keep the backend's connections open until a garbage collection
        self._actions = functools.lru_cache(maxsize=64)(actions_of)
        self._failure: CollectiveError | None = None
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @staticmethod
    def of(group: dist.ProcessGroup, policy: Policy, timeout: timedelta) -> NetworkGroup:
        """The network group of a process group whose tensors on a CPU go through gloo."""
        backend = group._get_backend(torch.device("cpu"))
        return NetworkGroup(dist.get_process_group_ranks(group), group.rank(), backend, policy, timeout)

    @property
    def timeout(self) -> timedelta:
        """Timeout of a collective that begins now."""
        # Asked for each time: torch lets a group's timeout be changed while it lives.
        return self._backend.options._timeout if self._timeout is None else self._timeout

    def way(self, kind: Kind, tensor: torch.Tensor) -> Way:
        """How a collective with this whole buffer is to run; see :class:`Way` for flat ones, which callers run."""
        return self.policy.way(kind, tensor.numel() * tensor.element_size())

    def way_quantized(self, given: torch.Tensor) -> Way:
        """How :meth:`all_gather_quantized` of this part is to run: by the bytes of its codes, which are sent."""
        return self.policy.way("all-gather", len(self.ranks) * coded_bytes(given.numel()))

    def all_gather(self, output: torch.Tensor, given: torch.Tensor, way: Way) -> Running:
        """All ranks' ``given`` into ``output``, in the order of ranks, 1 / ranks of it each; it may be a part of it."""
        sizes = [given.numel()] * len(self.ranks)
        pieces = pieces_of(output, sizes)
        own = pieces[self.rank]
        # FSDP2 gives a view of the output, which is in place already.
        if own.data_ptr() != given.data_ptr():
            # A part of the output may overlap with this rank's piece: copied first, or the copy
            # would overwrite what it reads.
            inside = given.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
            own.copy_((given.clone() if inside else given).detach().reshape(-1))
        return self._start("all-gather", pieces, way)

    def all_gather_quantized(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        way: Way,
        quantization: Quantization,
        then: Callable[[], None] = lambda: None,
    ) -> CollectiveWork:
        """:meth:`all_gather` of int8 numbers with scales, on this group's thread, and ``then``; see
        ``network.quantize``."""
        # Coded once, by the owner: every rank decodes the same codes and computes with the same weights.
        own = quantization.encoded(given.reshape(-1), "weights")
        coded = torch.empty(len(self.ranks) * own.numel(), dtype=torch.uint8)
        parts = pieces_of(output, [given.numel()] * len(self.ranks))

        def decode_all() -> None:
            # (ranks, bytes of one part)
            for part, codes in zip(parts, coded.view(len(self.ranks), -1), strict=True):
                decode(codes, part)
            then()

        return self.all_gather(coded, own, way).work(output, decode_all)

    def reduce_scatter(
        self, output: torch.Tensor, given: torch.Tensor, way: Way, quantization: Quantization | None = None
    ) -> Running:
        """This rank's part of the sum of ``given``, which stays as it is, into ``output``.

        With ``quantization`` a node's sum crosses as int8 numbers with scales, straight to the owner of a piece,
        whatever the way's route: on a ring each node would round it again.
        """
        pieces = pieces_of(given, [output.numel()] * len(self.ranks))
        if quantization is not None:
            way = Way("mesh", way.chunks)
        return self._start("reduce-scatter", pieces, way, pieces_of(output, [output.numel()])[0], quantization)

    def all_reduce(self, tensor: torch.Tensor, way: Way) -> Running:
        """The sum over all ranks, in place."""
        sizes = even_sizes(tensor.numel(), len(self.ranks))
        return self._start("all-reduce", pieces_of(tensor, sizes), way)

    def compare(self, call: Call, timeout: timedelta | None) -> None:
        """All ranks of the group are at this call.

        Raises:
            CollectiveError: on all ranks, with two calls that differ; or a rank has not come.
        """
        self.check_in_order()
        started, limit = time.monotonic(), (timeout or self.timeout).total_seconds()

        def wait(posted: Posted, other: int) -> None:
            try:
                # One limit for all rounds together.
                posted.wait(timedelta(seconds=max(started + limit - time.monotonic(), 1e-3)))
            except RuntimeError as error:
                passed = time.monotonic() - started
                raise self.failed(call.kind, call.size, (other, self.rank, other, 0), passed, error) from error

        # Tags of their own: ranks that call different collectives have used different numbers of the others.
        messages = _Messages(self._backend, _FIRST_OF_CALLS + next(self._calls) % _TAGS)
        first, last = first_and_last(str(call), self.rank, len(self.ranks), messages, wait)
        if first[0] != last[0]:
            (one, said), (other, says) = sorted((self.ranks[rank], text) for text, rank in (first, last))
            # Kept: messages of this call may still be under way, so no later one can be trusted.
            self._failure = CollectiveError(
                f"ranks of a group call different collectives: rank {one} {said}, rank {other} {says}"
            )
            raise self._failure

    def run(self, call: Call, job: Callable[[], Any], result: Any, timeout: timedelta | None) -> CollectiveWork:
        """``job``, once all ranks are at this call, on this group's thread; at once where that is the caller's."""
        work = CollectiveWork(result)

        def compared() -> None:
            self.compare(call, timeout)
            job()

        # A job that calls another collective: queued behind itself it would wait for ever.
        if threading.current_thread() is self._thread:
            work.run(compared)
        else:
            self.in_background(lambda: work.run(compared))
        return work

    def in_background(self, job: Callable[[], None]) -> None:
        """Run a job on this group's thread, after those before it."""
        self._check_open()
        if self._thread is None:
            # One thread for a group: its collectives run in the order in which they were called. It
            # holds the queue and not the group, which could otherwise never be freed.
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="collectives", daemon=True)
            self._thread.start()
            # A group that is never closed ends its thread, too: while the interpreter still lives, or C++ would abort.
            weakref.finalize(self, _end, self._jobs, self._thread)
        self._jobs.put(job)

    def close(self) -> None:
        """End this group's thread, after the jobs that it has; no collective can be started after this."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _check_open(self) -> None:
        if self._closed:
            raise CollectiveError("a collective of a process group that was destroyed")

    def check_in_order(self) -> None:
        """Raise the error of an earlier collective, if there was one: its messages may still be under way."""
        if self._failure is not None:
            raise CollectiveError(f"an earlier collective of this group failed: {self._failure}")

    def _start(
        self,
        kind: Kind,
        pieces: list[torch.Tensor],
        way: Way,
        own: torch.Tensor | None = None,
        quantization: Quantization | None = None,
    ) -> Running:
        self._check_open()
        self.check_in_order()
        assert way.route is not None, "flat collectives are the process group's own"
        self.hierarchical_calls += 1
        # No empty chunks: a piece of fewer elements than chunks has one element in each.
        chunks = tuple(min(way.chunks, piece.numel()) for piece in pieces)
        actions = self._actions(kind, self.policy.topology, chunks, way.route, self.rank)
        # All ranks count alike, because they start the same collectives in the same order.
        messages: Transport = _Messages(self._backend, _FIRST_TAG + next(self._tags) % _TAGS)
        if quantization is not None:
            messages = CodedBetweenNodes(messages, self.policy.topology.beyond(self.rank), quantization)
        execution = Execution(kind, chunks, actions, self.rank, pieces, messages, own)
        return Running(self, kind, execution, sum(piece.nbytes for piece in pieces))

    def failed(self, kind: str, size: int, message: Message, seconds: float, error: RuntimeError) -> CollectiveError:
        """Remember that a message did not come, or did not go: nothing of this group is in order now."""
        source, destination, piece, _ = message
        other = source if destination == self.rank else destination
        did = "has not sent" if other == source else "has not taken"
        # The rank that is late need not be the one that the data comes from: it may only pass it on.
        whose = f" (rank {self.ranks[piece]}'s part)" if piece != other else ""
        name = self.policy.topology.name_of
        text = (
            f"{kind} of {size:,} bytes over {self.policy.topology} failed after {seconds:.1f} s on rank "
            f"{self.ranks[self.rank]} ({name(self.rank)}): rank {self.ranks[other]} on {name(other)} {did} what is "
            f"due{whose}; it is lost or late, or waits for one that is: {str(error).strip().splitlines()[0]}"
        )
        self._failure = CollectiveError(text)
        return self._failure


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # and with it the group, before the next one comes


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    """Let a group's thread end; at the exit of a program its jobs get a moment."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(AT_EXIT)


class _Messages:
    """Point-to-point messages of one collective."""

    def __init__(self, backend: Any, tag: int) -> None:
        self._backend, self._tag = backend, tag

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        return self._backend.send([tensor], to, self._tag)

    def receive(self, into: torch.Tensor, source: int) -> Any:
        return self._backend.recv([into], source, self._tag)


class Running:
    """A collective that has been started on this rank; :meth:`finish` or :meth:`work` runs it."""

    def __init__(self, group: NetworkGroup, kind: Kind, execution: Execution, size: int) -> None:
        self._group, self._kind, self._execution, self._size = group, kind, execution, size

    def finish(self, timeout: timedelta | None = None) -> None:
        """Run it here, to its end.

        Args:
            timeout: of this one alone; None: the group's.

        Raises:
            CollectiveError: a rank is gone or late.
        """
        self._group.check_in_order()  # it may have failed since this one was started
        started = time.monotonic()
        limit = (timeout or self._group.timeout).total_seconds()
        for message, posted in self._execution.steps():
            # One limit for the whole collective, not for each message.
            left = max(started + limit - time.monotonic(), 1e-3)
            try:
                posted.wait(timedelta(seconds=left))
            except RuntimeError as error:
                passed = time.monotonic() - started
                raise self._group.failed(self._kind, self._size, message, passed, error) from error

    def work(
        self,
        result: Any,
        then: Callable[[], object] = lambda: None,
        timeout: timedelta | None = None,
        call: Call | None = None,
    ) -> CollectiveWork:
        """Run it on the group's thread, and ``then``; with ``call`` once all ranks are at it."""
        # Both are modes of a thread, and this one's are not the caller's.
        inference = any(piece.is_inference() for piece in self._execution.pieces)

        def job() -> None:
            with torch.inference_mode() if inference else torch.no_grad():
                self.finish(timeout)
                then()

        if call is not None:
            return self._group.run(call, job, result, timeout)
        work = CollectiveWork(result)
        self._group.in_background(lambda: work.run(job))
        return work


class CollectiveWork(dist.Work):
    """A handle as torch.distributed's own: FSDP, functional collectives and DDP wait for it where they use the result.

    It has to be a ``dist.Work``: torch never waits for any other object.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result, self._done = result, threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def run(self, job: Callable[[], object]) -> None:
        """Run ``job``, and mark this work as done with its result or its error."""
        try:
            job()
        except BaseException as error:
            self.end(error)
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Mark the work as done, with an error or without, and wake waiting threads."""
        self._error = error
        # The future first, as gloo does: who has waited may read it.
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)
        self._done.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the result is there. The collective has its own timeout; a shorter one may be given here.

        Raises:
            CollectiveError: a rank is gone or late.
        """
        if not self._done.wait(timeout.total_seconds() or None):
            raise CollectiveError(f"no result within {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the result, or an error, is there."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether the result is there."""
        return self._done.is_set() and self._error is None

    def exception(self) -> Any:
        """The error, where there is one."""
        return self._error

    def result(self) -> Any:
        """The tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result."""
        return self._future
