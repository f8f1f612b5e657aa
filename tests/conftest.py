"""Settings for all tests: one thread per process, bytecode is kept, and no GPU tests where there is no GPU."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; spawned ranks inherit it
# Hundreds of programs that tests start import the package. Without bytecode, which containers often turn off, each of
# them compiles it, for longer than it runs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("any speed", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("any speed")


# Modules and thousands of tests stay until the end. The collector would walk them again and again while they are
# imported, and after that whenever it, or a test, looks for garbage; and once more when the interpreter ends.
gc.disable()
atexit.register(gc.freeze)


DEAREST = (
    *("training/test_any_model.py", "training/test_reinforcement_runs.py", "parity/test_pipeline.py"),
    *("training/test_finetune_parity.py", "parity/test_matrix.py", "training/test_fake_step.py"),
    *("training/test_environments.py", "training/test_pretrain.py", "training/", "parity/"),
)
"""Files and folders that run first, the dearest in front: a worker that begins one of them last keeps the others
waiting. See docs/measurements/tests.md."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((i for i, name in enumerate(DEAREST) if f"/tests/{name}" in path), len(DEAREST))

    items.sort(key=place)  # within a place as they were collected


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


@pytest.fixture
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that the test starts are forked where their PYTHONPATH is ``preloaded.python_path()``."""
    from tests.training.preloaded import preloaded  # imports torch

    with preloaded(tmp_path_factory.mktemp("forked")):
        yield
