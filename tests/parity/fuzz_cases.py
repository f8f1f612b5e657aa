"""Random problems and layouts, as command lines: pretraining, SFT, LoRA, DPO, and chains of resumes.

Whether a command line can be is asked of the program itself: what its settings refuse is drawn again. A new way to
split a model is a line in ``DEGREES``.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smp.config import ConfigError
from smp.models.presets import PRESETS
from smp.training.settings import read_settings
from smp.training.tuning.settings import read_finetune_settings
from tests.training.tiny_hf import WORDS, write_model, write_samples, write_tokenizer

DEGREES = {
    "--tensor-model-parallel-size": (1, 1, 2, 4),
    "--pipeline-model-parallel-size": (1, 1, 2, 4),
    "--context-parallel-size": (1, 1, 2, 4),
}
"""Ways to split a model, and by how much; data-parallel ranks take what is left."""
BATCH, STEPS = 8, 4
KINDS = ("pretrain", "pretrain", "pretrain", "sft", "lora", "dpo", "dpo lora")
QUIET = "--no-tensorboard --no-progress-bar --log-interval 1"
HYBRID = "--linear-attention-type gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 4 "
HYBRID += "--linear-num-value-heads 8 --linear-key-head-dim 6 --linear-value-head-dim 5 --attention-output-gate "
HYBRID += "--norm-epsilon 1e-3"
KIMI = "--linear-attention-type kda --linear-attention-freq 2 --linear-num-key-heads 4 --linear-num-value-heads 4 "
KIMI += "--linear-key-head-dim 6 --linear-value-head-dim 6 --norm-epsilon 1e-3"
MAMBA = "--linear-attention-type mamba2 --mamba-num-heads 8 --mamba-num-groups 4 --mamba-head-dim 6 "
MAMBA += "--mamba-state-dim 5 --norm-epsilon 1e-3"
FALCON_H1 = f"{MAMBA} --linear-attention-parallel --no-mamba-rms-norm --ssm-out-multiplier 0.7"
LATENT = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
LATENT += "--qk-layernorm"
DSA = f"{LATENT} --q-lora-rank 12 --experimental-attention-variant dsa --dsa-indexer-n-heads 4 "
DSA += "--dsa-indexer-head-dim 8 --dsa-indexer-topk 6 --dsa-indexer-use-sparse-loss"
PATTERN = "--hybrid-layer-pattern M*-M --mamba-num-heads 8 --mamba-num-groups 4 --mamba-head-dim 6 --mamba-state-dim 5 "
PATTERN += "--norm-epsilon 1e-3 --position-embedding-type none"
MIXERS = (HYBRID, KIMI, f"{MAMBA} --linear-attention-freq 2", FALCON_H1, DSA)
LLAMA = (
    "",
    "--qk-layernorm",
    "--window-size 5 --add-qkv-bias",
    "--parallel-residual --rotary-percent 0.5",
    "--use-rope-scaling --rope-original-max-position 64",
    "--no-disable-bias-linear --no-swiglu --squared-relu",
    PATTERN,
    *MIXERS,
)
GPT2 = "--normalization LayerNorm --no-swiglu --position-embedding-type learned_absolute --no-disable-bias-linear"
GPT2_MORE = ("", "--tanh-gelu", "--window-size 3", "--qk-layernorm", "--parallel-residual --squared-relu")
ROUTERS = (
    "--moe-router-topk 2",
    "--moe-router-topk 3 --moe-router-pre-softmax --moe-router-topk-scaling-factor 1.5",
    "--moe-router-topk 1 --moe-router-pre-softmax",
    "--moe-router-topk 2 --moe-router-score-function sigmoid",
    "--moe-router-topk 1 --moe-router-score-function sigmoid --moe-apply-probs-on-input",
    "--moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5",
    "--moe-router-topk 3 --moe-router-pre-softmax --moe-router-num-groups 4 --moe-router-group-topk 3 "
    "--moe-router-group-score max --moe-router-topk-scaling-factor 4",
)
BALANCES = (
    "",
    "--moe-z-loss-coeff .01",
    "--moe-aux-loss-coeff .02",
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff .02",
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff .02 --moe-z-loss-coeff .01",
    "--moe-router-load-balancing-type sinkhorn",
)
CAPACITIES = (
    *("", ""),
    "--moe-expert-capacity-factor 1.0",
    "--moe-expert-capacity-factor 0.6 --moe-token-drop-policy position",
    "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
)
SHARED = (
    "",
    "--moe-shared-expert-intermediate-size 16",
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",
)
BESIDE_EXPERTS = (
    *("", ""),
    "--mtp-num-layers 1",
    "--no-disable-bias-linear --no-swiglu --quick-geglu --activation-func-clamp-value 7 --softmax-type learnable "
    "--window-size 4 --window-attn-skip-freq 2",
    "--no-swiglu --squared-relu",
    "--no-swiglu --no-disable-bias-linear --tanh-gelu",
    "--attention-chunk-size 6 --no-rope-freq 2",
    *MIXERS,
    LATENT,
)
SCHEDULES = (
    "--lr-decay-style constant",
    "--lr-decay-style cosine --min-lr 1e-3",
    "--lr-decay-style linear --lr-warmup-iters 1",
    "--lr-decay-style WSD --lr-wsd-decay-iters 2",
)
OPTIMIZERS = (
    "--optimizer sgd --lr 0.02",
    "--optimizer sgd --lr 0.02 --sgd-momentum 0.9",
    "--optimizer adam --lr 0.01 --adam-eps 0.01",  # with a small one it makes as much of rounding as of gradients
)
GENTLE = (
    "--optimizer sgd --lr 2e-3",
    "--optimizer sgd --lr 2e-3 --sgd-momentum 0.9",
    "--optimizer adam --lr 1e-3 --adam-eps 0.01",
)
"""For pairs. Once a pair is told apart, its loss and gradient are about exp(-margin): their relative error is the
margin's absolute one, and the margin is a difference of sums of about a hundred log-probabilities (1e-5 in fp32)."""


