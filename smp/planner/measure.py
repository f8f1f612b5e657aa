"""Measures one device of this machine and writes its shares with error bars to a file for tools/plan.py --gpu.

Products, attention and element-wise passes of the sizes that training has, each many times. A share is the median over
sizes; its error bar is how far sizes lie apart (a planner that knows one share for all sizes is off by that), or the
spread of repetitions where that is larger. Links cannot be measured with one device: they stay as the data sheet has
them, with the error of an assumption. So does the share of FP8's peak that products reach, which is not timed.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml

from smp.config import ConfigError
from smp.planner.devices import Device, ShareErrors

GPU_SIZES = ((8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (16384, 8192, 8192))
CPU_SIZES = ((512, 512, 512), (1024, 768, 512), (512, 512, 1536))
"""(rows, columns, inner size) of products."""
REPEATS = 15
LEAST_ERROR = 0.01
MAY_BE_ZERO = ("latency", "launch", "fp8_peak", "domain", "leaf", "watts")
"""Fields of ``Device`` that are never divided by, or whose 0 means that there is none."""


@dataclass(frozen=True)
class Rate:
    """A rate per second, and its relative error as a single number for all sizes."""

    value: float
    error: float

    @staticmethod
    def of(sizes: Sequence[Sequence[float]]) -> Rate:
        """The rate from repeated measurements of each size."""
        middle = [statistics.median(times) for times in sizes]
        value = statistics.median(middle)
        apart = statistics.pstdev(middle) / value
        shaky = max(
            # The standard error of a size's mean.
            statistics.pstdev(times) / (m * math.sqrt(len(times)))
            for times, m in zip(sizes, middle, strict=True)
        )
        return Rate(value, max(apart, shaky, LEAST_ERROR))


def measured(base: Device, where: torch.device) -> Device:
    """``base`` with the shares and errors measured on this device."""
    on_gpu = where.type == "cuda"
    dtype, sizes = (torch.bfloat16, GPU_SIZES) if on_gpu else (torch.float32, CPU_SIZES)
    products = Rate.of([_product(where, dtype, *size) for size in sizes])
    attention = Rate.of([_attention(where, dtype, length) for length in ((4096, 8192) if on_gpu else (256, 512))])
    memory = Rate.of(
        [_elementwise(where, dtype, count) for count in ((1 << 26, 1 << 28) if on_gpu else (1 << 22, 1 << 23))]
    )
    launch = Rate.of([_launch(where)])
    errors = replace(
        base.errors, product=products.error, attention=attention.error, memory=memory.error, host=launch.error
    )
    if not on_gpu:
        # Without a data sheet the rates are the peaks; links are copies by the same cores.
        link, size = memory.value / 2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(
            2 * products.value,  # predictions halve the peak for fp32, which was measured here
            float(size), memory.value, link, link, devices_per_node=1, tiles=1, product_share=1.0,
            attention_share=attention.value / products.value, memory_share=1.0, link_share=1.0,
            launch=1 / launch.value, family="cpu", watts=0.0, errors=errors,
        )  # fmt: skip
    return replace(
        base,
        product_share=products.value / base.peak,
        attention_share=attention.value / base.peak,
        memory_share=memory.value / base.bandwidth,
        launch=1 / launch.value,
        errors=errors,
    )


def _rates(work: float, run: Callable[[], object], where: torch.device) -> list[float]:
    """Work per second in each repetition."""

    def wait() -> None:
        if where.type == "cuda":
            torch.cuda.synchronize()

    # The first calls load kernels and choose algorithms.
    for _ in range(3):
        run()
    found = []
    for _ in range(REPEATS):
        wait()
        began = time.perf_counter()
        run()
        wait()
        found.append(work / (time.perf_counter() - began))
    return found


def _product(where: torch.device, dtype: torch.dtype, rows: int, columns: int, inner: int) -> list[float]:
    a = torch.randn(rows, inner, device=where, dtype=dtype)
    b = torch.randn(inner, columns, device=where, dtype=dtype)
    return _rates(2 * rows * columns * inner, lambda: a @ b, where)


def _attention(where: torch.device, dtype: torch.dtype, length: int) -> list[float]:
    """Causal attention, which computes half of the scores."""
    heads, width = (32, 128) if where.type == "cuda" else (4, 64)
    # 2 products of 2 n^2 width FLOPs for each head, half of them masked.
    q, k, v = (torch.randn(1, heads, length, width, device=where, dtype=dtype) for _ in range(3))
    work = 2 * heads * length * length * width
    return _rates(work, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), where)


def _elementwise(where: torch.device, dtype: torch.dtype, count: int) -> list[float]:
    """An addition, which moves three numbers for each result."""
    a, b = (torch.randn(count, device=where, dtype=dtype) for _ in range(2))
    return _rates(3 * count * a.itemsize, lambda: torch.add(a, b, out=a), where)


def _launch(where: torch.device) -> list[float]:
    """Operations on tiny tensors, a thousand in a row."""
    a = torch.zeros(8, device=where)

    def many() -> None:
        for _ in range(1000):
            a.add_(1)

    return _rates(1000, many, where)


def write_device(device: Device, path: Path) -> None:
    """Write every field, and the errors, as YAML."""
    text = yaml.safe_dump(asdict(device), sort_keys=False)
    path.write_text(f"# Written by tools/plan.py --measure: what one device does; errors are relative.\n{text}")


def read_device(path: Path) -> Device:
    """The device in a file of :func:`write_device`.

    Raises:
        ConfigError: it is something else.
    """
    try:
        said: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        # Unknown fields raise TypeError: files of another version are refused.
        errors = ShareErrors(**said.pop("errors"))
        device = Device(**said, errors=errors)
        numbers = {f.name: getattr(device, f.name) for f in fields(device) if f.name not in ("errors", "family")}
        if not all(
            isinstance(n, int | float) and 0 <= n < math.inf for n in [*numbers.values(), *vars(errors).values()]
        ):
            raise ValueError("every value is a number of at least 0")
        if nothing := [name for name, n in numbers.items() if n == 0 and name not in MAY_BE_ZERO]:
            raise ValueError(f"{', '.join(nothing)}: 0 has to be above 0")
    except (OSError, TypeError, ValueError, AttributeError, KeyError, yaml.YAMLError) as error:
        raise ConfigError(f"--gpu {path} is no file that --measure wrote: {error}") from None
    return device
