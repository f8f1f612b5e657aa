"""CUDA C++ without a GPU: it compiles for each target without spills, and its library loads without torch."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from smp.config import ConfigError
from smp.kernels.cuda import library as cuda_library
from smp.kernels.cuda.build import LIBRARY, BuildError, build, nvcc_path
from smp.kernels.dispatch import choose_kernels


@pytest.mark.skipif(nvcc_path() is None, reason="nvcc is not on PATH")
def test_compiles_for_ampere_and_hopper_without_spills_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = build(tmp_path, archs="80;90a")
    assert set(re.findall(r"for '(sm_\w+)'", said)) == {"sm_80", "sm_90a"}
    assert said.count("Compiling entry function") == 2 * 2 * 2 * 2  # targets, kernels, dtypes, aligned or not
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
    assert set(re.findall(r"(\d+) bytes stack frame", said)) == {"0"}
    assert [path.name for path in tmp_path.iterdir()] == [LIBRARY]
    library = ctypes.CDLL(str(tmp_path / LIBRARY))
    library.smp_error_string.restype = ctypes.c_char_p
    assert library.smp_error_string(1) == b"invalid argument"
    assert (
        library.smp_cross_entropy_stats(None, None, None, *[ctypes.c_int64(0)] * 3, 1, None) == 0
    )  # no rows, no launch
    monkeypatch.setattr(cuda_library, "library_path", lambda: tmp_path / LIBRARY)
    cuda_library.library.cache_clear()
    if not torch.cuda.is_available():
        assert cuda_library.library().smp_usable() != 0
        with pytest.raises(ConfigError, match="does not run on this device") as caught:
            choose_kernels("cuda", torch.device("cuda"))
        assert "\n" not in str(caught.value)
    cuda_library.library.cache_clear()


def test_a_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="need nvcc"):
        build(tmp_path)
