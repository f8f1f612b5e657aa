"""Orders of epochs: small ones leave no files, large ones are made once and ahead of their epoch."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import smp.data.epochs as epochs_module
from smp.data.cache import CacheFolderError, NodeCache
from smp.data.epochs import DocumentSamples
from smp.data.gpt_dataset import GPTDataset
from smp.data.packed_dataset import PackedDataset
from tests.data.test_gpt_dataset import write


class Numbers(DocumentSamples[list[int]]):
    """Orders of so many integers."""

    packing, needs = "numbers", ""
    samples_per_epoch = 1

    def __init__(self, folder: Path, cache: NodeCache | None, numbers: int, made: list[int]) -> None:
        self.numbers, self.made = numbers, made
        super().__init__(write(folder / "data", [9]), range(1), 8, 1, cache=cache, key="order")

    def _size(self) -> int:
        return self.numbers

    def _shuffle(self, epoch: int) -> np.ndarray:
        self.made.append(epoch)
        return np.array([epoch, self.numbers])

    def _parse(self, packed: np.ndarray) -> list[int]:
        return packed.tolist()


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "next-epoch":
            thread.join()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.npy"))


def test_only_large_orders_are_kept(tmp_path: Path) -> None:
    made: list[int] = []
    for numbers, kept in (
        (epochs_module.LARGE - 1, []),
        (epochs_module.LARGE, ["order-numbers_documents_0_to_1_length_8_seed_1-epoch_3.npy"]),
    ):
        found = Numbers(tmp_path, NodeCache(tmp_path), numbers, made)
        assert found._order(3) == found._order(3) == [3, numbers]
        assert files(tmp_path) == kept
    assert Numbers(tmp_path, NodeCache(tmp_path), epochs_module.LARGE, made)._order(3) == [3, epochs_module.LARGE]
    assert made == [3, 3]  # the last one was read from the file


def test_the_two_latest_are_at_hand(tmp_path: Path) -> None:
    made: list[int] = []
    found = Numbers(tmp_path, None, 5, made)
    for epoch in (0, 1, 0, 1, 2, 1, 0):
        assert found._order(epoch)[0] == epoch
    assert made == [0, 1, 2, 0]


def test_a_large_order_is_made_ahead_and_once(tmp_path: Path) -> None:
    made: list[int] = []
    found = Numbers(tmp_path, NodeCache(tmp_path), epochs_module.LARGE, made)
    found._order(0)
    for _ in range(20):
        found._prepare(1)
    wait()
    assert made == [0, 1] and found._order(1)[0] == 1 and made == [0, 1]
    small = Numbers(tmp_path, None, 5, made)
    small._prepare(1)
    wait()
    assert made == [0, 1]


def test_what_goes_wrong_ahead_is_met_by_the_reader(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    found = Numbers(tmp_path, NodeCache(tmp_path / "file" / "cache"), epochs_module.LARGE, [])
    found._prepare(1)
    wait()
    assert capfd.readouterr().err == ""
    with pytest.raises(CacheFolderError, match="--data-cache-path"):
        found._order(1)


@pytest.mark.parametrize("kind", [GPTDataset, PackedDataset])
def test_the_second_half_of_an_epoch_prepares_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[GPTDataset] | type[PackedDataset]
) -> None:
    monkeypatch.setattr(epochs_module, "LARGE", 1)
    data = kind(write(tmp_path / "data", [9] * 12), range(12), 8, 1, cache=NodeCache(tmp_path / "cache"), key="k")
    n = data.samples_per_epoch
    assert n > 4
    for index, ready in ((0, 1), (n // 2 - 1, 1), (n - 1, 2), (n + 1, 2), (2 * n - 1, 3)):
        data.sample(index)
        wait()
        assert len(files(tmp_path / "cache")) == ready, index
    plain = kind(data.dataset, range(12), 8, 1)
    assert [data.sample(i).input_ids.tolist() for i in range(3 * n)] == [
        plain.sample(i).input_ids.tolist() for i in range(3 * n)
    ]
