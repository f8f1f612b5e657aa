"""Compile ``smp/kernels/csrc`` into one shared library, next to the sources: ``python -m smp.kernels.cuda.build``.

Needs nvcc and a C++ compiler, no GPU, and not torch: the library has C functions only, so one build serves every torch.
``SMP_BUILD_CUDA=1 pip install .`` does the same for the wheel. ``SMP_CUDA_ARCHS`` names the targets, by default
``80;90a``: machine code for A100 and H100/H200; anything newer compiles the PTX of compute_90 that lies next to them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = "libsmp_kernels.so"
SOURCES = Path(__file__).resolve().parents[1] / "csrc"
DEFAULT_ARCHS = "80;90a"


class BuildError(RuntimeError):
    """The kernels cannot be built; the message says what is missing, or is the compiler's."""


def nvcc_path() -> str | None:
    """The compiler of CUDA_HOME or, without one, of PATH."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")


def build(folder: Path = SOURCES, archs: str | None = None) -> str:
    """Write the library into ``folder`` and return what the compiler said of registers and spills.

    Args:
        folder: where the library goes.
        archs: targets such as ``"80;90a"``; by default those of SMP_CUDA_ARCHS.

    Raises:
        BuildError: there is no nvcc, or it failed.
    """
    nvcc = nvcc_path()
    if nvcc is None:
        raise BuildError("the CUDA C++ kernels need nvcc: put it on PATH or set CUDA_HOME")
    names = (archs or os.environ.get("SMP_CUDA_ARCHS") or DEFAULT_ARCHS).split(";")
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    if archs is None:
        # PTX too, which the driver compiles for GPUs that are newer than these.
        targets.append("-gencode=arch=compute_90,code=compute_90")
    flags = ["-O3", "-std=c++17", "-Xptxas=-v", "-Xcompiler=-fPIC", "-shared"]
    output = folder / LIBRARY
    temporary = output.with_suffix(f".{os.getpid()}.tmp")
    sources = [str(path) for path in sorted(SOURCES.glob("*.cu"))]
    done = subprocess.run([nvcc, *flags, *targets, "-o", str(temporary), *sources], capture_output=True, text=True)
    if done.returncode != 0:
        temporary.unlink(missing_ok=True)
        raise BuildError(done.stderr or done.stdout)
    os.replace(temporary, output)  # whole or not at all: another process may be loading it
    return done.stderr + done.stdout


if __name__ == "__main__":
    try:
        build()
    except BuildError as error:
        sys.exit(f"error: {error}")
    print(f"built {SOURCES / LIBRARY}")
