"""Settings for all tests: one thread per process, and no GPU tests where there is no GPU."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; spawned ranks inherit it

settings.register_profile("any speed", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("any speed")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # takes seconds, and most tests of settings and data do without

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
