"""Every setting of a run: one tree of dataclasses, no torch import.

Flags, YAML keys, ``--help`` and the table in ``docs/configuration.md`` are generated from these fields, so a field's
docstring is its documentation. Names are flat: a field name is unique over all groups, ``--kebab-case`` on the command
line and ``snake_case`` in YAML. They are Megatron's names wherever Megatron has one. Which of them an entry point has,
and where its defaults and texts are others, is in ``smp.config.command_line.entry_points``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from smp.config.declare import GIVEN, Words, only_with
from smp.config.distillation import DistillationConfig
from smp.config.model import ModelConfig
from smp.config.objectives import OBJECTIVES, ObjectiveConfig, ObjectiveFacts
from smp.config.parallel import ParallelConfig
from smp.config.rollouts import ONLINE, RolloutConfig
from smp.config.vision import VisionConfig


class ConfigError(ValueError):
    """A setting that cannot work. The message is one line and names the flag to change."""


@dataclass
class DataConfig:
    """What is trained on."""

    data_path: Words | None = None
    """What to read: the prefix of a .bin/.idx pair (Megatron's indexed dataset), or a text file (.jsonl, .txt,
    .parquet, also .gz or .zst), which is tokenized first. Several are blended, by weights when each has a number before
    it (0.3 wiki 0.7 web), else by their sizes."""
    data_args_path: str | None = None
    """File with the words of --data-path."""
    train_data_path: Words | None = None
    """Training data, as in --data-path, when validation and test data are separate files."""
    valid_data_path: Words | None = None
    """Validation data, with --train-data-path."""
    test_data_path: Words | None = None
    """Test data, with --train-data-path: evaluated once, at the end of the run."""
    data_cache_path: str | None = None
    """Folder for indices and tokenized text, built once per node. Default: the folder cache next to the data."""
    mock_data: bool = False
    """Train on synthetic tokens that are a function of (seed, sample index). Needs only --vocab-size."""
    split: str = only_with("969,30,1", mock_data=False)
    """Relative sizes of the train, validation and test parts of the documents; missing ones are 0."""
    tokenizer_model: str | None = None
    """Sentencepiece model, Hugging Face tokenizer.json or tiktoken file, or a folder with one. Gives the vocabulary
    size and checks it against the model's."""
    tiktoken_pattern: Literal["gpt2", "cl100k", "o200k", "llama3"] | None = only_with(None, tokenizer_model=GIVEN)
    """How text is split before a tiktoken file's merges; the file itself does not say."""
    seq_length: int | None = None
    """Tokens per sample. Default: --max-position-embeddings, at most 8192."""
    micro_batch_size: int = 1
    """Samples in one forward pass of one data-parallel process."""
    global_batch_size: int | None = None
    """Samples per optimizer step, any number: if micro-batches x data-parallel processes do not divide it, rows of
    weight 0 pad the last micro-batches. Default: micro batch x data-parallel processes (no accumulation)."""
    rampup_batch_size: Words | None = None
    """Three numbers: first batch size, increment, and the samples over which it grows to --global-batch-size."""
    step_batch_size_schedule: Words | None = None
    """Batch sizes in steps, as pairs of consumed tokens (--seq-length of each sample) and samples per step from there
    on: 0:16 2.4B:320, with K, M, B and T for thousands to trillions. --global-batch-size is then the largest of
    them."""
    packing: Literal["stream", "best-fit", "off"] | None = "stream"
    """How documents become sequences. stream: joined and cut every --seq-length tokens. best-fit: a document that fits
    is never cut; sequences are filled by best-fit decreasing and padded."""
    reset_attention_mask: bool = False
    """Tokens do not attend to other documents in their sequence."""
    reset_position_ids: bool = only_with(False, position_embedding_type=("rope", "learned_absolute"))
    """Positions start at 0 in every document."""
    eod_mask_loss: bool = False
    """No loss where the last token of a document would predict the first one of the next."""
    num_workers: int = 2
    """Threads that read batches ahead; 0 reads each when it is needed."""
    chat_template: str | None = None
    """File with a Jinja chat template, instead of the tokenizer's own."""
    apply_chat_template: bool = False
    """Render samples whose prompt and answer are texts as a user's and the assistant's message. Without it such texts
    are trained as they are."""
    mask_prompt: bool = True
    """Train on what the assistant says (or the completion) only; --no-mask-prompt trains on all tokens."""
    truncation_side: Literal["right", "left"] = "right"
    """Which end of a text is cut off that is longer than --seq-length: right its last tokens, left its first."""
    bad_sample_threshold: float = 0.01
    """Largest fraction of samples that may be broken (not JSON, unknown role, nothing to train on). They are left out
    and named by line number; more are an error."""
    preview: int = 0
    """Print this many samples as the model would see them, with trained tokens in colour (in a pipe: in ⟦ ⟧), and
    exit."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) instead of training all weights."""

    lora_rank: int | None = None
    """Freeze the model and train adapters of this rank. Default: all weights are trained."""
    lora_alpha: float | None = None
    """What an adapter adds is scaled by alpha / rank. Default: 2 x rank."""
    lora_dropout: float | None = None
    """Dropout on the input of adapters. Default: 0, or that of --load-adapter."""
    lora_target_modules: str | None = None
    """Linear layers that get an adapter: shell patterns, separated by commas, of whole names or of their last part
    (query, key, value, output, gate, up, down). Experts only by whole names, such as *.experts.*. all-linear, the
    default: all except experts."""
    use_dora: bool = False
    """Also train the norms of a weight's rows (DoRA, peft's use_dora). Not with --lora-dropout, not on experts. An
    adapter in --load-adapter may bring it."""
    load_in_4bit: bool = False
    """QLoRA: keep the frozen weights of linear layers in 4 bits (NF4, as bitsandbytes). Embedding, output matrix and
    experts keep their precision. Needs adapters."""
    bnb_4bit_use_double_quant: bool = only_with(True, load_in_4bit=True)
    """Also quantize the scales of 4-bit weights."""
    load_adapter: str | None = None
    """Start from the adapter in this folder of peft's format, which brings rank, alpha and target modules."""


