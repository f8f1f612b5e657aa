"""Mllama's samples are in a batch what they are alone; see smp/hf/run/cross_attention.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smp.hf.run.cross_attention import own_images
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE
from tests.training.any_model_lab import LR, largest_error, tune_types
from tests.training.tiny_vision import write_vision_type
from tests.training.vision_lab import vision_loop

LEAST = torch.finfo(torch.float32).min


def test_a_token_in_front_of_images_sees_those_of_its_sample() -> None:
    """Of three images with two keys each: a sample of one image, one of two, and one of none."""
    o, x = 0.0, LEAST
    mask = torch.tensor(
        [
            [[o, o, o, o, o, o], [o, x, x, x, x, x]],  # the first token is in front of all images
            [[o, o, o, o, o, o], [x, x, o, o, x, x]],
            [[o, o, o, o, o, o], [o, o, o, o, o, o]],
        ]
    )[:, None]
    seen = torch.tensor([[0, 1], [0, 1], [0, 0]])[:, None, :, None] > 0
    got = own_images(mask, seen, 3)[:, 0]
    assert torch.equal(got[:, 1][:2], mask[:2, 0, 1]), "what sees an image sees what it saw"
    assert got[0, 0].tolist() == [o, o, x, x, x, x]
    assert got[1, 0].tolist() == [x, x, o, o, x, x]
    assert (got[2] == x).all(), "nothing"


def test_a_run_equals_a_plain_loop_of_transformers(tmp_path: Path) -> None:
    """Samples of 0 to 3 images in one batch, gates open."""
    pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    folder = write_vision_type(tmp_path / "mllama", "mllama")
    flags = (
        f"--load {folder} --data-path {folder}/vl.jsonl --log-dir {folder}/logs --seq-length 256 --micro-batch-size 4 "
        f"--global-batch-size 8 --lr {LR} --optimizer sgd --weight-decay 0 --train-iters 3 --packing off "
        "--recompute-granularity full"
    )
    ((run,),) = run_distributed(tune_types, 1, [flags])
    errors = largest_error(run, vision_loop(folder, run["batches"]))
    assert max(errors.values()) <= TOLERANCE, errors
