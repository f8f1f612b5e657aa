"""Training runs of other trainers, published with their layouts, and the planner's predictions for them.

``runs.yaml`` holds the rows as they were published. A third of them is never used for calibration: which, a hash
of the row decides. Trainers differ in kernels and in what they hide, so each gets factors of the shares of a device
that ``fit.py`` finds on the other two thirds (``fit.yaml``); the page of errors has both, with and without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from smp.config import Config, DataConfig, Layout, ModelConfig, ParallelConfig, TrainingConfig, resolve
from smp.models.arithmetic import training_flops_per_token
from smp.models.presets import PRESETS
from smp.pipeline.stage_plan import Plan, plan_pipeline
from smp.planner.devices import DEVICES, Device
from smp.planner.search import shortened
from smp.planner.seconds import StepTime
from smp.planner.step_time import StepModel

HERE = Path(__file__).parent
FIT = HERE / "fit.yaml"
HELD_OUT = 3
"""One row of so many is held out of calibration."""
# smp refuses MXFP8 with experts, and on tensor cores.
_FP8 = {"fp8": "tensorwise", "mxfp8": "tensorwise", "rowwise": "rowwise"}


@dataclass(frozen=True)
class Factors:
    """A trainer's kernels relative to a device's shares: factors of ``Device``'s values."""

    product_share: float = 1.0
    fp8_share: float = 1.0
    attention_share: float = 1.0
    memory_share: float = 1.0
    link_share: float = 1.0

    def of(self, device: Device) -> Device:
        """The device with this trainer's kernels."""
        shares: dict[str, Any] = {f.name: getattr(device, f.name) * getattr(self, f.name) for f in fields(self)}
        return replace(device, **shares)


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        source: key of the list of sources.
        gpu, gpus: kind and number.
        tokens: per second and GPU; None where FLOP/s are given.
        tflops: model FLOP/s of a GPU, in 1e12.
        mtp: layers of multi-token prediction.
        fsdp: with weights sharded over data-parallel ranks; 0: the optimizer's state.
        strategy: of FSDP where it has one: 2 keeps gathered weights, 3 does not.
    """

    source: str
    gpu: str
    gpus: int
    model: str
    seq: int
    gbs: int
    precision: str = "bf16"
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    fsdp: int = 0
    strategy: int = 3
    mtp: int = 0
    mbs: int = 1
    recompute: str = "none"
    tokens: float | None = None
    tflops: float | None = None
    note: str = field(default="", compare=False)

    @cached_property
    def held_out(self) -> bool:
        """Decided by a hash of the settings, not of the result."""
        # The note and the layout count; results do not, so a corrected figure moves no row.
        said = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in ("tokens", "tflops")]
        return int(hashlib.sha256(";".join(said).encode()).hexdigest(), 16) % HELD_OUT == 0

    @property
    def layout_in_words(self) -> str:
        """Degrees other than 1, and whatever else the step depends on."""
        names = {"tp": "TP", "pp": "PP", "vp": "VP", "cp": "CP", "ep": "EP"}
        words = [f"{name} {getattr(self, key)}" for key, name in names.items() if getattr(self, key) > 1]
        words += [f"{self.recompute} recompute"] if self.recompute != "none" else []
        words += [self.note] if self.note else []
        return ", ".join([*words, f"{self.mbs} x {self.seq:,}"])

    @cached_property
    def config(self) -> Config:
        """Resolved settings of smp that are closest to the run's."""
        model = dict(PRESETS.get(self.model) or _shape(self.model)) | {"max_position_embeddings": self.seq}
        if self.model.startswith("gpt-oss") or self.model in PRESETS:
            model["max_position_embeddings"] = max(self.seq, PRESETS[self.model]["max_position_embeddings"])
        model |= {"mtp_num_layers": self.mtp} if self.mtp else {}
        parallel = _parallel(self)
        data = DataConfig(mock_data=True, seq_length=self.seq, micro_batch_size=self.mbs, global_batch_size=self.gbs)
        training = TrainingConfig(dry_run=True)
        # dry_run: no data and no length of the run is asked for.
        return resolve(Config(ModelConfig(**model), parallel=parallel, data=data, training=training), self.gpus)

    @cached_property
    def layout(self) -> Layout:
        """The run's degrees."""
        return Layout.from_config(self.config.parallel, self.gpus)

    @cached_property
    def plan(self) -> Plan | None:
        """The plan of its pipeline; None without one."""
        return plan_pipeline(shortened(self.config, self.layout), self.layout) if self.pp > 1 else None

    @cached_property
    def flops(self) -> float:
        """Training FLOPs of a token."""
        assert self.config.model.vocab_size is not None
        return training_flops_per_token(self.config.model, self.seq, self.config.model.vocab_size)

    @property
    def measured(self) -> float:
        """TFLOP/s per GPU, as published or from tokens per second."""
        if self.tflops is not None:
            return self.tflops
        assert self.tokens is not None, "one of both is given"
        return self.tokens * self.flops / 1e12

    def step(self, factors: Factors) -> StepTime:
        """The predicted step."""
        return StepModel(self.config, self.layout, factors.of(DEVICES[self.gpu]), self.plan).predict()

    def rate(self, step: StepTime) -> float:
        """TFLOP/s per GPU for this step time."""
        return self.gbs * self.seq / step.total / self.gpus * self.flops / 1e12


