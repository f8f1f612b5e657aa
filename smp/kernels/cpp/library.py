"""The shared library of the C++ files in ``csrc``: compiled by the first run that needs it, kept for later ones.

It has C functions only, so one build serves every torch, and it is loaded through ctypes. It lies in the user's cache
folder under a name that says what it was made of; compiling takes five seconds. The compiler is given the instructions
that it may use, not those of this machine, so nodes of different processors share a home; which of them may call it
:func:`why_not` says. Threads are those of torch: both use GNU's OpenMP, of which a process has one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parents[1] / "csrc"
SOURCES = ("attention.cpp", "rows.cpp")
HEADERS = ("vectors.h",)
_SETS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16")
"""Instructions that the compiler may use. Only code for bf16 has those of the last, see :func:`why_not`."""
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-mfma", *(f"-m{name}" for name in _SETS))
DTYPES = (torch.float32, torch.bfloat16)
"""That it computes in."""
_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "n": ctypes.c_int64, "f": ctypes.c_float}
_ARGUMENTS = {
    "smp_attention_memory": "pii",
    "smp_attention_sums": "p",
    "smp_attention_forward": "pi" + 7 * "p",
    "smp_attention_backward": "pi" + 12 * "p",
    "smp_softmax_stats": "ippp" + 4 * "n",
    "smp_logits_to_gradient": "ipppp" + 5 * "n",
    "smp_norm": "i" + 8 * "p" + "nnfn",
    "smp_norm_sums": "nn",
    "smp_norm_gradient": "i" + 10 * "p" + "nnn",
    "smp_swiglu": "ippp" + 5 * "n",
    "smp_swiglu_gradient": "i" + 6 * "p" + 6 * "n",
    "smp_rotate": "ipppp" + 4 * "n" + "fn",
}
"""Function -> a letter for each argument."""


class BuildError(RuntimeError):
    """The library cannot be had; the message says in one line what is missing."""


@cache
def can_run(dtype: torch.dtype) -> bool:
    """Whether :func:`why_not` has nothing against ``dtype``; asked in each call."""
    return not why_not(dtype)


def why_not(dtype: torch.dtype) -> str:
    """Why the library does not compute in ``dtype`` on this machine; "": it does, and is built."""
    if dtype not in DTYPES:
        return f"it does not compute in {str(dtype).removeprefix('torch.')}"
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    needed = ["fma3", "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"]
    needed += ["avx512_bf16"] if dtype == torch.bfloat16 else []
    if not sys.platform.startswith("linux") or not all(capabilities.get(name, False) for name in needed):
        return "it needs Linux on a processor with AVX-512" + (" for bf16" if dtype == torch.bfloat16 else "")
    if dtype == torch.bfloat16 and capabilities.get("amx_bf16", False):
        return "it was not measured beside AMX, which PyTorch's takes in bf16"
    try:
        library()
    except BuildError as error:
        return str(error)
    return ""


@cache
def library() -> ctypes.CDLL:
    """The library, built if it does not exist.

    Raises:
        BuildError: it cannot be built or loaded.
    """
    try:
        path = _built()
    except OSError as error:
        raise BuildError(f"{', '.join(SOURCES)}: {error}") from None
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{error} (if {path} is damaged, delete it)") from None
    # Without argtypes ctypes would pass pointers as 32-bit integers.
    for name, kinds in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = [_KINDS[kind] for kind in kinds], None
    for name in ("smp_attention_memory", "smp_attention_sums", "smp_norm_sums"):
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


def cache_folder() -> Path:
    """Where it is kept: ``$XDG_CACHE_HOME/smp``, or ``~/.cache/smp``.

    Raises:
        BuildError: there is no home, as for a user id that the system does not know.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "smp"
    except RuntimeError:
        raise BuildError("there is no home directory to keep it in; set XDG_CACHE_HOME") from None


def computes(*tensors: torch.Tensor | None) -> bool:
    """Whether these, without which there is a None, have one dtype that it computes in. Models may be converted after
    they were built (``.double()``); PyTorch's functions take such."""
    first = tensors[0]
    assert first is not None
    return all(t is None or t.dtype == first.dtype for t in tensors) and can_run(first.dtype)


def require(fits: bool, what: str) -> None:
    """C++ reads memory: a tensor of another shape than the function's would be read past its end.

    Raises:
        ValueError: it does not fit.
    """
    if not fits:
        raise ValueError(f"C++ takes {what}")


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` with neighbouring elements in its last dimension; of a tensor that has them, itself."""
    return x if x.stride(-1) == 1 else x.contiguous()


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """As its functions take tensors."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _built() -> Path:
    """The library's file. Of several processes one compiles, and the others wait for it."""
    sources = [str(FOLDER / name) for name in SOURCES]
    texts = b"".join((FOLDER / name).read_bytes() for name in (*SOURCES, *HEADERS))
    # With the C library, which an older one cannot replace: containers may share a home. Not with the compiler: nodes
    # without one take what another has made.
    made_of = " ".join((*FLAGS, *platform.libc_ver())).encode() + texts
    path = cache_folder() / f"kernels-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if path.exists():
        # Code that is run as this user: whoever can write to a shared folder could have put it there.
        if path.stat().st_uid not in (os.getuid(), 0):
            raise BuildError(f"{path} belongs to another user; set XDG_CACHE_HOME to a folder of your own")
        return path
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("there is no C++ compiler (g++)")
    import fcntl  # not on Windows, where this file is imported, too

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            done = subprocess.run(
                [compiler, *FLAGS, "-o", str(temporary), *sources], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                temporary.unlink(missing_ok=True)
                said = next((line for line in done.stderr.splitlines() if "error" in line), "it failed")
                raise BuildError(f"{Path(compiler).name}: {said}")
            os.replace(temporary, path)  # whole or not at all: a killed compiler leaves no half of it
    return path
