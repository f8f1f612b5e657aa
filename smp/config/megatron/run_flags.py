"""Flags of Megatron-LM for training, data and layout that depend on other flags; like ``model_flags``."""

from __future__ import annotations

import json
import os
import re

from smp.config.batch import scheduled
from smp.config.command_line.fields import settings
from smp.config.megatron.line import Line, leave
from smp.config.schema import DataConfig

_WITHOUT_DOCUMENTS = ("packing", "reset_attention_mask", "reset_position_ids", "eod_mask_loss", "data_cache_path")
_LENGTHS_IN_SAMPLES = ("--lr-decay-samples", "--lr-warmup-samples", "--lr-wsd-decay-samples")
_OF_LOADING = ("finetune", "load_optim", "ckpt_step")
# DeepSpeed's ZeRO stages by what they shard.
_ZERO = {"0": "no_shard", "1": "optim", "2": "optim_grads", "3": "optim_grads_params"}
_SOURCES = ("data_path", "data_args_path", "train_data_path", "mock_data")


def virtual_stages(line: Line) -> None:
    value = line.one("--num-layers-per-virtual-pipeline-stage")
    if value is None:
        return
    layers, ranks = line.number("num_layers"), line.number("pipeline_model_parallel_size")
    each = int(value) if value.isdecimal() else 0
    # isdecimal: a sign or a point would be no number of layers.
    if each < 1 or layers % (ranks * each):
        line.problems.append(
            f"--num-layers-per-virtual-pipeline-stage {value}: {layers} layers are not divisible by "
            f"--pipeline-model-parallel-size {ranks} x {value}"
        )
    else:
        line.put("--num-virtual-stages-per-pipeline-rank", str(layers // (ranks * each)))


def exchange(line: Line) -> None:
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
        # At least 1: a wrong degree is reported by its own check.
        degrees *= max(1, line.number(name))
    return max(1, line.processes // degrees)


def sharding(line: Line) -> None:
    """--hybrid-shard-degree and --data-parallel-sharding-strategy. Without a flag Megatron replicates; its distributed
    optimizer shards optimizer states."""
    fsdp = {"--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"} & line.given.keys()
    strategy = line.one("--data-parallel-sharding-strategy")
    stage = line.one("--zero-stage")  # DeepSpeed's
    if stage is not None:
        strategy = _ZERO.get(stage)
        if strategy is None:
            line.problems.append(f"--zero-stage {stage}: give 0, 1, 2 or 3")
            return
    elif not fsdp:
        # Megatron's distributed optimizer is ZeRO-1.
        strategy = "optim" if "--use-distributed-optimizer" in line.given else "no_shard"
    elif strategy is None:
        # torch's FSDP2 shards everything; Megatron's own default is not to shard.
        strategy = "optim_grads_params" if "--use-torch-fsdp2" in fsdp else "no_shard"
    if line.one("--outer-dp-sharding-strategy") not in (None, "no_shard"):
        line.problems.append("--outer-dp-sharding-strategy: replicas of --hybrid-shard-degree hold no shards")
    if (strategy == "no_shard" or _data_parallel(line) == 1) and line.number("context_parallel_size") == 1:
        leave(line, ("fp8_param_gather",), "no weights are sharded")
    instances, data = line.one("--num-distributed-optimizer-instances") or "1", _data_parallel(line)
    if not instances.isdecimal() or int(instances) < 1 or data % int(instances):
        line.problems.append(f"--num-distributed-optimizer-instances {instances} does not divide {data} replicas")
    elif strategy == "no_shard":
        line.put("--hybrid-shard-degree", "1")
    else:
        # Megatron's instances are replicas: this project's degree is ranks per replica.
        line.put("--hybrid-shard-degree", "0" if instances == "1" else str(data // int(instances)))
        if line.number("pipeline_model_parallel_size") == 1:  # a pipeline's gradients are reduced once a step anyway
            line.put("--data-parallel-sharding-strategy", strategy)


def tokenizer(line: Line) -> None:
    """--tokenizer-model or --vocab-size: Megatron's data are token ids already, so a number of ids is enough."""
    kind, model, entries = line.one("--tokenizer-type"), line.one("--tokenizer-model"), line.one("--vocab-file")
    size = line.one("--vocab-size")
    said = f"--tokenizer-type {kind}"
    # GPT-2's vocabulary is a JSON object whose length is the number of ids.
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
        # Megatron would ask the hub for such a name.
        elif kind == "HuggingFaceTokenizer" and not os.path.isfile(model) and not os.path.isfile(file_in):
            line.problems.append(f"--tokenizer-model {model}: there is no {file_in}; the hub is not asked")
        else:
            line.put("--tokenizer-model", model if not os.path.isfile(file_in) else file_in)
    else:
        line.problems.append(f"{said}: give --tokenizer-model a tokenizer.json or a sentencepiece model")


def folders(line: Line) -> None:
    save, load, start = (line.one(flag) for flag in ("--save", "--load", "--pretrained-checkpoint"))
    if save is not None:
        line.put("--save", save)
    if start is not None and load is not None:
        line.problems.append(
            f"--pretrained-checkpoint {start} with --load {load}: start with --load {start} --finetune, go on with "
            "--load auto"
        )
    elif start is not None:
        line.put("--load", start, "--finetune")
    # Scripts give the same folder twice, for the first start and for restarts: that is --load auto.
    elif load is not None:
        # realpath: the two may be spelled differently.
        both = save is not None and os.path.realpath(load) == os.path.realpath(save)
        both = both and "--exit-on-missing-checkpoint" not in line.given
        line.put("--load", "auto" if both else load)
        if both:
            leave(line, ("load_optim",), "--load auto continues with the optimizer's state")
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


def data(line: Line) -> None:
    if not any(name in line.words for name in _SOURCES):
        line.put("--mock-data")
        line.notes.append("note: the line names no data, so it trains on mock data, as Megatron does")
    if "split" in line.words:  # Megatron takes any characters between the numbers, such as a script's quotes
        line.put("--split", ",".join(re.findall(r"[.0-9]+", line.words["split"][1])) or line.words["split"][1])
    if line.says("mock_data"):
        leave(line, _WITHOUT_DOCUMENTS, "with --mock-data")
    if "load" not in line.words:
        leave(line, _OF_LOADING, "without --load")


def evaluation(line: Line) -> None:
    """Megatron's ``--eval-iters 0`` turns evaluation off, as leaving out ``--eval-interval`` does here."""
    if line.one("--eval-iters") == "0":
        leave(line, ("eval_iters", "eval_interval"), "no evaluation, as --eval-iters 0 says")


def samples(line: Line) -> None:
    """Lengths of the schedule in samples where the batch size changes: Megatron then counts samples, and lengths in
    iterations are iterations of the largest batch. (For a schedule of batches without --global-batch-size Megatron
    takes one micro-batch per rank, which is hardly meant.)"""
    if "train_iters" not in line.words:
        return
    if line.one("--lr-warmup-samples") == "0":
        line.words.pop("lr_warmup_samples", None)  # Megatron's default, with iterations too
    said = [flag for flag in _LENGTHS_IN_SAMPLES if flag[2:].replace("-", "_") in line.words]
    if said:
        line.problems.append(f"{', '.join(said)} with --train-iters: give --lr-*-iters, or --train-samples")
    batch = _largest_batch(line)
    if said or batch is None:
        return
    style = line.words["lr_decay_style"][1]
    lengths = {f"lr_{part}": line.words.pop(f"lr_{part}_iters", None) for part in ("decay", "warmup", "wsd_decay")}
    if lengths["lr_decay"] is None and style != "constant":
        # Without a length the decay ends with the run, in iterations here.
        lengths["lr_decay"] = line.words["train_iters"]
    for part, words in lengths.items():
        if words is not None:
            count = settings()["train_iters"].parse(words[1], words[0])
            line.put(f"--{part.replace('_', '-')}-samples", str(count * batch))
    line.notes.append("note: the batch changes, so the learning rate follows samples, as in Megatron")


def _largest_batch(line: Line) -> int | None:
    """Samples of the largest step where the batch size changes; None: it does not, or --global-batch-size is
    missing."""
    if "step_batch_size_schedule" in line.words:
        pairs = line.words["step_batch_size_schedule"][1]
        length = line.number("seq_length") if "seq_length" in line.words else 1
        return scheduled(DataConfig(step_batch_size_schedule=pairs, seq_length=length)).largest
    ramp = "rampup_batch_size" in line.words and "global_batch_size" in line.words
    return line.number("global_batch_size") if ramp else None


BEFORE_DEFAULTS = (virtual_stages, exchange, sharding, tokenizer, folders, data, evaluation)
AFTER_DEFAULTS = (samples,)
