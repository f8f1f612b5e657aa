"""Measurements of other trainers that were published, to compare predictions with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smp.config import Config, DataConfig, Layout, ModelConfig, ParallelConfig, TrainingConfig, resolve
from smp.models.arithmetic import training_flops_per_token
from smp.models.presets import PRESETS
from smp.pipeline.plan import plan_pipeline
from smp.planner.devices import DEVICES
from smp.planner.search import shortened
from smp.planner.step_time import StepModel


@dataclass(frozen=True)
class Published:
    """One row of a published table.

    Attributes:
        source: who measured.
        what: model and setup in words.
        gpu, gpus: kind and number.
        model, parallel, data: settings.
        tokens: per second and GPU; None where FLOP/s are given.
        tflops: per second and GPU.
    """

    source: str
    what: str
    gpu: str
    gpus: int
    model: dict[str, Any]
    parallel: dict[str, Any]
    data: dict[str, Any]
    tokens: float | None = None
    tflops: float | None = None

    def config(self) -> Config:
        """Resolved."""
        return resolve(
            Config(
                model=ModelConfig(**self.model),
                parallel=ParallelConfig(bf16=True, **self.parallel),
                data=DataConfig(mock_data=True, **self.data),
                training=TrainingConfig(dry_run=True),
            ),
            self.gpus,
        )

    def tflops_of(self, tokens: float, config: Config) -> float:
        """Model FLOPs per second and GPU, in 1e12, of so many tokens."""
        length, vocab = config.data.seq_length, config.model.vocab_size
        assert length is not None and vocab is not None
        return tokens * training_flops_per_token(config.model, length, vocab) / 1e12

    def predicted(self) -> tuple[float, float]:
        """Measured and predicted TFLOP/s of a GPU."""
        config = self.config()
        layout = Layout.from_config(config.parallel, self.gpus)
        plan = plan_pipeline(shortened(config, layout), layout) if layout.pp > 1 else None
        step = StepModel(config, layout, DEVICES[self.gpu], plan).predict()
        data = config.data
        assert data.global_batch_size is not None and data.seq_length is not None
        tokens = data.global_batch_size * data.seq_length / step.total / self.gpus
        measured = self.tflops if self.tokens is None else self.tflops_of(self.tokens, config)
        assert measured is not None
        return measured, self.tflops_of(tokens, config)


def _megatron(
    name: str, heads: int, hidden: int, layers: int, tp: int, pp: int, batch: int, tflops: float
) -> Published:
    """Of Megatron-LM's README: GPT, vocabulary 131,072, 4,096 tokens, data parallelism 48. Its stages per rank and
    micro-batch sizes are not told: two and one are taken."""
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 131072}
    kind = {"swiglu": False, "normalization": "LayerNorm", "max_position_embeddings": 4096}
    chunks = {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_schedule": "interleaved"} if pp > 1 else {}
    return Published(
        source="Megatron-LM README",
        what=f"GPT {name}, TP {tp} PP {pp}",
        gpu="h100",
        gpus=48 * tp * pp,
        model=shape | kind,
        parallel={
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "pipeline_model_parallel_size": pp,
            "data_parallel_sharding_strategy": "optim_grads_params" if pp > 1 else "optim",
            **chunks,
        },
        data={"seq_length": 4096, "global_batch_size": batch},
        tflops=tflops,
    )


def _titan(
    model: str, gpu: str, gpus: int, rows: int, tokens: float, what: str, recompute: str = "selective", tp: int = 1
) -> Published:
    """Of torchtitan's benchmarks: 8,192 tokens, one micro-batch of ``rows`` sequences on each data-parallel rank."""
    return Published(
        source="torchtitan",
        what=f"{model}, {what}",
        gpu=gpu,
        gpus=gpus,
        model={**PRESETS[model]},
        parallel={
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "recompute_granularity": recompute,
        },
        data={"seq_length": 8192, "micro_batch_size": rows},
        tokens=tokens,
    )


PUBLISHED = (
    _megatron("1.7B", 16, 2048, 24, 1, 1, 192, 408.8),
    _megatron("7.1B", 32, 4096, 30, 2, 1, 192, 465.9),
    _megatron("16B", 48, 6144, 32, 4, 1, 192, 489.1),
    _megatron("32B", 56, 7168, 48, 8, 1, 192, 459.6),
    _megatron("70B", 64, 8192, 84, 8, 2, 384, 419.7),
    _megatron("119B", 80, 10240, 92, 8, 4, 768, 420.5),
    _megatron("177B", 96, 12288, 96, 8, 6, 1152, 432.8),
    _megatron("314B", 128, 16384, 96, 8, 8, 1536, 474.4),
    _titan("llama3-8b", "h100", 8, 2, 5762, "FSDP 8, eager"),
    _titan("llama3-8b", "h100", 8, 2, 6667, "FSDP 8, compiled"),
    _titan("llama3-8b", "h100", 128, 2, 6514, "FSDP 128, compiled"),
    _titan("llama3-70b", "h100", 256, 16, 597.3, "FSDP 32 x TP 8, full recompute", "full", 8),
    _titan("llama3-8b", "h100", 64, 1, 4378, "FSDP 8 x TP 8", "selective", 8),
    _titan("llama3-8b", "a100", 64, 2, 2973, "FSDP 64 (2024)"),
    _titan("llama3-70b", "a100", 64, 2, 331, "FSDP 64, full recompute (2024)", "full"),
)
"""bf16 only: what is measured with FP8 is left out."""


def table() -> list[str]:
    """Rows of a page: measured, predicted, error."""
    lines = ["| Measured by | Run | GPUs | measured TFLOP/s per GPU | predicted | error |", "|---|---|---|---|---|---|"]
    for row in PUBLISHED:
        measured, predicted = row.predicted()
        lines.append(
            f"| {row.source} | {row.what} | {row.gpus:,} {row.gpu} | {measured:.0f} | {predicted:.0f} | "
            f"{100 * (predicted / measured - 1):+.0f} % |"
        )
    return lines
