"""Copies from the host to the device."""

from __future__ import annotations

import torch


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` on ``device``, in the order of the device's work: from pinned memory, so that the host does not wait."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    # Only a copy from pinned memory is asynchronous; from pageable memory the host waits.
    return x.pin_memory().to(device, non_blocking=True)
