"""A command line of Megatron-LM's in this project's flags: what ``--from-megatron`` does.

Flags that mean the same stay, flags with a counterpart become it, Megatron's defaults are spelled out, what changes
nothing is left out, and all that does not exist is refused at once. What a flag becomes is data, in ``table``, but for
those that depend on others: these are here.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from smp.config.batch import scheduled
from smp.config.cli import FROM_MEGATRON, build_tree, read_values
from smp.config.entry_points import PRETRAIN
from smp.config.fields import did_you_mean, settings, without_effect
from smp.config.megatron.table import DEFAULTS, REQUIRED, ROWS, fate_of
from smp.config.schema import ConfigError, DataConfig

_WITHOUT_DOCUMENTS = ("packing", "reset_attention_mask", "reset_position_ids", "eod_mask_loss", "data_cache_path")
_LENGTHS_IN_SAMPLES = ("--lr-decay-samples", "--lr-warmup-samples", "--lr-wsd-decay-samples")
_OF_LOADING = ("finetune", "load_optim", "ckpt_step")
_ZERO = {"0": "no_shard", "1": "optim", "2": "optim_grads", "3": "optim_grads_params"}
_SOURCES = ("data_path", "data_args_path", "train_data_path", "mock_data")


@dataclass
class Line:
    """A line while it is translated.

    Attributes:
        processes: of the run.
        given: Megatron's flags and their values.
        own: flags that only this project has; they go before all else.
        words: the result: flag and values by name of the setting.
        left_out: what changes nothing.
        refused: flags and values by the answer to them.
        problems: what else cannot be, a clause each.
        notes: what the user should know besides.
    """

    processes: int
    given: dict[str, list[str]] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)
    words: dict[str, list[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def one(self, flag: str) -> str | None:
        """The value of a flag of Megatron's; None: it is not given."""
        return self.given[flag][0] if flag in self.given else None

    def put(self, *words: str) -> None:
        """Take flags of this project, each with its values, into the result."""
        name = ""
        for word in words:
            if word.startswith("--"):
                name = _setting(word)
                self.words[name] = []
            self.words[name].append(word)

    def number(self, name: str, otherwise: int = 1) -> int:
        """The value of a whole-number setting of the result."""
        words = self.words.get(name)
        return otherwise if words is None else settings()[name].parse(words[1], words[0])

    def says(self, name: str, value: str | None = None) -> bool:
        """Whether the result has this switch on, or the setting at ``value``."""
        words = self.words.get(name)
        return words == ([settings()[name].flag] if value is None else [settings()[name].flag, value])


@dataclass(frozen=True)
class Translation:
    """Attributes: the line in this project's flags, and what to tell the user of it."""

    argv: list[str]
    notes: list[str]


def translate(argv: Sequence[str], processes: int) -> Translation:
    """``argv``, a line of Megatron's and perhaps flags of this project, for so many processes.

    Raises:
        ConfigError: flags that are not known or ask for what does not exist, all of them in one line.
    """
    line = Line(processes)
    _read(line, [word for word in argv if word != FROM_MEGATRON])
    for flag, values in line.given.items():
        _take(line, flag, values)
    for derive in (
        _positions,
        _heads,
        _window,
        _latent_yarn,
        _experts,
        _virtual_stages,
        _exchange,
        _sharding,
        _tokenizer,
        _folders,
        _data,
        _evaluation,
    ):
        derive(line)
    line.put(*line.own)
    _defaults(line)
    for derive in (_gelu, _query_norm, _recompute, _samples, _requirements):
        derive(line)
    clauses = [f"{', '.join(flags)}: {answer}" for answer, flags in line.refused.items()] + line.problems
    if clauses:
        raise ConfigError(f"{FROM_MEGATRON}: " + "; ".join(clauses))
    _drop_what_is_idle(line)
    ordered = [word for name in settings() for word in line.words.get(name, ())]
    return Translation(ordered, _said(line, ordered))


def _said(line: Line, ordered: list[str]) -> list[str]:
    count = len(line.left_out)
    left = [f"note: {count} flags of Megatron's change nothing here and are left out: {', '.join(line.left_out)}"]
    return [*(left if count else []), *line.notes, f"in this project's flags: {shlex.join(ordered)}"]


def _setting(flag: str) -> str:
    """Name of the setting of a flag of this project; of ``--no-x`` that of x."""
    name = flag.removeprefix("--").replace("-", "_")
    return name if name in settings() else name.removeprefix("no_")