@dataclass
class OptimizerConfig:
    """Optimizer, learning-rate schedule and clipping."""

    optimizer: Literal["adam", "apex-adam", "sgd", "muon"] = "adam"
    """adam: torch's fused AdamW; apex-adam: apex's FusedAdam (must be installed); muon: orthogonalized updates for the
    matrices of blocks, AdamW for embeddings, output matrix, norms and biases."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = only_with(0.0, lr_decay_style=("cosine", "linear", "WSD"))
    """Learning rate at the end of the decay."""
    decoupled_lr: float | None = None
    """Peak learning rate of the embedding and of the output matrix, instead of --lr."""
    decoupled_min_lr: float | None = only_with(None, decoupled_lr=GIVEN)
    """Their learning rate at the end of the decay. Default: --min-lr."""
    lr_decay_style: Literal["cosine", "linear", "WSD", "constant"] = "cosine"
    """Shape of the decay after the warm-up. WSD stays at the peak and decays at the end."""
    lr_decay_iters: int | None = only_with(None, lr_decay_style=("cosine", "linear", "WSD"), lr_warmup_fraction=GIVEN)
    """Iteration at which the decay ends. Default: the last one."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_init: float = only_with(0.0, lr_warmup_iters=GIVEN, lr_warmup_samples=GIVEN, lr_warmup_fraction=GIVEN)
    """Learning rate that the warm-up begins at."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay iterations, instead of --lr-warmup-iters."""
    lr_wsd_decay_iters: int | None = only_with(None, lr_decay_style="WSD")
    """WSD: length of the final decay. Default: a tenth of the decay iterations."""
    lr_decay_samples: int | None = only_with(None, lr_decay_style=("cosine", "linear", "WSD"), lr_warmup_fraction=GIVEN)
    """Consumed samples at which the decay ends, instead of --lr-decay-iters: the schedule then counts samples.
    Default with --train-samples and a batch that changes: these."""
    lr_warmup_samples: int | None = None
    """Samples of linear warm-up, instead of --lr-warmup-iters."""
    lr_wsd_decay_samples: int | None = only_with(None, lr_decay_style="WSD")
    """WSD: samples of the final decay, instead of --lr-wsd-decay-iters."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = only_with(
        "exponential", lr_decay_style="WSD"
    )
    """WSD: shape of the final decay."""
    weight_decay: float = 0.1
    """Weight decay, decoupled with Adam, added to the gradient with sgd; never on biases and norms (one dimension)."""
    apply_wd_to_qk_layernorm: bool = only_with(False, qk_layernorm=True)
    """Weight decay also on the norms of queries and keys (Qwen3-Next)."""
    adam_beta1: float = only_with(0.9, optimizer=("adam", "apex-adam", "muon"))
    """Decay rate of Adam's first moment."""
    adam_beta2: float = only_with(0.95, optimizer=("adam", "apex-adam", "muon"))
    """Decay rate of Adam's second moment."""
    adam_eps: float = only_with(1e-8, optimizer=("adam", "apex-adam", "muon"))
    """Added to Adam's denominator."""
    exp_avg_dtype: Literal["fp32", "bf16", "fp8"] = only_with("fp32", optimizer="adam")
    """Storage of Adam's first moment. Below fp32 it is rounded stochastically. fp8 has a scale per 128 elements of a
    row. Biases and norms stay in fp32."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp8"] = only_with("fp32", optimizer="adam")
    """Storage of Adam's second moment, in the same way; fp8 stores its square root."""
    sgd_momentum: float = only_with(0.0, optimizer="sgd")
    """Momentum of --optimizer sgd."""
    optimizer_cpu_offload: bool = only_with(False, optimizer="adam")
    """Keep Adam's moments in host memory and compute its steps there. Gradients are copied out during the last backward
    pass, new weights back while other parameters are updated."""
    muon_momentum: float = only_with(0.95, optimizer="muon")
    """Decay rate of Muon's momentum."""
    muon_use_nesterov: bool = only_with(True, optimizer="muon")
    """Nesterov's momentum in Muon; --no-muon-use-nesterov takes the plain one."""
    muon_num_ns_steps: int = only_with(5, optimizer="muon")
    """Newton-Schulz steps of Muon's orthogonalization."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = only_with("spectral", optimizer="muon")
    """Scale of Muon's update of an (out, in) matrix, times --muon-extra-scale-factor. spectral: sqrt(max(out, in));
    unit_rms_norm: sqrt(out / in); shape_scaling: sqrt(max(1, out / in))."""
    muon_extra_scale_factor: float = only_with(0.2, optimizer="muon")
    """Extra factor of Muon's update, see --muon-scale-mode. With spectral, 0.2 makes updates as large as AdamW's, so
    its learning rate fits."""
    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient; 0 switches clipping off."""