@dataclass(frozen=True)
class Layout:
    """A part of a run: on so many processes, up to an iteration."""

    world: int
    flags: str
    until: int = STEPS


@dataclass(frozen=True)
class Problem:
    """What is trained, whatever the layout.

    Attributes:
        seed: it was drawn with, and so were its layouts.
        kind: one of ``KINDS``.
        flags: of all of its runs.
        chains: runs that have to equal the one of ``alone``; of several layouts each resumes what the one before saved.
    """

    seed: int
    kind: str
    flags: str
    chains: tuple[tuple[Layout, ...], ...]

    @property
    def pretrains(self) -> bool:
        return self.kind == "pretrain"

    @property
    def alone(self) -> Layout:
        """One rank, few micro-batches, nothing computed twice."""
        return Layout(1, f"--micro-batch-size {BATCH // (self.micro_batches or (2 if 'rampup' in self.flags else 1))}")

    @property
    def micro_batches(self) -> int | None:
        """Of a step on each rank, where a balancing loss depends on their number (docs/moe.md)."""
        words = self.flags.split()
        if "--moe-aux-loss-coeff" not in words or "seq_aux_loss" in words:
            return None
        return 2

    def command(self, layout: Layout, save: Path | None, resumed: bool) -> str:
        """The command line of a part of a chain."""
        words = [self.flags, layout.flags]
        if save is not None:
            words += [f"--save {save}", f"--exit-interval {layout.until}" if layout.until < STEPS else ""]
        if resumed:
            words.append("--load auto" if self.pretrains else "--resume")
        return " ".join(words)