def _parallel(run: Run) -> ParallelConfig:
    """A row's layout in smp's settings."""
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": run.tp,
        "sequence_parallel": run.tp > 1,
        "pipeline_model_parallel_size": run.pp,
        "context_parallel_size": run.cp,
        "expert_model_parallel_size": run.ep,
        "recompute_granularity": run.recompute,
    }
    if run.vp > 1:
        settings |= {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": run.vp}
    # Megatron's name of several chunks per rank.
    if run.pp == 1:
        sharded = {2: "optim_grads", 3: "optim_grads_params"}[run.strategy]
        trainer = sources()[run.source].trainer
        whole = trainer == "megatron" and not run.fsdp  # a distributed optimizer gathers once per step
        settings["data_parallel_sharding_strategy"] = "optim" if whole else sharded
    if run.precision != "bf16":
        settings |= {"fp8_format": "hybrid", "fp8_recipe": _FP8[run.precision]}
    return ParallelConfig(bf16=True, **settings)


def _shape(name: str) -> dict[str, Any]:
    """Sizes of GPTs in Megatron's README and of MosaicML's: LayerNorm, GELU, no gate."""
    layers, width, heads = _file()["models"][name]
    shape = {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads, "swiglu": False}
    shape |= {"normalization": "LayerNorm", "ffn_hidden_size": 4 * width}
    learned = {"position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False}
    return shape | (learned | {"vocab_size": 50368} if name.startswith("mpt") else {"vocab_size": 131072})


@dataclass(frozen=True)
class Source:
    """Where figures come from."""

    title: str
    trainer: str
    address: str
    about: str = ""


@cache
def _file() -> Any:
    return yaml.safe_load((HERE / "runs.yaml").read_text(encoding="utf-8"))


@cache
def sources() -> Mapping[str, Source]:
    """Sources by key."""
    return {key: Source(**one) for key, one in _file()["sources"].items()}


@cache
def runs() -> Sequence[Run]:
    """All rows."""
    return [Run(**row) for row in _file()["runs"]]


def group_of(run: Run) -> str:
    """The group of runs that share factors: one trainer on one kind of GPU, with or without experts."""
    hides = " async TP" if run.note == "async TP" else ""
    experts = ""
    if run.config.model.num_experts:
        experts = " experts" if run.precision == "bf16" else " experts in FP8"
    return f"{sources()[run.source].trainer}{hides}{experts} {DEVICES[run.gpu].family}"
