"""Thousands of small files are written here, and none has to outlive a power failure. One tokenizer serves all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import smp.data.files.text_files as text_files
from tools.train_tokenizer import train


@pytest.fixture(autouse=True, scope="module")
def files_stay_in_memory() -> Iterator[None]:
    """No waiting for the disk, which is most of the time that these tests would take on a busy one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sentencepiece model of 400 token ids."""
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(train([Path(__file__).with_name("test_blend.py").read_text()], 400, "bpe", 0))
    return str(path)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks in little text."""
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 200)
