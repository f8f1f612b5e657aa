"""Every differentiable collective's backward pass is its adjoint: <A x, y> = <x, A^T y>, summed over the ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_distributed

# name -> rows in and out per rank, on 3 ranks; whether the input, the output is one tensor that all ranks hold
PAIRS = {
    "copy_to_group": (6, 6, True, False),
    "reduce_from_group": (6, 6, False, True),
    "gather_tokens": (2, 6, False, False),
    "start_gather": (2, 6, False, False),
    "reduce_scatter_tokens": (6, 2, False, False),
    "split_tokens": (6, 2, True, False),
}


def inner_products(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """(<A x, y>, <x, A^T y>) by name."""
    import torch.distributed as dist

    from smp.config import Layout
    from smp.parallel import collectives
    from smp.parallel.context import build_context

    group = collectives.Group.of(build_context(Layout(tp=world), "cpu").tp)
    out = {}
    for name, (rows_in, rows_out, same_in, same_out) in PAIRS.items():
        mine, shared = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(99)
        x = torch.randn(rows_in, 4, generator=shared if same_in else mine, dtype=torch.float64, requires_grad=True)
        y = torch.randn(rows_out, 4, generator=shared if same_out else mine, dtype=torch.float64)
        result = (
            collectives.start_gather(x, group)() if name == "start_gather" else getattr(collectives, name)(x, group)
        )
        result.backward(y)
        assert x.grad is not None
        # a tensor that all ranks hold is one vector: it counts once
        left = (result.detach() * y).sum() / (world if same_out else 1)
        right = (x.detach() * x.grad).sum() / (world if same_in else 1)
        sums = torch.stack((left, right))
        dist.all_reduce(sums)
        out[name] = (sums[0].item(), sums[1].item())
    return out


@pytest.fixture(scope="module")
def products() -> dict[str, tuple[float, float]]:
    return run_distributed(inner_products, 3)[0]


@pytest.mark.parametrize("name", PAIRS)
def test_backward_is_the_adjoint(products: dict[str, tuple[float, float]], name: str) -> None:
    left, right = products[name]
    assert left == pytest.approx(right, rel=1e-12)
    assert abs(left) > 1e-3


def gathered(rank: int, world: int) -> None:
    import torch.distributed as dist

    from smp.parallel.collectives import Group, gather_features, gather_sequence

    assert dist.group.WORLD is not None
    group = Group(dist.group.WORLD.group_name, world, rank)
    for shape in ((5,), (3, 5), (2, 3, 5)):
        whole = torch.arange(float(torch.Size((*shape[:-1], world * 5)).numel())).view(*shape[:-1], world * 5)
        found = gather_features(whole[..., 5 * rank : 5 * rank + 5], group)
        assert torch.equal(found, whole) and found.is_contiguous()
    whole = torch.randn(2, 4 * world, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = gather_sequence(whole[:, 4 * rank : 4 * rank + 4], group)
    assert torch.equal(found, whole) and found.is_contiguous() and not found._is_view()
    found.sum().backward()
    assert whole.grad is not None and whole.grad.sum(dim=(0, 2)).nonzero().flatten().tolist() == [
        *range(4 * rank, 4 * rank + 4)
    ]


def test_what_is_gathered_lies_in_memory_as_it_is_read() -> None:
    run_distributed(gathered, 3)
