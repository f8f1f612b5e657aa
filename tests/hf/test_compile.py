"""``torch.compile`` of a transformed model gives the losses and gradients of the model in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import smp
from tests.distributed import run_distributed
from tests.hf.families import batch, build, gradients, worst

pytest.importorskip("transformers")


def _compiled(rank: int, world_size: int) -> list[tuple[str, bool, float, str]]:
    results = []
    for loss, sequence in (("gathered", False), ("vocab_parallel", False), ("chunked", True), ("vocab_parallel", True)):
        smp.state.reset()
        smp.init({"tensor_parallel_degree": 2, "sequence_parallel": sequence})
        alone = build("Qwen3")
        model = smp.transform(copy.deepcopy(alone), loss=loss)
        compiled: Any = torch.compile(model, backend="aot_eager")
        found = gradients(compiled, 2)
        names = {name.removeprefix("_orig_mod."): tensor for name, tensor in found.items()}
        results.append((loss, sequence, *worst(names, gradients(alone, 2))))
        if loss == "vocab_parallel":
            logits = compiled(**batch(1)).logits
            wanted = alone(**batch(1)).logits
            torch.testing.assert_close(logits.full_tensor(), wanted, rtol=1e-5, atol=1e-5)
            assert not logits.requires_grad
    return results


@pytest.mark.slow
def test_a_compiled_model_equals_one_process() -> None:
    for results in run_distributed(_compiled, 2):
        assert len(results) == 4 and all(error <= 1e-5 for *_, error, _ in results), results