def _read(line: Line, argv: list[str]) -> None:
    """Flags with their values, Megatron's apart from those that only this project has."""
    known = settings()
    while argv:
        flag, equals, value = argv.pop(0).partition("=")
        if not flag.startswith("--"):
            line.problems.append(f"unexpected {flag!r}: a value follows its flag")
            continue
        values = [value] if equals else []
        while argv and not argv[0].startswith("--") and not equals:
            values.append(argv.pop(0))
        setting = known.get(_setting(flag))
        if flag in ("--model", "--config"):
            line.problems.append(f"{flag}: the sizes are Megatron's flags; leave it out")
            continue
        if flag in ROWS:
            arity = ROWS[flag].arities[flag]
        elif setting is not None:
            arity = "" if setting.type is bool else "+" if setting.many else "1"
        else:
            near = did_you_mean(flag, [*ROWS, *(s.flag for s in known.values())], ": is it Megatron's?")
            line.problems.append(f"unknown flag {flag}{near}")
            continue
        if arity != "+" and len(values) != len(arity):
            line.problems.append(f"{flag} takes {'one value' if arity else 'no value'}, not {len(values)}")
        elif flag in ROWS:
            line.given[flag] = values
        else:
            line.own += [flag, *values]


def _take(line: Line, flag: str, values: list[str]) -> None:
    """What the table says of one flag."""
    row, fate, value = ROWS[flag], fate_of(flag), " ".join(values)
    if value in row.values or fate == "left out":
        words = row.values.get(value, "")
        if words:
            line.put(*words.split())
        else:
            line.left_out.append(" ".join([flag, *values]))
    elif fate == "same":
        line.put(flag, *values)
    elif fate == "becomes":
        line.put(*(word if word != "{}" else value for word in row.words.split()))
        if flag == "--fp16":
            line.notes.append("note: --fp16 becomes --bf16, another number format: there is no fp16 with a loss scale")
    elif fate == "refused":
        line.refused.setdefault(row.answer, []).append(" ".join([flag, *values]))


def _positions(line: Line) -> None:
    if "--no-position-embedding" in line.given and not line.says("position_embedding_type", "rope"):
        line.put("--position-embedding-type", "none")


def _heads(line: Line) -> None:
    if "--multi-latent-attention" in line.given:
        _leave(line, ("kv_channels",), "--multi-latent-attention has widths of its own")
    if line.says("moe_router_score_function", "sigmoid"):
        _leave(line, ("moe_router_pre_softmax",), "sigmoid scores have no softmax")
    groups = line.one("--num-query-groups")
    if "--group-query-attention" in line.given:
        line.put("--num-query-groups", groups or "1")
    elif groups is not None:
        line.left_out.append(f"--num-query-groups {groups} (without --group-query-attention)")


def _window(line: Line) -> None:
    if "--window-size" not in line.given:
        return
    text = " ".join(line.given["--window-size"])
    sides = [int(number) for number in re.findall(r"-?\d+", text)]
    if len(sides) != 2 or sides[1] not in (0, -1):
        line.problems.append(f"--window-size {text}: a token sees itself and tokens before it: give Megatron's (n-1,0)")
    elif sides[0] >= 0:
        line.put("--window-size", str(sides[0] + 1))


def _gelu(line: Line) -> None:
    """Megatron's GELU with a fused bias, which is its default, is the tanh approximation."""
    plain = line.says("swiglu") is False and not line.says("squared_relu")
    fused = "--no-bias-gelu-fusion" not in line.given and not line.says("disable_bias_linear")
    if plain and (fused or "--openai-gelu" in line.given) and "tanh_gelu" not in line.words:
        line.put("--tanh-gelu")


def _query_norm(line: Line) -> None:
    if "--qk-layernorm" not in line.given:
        return
    line.put("--qk-layernorm")
    if not line.says("normalization", "RMSNorm"):
        line.problems.append("--qk-layernorm: here it is RMSNorm; give --normalization RMSNorm")


