"""What people install: the wheel, the pinned versions and the Makefile."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import smp
from smp.config.command_line.commands import COMMANDS, DISTRIBUTION, TOOLS
from smp.kernels.cuda.build import nvcc_path

ROOT = Path(__file__).parents[1]
PYPI_NAMES = {"PIL": "pillow", "yaml": "pyyaml", "mlflow": "mlflow-skinny", "fla": "flash-linear-attention"}
# extras that "make test" does without; torch's choice with CUDA
NOT_PINNED = {"wandb", "mlflow-skinny", "lm-eval", "trl", "datasets", "triton", "flash-linear-attention", "vllm"}
NOT_ON_AN_INDEX = {"apex"}  # used where it is installed

IMPORT_ALL = """
import importlib, importlib.util, pkgutil, smp
triton = importlib.util.find_spec("triton") is not None
for module in pkgutil.walk_packages(smp.__path__, "smp."):
    if triton or not module.name.startswith("smp.kernels.triton."):
        importlib.import_module(module.name)
    print(module.name)
print(smp.__file__)
"""


END_OF_HELP = "-- end of a page --"
ALL_HELP = f"""
import runpy, sys
files = sys.argv[1:]
for number, file in enumerate(files):
    sys.argv = [file, "--help"]
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (file, end.code)
    print({END_OF_HELP!r} * (number + 1 < len(files)), end="", flush=True)
"""
"""Console scripts one after the other, as each would import torch for itself."""

TRAIN = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from smp.layers import MLP, RMSNorm, init_weights
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = torch.nn.Sequential(RMSNorm(8, mesh), MLP(8, 16, mesh))
init_weights(model, seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(2):
    loss = (model(torch.ones(3, 8)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[1] < losses[0], losses
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, output = copy_of_the_sources(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", output, source)
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, console scripts in bin/."""
    site = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--target", site, wheel)
    return site


def copy_of_the_sources(folder: Path) -> Path:
    """To build from: setuptools leaves a build folder beside the sources."""
    source = folder / "source"
    shutil.copytree(ROOT / "smp", source / "smp", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "recipes_collection", source / "recipes_collection")
    shutil.copytree(ROOT / "tools", source / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE", "pretrain_gpt.py", "finetune.py"):
        shutil.copy(ROOT / name, source)
    return source


def pip(*words: object) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def requirements(wheel: Path) -> list[Requirement]:
    """Requires-Dist of the wheel, extras included."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    assert metadata["Name"] == DISTRIBUTION and metadata["Version"] == smp.__version__
    return [Requirement(text) for text in metadata.get_all("Requires-Dist")]


def pins() -> dict[str, str]:
    """Canonical name -> version, of constraints.txt."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_the_wheel_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *modules, location = done.stdout.split()
    assert Path(location) == installed / "smp" / "__init__.py"
    sources = (ROOT / "smp").rglob("*.py")
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in sources}
    assert set(modules) == dotted - {"smp"}


def test_layers_of_the_wheel_train(installed: Path, tmp_path: Path) -> None:
    assert (installed / "smp" / "py.typed").exists()
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_kernels_import_without_what_they_may_use() -> None:
    code = "import sys; sys.modules['triton'] = sys.modules['apex'] = None; import smp.layers, smp.training.launch"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(nvcc_path() is None, reason="nvcc is not on PATH")
def test_machine_code_comes_only_when_asked_for(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(path: Path) -> set[str]:
        with zipfile.ZipFile(path) as archive:
            return {Path(name).name for name in archive.namelist() if "/csrc/" in name}

    sources = {"attention.cpp", "rows.cpp", "vectors.h", "cross_entropy.cu"}
    assert holds(wheel) == sources and wheel.name.endswith("-py3-none-any.whl")
    monkeypatch.setenv("SMP_BUILD_CUDA", "1")
    monkeypatch.setenv("SMP_CUDA_ARCHS", "90a")
    source = copy_of_the_sources(tmp_path)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (path,) = tmp_path.glob("*.whl")
    assert holds(path) == {*sources, "libsmp_kernels.so"} and "none-any" not in path.name


def test_the_wheel_launches_recipes_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])}
    words = ["recipes=laptop/debug", "dry_run=true", f"base_results_dir={tmp_path}"]
    command = [str(installed / "bin" / "smp-launch"), *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "debug" / "train.sh").read_text()
    assert "-m pretrain_gpt" in script and "\ncd " not in script and (installed / "pretrain_gpt.py").is_file()


