"""--cp-comm-type auto: choose the exchange that a cost model predicts to be fastest, and print the prediction.

The cost model uses bytes, links, FLOPs and the number of kernel calls. Nothing is measured, so that a run and its
resume make the same choice. A ring's exchanges overlap with the block that is computed meanwhile, an all-gather's with
the heads before; an all-to-all overlaps with nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from smp.layers.context_parallel.cost import Exchanged, bytes_sent, key_copies

BACKWARD = 2.5
"""FLOPs of the backward pass of a fused kernel / forward."""
GATHERED_BYTES = 128 << 20
"""Bytes of keys and values that an all-gather collects at once, but at least one head."""


def heads_at_once(groups: int, bytes_of_one: int) -> int:
    """Key/value heads that an all-gather collects at a time, of ``groups``."""
    return min(max(GATHERED_BYTES // bytes_of_one, 1), groups)


@dataclass(frozen=True)
class Machine:
    """Assumed rates of one process's device and links.

    Attributes:
        flops: of attention, per second.
        inside, between: bytes per second that a process sends inside of a node, and from node to node.
        message: seconds of an exchange without bytes.
        call: seconds of a kernel's call without work.
        one_call: a kernel takes documents of any lengths in one call.
        local: consecutive ranks of a context-parallel group on a node.
    """

    flops: float
    inside: float
    between: float
    message: float
    call: float
    one_call: bool
    local: int = 8


H100 = Machine(flops=500e12, inside=400e9, between=45e9, message=20e-6, call=10e-6, one_call=True)
CPU = Machine(flops=50e9, inside=2e9, between=1e9, message=300e-6, call=50e-6, one_call=False)


@dataclass(frozen=True)
class Seen:
    """How far back a token of a layer attends: window, chunk, documents.

    Attributes:
        window: largest number of tokens that it sees, itself included; None: no limit.
        document: mean length of documents, or of attention chunks; None: a sequence is one document.
    """

    window: int | None = None
    document: int | None = None


@dataclass(frozen=True)
class Estimate:
    """Predicted cost of an exchange: mean over layers, one micro-batch, forward and backward pass.

    Attributes:
        kind, heads_group: --cp-comm-type, and of a2a+p2p the ranks that exchange heads.
        sent: bytes, of a process.
        exchange, waiting: seconds that exchanges take, and that nothing is computed meanwhile.
        calls: seconds of kernels' calls.
    """

    kind: str
    heads_group: int
    sent: int
    exchange: float
    waiting: float
    calls: float

    @property
    def cost(self) -> float:
        """Seconds in addition to the computation itself, which all exchanges have in common."""
        return self.waiting + self.calls

    def plus(self, other: Estimate, times: float) -> Estimate:
        """This estimate, with the seconds of another one of the same way added ``times`` times."""
        parts = {name: getattr(self, name) + times * getattr(other, name) for name in ("exchange", "waiting", "calls")}
        return replace(self, **parts)


@dataclass(frozen=True)
class Choice:
    """The chosen exchange, and the table of predictions."""

    best: Estimate
    lines: tuple[str, ...]


def attention_flops(of: Exchanged, length: int, seen: Seen) -> float:
    """FLOPs of one layer's attention, in the forward pass and on one process, causal: 4 x head_dim for each head and
    pair that is seen.

    Args:
        of: sizes.
        length: of whole sequences.
        seen: what a token sees.
    """
    longest, window = min(length, seen.document or length), seen.window
    pairs = (longest + 1) / 2
    if window is not None and window < longest:
        pairs = window - window * (window - 1) / (2 * longest)  # the first tokens have fewer before them
    return 4.0 * of.head_dim * of.heads * of.tokens * pairs


def choose_comm_type(
    of: Exchanged, length: int, machine: Machine, layers: Mapping[Seen, int] | None = None, *, whole_only: bool = False
) -> Choice:
    """The cheapest of p2p, all_gather, a2a and a2a+p2p that this model can use.

    Args:
        of: sizes of one layer's attention on one process.
        length: of whole sequences.
        machine: what links and kernels do.
        layers: how many see what; None: all see all.
        whole_only: only what computes whole sequences can be used.
    """
    layers = layers or {Seen(): 1}
    shares = {seen: number / sum(layers.values()) for seen, number in layers.items()}
    found = [_of_layers(kind, size, of, length, shares, machine) for kind, size in _ways(of, whole_only=whole_only)]
    if not found:
        raise ValueError(f"{of.heads} heads on each of {of.cp} processes: nothing takes documents under torch.compile")
    # The first of equals, see ``_ways``.
    best = min(found, key=lambda estimate: estimate.cost)
    flops = sum(share * attention_flops(of, length, seen) for seen, share in shares.items())
    seconds, which = (1 + BACKWARD) * flops / machine.flops, "one layer" if len(shares) == 1 else "the mean layer"
    lines = [f"context parallelism of {of.cp}, {which}: {1e3 * seconds:.3g} ms of attention; in addition", _HEADER]
    lines += [_row(estimate, chosen=estimate is best) for estimate in found]
    return Choice(best, tuple(lines))


_HEADER = "  --cp-comm-type     MiB sent   exchange ms    waiting ms      calls ms"


def _row(e: Estimate, *, chosen: bool) -> str:
    name = f"{e.kind} {e.heads_group}" if e.kind == "a2a+p2p" else e.kind
    numbers = f"{e.sent / 2**20:>10.1f} {1e3 * e.exchange:>13.3g} {1e3 * e.waiting:>13.3g} {1e3 * e.calls:>13.3g}"
    return f"  {name:<16} {numbers}{'   chosen' * chosen}"


def _ways(of: Exchanged, *, whole_only: bool) -> Iterator[tuple[str, int]]:
    """(kind, ranks that exchange heads); of equals the first is chosen: an all-to-all has the bits of one rank."""
    if of.heads % of.cp == 0:
        yield "a2a", of.cp
    if whole_only:
        return
    yield "all_gather", 1
    yield "p2p", 1
    for size in range(2, of.cp):
        if of.cp % size == 0 and of.heads % size == 0:
            yield "a2a+p2p", size


def _of_layers(
    kind: str, size: int, of: Exchanged, length: int, shares: Mapping[Seen, float], machine: Machine
) -> Estimate:
    """One way, of the mean layer."""
    sent = sum(bytes_sent(kind, replace(of, heads_group=size if kind == "a2a+p2p" else 1)))
    mean = Estimate(kind, size, sent, 0.0, 0.0, 0.0)
    for seen, share in shares.items():
        # Documents of the whole micro-batch: every rank has a part of each.
        documents = 1 if seen.document is None else max(of.cp * of.tokens // seen.document, 1)
        mean = mean.plus(_estimate(kind, size, of, attention_flops(of, length, seen), documents, machine), share)
    return mean


def _estimate(kind: str, size: int, of: Exchanged, flops: float, documents: int, machine: Machine) -> Estimate:
    of = replace(of, heads_group=size if kind == "a2a+p2p" else 1)
    forward, backward = bytes_sent(kind, of)
    compute = flops / machine.flops
    exchange = waiting = 0.0
    steps = of.cp // size if kind in ("p2p", "a2a+p2p") else 1
    # Zig-zag: a rank has two pieces of each document.
    blocks = 2 if machine.one_call else 2 * documents
    calls = 2 * machine.call * (1 if kind == "a2a" else steps * blocks)  # forward and backward
    if kind in ("a2a", "a2a+p2p"):
        # The all-to-all is among ``size`` neighbours only, the ring below among the groups.
        heads = replace(of, cp=size)
        # An all-to-all hides behind nothing: attention needs all tokens of its heads.
        exchange = waiting = sum(_all_to_all(sent, size, machine) for sent in bytes_sent("a2a", heads))
    if steps > 1:
        # Repeated key/value heads travel around the ring as often as they were repeated.
        copies = key_copies(of.heads, of.groups, size)
        ring = replace(of, groups=of.groups * copies, cp=steps)
        taken, exposed = _ring(ring, compute, _speed(of.cp, machine), machine.message)
        exchange, waiting = exchange + taken, waiting + exposed
    if kind == "all_gather":
        exchange, waiting = _all_gather(of, compute, _speed(of.cp, machine), machine.message)
    return Estimate(kind, size, forward + backward, exchange, waiting, calls)


def _speed(ranks: int, machine: Machine) -> float:
    """Rate of the slowest link around all ranks, bytes per second."""
    return machine.inside if ranks <= machine.local else machine.between


def _all_to_all(sent: int, size: int, machine: Machine) -> float:
    # Share of the other ranks that are on this node.
    near = (min(size, machine.local) - 1) / (size - 1)
    return 2 * machine.message + sent * (near / machine.inside + (1 - near) / machine.between)


def _ring(of: Exchanged, compute: float, speed: float, message: float) -> tuple[float, float]:
    """Seconds of all transfers, and those in which nothing is computed."""
    hops, step = of.cp - 1, compute / of.cp
    keys, gradients = (size / speed + message for size in (of.key_bytes(), of.key_bytes() * 4 // of.element))
    later = BACKWARD * step
    # Forward: each hop of keys runs under one step. Backward: keys and the gradients behind them
    # run under a step that takes ``BACKWARD`` times as long.
    exposed = hops * max(keys - step, 0.0) + (hops - 1) * max(keys + gradients - later, 0.0)
    exposed += max(keys - later / 2, 0.0) + max(gradients - later / 2, 0.0)  # halves of the own block at both ends
    return hops * (2 * keys + gradients), exposed


def _all_gather(of: Exchanged, compute: float, speed: float, message: float) -> tuple[float, float]:
    """Seconds of all transfers, and those in which nothing is computed: the first heads' keys and the last heads'
    gradients have nothing to hide behind."""
    parts = of.groups / heads_at_once(of.groups, of.key_bytes() * of.cp // of.groups)
    forward, backward = (sent / speed + 2 * parts * message for sent in bytes_sent("all_gather", of))
    # All parts but one travel while another one is computed.
    hidden = (parts - 1) / parts
    exposed = sum(
        max(taken - hidden * work, (1 - hidden) * taken)
        for taken, work in ((forward, compute), (backward, BACKWARD * compute))
    )
    return forward + backward, exposed
