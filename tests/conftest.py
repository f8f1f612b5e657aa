"""Settings for all tests: one thread per process, and no GPU tests where there is no GPU."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; spawned ranks inherit it

settings.register_profile("any speed", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("any speed")


# Modules and thousands of tests stay until the end. The collector would walk them again and again while they are
# imported, and after that whenever it, or a test, looks for garbage; and once more when the interpreter ends.
gc.disable()
atexit.register(gc.freeze)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # takes seconds, and most tests of settings and data do without

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def _own_state() -> Iterator[None]:
    """What a file leaves in ``smp.state`` (a run of transformers' model in the test's own process does) ends with it:
    which file comes next differs from machine to machine."""
    yield
    if "smp.hf.state" in sys.modules:  # not imported for this: tests of settings do without torch
        sys.modules["smp.hf.state"].state.reset()
