"""The model of a fine-tuning run: adapters put on, the rest frozen, sharded, and filled from where it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp.checkpoint import CheckpointError
from smp.checkpoint.all_ranks import on_all_ranks
from smp.checkpoint.folders.latest import find, iteration_name
from smp.config import Config, ConfigError
from smp.config.rules.finetune import ALL_LINEAR, targets_of
from smp.config.schema import LoraConfig
from smp.convert.changes import changes, changes_of_files, other_than_trained
from smp.convert.describe import read_architecture
from smp.convert.huggingface.config import is_hf_folder
from smp.convert.huggingface.folder import open_hf
from smp.convert.load import load_weights
from smp.convert.peft.adapters import Adapter, family_for, linear_modules, partly_adapted
from smp.convert.peft.experts import expert_tensors
from smp.convert.smp_format import SmpWeights
from smp.convert.weights import Weights
from smp.layers import init_weights
from smp.layers.adapters.dora import begin_magnitudes
from smp.layers.adapters.lora import adaptable, adapters_of, attach, choose
from smp.layers.adapters.quantized import Blocks, fill, quantize_layers, quantized_layers, read_blocks, whole_shape
from smp.layers.linear import linear_layers
from smp.models.foreign import freeze_parts
from smp.models.protocol import Model
from smp.parallel.agree import gather
from smp.parallel.dtensor_region import local_region
from smp.sharding.parallelize import parallelize
from smp.training.build import RunSetup, assemble, compiles_experts
from smp.training.checkpoints.foreign_weights import (
    begin_foreign_magnitudes,
    begin_foreign_scores,
    fill_foreign,
    stored_matrices,
)
from smp.training.tuning.adapter_files import OF_HEADS, reference_config

_OWN_TO_TUNING = ("mtp_num_layers", "mtp_loss_scaling_factor", *OF_HEADS)
"""Settings that fine-tuning changes itself, with a note of its own."""


@dataclass(frozen=True)
class AdapterPlan:
    """Which layers get an adapter, and of what rank.

    Attributes:
        sizes: (rank, alpha) of the adapter of each named layer.
        dora: whether they train the norms of rows too.
    """

    sizes: Mapping[str, tuple[int, float]]
    dora: bool

    @staticmethod
    def asked(names: Iterable[str], lora: LoraConfig) -> AdapterPlan:
        """The plan of adapters on these layers, from --lora-rank, --lora-alpha and --use-dora."""
        assert lora.lora_rank is not None and lora.lora_alpha is not None, "filled in before"
        return AdapterPlan(dict.fromkeys(names, (lora.lora_rank, lora.lora_alpha)), lora.use_dora)

    @staticmethod
    def of_files(found: Mapping[str, Adapter], lora: LoraConfig) -> AdapterPlan:
        """The plan of the adapters in --load-adapter.

        Raises:
            ConfigError: they have norms of rows, which go with no dropout.
        """
        dora = any(adapter.magnitude is not None for adapter in found.values())
        if dora and lora.lora_dropout:
            raise ConfigError(
                "--load-adapter has use_dora and a dropout, which do not go together; give --lora-dropout 0"
            )
        return AdapterPlan({name: (adapter.rank, adapter.alpha) for name, adapter in found.items()}, dora)


def open_base(config: Config) -> Weights:
    """The weights that --load names.

    Raises:
        CheckpointError, ConfigError: they cannot be read, or are not of a supported architecture.
    """
    load, step = config.checkpoint.load, config.checkpoint.ckpt_step
    assert load is not None, "checked with the settings"
    if is_hf_folder(load):
        if step is not None:
            raise ConfigError(f"--ckpt-step {step}: --load {load} is a Hugging Face folder")
        weights: Weights = open_hf(load)
        changed = changes_of_files(weights.config, config.model, _OWN_TO_TUNING)
    else:
        weights = SmpWeights(find(load) if step is None else Path(load) / iteration_name(step))
        changed = changes(weights.config, config.model, _OWN_TO_TUNING)
    # Fine-tuning trains next-token prediction only.
    if weights.config.mtp_num_layers is not None:
        weights.notes.append("layers of multi-token prediction (--mtp-num-layers) are left out")
    if changed:
        weights.notes.append(f"note: {other_than_trained(load, changed)}")
    return weights


def build_finetune_model(
    config: Config, setup: RunSetup, start: Mapping[str, Adapter] | None, *, trainable: bool = True
) -> tuple[Model, list[str]]:
    """(the model, notes for the user). It is built on the meta device and sharded, and only then filled.

    Args:
        start: adapters to begin with, which say which layers have one; None: those that ``config`` asks for, if any.
        trainable: False for a frozen copy.

    Raises:
        ConfigError: a pattern of --lora-target-modules chooses no layer.
        CheckpointError: the weights cannot be read.
    """
    # The order is that of ``parallelize``: adapters, frozen and packed weights have to be there before FSDP cuts them.
    model = assemble(config, setup)
    in_4_bits = config.lora is not None and config.lora.load_in_4bit
    tune(model, config, _adapter_plan(model, config, start) if config.has_adapters else None, trainable=trainable)
    experts = compiles_experts(setup.device)
    parallelize(
        model, setup.context, config.parallel, setup.offload, compile_experts=experts, eager_rounding=config.writes
    )
    model.allocate(setup.device)
    if config.model.is_foreign:
        assert config.checkpoint.load is not None, "checked with the settings"
        return model, _fill_foreign(model, config, start)
    if config.has_adapters:
        # A is random, B is 0: an adapter begins as no change (LoRA, arXiv 2106.09685).
        init_weights(model, config.training.seed, only="lora")
    adapters = adapters_of(model)
    of_adapters = {f"{layer}.lora.{name}" for layer, m in adapters.items() for name, _ in m.named_parameters()}
    if begins_scores(config):
        init_weights(model, config.training.seed, only="head")  # the files are of a language model
        of_adapters.add("head.weight")
    # Tensors that the files do not have, and those that are quantized while they are read.
    elsewhere = of_adapters | {f"{layer}.weight" for layer in quantized_layers(model)}
    notes = load_weights(model, lambda: open_base(config), leave=elsewhere)
    if "head.weight" in of_adapters:
        notes.append(_BEGUN.format(config.training.seed))
    if in_4_bits:
        _load_in_4_bits(model, config)
    if start is not None:
        _fill_adapters(model, start)
    elif config.has_adapters:
        # After the weights are there: DoRA's magnitudes begin as their row norms.
        begin_magnitudes(layer for name, layer in linear_layers(model).items() if name in adapters)
    if config.has_adapters and config.model.num_experts is not None:
        # Ranks of a pipeline have different layers; all say the same.
        adapted = any(gather(any(".experts." in name for name in adapters_of(model))))
        notes.append(f"note: {'routers' if adapted else 'experts and routers'} have no adapters: they are frozen")
        if in_4_bits:
            notes.append(
                "WARNING: --load-in-4bit: attention, dense MLPs and shared experts are in 4 bits, experts are not"
            )
    return model, notes


_BEGUN = "note: the score head starts from random values, by --seed {}"


def begins_scores(config: Config) -> bool:
    """Whether this run makes a reward model from a language model."""
    said = read_architecture(
        config.checkpoint.load or "", config.checkpoint.ckpt_step, config.model.model_implementation
    )
    return config.objective_facts.has_scores and not (said or {}).get("scalar_head")


def _fill_foreign(model: Model, config: Config, start: Mapping[str, Adapter] | None) -> list[str]:
    """Fill a model that transformers computes; returns notes for the user."""
    load = config.checkpoint.load
    assert load is not None, "checked with the settings"
    if config.has_adapters:
        init_weights(model, config.training.seed, only="lora")
    packed = {f"{layer}.weight" for layer in quantized_layers(model)}
    begins = begins_scores(config)
    notes = fill_foreign(model, load, lambda: open_base(config), packed | ({"score.weight"} if begins else set()))
    if begins:
        begin_foreign_scores(model, config.training.seed)
        notes.append(_BEGUN.format(config.training.seed))
    if packed:
        _load_in_4_bits(model, config)
        inside = {id(p) for block in model.blocks() for p in block.parameters()}
        matrices = [name for name, p in model.named_parameters() if p.ndim > 1 and id(p) in inside]
        wide = [name for name in matrices if name not in packed and ".lora." not in name]
        if wide:
            notes.append(f"WARNING: --load-in-4bit: {len(wide)} tensors are not in 4 bits: {wide[0]} ...")
    if start is not None:
        _fill_adapters(model, start)
    elif config.has_adapters:
        begin_foreign_magnitudes(model)
    return notes


def _load_in_4_bits(model: Model, config: Config) -> None:
    """Fill the weights that are kept in 4 bits. Each rank reads and quantizes its own shard, some rows at a time; ranks
    exchange scales only afterwards, when no rank can fail alone any more."""
    layers = quantized_layers(model)
    found: dict[str, Blocks] = {}

    def read() -> None:
        assert config.checkpoint.load is not None, "checked with the settings"
        with stored_matrices(model, config.checkpoint.load, lambda: open_base(config)) as (form, read_into):
            for name, layer in layers.items():
                weight, shape = f"{name}.weight", whole_shape(layer)
                stored, dtype = form(weight)
                if stored != shape:
                    raise CheckpointError(f"tensor {weight} of shape {list(shape)} is not in the files")
                found[name] = read_blocks(layer, partial(read_into, weight), dtype)

    on_all_ranks("", read, lambda _: None)
    for name, layer in layers.items():
        fill(layer, found.pop(name))


def tune(model: Model, config: Config, plan: AdapterPlan | None, *, trainable: bool = True) -> None:
    """Turn a model on the meta device into what this run trains, before it is sharded: with adapters all else is
    frozen, and frozen weights are kept in bf16 or in 4 bits.

    Args:
        plan: of the adapters; None: there are none.
        trainable: False for a frozen copy.
    """
    lora = config.lora
    assert lora is not None, "settings of a fine-tuning run"
    if plan is not None:
        if plan.dora and config.parallel.fp8_param_gather:
            raise ConfigError(
                "--fp8-param-gather: adapters with use_dora take norms of weights, which would be rounded; leave it out"
            )
        attach(model, plan.sizes, dropout=lora.lora_dropout or 0.0, seed=config.training.seed, dora=plan.dora)
        if config.objective_facts.has_scores and model.head is not None:
            model.head.requires_grad_(True)  # the row of scores is trained as a whole
    if config.vision is not None and config.vision.frozen:
        freeze_parts(model, config.vision.frozen)
    if not trainable:
        model.requires_grad_(False)
    if lora.load_in_4bit:
        quantize_layers(model, double=lora.bnb_4bit_use_double_quant)
    # After quantizing, which gives weights that are bf16 already.
    if config.parallel.bf16:
        _keep_in_bf16(model)


def _adapter_plan(model: Model, config: Config, start: Mapping[str, Adapter] | None) -> AdapterPlan:
    """The plan of adapters, at least for this rank's layers."""
    lora = config.lora
    assert lora is not None, "settings of a fine-tuning run"
    if start is not None:
        if config.model.is_foreign and (others := sorted(start.keys() - adaptable(model).keys())):
            raise ConfigError(
                f"--load-adapter {lora.load_adapter}: {others[0]} takes no adapter: transformers has a fused kernel "
                "read its weight; merge it with peft, or train it without that"
            )
        return AdapterPlan.of_files(start, lora)
    return AdapterPlan.asked(_chosen_layers(model, config, lora), lora)


