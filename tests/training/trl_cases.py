"""What this project and TRL's trainers are given alike: tiny models, rows of text, and the settings of each loss.

The models' weights are drawn by numpy's RandomState, whose numbers never change, by name of the tensor: so they do not
depend on the versions of torch and transformers.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from smp.data.keyed_random import keyed_permutation
from tests.training.tiny_hf import write_model, write_tokenizer

STEPS, ROWS, SEED, BETA, LR = 3, 6, 1234, 0.3, 0.005
WEIGHTS = (1.3, 0.8)
CENTER = 0.1
LETTERS = np.array(list("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"))  # each is a token
MODELS = {"llama": "llama", "moe": "qwen2-moe"}
PAIRS, LABELLED = {"prompt": (2, 8), "chosen": (1, 8), "rejected": (1, 8)}, {"prompt": (2, 8), "completion": (1, 8)}


@dataclass(frozen=True)
class Loss:
    """Attributes: flags of finetune.py; least and most letters of each column of a row; the seed of the rows."""

    flags: str
    columns: dict[str, tuple[int, int]]
    seed: int

    @property
    def labelled(self) -> bool:
        return "completion" in self.columns


LOSSES = {
    "sigmoid": Loss(f"--objective dpo --dpo-beta {BETA}", PAIRS, 1),
    "hinge": Loss(f"--objective dpo --dpo-loss-type hinge --dpo-beta {BETA}", PAIRS, 2),
    "ipo": Loss(f"--objective dpo --dpo-loss-type ipo --dpo-beta {BETA}", PAIRS, 3),
    "orpo": Loss(f"--objective orpo --orpo-beta {BETA}", PAIRS, 4),
    "kto": Loss(
        f"--objective kto --kto-beta {BETA} --kto-desirable-weight {WEIGHTS[0]} --kto-undesirable-weight {WEIGHTS[1]}",
        LABELLED,
        5,
    ),
    "reward": Loss(f"--objective reward --reward-center-coefficient {CENTER}", {"prompt": (2, 8), **PAIRS}, 6),
}


def rows_of(loss: Loss) -> list[dict[str, Any]]:
    """One batch of texts; two of three answers with a label are desirable."""
    drawn = np.random.RandomState(loss.seed)
    text = lambda least, most: "".join(drawn.choice(LETTERS, drawn.randint(least, most + 1)))  # noqa: E731
    rows: list[dict[str, Any]] = [{name: text(*size) for name, size in loss.columns.items()} for _ in range(ROWS)]
    return [row | {"label": i % 3 != 1} for i, row in enumerate(rows)] if loss.labelled else rows


def orders() -> list[list[int]]:
    """The rows of each step: every step is an epoch."""
    return [keyed_permutation(ROWS, SEED, 1, step).tolist() for step in range(STEPS)]


def write_folders(root: Path) -> None:
    """``<model>`` and ``<model>-reward``, with a row of scores, for each of ``MODELS``; and rows of each loss."""
    import transformers

    for name, kind in MODELS.items():
        write_tokenizer(root / name)
        write_model(root / name, kind, layers=2)
        _without_aux_loss(root / name / "config.json")
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        load(root / name, num_labels=1, pad_token_id=0).save_pretrained(root / f"{name}-reward")
        for folder in (root / name, root / f"{name}-reward"):
            _draw(folder / "model.safetensors")
    for name, loss in LOSSES.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(loss)))


def _without_aux_loss(path: Path) -> None:
    """TRL adds the router's loss of some objectives, over other tokens than this project."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | ({"router_aux_loss_coef": 0.0} if "router_aux_loss_coef" in config else {})))


def _draw(path: Path) -> None:
    """Other weights, by name."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        numbers = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(tensor.shape))
        tensors[name] = torch.from_numpy(1 + 0.1 * numbers if "norm" in name else 0.15 * numbers).to(torch.float32)
    save_file(tensors, path, metadata={"format": "pt"})
