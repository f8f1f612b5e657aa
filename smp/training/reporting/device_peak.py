"""Peak FLOP/s of devices, for MFU."""

from __future__ import annotations

from typing import Literal

# Words of a device's name -> peak of dense matrix products in TFLOP/s (bf16, fp32 as TF32). The entry with most words
# wins. From the vendors' data sheets; NVIDIA's often print twice as much, for 2:4 sparsity.
_PEAK_TFLOPS: dict[str, tuple[float, float]] = {
    "A100": (312, 156),  # NVIDIA A100 data sheet, SXM and PCIe alike
    "A10G": (70, 35),  # NVIDIA A10G data sheet
    "L4": (121, 60),  # NVIDIA L4 data sheet
    "L40S": (362, 183),  # NVIDIA L40S data sheet
    "H100": (989, 494.5),  # NVIDIA H100 data sheet, SXM
    "H100 PCIe": (756, 378),  # NVIDIA H100 data sheet
    "H100 NVL": (835, 417.5),  # NVIDIA H100 NVL data sheet
    "H200": (989, 494.5),  # NVIDIA H200 data sheet, SXM
    "H200 NVL": (835.5, 417.5),  # NVIDIA H200 data sheet
    "GH200": (989, 494.5),  # NVIDIA GH200 data sheet
    "B200": (2250, 1125),  # NVIDIA DGX B200 data sheet / 8
    "GB200": (2500, 1250),  # NVIDIA GB200 NVL72 page / 72
    "MI300X": (1307.4, 653.7),  # AMD Instinct MI300X data sheet
}


def peak_flops(device_name: str, dtype: Literal["bf16", "fp32"]) -> float | None:
    """Largest possible FLOP/s of a device in dense matrix products, or None when it is not in the table.

    Args:
        device_name: as ``torch.cuda.get_device_name()`` says it, such as ``"NVIDIA H100 80GB HBM3"``.
        dtype: compute precision; fp32 products run as TF32.
    """
    # Whole words: "A10" must not match "A100".
    words = set(device_name.replace("-", " ").split())
    known = [name for name in _PEAK_TFLOPS if set(name.split()) <= words]
    if not known or "MIG" in words:  # a slice of a device has a slice of its peak
        return None
    best = max(known, key=lambda name: len(name.split()))
    return _PEAK_TFLOPS[best][("bf16", "fp32").index(dtype)] * 1e12