def write_inputs(folder: Path) -> None:
    """Models, a tokenizer, samples and texts."""
    for name, kind, tied in (("llama", "llama", False), ("tied", "llama", True), ("gpt2", "gpt2", False)):
        write_tokenizer(folder / name)
        write_model(folder / name, kind, tied=tied)
    write_samples(folder)
    texts = [" ".join((WORDS * 4)[i % 3 :][: 1 + i * 5 % 7]) for i in range(200)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def draw(seed: int, inputs: Path, worlds: tuple[int, ...] = (2, 4), chains: int = 3, experts: bool = False) -> Problem:
    """The problem of a seed, with so many chains; with ``experts`` one that has some."""
    rng = random.Random(seed)
    while True:
        kind = "pretrain" if experts else rng.choice(KINDS)
        flags = " ".join(_pretraining(rng, inputs, experts) if kind == "pretrain" else _tuning(rng, kind, inputs))
        flags += f" {QUIET} --global-batch-size {BATCH} --train-iters {STEPS} --seed {rng.randrange(1000)}"
        problem = Problem(seed, kind, flags, ())
        if _fits(problem, problem.alone):
            break
    drawn = [_chain(rng, problem, worlds) for _ in range(chains)]
    return Problem(seed, kind, flags, tuple(drawn))


def _chain(rng: random.Random, problem: Problem, worlds: tuple[int, ...]) -> tuple[Layout, ...]:
    ends = rng.choice([(STEPS,), (STEPS,), (2, STEPS), (1, 3, STEPS)])
    here = (1, *worlds) if len(ends) > 1 else worlds
    return tuple(next(_layouts(rng, problem, rng.choice(here), end)) for end in ends)


def _layouts(rng: random.Random, problem: Problem, world: int, until: int) -> Iterator[Layout]:
    while True:
        layout = Layout(world, " ".join(_layout(rng, world, problem)), until)
        if _fits(problem, layout):
            yield layout


def _layout(rng: random.Random, world: int, problem: Problem) -> Iterator[str]:
    degrees = {flag: rng.choice(sizes) for flag, sizes in DEGREES.items()}
    yield from (f"{flag} {size}" for flag, size in degrees.items() if size > 1)
    data = max(world // math.prod(degrees.values()), 1)
    tensor, pipeline = degrees["--tensor-model-parallel-size"], degrees["--pipeline-model-parallel-size"]
    if tensor > 1 and rng.random() < 0.6:
        yield "--sequence-parallel"
    if pipeline > 1:
        yield rng.choice(["", "--pipeline-schedule " + rng.choice(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])])
        yield rng.choice(["", "", "--pipeline-reshard"])
    if degrees["--context-parallel-size"] > 1:
        yield rng.choice(["", "--cp-comm-type " + rng.choice(["p2p", "all_gather", "a2a", "a2a+p2p"])])
    if "--num-experts" in problem.flags:
        yield f"--expert-model-parallel-size {rng.choice([1, 2, 4])}"
        yield rng.choice(["", f"--expert-tensor-parallel-size {rng.choice([1, 2])}"]) if tensor > 1 else ""
    if data > 1:
        yield rng.choice(["", f"--hybrid-shard-degree {rng.choice([d for d in (1, 2, 4) if data % d == 0])}"])
    sizes = [m for m in (1, 2, 4, 8) if BATCH % (m * data) == 0] or [1]
    if problem.micro_batches is not None:  # 0, with more ranks than have a sample each, is refused and drawn again
        sizes = [BATCH // (problem.micro_batches * data)]
    yield f"--micro-batch-size {rng.choice(sizes)}"
    yield rng.choice(["", "", "--recompute-granularity selective", "--recompute-granularity full"])
    yield rng.choice(["", "", "--attention-backend math"])
    yield f"--make-vocab-size-divisible-by {rng.choice([1, 8, 128])}"


def _experts(rng: random.Random) -> Iterator[str]:
    yield f"--num-experts {rng.choice([4, 8])} --moe-ffn-hidden-size {rng.choice([16, 24])}"
    yield from (rng.choice(kinds) for kinds in (ROUTERS, BALANCES, CAPACITIES, SHARED, BESIDE_EXPERTS))
    yield f"--moe-layer-freq {rng.choice(['1', '1', '2', '[0]*1+[1]*1', '[0]*1+[1]*3', '[1,0]*2'])}"


def _pretraining(rng: random.Random, inputs: Path, experts: bool = False) -> Iterator[str]:
    llama, heads = experts or rng.random() < 0.6, rng.choice([4, 4, 8])
    groups, length = rng.choice([g for g in (1, 2, 4, 8) if heads % g == 0]), rng.choice([15, 16, 24, 31])
    yield f"--num-layers {rng.choice([2, 4, 4, 8])} --hidden-size {rng.choice([16, 18, 32])}"
    yield f"--num-attention-heads {heads} --num-query-groups {groups} --ffn-hidden-size {rng.choice([36, 64])}"
    if experts or (llama and rng.random() < 0.7):
        model = " ".join(_experts(rng))
    else:
        model = rng.choice(LLAMA) if llama else f"{GPT2} {rng.choice(GPT2_MORE)}"
    yield model if "latent" in model else f"{model} --kv-channels 8"
    yield rng.choice(["", "--no-untie-embeddings-and-output-weights"])
    yield f"--init-method-std 0.1 --seq-length {length} --max-position-embeddings {length + 2}"
    yield from _course(rng, OPTIMIZERS)
    if rng.random() < 0.5:
        yield f"--mock-data --vocab-size {rng.choice([33, 97])}"
    else:
        yield f"--data-path {inputs}/texts.jsonl --tokenizer-model {inputs}/llama/tokenizer.json --vocab-size 300"
        yield f"--data-cache-path {inputs}/cache"
        yield rng.choice(["", "--eod-mask-loss", "--packing best-fit"])
        yield rng.choice(["", "--reset-attention-mask", "--reset-attention-mask --reset-position-ids"])
    yield rng.choice(["", "", f"--rampup-batch-size {BATCH // 2} {BATCH // 2} {BATCH}"])


def _tuning(rng: random.Random, kind: str, inputs: Path) -> Iterator[str]:
    pairs = kind.startswith("dpo")
    model = rng.choice(["llama", "tied", "gpt2"])
    yield f"--load {inputs}/{model} --data-path {inputs}/{'dpo' if pairs else 'sft'}.jsonl --seq-length 48"
    yield from _course(rng, GENTLE if pairs else OPTIMIZERS)
    if "lora" in kind:
        yield f"--lora-rank {rng.choice([1, 4])}"
        yield rng.choice(["", "--lora-dropout 0.25"])
        yield rng.choice(["", "--lora-target-modules query,down", "--lora-target-modules layers.[01].*"])
    if pairs:
        references = ["copy", "precomputed", *(["adapters-off"] if "lora" in kind else [])]
        yield f"--objective dpo --dpo-reference {rng.choice(references)}"
        yield rng.choice(["", "--dpo-label-smoothing 0.1", "--dpo-beta 0.5"])
    else:
        yield rng.choice(["", "--packing off", "--no-mask-prompt"])


def _course(rng: random.Random, optimizers: tuple[str, ...]) -> Iterator[str]:
    yield rng.choice(optimizers)
    yield rng.choice(SCHEDULES)
    yield f"--clip-grad {rng.choice([0, 0.2, 1])} --weight-decay {rng.choice([0, 0.1])}"
    yield rng.choice(["", "", "--hidden-dropout 0.1", "--attention-dropout 0.2"])
    yield rng.choice(["", "--eval-interval 2 --eval-iters 1"])


def _fits(problem: Problem, layout: Layout) -> bool:
    words = f"{problem.flags} {layout.flags}".split()
    try:
        if problem.pretrains:
            read_settings(words, PRESETS, layout.world)
        else:
            read_finetune_settings(words, layout.world)
    except ConfigError:
        return False
    return True