def _chosen_layers(model: Model, config: Config, lora: LoraConfig) -> list[str]:
    """Names of this rank's layers that --lora-target-modules chooses."""
    targets = targets_of(config)
    chosen = choose(model, targets)
    # A pattern may match layers of another pipeline rank only.
    everywhere = gather({target: len(names) for target, names in chosen.items()})  # pipeline ranks have parts
    nothing = [target for target in targets if not any(counts[target] for counts in everywhere)]
    if set(all_linear := ALL_LINEAR.split(",")) <= set(targets):  # a plain MLP has no gate
        nothing = [target for target in nothing if target not in all_linear]
    if nothing:
        # For the message: names of linear layers, of all ranks.
        last = sorted({name.rpartition(".")[2] for part in gather(list(adaptable(model))) for name in part})
        raise ConfigError(
            f"--lora-target-modules {nothing[0]} chooses no linear layer of this model: they are {', '.join(last)}"
            f"{'' if config.model.is_foreign else _explained(nothing[0], config)}"
        )
    names = [name for names in chosen.values() for name in names]
    refused = f"--lora-dropout {lora.lora_dropout}" if lora.lora_dropout else "--use-dora" if lora.use_dora else ""
    experts = any(gather(any(".experts." in name for name in names)))
    if refused and experts:
        raise ConfigError(f"{refused}: adapters on experts do not have it; leave it out, or experts")
    if experts and config.checkpoint.save is not None:  # as the end of the run would, which writes them
        expert_tensors(config.model, family_for(config.model, reference_config(config)), lambda *_: True)
    if lora.use_dora and not config.model.is_foreign:
        _check_whole_modules(names, config)
    return names


