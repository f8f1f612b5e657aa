"""Where the products of experts are one kernel, and what a run says of it. (Their results: ``tests/layers/moe``.)"""

from __future__ import annotations

import pytest
import torch

from smp.kernels.grouped import describe_products, has_kernel

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "dtype", "widths", "taken"),
    [
        ((9, 0), torch.bfloat16, (64, 48), True),
        ((10, 0), torch.bfloat16, (64, 48), True),
        ((8, 0), torch.bfloat16, (64, 48), False),
        ((12, 0), torch.bfloat16, (64, 48), False),
        ((9, 0), torch.float32, (64, 48), False),
        ((9, 0), torch.bfloat16, (64, 12), False),
    ],
)
def test_where_the_host_waits_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    widths: tuple[int, int],
    taken: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_kernel(GPU, dtype, widths) == taken
    (line,) = describe_products(GPU, dtype, widths)
    assert ("the host waits" in line) != taken
    assert describe_products(torch.device("cpu"), dtype, widths) == []
