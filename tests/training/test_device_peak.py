import pytest

from smp.training.reporting.device_peak import peak_flops


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12, 156e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 494.5e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA H200", 989e12, 494.5e12),
        ("NVIDIA B200", 2250e12, 1125e12),
        ("NVIDIA L40S", 362e12, 183e12),
        ("NVIDIA L4", 121e12, 60e12),
        ("AMD Instinct MI300X", 1307.4e12, 653.7e12),
    ],
)
def test_peak_of_known_devices(name: str, bf16: float, fp32: float) -> None:
    assert (peak_flops(name, "bf16"), peak_flops(name, "fp32")) == pytest.approx((bf16, fp32))


@pytest.mark.parametrize("name", ["cpu", "", "Tesla V100-SXM2-16GB", "NVIDIA H200 MIG 1g.18gb", "NVIDIA L40"])
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None
