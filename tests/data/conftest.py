"""Thousands of small files are written here, and none of them has to outlive a power failure."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def files_stay_in_memory() -> Iterator[None]:
    """No waiting for the disk, which is most of the time that these tests would take on a busy one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