@dataclass
class TrainingConfig:
    """Length of the run, evaluation, what ends it and how it is observed."""

    train_iters: int | None = None
    """Optimizer steps to train for. One of --train-iters and --train-samples is needed."""
    train_samples: int | None = None
    """Samples to train for in all, instead of --train-iters (rounded up to whole steps), whatever batch sizes they are
    trained with. The learning rate then follows samples."""
    seed: int = 1234
    """Seed of initial weights, data order and dropout."""
    eval_interval: int | None = None
    """Evaluate on the validation split every so many iterations, and at the end. Default: never."""
    eval_epochs: float | None = None
    """Evaluate every so many passes over the training samples, rounded to whole iterations, instead of
    --eval-interval."""
    eval_iters: int = only_with(10, eval_interval=GIVEN, eval_epochs=GIVEN, test_data_path=GIVEN)
    """Global batches per evaluation."""
    full_validation: bool = only_with(False, eval_interval=GIVEN, eval_epochs=GIVEN)
    """Evaluate on all validation samples, instead of --eval-iters batches of them."""
    exit_interval: int | None = None
    """Save and stop after an iteration that is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and stop once the run has lasted this long."""
    max_skipped_steps: int = 10
    """Steps with a NaN or infinite loss or gradient norm are skipped. This many in a row end the run."""
    spike_policy: Literal["warn", "skip", "rewind"] | None = None
    """What to do about a step whose loss or gradient norm is far above the last ones. warn: say so; skip: drop its
    update; rewind: also go back to the last snapshot, see --spike-rewind-steps. Data go on after it. Default:
    nothing is looked for."""
    spike_window: int = only_with(128, spike_policy=GIVEN)
    """Steps that a step is compared with. Nothing is a spike before half of them are done."""
    spike_threshold: float = only_with(6.0, spike_policy=GIVEN)
    """Standard deviations above their mean that make a spike."""
    spike_rewind_steps: int = only_with(100, spike_policy="rewind")
    """Take a snapshot of weights and moments in host memory every so many iterations, and at each save: how far
    --spike-policy rewind goes back at most."""
    check_replicas_interval: int | None = None
    """Every so many iterations, and before each save, compare what several ranks hold (weights and optimizer moments
    that are replicated over --dp-replicate or tensor parallelism) bit for bit. Of three or more copies the majority
    replaces the others; if two differ, the run ends."""
    rerun_mode: Literal["disabled", "validate_results"] = "disabled"
    """validate_results: compute a step again, from the same batch and weights, when its loss or gradient norm is not
    finite or a spike, and in every --check-replicas-interval; ranks whose bits differ are named."""
    deterministic_mode: bool = False
    """Use only deterministic algorithms; an operation that has none is an error."""
    profile: bool = False
    """Record a torch profiler trace and a memory snapshot into --log-dir."""
    profile_step_start: int = only_with(3, profile=True, trace_pipeline=True)
    """First iteration of --profile, and the one of --trace-pipeline. If a resume is past it, the first iteration of
    that run."""
    profile_step_end: int = only_with(5, profile=True)
    """Iteration before which --profile stops."""
    trace_pipeline: bool = False
    """Write a Chrome trace of the pipeline's actions in iteration --profile-step-start to
    <log-dir>/pipeline_trace.json; tools/plot_pipeline.py draws it."""
    dry_run: bool = False
    """Print the resolved settings, the mesh, parameters per rank and a memory estimate, then exit."""
    suggest: float | None = only_with(None, dry_run=True)
    """With --dry-run: also print which memory-saving flags make the run fit into this many GiB per device, the cheapest
    first."""
    train_epochs: float | None = None
    """Passes over the training samples, also a part of one, instead of --train-iters and --train-samples."""

    @property
    def evaluates(self) -> bool:
        """Whether the validation data are read."""
        return self.eval_interval is not None or self.eval_epochs is not None


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = None
    """Folder that checkpoints are saved under, or a URL such as s3://bucket/run. One job at a time may use it."""
    load: str | None = None
    """Folder to resume from: its newest checkpoint that is whole, or that one checkpoint. auto: what --save holds, or a
    fresh start when it holds nothing. A Hugging Face folder gives the architecture and the weights. With another --save
    the same command started again continues from what it has saved there."""
    save_interval: int | None = None
    """Save every so many iterations. The end of a run is saved in any case."""
    save_epochs: float | None = None
    """Save every so many passes over the training samples, rounded to whole iterations, instead of --save-interval."""
    save_mtbf_hours: float | None = None
    """In place of --save-interval: mean time between failures. A checkpoint is saved every sqrt(2 x measured cost of a
    save x this) (Young). The first save is after the first iteration, to measure the cost."""
    async_save: bool = False
    """Write checkpoints in the background. Training stops only while the state is copied to host memory, which needs
    room for one copy."""
    peer_snapshot_interval: int | None = None
    """Every so many iterations keep a copy of the training state in the memory of its node and of the next one. Workers
    that torchrun starts again (--max-restarts) continue from there, without reading a disk."""
    peer_snapshot_dir: str = only_with("/dev/shm", peer_snapshot_interval=GIVEN)
    """Folder in memory, on every node, that these copies are in: room for two of a node's part of the state, and of the
    next one's."""
    ckpt_step: int | None = None
    """Load this iteration of --load, not the newest one."""
    finetune: bool = False
    """Take only the weights from --load and start at iteration 0."""
    load_optim: bool = True
    """Load the optimizer too; --no-load-optim takes only weights and counters from --load and starts a new
    optimizer."""
    exit_on_missing_checkpoint: bool = only_with(True, load=GIVEN)
    """End with an error when --load has no checkpoint; --no-exit-on-missing-checkpoint starts from scratch instead."""
    keep_last_k: int | None = None
    """Keep only this many newest checkpoints (at least 2), and those of --save-retain-interval and --keep-best-k.
    Default: 2 if one of those is given, else all are kept."""
    save_retain_interval: int | None = None
    """Also keep checkpoints whose iteration is a multiple of this."""
    keep_best_k: int | None = None
    """Also keep this many checkpoints with the lowest validation loss. Needs --eval-interval."""
    save_hf: bool = False
    """When the run has ended, write its model as a Hugging Face folder to <save>/hf_model, adapters merged."""
    resume: bool = False
    """Continue from the newest checkpoint in --save if there is one. The same command line then works for every
    restart."""