def _latent_yarn(line: Line) -> None:
    """Megatron's RoPE beside latent attention is YaRN, which with its default factor of 1 changes nothing."""
    flags = ("--rope-type", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim")
    given = [f"{flag} {line.one(flag)}" for flag in flags if flag in line.given]
    latent, kind = "--multi-latent-attention" in line.given, line.one("--rope-type")
    factor = line.one("--rotary-scaling-factor") or "1.0"
    if kind not in (None, "rope", "yarn"):
        line.problems.append(f"--rope-type {kind}: give rope or yarn")
    elif not all(_is_number(line.one(flag) or "1") for flag in flags[1:]):
        line.problems.append(f"{', '.join(given)}: numbers")
    elif latent and kind == "rope" and float(factor) > 1 and float(line.one("--mscale-all-dim") or 0):
        line.problems.append(
            "--rope-type rope with --rotary-scaling-factor and --mscale-all-dim: Megatron scales attention by them "
            "although RoPE is not scaled; give --softmax-scale"
        )
    elif not latent or kind == "rope" or float(factor) == 1:
        why = "YaRN by a factor of 1 changes nothing" if latent and kind != "rope" else "there is no YaRN to set up"
        line.left_out += [f"{words} ({why})" for words in given]
    else:
        line.put("--use-rope-scaling", "--rope-scaling-type", "yarn", "--rope-scaling-factor", factor)
        line.put("--rope-original-max-position", "4096")  # a constant of Megatron's
        weight, of_all = (float(line.one(flag) or other) for flag, other in (("--mscale", 1), ("--mscale-all-dim", 0)))
        if weight and of_all:
            line.put("--yarn-mscale", str(weight), "--yarn-mscale-all-dim", str(of_all))
        elif of_all:
            line.problems.append(f"--mscale 0 beside --mscale-all-dim {of_all}: give both or none")
        else:
            line.put("--yarn-attention-factor", repr(0.1 * weight * math.log(max(1.0, float(factor))) + 1.0))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _experts(line: Line) -> None:
    """Megatron takes a negative capacity for none, and passes over the coefficient of a loss that there is not."""
    if (line.one("--moe-expert-capacity-factor") or "").startswith("-"):
        _leave(line, ("moe_expert_capacity_factor",), "no capacity")
    if line.says("moe_router_load_balancing_type", "none"):
        _leave(line, ("moe_aux_loss_coeff",), "without a loss of balance")


def _virtual_stages(line: Line) -> None:
    value = line.one("--num-layers-per-virtual-pipeline-stage")
    if value is None:
        return
    layers, ranks = line.number("num_layers"), line.number("pipeline_model_parallel_size")
    each = int(value) if value.isdecimal() else 0
    if each < 1 or layers % (ranks * each):
        line.problems.append(
            f"--num-layers-per-virtual-pipeline-stage {value}: {layers} layers are not divisible by "
            f"--pipeline-model-parallel-size {ranks} x {value}"
        )
    else:
        line.put("--num-virtual-stages-per-pipeline-rank", str(layers // (ranks * each)))


def _exchange(line: Line) -> None:
    kinds = line.given.get("--cp-comm-type")
    if kinds is None:
        return
    if len(set(kinds)) != 1:
        line.problems.append(f"--cp-comm-type {' '.join(kinds)}: one value for all layers")
    elif line.number("context_parallel_size") == 1:
        line.left_out.append(f"--cp-comm-type {kinds[0]} (without --context-parallel-size)")
    else:
        line.put("--cp-comm-type", kinds[0])


def _data_parallel(line: Line) -> int:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    degrees = 1
    for name in names:
        degrees *= max(1, line.number(name))
    return max(1, line.processes // degrees)


def _sharding(line: Line) -> None:
    """Replicas without a word of sharding, as in Megatron; its distributed optimizer shards the optimizer's state."""
    fsdp = {"--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"} & line.given.keys()
    strategy = line.one("--data-parallel-sharding-strategy")
    stage = line.one("--zero-stage")  # DeepSpeed's
    if stage is not None:
        strategy = _ZERO.get(stage)
        if strategy is None:
            line.problems.append(f"--zero-stage {stage}: give 0, 1, 2 or 3")
            return
    elif not fsdp:
        strategy = "optim" if "--use-distributed-optimizer" in line.given else "no_shard"
    elif strategy is None:
        strategy = "optim_grads_params" if "--use-torch-fsdp2" in fsdp else "no_shard"
    if line.one("--outer-dp-sharding-strategy") not in (None, "no_shard"):
        line.problems.append("--outer-dp-sharding-strategy: replicas of --hybrid-shard-degree hold no shards")
    if (strategy == "no_shard" or _data_parallel(line) == 1) and line.number("context_parallel_size") == 1:
        _leave(line, ("fp8_param_gather",), "no weights are sharded")
    instances, data = line.one("--num-distributed-optimizer-instances") or "1", _data_parallel(line)
    if not instances.isdecimal() or int(instances) < 1 or data % int(instances):
        line.problems.append(f"--num-distributed-optimizer-instances {instances} does not divide {data} replicas")
    elif strategy == "no_shard":
        line.put("--hybrid-shard-degree", "1")
    else:
        line.put("--hybrid-shard-degree", "0" if instances == "1" else str(data // int(instances)))
        if line.number("pipeline_model_parallel_size") == 1:  # a pipeline's gradients are reduced once a step anyway
            line.put("--data-parallel-sharding-strategy", strategy)


def _tokenizer(line: Line) -> None:
    """A tokenizer's file, or the number of token ids: data of Megatron's are ids already."""
    kind, model, entries = line.one("--tokenizer-type"), line.one("--tokenizer-model"), line.one("--vocab-file")
    size = line.one("--vocab-size")
    said = f"--tokenizer-type {kind}"
    if kind in ("GPT2BPETokenizer", None) and entries is not None:
        try:
            with open(entries, encoding="utf-8") as file:
                line.put("--vocab-size", str(len(json.load(file))))
        except (OSError, ValueError) as error:
            line.problems.append(f"--vocab-file {entries}: {getattr(error, 'strerror', None) or 'no JSON object'}")
    elif kind == "NullTokenizer" or (kind is None and model is None):
        if size is not None:
            line.put("--vocab-size", size)
        elif kind is not None:
            line.problems.append(f"{said} needs --vocab-size")
    elif kind in (
        "HuggingFaceTokenizer",
        "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer",
        "Llama2Tokenizer",
        None,
    ):
        file_in = os.path.join(model or "", "tokenizer.json")
        if model is None:
            line.problems.append(f"{said} needs --tokenizer-model")
        elif kind == "HuggingFaceTokenizer" and not os.path.isfile(model) and not os.path.isfile(file_in):
            line.problems.append(f"--tokenizer-model {model}: there is no {file_in}; the hub is not asked")
        else:
            line.put("--tokenizer-model", model if not os.path.isfile(file_in) else file_in)
    else:
        line.problems.append(f"{said}: give --tokenizer-model a tokenizer.json or a sentencepiece model")


def _folders(line: Line) -> None:
    save, load, start = (line.one(flag) for flag in ("--save", "--load", "--pretrained-checkpoint"))
    if save is not None:
        line.put("--save", save)
    if start is not None and load is not None:
        line.problems.append(
            f"--pretrained-checkpoint {start} beside --load {load}: start with --load {start} --finetune, go on with "
            "--load auto"
        )
    elif start is not None:
        line.put("--load", start, "--finetune")
    elif load is not None:
        both = save is not None and os.path.realpath(load) == os.path.realpath(save)
        both = both and "--exit-on-missing-checkpoint" not in line.given
        line.put("--load", "auto" if both else load)
        if both:
            _leave(line, ("load_optim",), "--load auto goes on with the optimizer's state")
        elif {"--exit-on-missing-checkpoint", "--no-exit-on-missing-checkpoint"}.isdisjoint((*line.given, *line.own)):
            line.notes.append(
                f"note: it is an error when --load {load} has no checkpoint, where Megatron starts from random "
                "weights; --no-exit-on-missing-checkpoint does so"
            )
    if "--exit-on-missing-checkpoint" in line.given:
        if load is None:
            line.left_out.append("--exit-on-missing-checkpoint (without --load)")
        else:
            line.put("--exit-on-missing-checkpoint")
    if "--use-checkpoint-args" in line.given and (load is None or line.says("load", "auto")):
        line.problems.append("--use-checkpoint-args needs a --load other than --save: else the flags say the sizes")


def _data(line: Line) -> None:
    if not any(name in line.words for name in _SOURCES):
        line.put("--mock-data")
        line.notes.append("note: the line names no data, so it trains on mock data, as Megatron does")
    if "split" in line.words:  # any characters between the numbers, such as a script's quotes
        line.put("--split", ",".join(re.findall(r"[.0-9]+", line.words["split"][1])) or line.words["split"][1])
    if line.says("mock_data"):
        _leave(line, _WITHOUT_DOCUMENTS, "with --mock-data")
    if "load" not in line.words:
        _leave(line, _OF_LOADING, "without --load")


def _evaluation(line: Line) -> None:
    """Megatron's ``--eval-iters 0`` is no evaluation, which here is no ``--eval-interval``."""
    if line.one("--eval-iters") == "0":
        _leave(line, ("eval_iters", "eval_interval"), "no evaluation, as --eval-iters 0 says")


def _leave(line: Line, names: Sequence[str], why: str) -> None:
    """Leave out settings of the result that this project would refuse, and Megatron passes over."""
    for name in names:
        if name in line.words:
            line.left_out.append(f"{' '.join(line.words.pop(name))} ({why})")


def _defaults(line: Line) -> None:
    """Megatron's defaults, as flags; not those of a model that a checkpoint describes."""
    for name, value in DEFAULTS.items():
        setting = settings()[name]
        if name in line.words or (setting.group == "model" and "--use-checkpoint-args" in line.given):
            continue
        if setting.type is bool:
            line.put(setting.flag if value == "true" else "--no-" + setting.flag[2:])
        else:
            line.put(setting.flag, value)


def _samples(line: Line) -> None:
    """Where the batch changes Megatron's schedule counts samples, also where lengths are in iterations: then these are
    iterations of the largest batch. (Of a schedule of batches without --global-batch-size Megatron takes one
    micro-batch of each rank, which none can mean.)"""
    if "train_iters" not in line.words:
        return
    if line.one("--lr-warmup-samples") == "0":
        line.words.pop("lr_warmup_samples", None)  # Megatron's default, beside iterations too
    said = [flag for flag in _LENGTHS_IN_SAMPLES if flag[2:].replace("-", "_") in line.words]
    if said:
        line.problems.append(f"{', '.join(said)} beside --train-iters: give --lr-*-iters, or --train-samples")
    batch = _largest_batch(line)
    if said or batch is None:
        return
    style = line.words["lr_decay_style"][1]
    lengths = {f"lr_{part}": line.words.pop(f"lr_{part}_iters", None) for part in ("decay", "warmup", "wsd_decay")}
    if lengths["lr_decay"] is None and style != "constant":
        lengths["lr_decay"] = line.words["train_iters"]
    for part, words in lengths.items():
        if words is not None:
            count = settings()["train_iters"].parse(words[1], words[0])
            line.put(f"--{part.replace('_', '-')}-samples", str(count * batch))
    line.notes.append("note: the batch changes, so the learning rate follows samples, as in Megatron")


def _largest_batch(line: Line) -> int | None:
    """Samples of the largest step, where steps change; None: they do not, or --global-batch-size is missing."""
    if "step_batch_size_schedule" in line.words:
        pairs = line.words["step_batch_size_schedule"][1]
        length = line.number("seq_length") if "seq_length" in line.words else 1
        return scheduled(DataConfig(step_batch_size_schedule=pairs, seq_length=length)).largest
    ramp = "rampup_batch_size" in line.words and "global_batch_size" in line.words
    return line.number("global_batch_size") if ramp else None


def _recompute(line: Line) -> None:
    if "--moe-layer-recompute" in line.given and line.given.get("--recompute-granularity") == ["full"]:
        line.problems.append("--moe-layer-recompute beside --recompute-granularity full, which repeats experts too")


def _requirements(line: Line) -> None:
    """What Megatron has no default for either."""
    described = "--use-checkpoint-args" in line.given
    names = [*(() if described else REQUIRED), "micro_batch_size", "lr"]
    missing = [settings()[name].flag for name in names if name not in line.words]
    if missing:
        line.problems.append(f"missing, as for Megatron: {', '.join(missing)}")


def _drop_what_is_idle(line: Line) -> None:
    """Leave out settings without an effect beside the rest: Megatron passes over them, this project refuses them."""
    defaults = [name for name in line.words if name in DEFAULTS]
    while True:
        values = read_values([word for words in line.words.values() for word in words], PRETRAIN, "")
        idle = [s.name for s in without_effect(build_tree(PRETRAIN, values)) if not s.noted]
        if not idle:
            return
        given = [name for name in idle if line.given.get(line.words[name][0]) == line.words[name][1:]]
        told = [name for name in idle if name not in defaults or name in given]
        _leave(line, told, "without effect beside the rest")
        for name in idle:
            line.words.pop(name, None)
