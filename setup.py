"""Packaging. The wheel holds the package ``smp``: layers, models and training for one's own scripts.

The entry points (pretrain_gpt.py and tools/) are scripts of the checkout, not commands of the wheel: they are short,
meant to be read and changed, and torchrun wants a file.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """``__version__`` of the package, read without importing it: torch may not be installed yet."""
    source = (HERE / "smp" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert match is not None, "smp/__init__.py has no __version__"
    return match[1]


BASE = [
    "torch>=2.11",
    "numpy>=2",
    "einops",
    "jinja2>=3.1",
    "sentencepiece>=0.2",
    "tokenizers>=0.21",
    "tensorboard",
    "PyYAML>=6",
    "tqdm",
    "xxhash>=3",
]
HF = ["transformers>=5"]
DATA = ["pyarrow", "tiktoken", "zstandard"]  # kinds of files and tokenizers
S3 = ["s3fs>=2024.10"]
EXTRAS = {
    "data": DATA,
    "gigatoken": ["gigatoken"],  # a faster tokenizer for preprocessing
    "hf": HF,
    "fsspec": ["fsspec>=2024.10"],  # checkpoints in any object store; its back-end comes on top
    "s3": S3,
    "wandb": ["wandb"],
    "plot": ["matplotlib"],
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
        *HF,
        *S3,
        "moto[server]",
        "gigatoken",
        # the builder that our files are compared with, and checkpoints that we read; it imports psutil without asking
        # for it, and takes any torch from 2.6 on, so it brings none. Elsewhere there is no wheel, and those tests are
        # skipped.
        "megatron-core==0.16.1; sys_platform == 'linux' and platform_machine == 'x86_64'",
        "psutil",
        "peft>=0.17",
    ],
    "dev": ["ruff", "mypy", "import-linter>=2", "pre-commit"],
}

readme = HERE / "README.md"
setup(
    name="smp",
    version=version(),
    description="An open training stack for Llama/GPT-family language models: tensor, sequence and hybrid-sharded data "
    "parallelism that never changes the math",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["smp", "smp.*"]),
    package_data={"smp": ["py.typed"]},
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