@dataclass
class LoggingConfig:
    """Logs, metrics and where they go."""

    log_dir: str = "runs/pretrain"
    """Folder of metrics.jsonl, starts.jsonl (settings, command, versions and commit of every start), status.json,
    goodput.json, TensorBoard events and profiles. tools/report.py makes a page of it."""
    log_interval: int = 10
    """Iterations between log lines and records."""
    log_format: Literal["short", "megatron"] = "short"
    """Log line of an iteration. short: at most 200 characters, with epoch and remaining time; megatron: Megatron's
    format, for scripts that parse it. metrics.jsonl has everything in both cases."""
    tensorboard: bool = True
    """Write TensorBoard events to <log-dir>/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (wandb must be installed)."""
    wandb_exp_name: str | None = only_with(None, wandb_project=GIVEN)
    """Name of the Weights & Biases run."""
    mlflow_experiment: str | None = None
    """Also log to this experiment of MLflow, settings as its parameters (mlflow or mlflow-skinny must be installed)."""
    mlflow_run_name: str | None = only_with(None, mlflow_experiment=GIVEN)
    """Name of the run in MLflow."""
    mlflow_tracking_uri: str | None = only_with(None, mlflow_experiment=GIVEN)
    """MLflow server, or file:PATH for a folder. Default: the environment variable MLFLOW_TRACKING_URI."""
    log_straggler: bool = False
    """Every 5 iterations compare what each rank took for its own computation, without waits for others, and for its
    data; a rank that is slower than its peers is named, with its host. docs/watching.md says how it is measured."""
    straggler_minmax_count: int = only_with(1, log_straggler=True)
    """How many of the fastest and of the slowest ranks a line of --log-straggler names."""
    progress_bar: bool = True
    """Show a progress bar on rank 0's stderr."""
    status_file: str | None = None
    """File with the state of the run: running, then done, requeue, failed or bad_config. If it says running and the
    process is gone, the process was killed. Default: <log-dir>/status.json (not written by a run that never
    started)."""


