"""Host to device."""

from __future__ import annotations

import torch


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` on ``device``, in the order of the device's work: from pinned memory, so that the host does not wait."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
