"""A transformed model in ``transformers.Trainer``.

Trainer leaves a model alone (it neither moves, wraps nor shards it) that says that it came cut, as models do that
transformers itself cut while loading. Then every data rank gets its own batches, tokens are counted once per
tensor-parallel group, and the optimizer sees the DTensors. The attributes that say so are private in transformers; a
test pins the installed release.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from smp.config.schema import ConfigError
from smp.hf.adapters import base_of
from smp.hf.clip import check_sharded
from smp.hf.state import state


def announce(model: Any) -> None:
    """Mark a transformers model as cut, with the number of ranks that read different data.

    A model that is not cut (one tensor-parallel rank) is left for Trainer to wrap.

    A model that nothing cuts (one tensor-parallel rank) stays Trainer's to wrap.
    """
    base, _ = base_of(model)
    cut = state.tp_size * state.cp_size * state.ep_size > 1
    if not cut or not hasattr(base, "is_distributed_loading_by_transformers"):
        return
    base._is_distributed_loading_by_transformers = True
    # Ranks with the same rows, which Trainer counts as one.
    base._tp_size = state.tp_size * state.cp_size
    base.config.distributed_config = _distributed_config(model, state.tp_size, state.dp_size)


def _distributed_config(model: nn.Module, tp_size: int, data_size: int) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    class Cut(DistributedConfig):
        """Checks the model when Trainer asks for the number of data ranks, at its construction: gradients of data ranks
        must be summed by FSDP, as Trainer leaves a cut model alone."""

        cut: nn.Module | None = None

        @property
        def dp_size(self) -> int:
            if self.cut is not None and hasattr(self.cut, "smp_context"):
                raise ConfigError("Trainer does not cut sequences: with it, context_parallel_degree is 1")
            if self.cut is not None and state.ep_size > 1:
                raise ConfigError("Trainer's clipping takes one mesh: with it, expert_parallel_degree is 1")
            if self.cut is not None:
                check_sharded(self.cut.named_parameters())
            return data_size

        def __deepcopy__(self, memo: dict[int, Any]) -> DistributedConfig:
            return _distributed_config(memo.get(id(model), model), tp_size, data_size)  # of the copied model

        def __reduce__(self) -> Any:  # in a file it is numbers, without the model
            return partial(DistributedConfig, tp_size=tp_size, fsdp_size=data_size), ()

    made = Cut(tp_size=tp_size, fsdp_size=data_size)
    made.cut = model
    return made


def parallelism_config() -> Any:
    """The value for ``TrainingArguments(parallelism_config=...)``: on machines without GPUs, where accelerate refuses
    tensor parallelism, and in general for evaluation, where all ranks of a tensor-parallel group have the same rows."""
    from accelerate import ParallelismConfig

    class OnAnyDevice(ParallelismConfig):  # type: ignore[misc]
        def _validate_accelerator(self, accelerator: Any) -> None:
            if self.total_size != accelerator.num_processes:
                raise ConfigError(
                    f"{self.total_size} ranks in the layout of smp.init, and accelerate knows of "
                    f"{accelerator.num_processes}: start them with torchrun, and without GPUs give "
                    "TrainingArguments(use_cpu=True)"
                )
            accelerator.gather_for_metrics = _rows_once(accelerator, self.tp_size)

        def __reduce__(self) -> Any:  # Trainer pickles its arguments with the weights
            return partial(ParallelismConfig, tp_size=self.tp_size, dp_shard_size=self.dp_shard_size), ()

    return OnAnyDevice(tp_size=state.tp_size, dp_shard_size=state.dp_size)


def _rows_once(accelerator: Any, tp_size: int) -> Any:
    """``accelerator.gather_for_metrics`` with each row once: accelerate would return every row ``tp_size`` times, and
    then cut too many from the last batch."""
    from accelerate.utils import recursively_apply

    def gather(tensors: Any) -> Any:
        def once(mine: torch.Tensor) -> torch.Tensor:
            rows = type(accelerator).gather(accelerator, mine)
            if mine.ndim == 0:  # a count of each process, which TRL divides by the tensor-parallel ranks itself
                return rows
            # [ranks, rows, ...]: tensor-parallel ranks are neighbours, so every tp_size-th is kept.
            return rows.unflatten(0, (accelerator.num_processes, -1))[::tp_size].flatten(0, 1)

        return recursively_apply(once, tensors)

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object:
            raise ConfigError("gather_for_metrics: a cut model's rows are gathered as tensors: use_gather_object=False")
        accelerator.gather = gather  # the number of tokens of a batch needs accelerate's own
        try:
            return type(accelerator).gather_for_metrics(accelerator, input_data)
        finally:
            del accelerator.gather

    return gather_for_metrics