@dataclass
class Config:
    """The whole tree. A fine-tuning run has an ``objective``, and adapters if its ``lora`` asks for them; a pretraining
    run has none of these groups."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig | None = None
    objective: ObjectiveConfig | None = None
    rollouts: RolloutConfig | None = None
    distillation: DistillationConfig | None = None
    vision: VisionConfig | None = None
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        lora = self.lora
        return lora is not None and (lora.lora_rank is not None or lora.load_adapter is not None)

    @property
    def objective_facts(self) -> ObjectiveFacts:
        """Facts of the objective; a pretraining run's is that of samples."""
        return OBJECTIVES["sft" if self.objective is None else self.objective.objective]

    @property
    def is_online(self) -> bool:
        """Whether it trains on what the model writes during the run."""
        return self.objective is not None and self.objective.objective in ONLINE

    @property
    def writes(self) -> bool:
        """Whether the model writes completions during the run."""
        return self.is_online or (self.distillation is not None and self.distillation.lmbda > 0)

    @property
    def has_reference(self) -> bool:
        """Whether the model is compared with a reference model."""
        if self.is_online and self.rollouts is not None:
            return bool(self.rollouts.beta)
        return self.objective_facts.has_reference

    @property
    def rows_per_micro_batch(self) -> int:
        """Sequences in one forward pass: those of its samples."""
        return self.objective_facts.rows * self.data.micro_batch_size

    @property
    def resume_from(self) -> str | None:
        """Where the state of a run comes from, as --load of pretraining says it. A fine-tuning run goes on from its own
        checkpoints or from none: what its --load names is not a state to resume but weights to begin with."""
        if self.objective is None:
            return self.checkpoint.load
        return "auto" if self.checkpoint.resume else None