def _explained(target: str, config: Config) -> str:
    """A hint for the message: which layers here are the module that Hugging Face names ``target``."""
    family = family_for(config.model, reference_config(config))
    if target in {"head", "embedding", *(end.rpartition(".")[2] for end in family.table.ends.values())}:
        return f"; {target} is in no block, and adapters on the output matrix or embeddings are not supported"
    for module, layers in linear_modules(config.model, family).items():
        if module.rpartition(".")[2] == target:
            return f"; Hugging Face's {target} is {','.join(name.rpartition('.')[2] for name in layers)} here"
    return ""


def _check_whole_modules(names: list[str], config: Config) -> None:
    """Raise ConfigError where only some layers of one Hugging Face module are chosen under --use-dora: peft's format
    has the norms of all rows of a module."""
    if partly := partly_adapted(names, config.model, family_for(config.model, reference_config(config))):
        raise ConfigError(
            f"--use-dora: {partly[0]} is one matrix of several layers in Hugging Face's model, and "
            "--lora-target-modules has to choose all of them or none"
        )


def _keep_in_bf16(model: nn.Module) -> None:
    """Cast frozen weights to bf16: they need no fp32 master copy, as they are never updated, and compute is in bf16."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # shared ones stay shared
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                # On the meta device: nothing is copied.
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.to(torch.bfloat16), requires_grad=False)
                setattr(module, name, made[parameter])


@torch.no_grad()
def _fill_adapters(model: Model, start: Mapping[str, Adapter]) -> None:
    """Copy this rank's shards of A and B from the whole matrices."""
    for name, adapter in adapters_of(model).items():
        for part_name, parameter in adapter.named_parameters():
            whole = getattr(start[name], part_name)
            if whole is None:
                raise CheckpointError(f"--load-adapter: {name} has no magnitude, which other layers have")
            # Offsets and sizes of the shard in the global tensor.
            region = local_region(parameter)
            part = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
            cast(DTensor, parameter).to_local().copy_(whole[part])
