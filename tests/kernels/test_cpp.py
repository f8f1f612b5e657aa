"""The C++ library: who builds it, what stands in its way, and where it lies."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from smp.kernels.attention_cores.sdpa import CPU, Scores
from smp.kernels.cpp import library
from smp.kernels.cpp.attention import _Call, attention, scratch_bytes


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder in which nothing is built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library.cache_clear()
    yield tmp_path / "smp"
    library.library.cache_clear()


def test_several_processes_build_it_once(empty: Path) -> None:
    if why := library.why_not(torch.float32):
        pytest.skip(why)
    (built,) = empty.glob("*.so")
    made = built.stat().st_mtime_ns
    built.unlink()
    code = "import torch; from smp.kernels.cpp.library import why_not; assert why_not(torch.float32) == ''"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert [path.name for path in empty.glob("*.so")] == [built.name] and built.stat().st_mtime_ns != made
    assert not list(empty.glob("*.tmp"))


def test_what_is_missing_is_one_line(empty: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "float64" in library.why_not(torch.float64)
    capable = dict.fromkeys(("fma3", "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"), True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capable)
    assert library.why_not(torch.bfloat16).endswith("AVX-512 for bf16")
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    assert library.why_not(torch.float32) == "there is no C++ compiler (g++)"
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capable)
    monkeypatch.setattr(library, "SOURCES", (str(broken),))
    if library.shutil.which("g++"):
        why = library.why_not(torch.float32)
        assert why.startswith("g++: ") and "error" in why and "\n" not in why
        assert not list((tmp_path / "smp").glob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_one_line(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty.parent / "file"))
    if library.sys.platform.startswith("linux") and library.shutil.which("g++"):
        with pytest.raises(library.BuildError, match="attention.cpp, rows.cpp: .*file"):
            library.library()


def test_nobody_has_a_home_is_one_line(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user id that the system does not know: the run goes on by PyTorch's kernels."""
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(library.Path, "expanduser", no_home)
    with pytest.raises(library.BuildError, match="no home directory to keep it in; set XDG_CACHE_HOME"):
        library.cache_folder()


def test_what_is_there_needs_no_compiler_and_has_to_be_ones_own(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a cluster often have no compiler; a shared folder may have a file that somebody else has put there."""
    if why := library.why_not(torch.float32):
        pytest.skip(why)
    library.library.cache_clear()
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    library.library()
    (built,) = empty.glob("*.so")
    # As root every file can be given away; elsewhere this process stands for another one.
    monkeypatch.setattr(library.os, "getuid", lambda: built.stat().st_uid + 1)
    library.library.cache_clear()
    if built.stat().st_uid != 0:
        with pytest.raises(library.BuildError, match="belongs to another user; set XDG_CACHE_HOME to a folder of your"):
            library.library()
    elif os.geteuid() == 0:
        os.chown(built, 12345, -1)
        with pytest.raises(library.BuildError, match="belongs to another user; set XDG_CACHE_HOME to a folder of your"):
            library.library()
        os.chown(built, 0, -1)
    else:
        library.library()  # the system's own


def test_a_damaged_file_is_named(empty: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if why := library.why_not(torch.float32):
        pytest.skip(why)
    (built,) = empty.glob("*.so")
    other = tmp_path / "other"
    (other / "smp").mkdir(parents=True)
    (other / "smp" / built.name).touch()  # what a lost power supply leaves
    monkeypatch.setenv("XDG_CACHE_HOME", str(other))
    library.library.cache_clear()
    with pytest.raises(
        library.BuildError, match=r"file too short \(if .*other/smp/kernels-\w+\.so is damaged, delete it"
    ):
        library.library()


def test_another_dtype_is_never_read_as_one_of_its_own() -> None:
    """A model that was made for fp32, and is .double() by now, has PyTorch's numbers; the operator itself refuses."""
    if why := library.why_not(torch.float32):
        pytest.skip(why)
    q, k, v = (torch.randn(1, 2, 128, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scores = Scores(True, None, None)
    out, lse = CPU["cpp"].forward(q, k, v, scores)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    got = CPU["cpp"].backward(dout, q, k, v, out, lse, scores=scores)
    for gradient, expected in zip(got, torch.autograd.grad(want, (q, k, v), dout), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="one of fp32 and bf16, not torch.float64"):
        attention(q, k, v, None, True, 1.0)
    with pytest.raises(TypeError, match=r"not torch.bfloat16, torch.float32"):
        attention(q.float(), k.bfloat16(), v.float(), None, True, 1.0)


def test_the_structure_is_that_of_the_source() -> None:
    """Its numbers in the order of the source, which ctypes cannot check."""
    text = (library.FOLDER / "attention.cpp").read_text().partition("struct Call {")[2].partition("}")[0]
    names = re.findall(r"(\w+)(?:\[\d\])?[,;]", "\n".join(line.partition("//")[0] for line in text.splitlines()))
    assert names == [name for name, *_ in _Call._fields_]
    assert ctypes.sizeof(_Call) == 8 * (8 + 8 * 3 + 2 + 1)


def test_scratch_is_known_without_data() -> None:
    """Bytes of a call, as the memory of a dry run counts them: of tensors without data, and more in a backward pass."""
    if why := library.why_not(torch.float32):
        pytest.skip(why)
    q, k = (torch.empty(4, heads, 512, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 4))
    forward, backward = (scratch_bytes(q, k, backward=way) for way in (False, True))
    packed = 4 * 4 * 4 * 512 * 64 * 2
    sums = 2 * 4 * 8 * 512 * 64 * 4
    assert packed < forward < 1.2 * packed and packed + sums < backward < 1.3 * (packed + sums)
