"""What --rollout-engine names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from smp.config import Config, ConfigError
from smp.convert.huggingface.config import is_hf_folder
from smp.convert.huggingface.folder import carried
from smp.generation import Generator
from smp.layers.adapters.lora import adapters_of
from smp.models.protocol import Model
from smp.parallel.agree import gather, on_all_or_none
from smp.training.build import RunSetup
from smp.training.rollouts.engines.engine import OutsideEngine, OwnLayers, RolloutEngine, Sampler, Share
from smp.training.rollouts.engines.live_weights import LiveWeights, WeightStream
from smp.training.rollouts.engines.transformers_sampler import TransformersSampler
from smp.training.rollouts.engines.vllm_sampler import VllmSampler


def build_engine(
    config: Config, setup: RunSetup, model: Model, generator: Callable[[], Generator]
) -> tuple[RolloutEngine, list[str]]:
    """(what writes the completions of a run, what the user should hear). All ranks call it together.

    Args:
        config: resolved.
        setup: of the run.
        model: that trains.
        generator: makes the one of the layers that train.

    Raises:
        ConfigError: it cannot be had.
    """
    rollouts = config.rollouts
    assert rollouts is not None, "settings of a fine-tuning run"
    if rollouts.rollout_engine == "smp":
        return OwnLayers(generator(), setup.context), []
    dtype = torch.bfloat16 if config.parallel.bf16 else torch.float32
    # Pipeline ranks have adapters of their own layers.
    scales = {name: scale for part in gather(_scales(model)) for name, scale in part.items()}
    stream = WeightStream(
        LiveWeights(model, config.model, dtype, setup.device), scales, _reference(config), setup.progress
    )
    shared = rollouts.vllm_tensor_parallel_size if rollouts.rollout_engine == "vllm" else 1
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    assert world % shared == 0, "checked with the settings"
    # Neighbouring ranks share an engine, and write the same texts.
    share = Share(rank // shared, world // shared, rank % shared == 0)

    def start() -> Sampler:
        try:
            return _sampler(config, setup, stream, dtype, share)
        except Exception as error:  # of another program, of whatever kind
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"--rollout-engine {rollouts.rollout_engine} does not start: {said}") from error

    # Together: a rank whose engine fails would leave the others in the first generation.
    sampler = on_all_or_none(start, ConfigError, "--rollout-engine")
    note = (
        f"rollout engine: {sampler.name}, {share.count} of them; its log-probabilities are compared with the trainer's "
        f"(engine difference), --importance-sampling-mode {rollouts.importance_sampling_mode}"
    )
    return OutsideEngine(sampler, stream, share), [note]


def _sampler(config: Config, setup: RunSetup, stream: WeightStream, dtype: torch.dtype, share: Share) -> Sampler:
    rollouts = config.rollouts
    assert rollouts is not None and config.data.seq_length is not None, "resolved before"
    if rollouts.rollout_engine == "transformers":
        return TransformersSampler(stream.content, dtype, setup.device, rollouts.generation_batch_size)
    return VllmSampler(
        stream.content,
        dtype,
        longest=config.data.seq_length,
        batch_size=rollouts.generation_batch_size,
        memory=rollouts.vllm_gpu_memory_utilization,
        tensor_parallel=rollouts.vllm_tensor_parallel_size,
        # Ranks of one engine need one seed, others must differ.
        seed=config.training.seed + share.index,
        temperature=rollouts.temperature,
    )


def _scales(model: Model) -> dict[str, float]:
    return {name: adapter.alpha / adapter.rank for name, adapter in adapters_of(model).items()}


def _reference(config: Config) -> Path | None:
    """The folder with the config.json of the model in --load, for what this project's settings do not say; None: there
    is none."""
    load = config.checkpoint.load
    if load is None:
        return None
    return Path(load) if is_hf_folder(load) else carried(Path(load))