def test_the_wheel_holds_the_package_the_entry_points_and_the_license_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {
        "smp",
        "finetune.py",
        "pretrain_gpt.py",
        f"{DISTRIBUTION.replace('-', '_')}-{smp.__version__}.dist-info",
    }
    assert any(name.endswith("LICENSE") for name in names)


def outside(site: Path, folder: Path, *words: object) -> str:
    """The output of a command in ``folder``, which is no checkout."""
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}
    done = subprocess.run(list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_editable_installation_is_found_beside_a_clone_of_its_name(tmp_path: Path) -> None:
    """A folder "smp" without __init__.py, where Python is started, would be a package to Python."""
    clone = copy_of_the_sources(tmp_path).rename(tmp_path / "smp")
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-e", str(clone)]
    site = sysconfig.get_path("purelib")  # the builder is there
    environment = {**os.environ, "PYTHONPATH": site}
    subprocess.run([python, "-m", "pip", "install", "-q", *options], check=True, env=environment)
    words = [python, "-c", "import smp; print(smp.__file__)"]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(clone / "smp/__init__.py")


def test_every_command_of_the_wheel_helps_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    scripts = {path.name for path in (installed / "bin").iterdir()}
    assert scripts == {f"smp-{name}" for name in COMMANDS}
    files = [str(installed / "bin" / name) for name in sorted(scripts)]
    pages = outside(installed, tmp_path, sys.executable, "-c", ALL_HELP, *files).split(END_OF_HELP)
    for name, text in zip(sorted(scripts), pages, strict=True):
        assert name in text and not re.search(r"tools/\w+\.py|python (main|finetune|pretrain_gpt)\.py", text), text


def test_a_command_of_the_wheel_works_by_either_name(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three\n" * 40)
    words = ("--input", "text.txt", "--model-prefix", "tokenizer", "--vocab-size", "270")
    outside(installed, tmp_path, installed / "bin" / "smp-train-tokenizer", *words)
    words = ("--input", "text.txt", "--tokenizer-model", "tokenizer.model", "--output-prefix", "out", "--workers", 1)
    outside(installed, tmp_path, sys.executable, "-m", "smp", "preprocess", *words)
    assert "1 document" in outside(installed, tmp_path, installed / "bin" / "smp-data", "ls", "out_text_document")
    words = ("--mock-data", "--vocab-size", 100, "--seq-length", 16, "--train-iters", 1, "--model", "debug")
    assert "iteration" in outside(installed, tmp_path, sys.executable, "-m", "smp", "pretrain", *words)


def test_an_unknown_command_is_told_with_the_nearest() -> None:
    command = [sys.executable, "-m", "smp", "covert"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: covert: there is no such command: did you mean convert?\n")


def test_the_commands_are_files_that_there_are() -> None:
    assert all((ROOT / "tools" / f"{file}.py").is_file() for file in TOOLS.values())


def test_no_text_installs_what_is_not_a_dependency(requirements: list[Requirement]) -> None:
    """``smp`` on the package index is a stranger's, and nobody has registered our own name there: texts install either
    the checkout itself (``.``) or libraries that setup.py declares."""
    known = {canonicalize_name(r.name) for r in requirements}
    patterns = ("*.md", "*.toml", "*.py", "*.sh", "Makefile", "docs/*.md", "smp/**/*.py", "smp/**/*.j2", "tools/*.py")
    patterns += ("examples/*.py", "benchmarks/*.py", "recipes_collection/**/*.yaml", "launcher_scripts/**/*.sh")
    found = [(path, words) for pattern in patterns for path in ROOT.glob(pattern) for words in installs(path)]
    assert len({path for path, _ in found}) > 15  # it does read them
    wrong = [f"{path.relative_to(ROOT)}: {word}" for path, words in found for word in words if not is_ours(word, known)]
    assert not wrong


def installs(path: Path) -> Iterator[list[str]]:
    """The words behind each ``pip install`` of a text, and the arguments of each call of pip_install."""
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"pip install\s+([^\n`;,()#]*)", text):
        yield [word.strip("\"'") for word in match[1].split(" # ")[0].split()] if "{" not in match[1] else []
    for match in re.finditer(r"pip_install\(([^)]*)\)", text):
        if ":" not in match[1]:  # its definition
            yield re.findall(r"[\"']([^\"']+)[\"']", match[1])


def is_ours(word: str, known: set[str]) -> bool:
    """Whether a word of an install command is an option, the checkout, prose behind it, or a known dependency."""
    if word.startswith(("-", "$", ".")) or word.endswith((".txt", ".whl")):
        return True
    name = re.match(r"[A-Za-z0-9._-]*", word)
    return name is not None and canonicalize_name(name[0].rstrip(".")) in known


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Top-level names of imported modules, and whether a function imports them only when it is called."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        lazy = node not in tree.body
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.split(".")[0], lazy


def test_what_is_imported_is_declared(requirements: list[Requirement]) -> None:
    base = {canonicalize_name(r.name) for r in requirements if r.marker is None}
    optional = {canonicalize_name(r.name) for r in requirements} | NOT_ON_AN_INDEX
    entry_points = [ROOT / "pretrain_gpt.py", ROOT / "finetune.py"]
    files = [*entry_points, *(ROOT / "smp").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    late = ROOT / "smp" / "kernels" / "triton"  # imported when the first of its kernels runs
    found = [(path, name, lazy or path.parent == late) for path in files for name, lazy in imports(path)]
    own = {"smp", "tools", *sys.stdlib_module_names}
    undeclared = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, name, lazy in found
        if name not in own and canonicalize_name(PYPI_NAMES.get(name, name)) not in (optional if lazy else base)
    ]
    assert not undeclared
    used = {canonicalize_name(PYPI_NAMES.get(name, name)) for _, name, _ in found}
    assert base - used == {"tensorboard"}  # torch.utils.tensorboard imports it


def test_every_direct_dependency_is_pinned_to_a_version_that_it_allows(requirements: list[Requirement]) -> None:
    wanted = [r for r in requirements if r.name not in NOT_PINNED]
    wrong = [str(r) for r in wanted if not r.specifier.contains(pins().get(canonicalize_name(r.name), "0"))]
    assert not wrong


def test_what_pinned_packages_need_is_pinned_and_they_agree() -> None:
    """Only packages installed at their pinned version can say what they need. What they pin themselves is theirs."""
    wrong = []
    for name, version in pins().items():
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        if installed.version.split("+")[0] != version:
            continue
        for needed in map(Requirement, installed.requires or []):
            applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
            exact = any(s.operator == "==" and not s.version.endswith("*") for s in needed.specifier)
            pin = pins().get(canonicalize_name(needed.name))
            if applies and (not exact if pin is None else not needed.specifier.contains(pin, prereleases=True)):
                wrong.append(f"{name} needs {needed}, pinned is {pin}")
    assert not wrong


def test_constraints_leave_the_choice_of_a_build_open() -> None:
    assert not [name for name in pins() if name.startswith(("nvidia", "cuda")) or name in ("triton", "pip")]
    assert not [version for version in pins().values() if not re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", version)]


def make(*words: str) -> list[str]:
    """The commands that make would run."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_make_env_takes_torch_alone_from_its_index() -> None:
    installs = [line for line in make("env", "TORCH_INDEX=cpu.example", "PIP_ARGS=--retries=9") if "install" in line]
    assert [("cpu.example" in line, "--no-deps" in line) for line in installs] == [(True, True), (False, False)]
    assert all("--retries=9" in line for line in installs)
    assert f'"torch=={pins()["torch"]}"' in installs[0] and "constraints.txt" in installs[1]


def test_make_gpu_uses_the_python_it_is_given_and_installs_nothing() -> None:
    lines = make("gpu", "PYTHON=machine-python")
    assert lines and all("machine-python" in line and "install" not in line for line in lines if line.strip())


@pytest.mark.parametrize("target", ["test", "check", "demo", "finetune-demo"])
def test_targets_bring_their_environment(target: str) -> None:
    assert any("-m venv" in line for line in make(target, "VENV=not-there"))


def test_ci_runs_the_commands_that_contributors_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert [line for line in script.read_text().splitlines() if line.startswith("make")] == ["make check", "make test"]
