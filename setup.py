"""Packaging. The wheel holds the package ``smp``: layers, models and training for one's own scripts.

The entry points pretrain_gpt.py and finetune.py are short scripts, meant to be read and changed; in the wheel they are
modules (``torchrun -m pretrain_gpt``) and commands beside the launcher's. Tools that are of use without a checkout are
``smp.tools`` in a wheel. smp/config/command_line/commands.py has the table of commands, and the name of the
distribution.
"""

import os
import re
import runpy
import shutil
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


def version() -> str:
    """``__version__`` of the package, read without importing it: torch may not be installed yet."""
    source = (HERE / "smp" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert match is not None, "smp/__init__.py has no __version__"
    return match[1]


NAMES = runpy.run_path(str(HERE / "smp" / "config" / "command_line" / "commands.py"))
"""Of the distribution and its commands."""

BUILD_CUDA = os.environ.get("SMP_BUILD_CUDA") == "1"
"""Whether to compile smp/kernels/csrc; without it the wheel is pure Python."""


class BuildPackage(build_py):
    """Also bring the recipes and tools, which are at the top of a checkout and inside of the package in a wheel; and
    compile the CUDA C++ kernels, by the file that ``python -m smp.kernels.cuda.build`` runs."""

    def run(self) -> None:
        super().run()
        root = HERE if self.editable_mode else Path(self.build_lib)
        if not self.editable_mode:
            recipes = root / "smp" / "launch" / "recipes_collection"
            shutil.copytree(HERE / "recipes_collection", recipes, dirs_exist_ok=True)
            tools = root / "smp" / "tools"
            tools.mkdir(parents=True, exist_ok=True)
            for name in (*(f"{file}.py" for file in NAMES["TOOLS"].values()), "report.html.jinja"):
                shutil.copy(HERE / "tools" / name, tools)
        if BUILD_CUDA:
            folder = root / "smp" / "kernels" / "csrc"
            folder.mkdir(parents=True, exist_ok=True)
            runpy.run_path(str(HERE / "smp" / "kernels" / "cuda" / "build.py"))["build"](folder)


class WithMachineCode(Distribution):
    """A wheel for one platform."""

    def has_ext_modules(self) -> bool:
        return True


BASE = [
    "torch>=2.11",
    "numpy>=2",
    "einops",
    "jinja2>=3.1",
    "omegaconf>=2.4",  # before, it needs a version of the ANTLR runtime that excludes others'
    "sentencepiece>=0.2.2",
    "tokenizers>=0.21",
    "tensorboard",
    "PyYAML>=6",
    "tqdm",
    "xxhash>=3",
]
HF = ["transformers>=5", "accelerate>=1.10", "huggingface_hub>=1", "pillow>=10"]  # accelerate: of transformers.Trainer
DATA = ["pyarrow", "tiktoken"]  # kinds of files and tokenizers
GIGATOKEN = ["gigatoken", "awkward"]  # a faster library for preprocessing, and the arrays that it returns
S3 = ["s3fs>=2024.10"]
REWARDS = ["math-verify[antlr4_13_2]>=0.8", "jsonschema"]  # of the built-in reward functions math and json_schema
SAGEMAKER = ["boto3>=1.34", "botocore"]
# A CUDA torch brings its own; beside a CPU torch it interprets and compiles kernels. 3.7.1 was tried; with 3.9.0
# the test of compiled kernels fails.
TRITON = ['triton>=3.6,<3.8; platform_system == "Linux"']
EXTRAS = {
    "data": DATA,
    "gigatoken": GIGATOKEN,
    "hf": HF,
    "fsspec": ["fsspec>=2024.10", "aiohttp"],  # any object store, whose back-end comes on top; aiohttp: of http
    "s3": S3,
    "sagemaker": SAGEMAKER,
    "wandb": ["wandb"],
    "mlflow": ["mlflow-skinny"],
    "eval": ["lm-eval>=0.4.9"],
    "plot": ["matplotlib"],
    "rewards": REWARDS,
    "vllm": ["vllm>=0.33"],  # another engine of completions, on a GPU; it brings a torch of its own choice
    "fla": ["flash-linear-attention"],  # Triton kernels of gated delta nets, on a GPU
    # setuptools builds the wheel that the packaging test installs; since 70.1 it needs no "wheel" for that.
    "test": [
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",
        "packaging",
        "setuptools>=77",
        "safetensors",
        *DATA,
        *TRITON,
        *HF,
        *S3,
        "moto[server]",
        *SAGEMAKER,
        *REWARDS,
        "kubernetes>=37",  # its models of the API are what manifests are checked against
        *GIGATOKEN,
        # the builder that our files are compared with, and checkpoints that we read; it imports psutil without asking
        # for it, and takes any torch from 2.6 on, so it brings none. Elsewhere there is no wheel, and those tests are
        # skipped.
        "megatron-core==0.16.1; sys_platform == 'linux' and platform_machine == 'x86_64'",
        "psutil",
        "peft>=0.17",
    ],
    # beside "test": the trainers that losses of answers are compared with; they bring some gigabytes' worth of others
    "test-trl": ["trl>=1.16", "datasets"],
    "dev": ["ruff", "mypy", "import-linter>=2", "pre-commit"],
}

readme = HERE / "README.md"
setup(
    name=NAMES["DISTRIBUTION"],
    version=version(),
    description="An open training stack for Llama/GPT-family language models: tensor, sequence and hybrid-sharded data "
    "parallelism that never changes the math",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # With it an editable installation is a path: its finder would come after a folder "smp", such as the clone itself.
    package_dir={"": "."},
    packages=find_packages(include=["smp", "smp.*"]),
    py_modules=["finetune", "pretrain_gpt"],
    package_data={
        "smp": [
            "py.typed",
            "kernels/csrc/*.cu",
            "kernels/csrc/*.cpp",
            "kernels/csrc/*.h",
            "launch/templates/*.j2",
            "planner/published/*.yaml",
        ]
    },
    entry_points={"console_scripts": [f"smp-{name} = smp.__main__:console" for name in NAMES["COMMANDS"]]},
    cmdclass={"build_py": BuildPackage},
    distclass=WithMachineCode if BUILD_CUDA else Distribution,
    install_requires=BASE,
    extras_require=EXTRAS,
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
