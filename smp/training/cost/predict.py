"""What a process of a run needs, in bytes: by formula, and by a step on tensors without data."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from smp.config import Config, ConfigError, Layout
from smp.config.batch import count_micro_batches
from smp.config.rules.finetune import targets_of
from smp.config.rules.mtp import mtp_layers
from smp.convert.peft.adapters import TENSORS
from smp.layers.adapters.lora import matching
from smp.layers.heads.head import CHUNK_BYTES
from smp.models.inventory import inventory
from smp.pipeline.stage_plan import Plan, plan_pipeline
from smp.training.cost.memory import MemoryEstimate, largest_memory
from smp.training.cost.model_share import Tuned

if TYPE_CHECKING:
    from smp.training.cost.fake_step import StepMeasures

MOST_PASSES = 160
"""Blocks times micro-batches that are tried on fake tensors, about a tenth of a second each; beyond, a formula
estimates."""


def predicted_memory(config: Config, world_size: int) -> MemoryEstimate:
    """Bytes of the process that needs most memory, by formula."""
    layout = Layout.from_config(config.parallel, world_size)
    plan = plan_pipeline(config, layout) if layout.pp > 1 else None
    return largest_memory(config, layout, CHUNK_BYTES["cuda"], plan, tuned_parts(config, layout))


def tried_memory(config: Config, world_size: int) -> int | None:
    """Peak bytes of the process that needs most memory, by a step on fake tensors; None where none is tried."""
    layout = Layout.from_config(config.parallel, world_size)
    steps = tried_steps(config, layout, plan_pipeline(config, layout) if layout.pp > 1 else None)
    return None if steps is None else max(step.peak for step in steps)


def tried_steps(config: Config, layout: Layout, plan: Plan | None) -> list[StepMeasures] | None:
    """Measures of a step of each pipeline rank on fake tensors; None where that takes too long, or where the objective
    has no such step."""
    # here, because it brings torch's tools for fake tensors, and with them triton, which only a dry run needs
    from smp.training.cost.fake_step import MOST_MICRO_BATCHES, fake_gpu_step
    from smp.training.cost.fake_tuning import can_be_tried

    data = config.data
    assert data.global_batch_size is not None, "resolved before"
    micro_batches = count_micro_batches(data, layout.data_parallel)
    passes = (config.model.num_layers + len(mtp_layers(config.model))) * (
        # Without a pipeline at most three are run, the others counted.
        min(micro_batches, MOST_MICRO_BATCHES) if plan is None else micro_batches
    )
    passes *= config.objective_facts.rows
    model = config.model
    # which of a sequence's tokens are on a process is not known without data
    placed = model.moe_expert_capacity_factor is not None or model.moe_router_load_balancing_type == "sinkhorn"
    across = layout.cp > 1 and model.num_experts is not None and placed
    if across or not can_be_tried(config) or passes > MOST_PASSES:
        # The formula of ``memory`` answers then.
        return None
    try:
        return [fake_gpu_step(config, layout, plan, rank) for rank in range(layout.pp)]
    except ConfigError:
        raise  # as the run will
    # Any other error: it is transformers' code that ran.
    except Exception:
        if not config.model.is_foreign:
            raise
        return None  # a module of transformers' may read numbers, as some experts do


def tuned_parts(config: Config, layout: Layout) -> Tuned:
    copies = config.objective is not None and config.objective.dpo_reference == "copy"
    in_4_bits = None
    if config.lora is not None and config.lora.load_in_4bit:
        in_4_bits = config.lora.bnb_4bit_use_double_quant
    adapters = adapter_elements(config, replace(layout, ep=1, etp=None))  # ep takes from FSDP what it cuts
    return Tuned(adapters, in_4_bits, rows=config.objective_facts.rows, copies=int(copies))


def adapter_elements(config: Config, layout: Layout) -> int:
    """Elements of all adapters on one process. Those of a file are taken to be fp32, and not shared."""
    lora = config.lora
    if lora is None:
        return 0
    if lora.load_adapter is not None:
        # The safetensors header is small next to the tensors; 4 bytes each.
        path = Path(lora.load_adapter) / TENSORS
        return path.stat().st_size // 4 if path.is_file() else 0
    if lora.lora_rank is None:
        return 0
    weights = {p.module: p for p in inventory(config.model) if p.linear or p.chosen is not None}
    plain = [name for name, weight in weights.items() if weight.linear]
    experts = [name for name, weight in weights.items() if not weight.linear]
    targets = targets_of(config)
    chosen = {name for target in targets for name in matching(plain, experts, target)}
    # A (rank, in) and B (out, rank) are cut as the weight (out, in) is; each expert has its own
    shapes = [weights[name].local_shape(layout) for name in chosen]
    magnitudes = sum(shape[-2] for shape in shapes) if lora.use_dora else 0
    return magnitudes + lora.lora_rank * sum(math.prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)
