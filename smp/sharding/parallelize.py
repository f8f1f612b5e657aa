"""Make a model trainable: apply recompute, offload, compile and hybrid FSDP, in this order.

TP and SP are part of the layers, and a pipeline rank builds only its own stages, so both are done before. FSDP comes
last: its hooks then run outside of recompute and compile, and recompute finds the weights already gathered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from smp.config import ParallelConfig
from smp.layers.block import MoEBlock, Run, TransformerBlock
from smp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from smp.layers.heads.head import VocabParallelHead
from smp.layers.moe import Experts
from smp.layers.moe.experts import ExpertLinear
from smp.models.protocol import Model
from smp.parallel.context import ParallelContext
from smp.parallel.network.select_collectives import NetworkCollectives
from smp.sharding.fp8_gather import gather_in_fp8
from smp.sharding.network import communicate_by
from smp.sharding.offload import Offload

_aten = torch.ops.aten
# What selective recompute keeps. An operator of smp counts as one for the dispatcher: products
# inside of it are not seen, so it is named itself.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.smp.cpp_attention.default,
    torch.ops.smp.linear.default,
    torch.ops.smp.column_parallel.default,
    torch.ops.smp.row_parallel.default,
    _aten._scaled_mm.default,
    torch.ops.smp.scaled_column_parallel.default,
    torch.ops.smp.scaled_row_parallel.default,
    torch.ops.smp.scaled_product.default,
    torch.ops.smp.grouped_product.default,
    torch.ops.smp.exchange_rows.default,
    torch.ops.smp.gated_delta_rule.default,
    torch.ops.smp.state_space.default,
    torch.ops.smp.choose_keys.default,
    torch.ops.smp.selected_attention.default,
    torch.ops.smp.indexer_loss.default,
    torch.ops.smp.dense_indexer_loss.default,
}
_VARLEN = "torch_attn._varlen_attn.default"
"""Also kept. By its name: it does not exist until torch.nn.attention.varlen is imported."""


Strategy = Literal["optim_grads_params", "optim_grads", "optim"]
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def parallelize(
    model: AnyModule,
    context: ParallelContext,
    config: ParallelConfig,
    offload: Offload | None = None,
    *,
    compile_experts: bool = True,
    eager_rounding: bool = False,
) -> AnyModule:
    """Apply recompute, offload, compile and hybrid FSDP to ``model`` (built on the meta device or not), in place.

    Build the optimizer afterwards: FSDP replaces the parameters.

    A whole model on one data-parallel rank needs no FSDP, which would copy all weights for the forward and for the
    backward pass and all gradients twice. There layers cast the master weights to the dtype of their input. (Parts of a
    pipeline keep FSDP: with several micro-batches in flight each would hold its own cast weights.)

    Args:
        model: with ``TransformerBlock`` modules. A ``smp.models.protocol.Model`` says in ``fsdp_units()`` what FSDP
            gathers and frees together; of any other module each block is a unit, and the rest is one.
        context: of the run.
        config: recompute, compile and precision.
        offload: what :func:`smp.sharding.offload.offload_of` made, where ``config`` asks for it.
        compile_experts: with ``config.compile``, also blocks with experts.
        eager_rounding: compiled code rounds to bf16 wherever uncompiled code does: of a model that also runs
            uncompiled, to write texts, whose log-probabilities are to be those of training.

    Raises:
        ValueError: ``config`` asks for offload, and it is not given.
    """
    if config.offload_activations and offload is None:
        raise ValueError("offload_activations: give what offload_of(config, device) makes")
    known = model if isinstance(model, Model) else None
    blocks = [m for m in model.modules() if isinstance(m, TransformerBlock)] if known is None else known.blocks()
    for block in blocks:
        # Offload lies around recompute: what it sends to the host is then the block's input alone.
        left_out = isinstance(block, MoEBlock) and not compile_experts
        settings = replace(config, compile=False) if left_out else config
        block.run = _wrapped(block.run, settings, eager_rounding and config.bf16)
        if offload is not None:
            block.run = offload.around(block, block.run)
    # Also where there is no FSDP: a norm would count copies there too.
    _check_parameters(model)
    # One rank has FSDP, too, where nothing else casts weights.
    casts = known is None or known.casts_weights or not config.bf16
    if context.fsdp is None or (casts and not context.has_fsdp):
        if config.bf16:
            _check_compute_dtype(model)
        return model
    units: list[Any] = [*blocks] if known is None else known.fsdp_units()
    # Experts first: ``fully_shard`` leaves parameters alone that a unit inside has taken.
    if context.expert_fsdp is not None:
        _shard_experts(model, context.expert_fsdp, context.collectives, bf16=config.bf16)
    shard(model, units, context.fsdp, bf16=config.bf16, collectives=context.collectives)
    if config.fp8_param_gather:
        gather_in_fp8(model)
    if context.pp_size == 1:  # a pipeline's schedule says itself when weights are gathered
        only_trained = () if known is None else known.mtp_blocks  # validation would leave them gathered
        prefetch([block for block in blocks if block not in only_trained])
        _gather_once(model)
        if config.data_parallel_sharding_strategy != "optim_grads_params":
            model.set_reshard_after_forward(False)  # type: ignore[operator]
    return model


def _check_compute_dtype(model: nn.Module) -> None:
    """Without FSDP nothing casts an embedding's rows, and all that follows would silently be fp32."""
    for name, module in model.named_modules():
        embeds = isinstance(module, VocabParallelEmbedding | PositionEmbedding)
        if embeds and module.compute_dtype != torch.bfloat16:
            raise ValueError(f"bf16 without FSDP: build {name or 'the model'} with compute_dtype=torch.bfloat16")


def _gather_once(model: nn.Module) -> None:
    """Avoid unnecessary gathers: the backward pass begins with the head's unit, which is still gathered, and the
    gradient of an embedding does not need its weights. Behind the embedding FSDP2 would also prefetch, for a backward
    pass that is over, the last unit of the micro-batch before; it is told to prefetch itself."""
    for module in model.modules():
        # Freed after its forward pass it would be gathered again at once.
        if isinstance(module, FSDPModule) and isinstance(module, VocabParallelHead):
            module.set_reshard_after_forward(False)
        elif isinstance(module, FSDPModule) and isinstance(module, VocabParallelEmbedding):
            # A gradient of rows that were looked up needs no rows.
            module.set_unshard_in_backward(False)
            module.set_modules_to_backward_prefetch([module])


def prefetch(units: Sequence[nn.Module]) -> None:
    """Gather the weights of the next unit before the current one computes, in both directions.

    FSDP2 does this on its own only in the backward pass, and in the forward pass as far as the host runs ahead of the
    device; a host that is busy, or waits for something, would leave the links idle.
    """
    for unit, following in itertools.pairwise(units):
        assert isinstance(unit, FSDPModule) and isinstance(following, FSDPModule)
        unit.set_modules_to_forward_prefetch(with_experts(following))
        following.set_modules_to_backward_prefetch(with_experts(unit))
    for unit in units:
        # Without this FSDP2 would prefetch for them by itself, in an order that knows nothing of blocks.
        for experts in with_experts(unit)[1:]:  # they come with their block, and fetch nothing themselves
            experts.set_modules_to_backward_prefetch([experts])


def with_experts(unit: nn.Module) -> list[Any]:
    """A unit, and the block's experts in it where they are one of their own."""
    return [unit, *(module for module in unit.modules() if module is not unit and isinstance(module, FSDPModule))]


def _wrapped(run: Run, config: ParallelConfig, eager_rounding: bool) -> Run:
    """``run`` with its activations recomputed in the backward pass, and compiled. There is no RNG state to restore:
    dropout is keyed.

    Full recompute is Chen et al. 2016 (arXiv 1604.06174), selective Korthikanti et al. 2022 (arXiv 2205.05198, part 5).
    Selective recompute goes inside of the compiler, which then keeps what it names; from outside it would keep the
    compiled code's buffers, and that code overwrites them: wrong gradients. Full recompute stays outside: it replays
    the compiled block, and torch 2.13 cannot save the device mesh that the parameters bring into a replayed graph.
    """
    # Non-reentrant: the other kind takes no context_fn and no keyword arguments.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if config.recompute_granularity == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_expensive)
        run = functools.partial(checkpoint, run, **options)
    if config.compile:
        # The compiler leaves out roundings between operations that it fuses; with this it keeps them.
        rounding: Any = {"emulate_precision_casts": True} if eager_rounding else None
        run = torch.compile(run, fullgraph=True, options=rounding)
        # Numbers of rows that the host reads, of experts on several ranks, become sizes of the graph.
        run = torch._dynamo.config.patch(capture_scalar_outputs=True)(run)
    return functools.partial(checkpoint, run, **options) if config.recompute_granularity == "full" else run


def _keep_expensive(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is expensive to redo or crosses a link; norms, activations, RoPE and casts are cheap."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT or str(op) == _VARLEN else CheckpointPolicy.PREFER_RECOMPUTE


def shard(
    model: nn.Module,
    units: list[Any],
    mesh: DeviceMesh,
    *,
    bf16: bool = False,
    collectives: NetworkCollectives | None = None,
) -> nn.Module:
    """Hybrid FSDP (FSDP2; Zhao et al. 2023, arXiv 2304.11277) over ``mesh``: shard within ``dp_shard``, replicate over
    ``dp_replicate`` if it is there.

    Gradients are summed, never averaged: the loss is already divided by the global number of valid tokens.

    Args:
        model: anything whose parameters are DTensors on the TP mesh of the same parent mesh; on a TP mesh of one rank
            also ordinary parameters.
        units: submodules (or lists of them) that are gathered and freed together; the rest of ``model`` is one more.
        mesh: 1-D ``dp_shard`` or 2-D ``(dp_replicate, dp_shard)``, see ``ParallelContext.fsdp``.
        bf16: compute in bfloat16 with fp32 master weights; gradients are reduced in fp32.
        collectives: how weights are gathered and gradients reduced, of ``choose_collectives``; by default flat.

    Raises:
        ValueError: for an ordinary parameter next to parameters that are split over several TP ranks.
    """
    _check_parameters(model)
    elsewhere = {
        module for module in model.modules() if isinstance(module, FSDPModule)
    }  # experts, over their own ranks
    # Units before the whole: what is left in ``model`` then becomes the root's unit.
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh, mp_policy=_precision(bf16), shard_placement_fn=_expert_cut(model, mesh))
    here = [module for module in model.modules() if module not in elsewhere]
    _sum_gradients(here, mesh)
    again = _gathered_again(units) if _is_trained(model) else set()
    communicate_by(here, mesh, collectives or NetworkCollectives(), again)
    return model


def _gathered_again(units: list[Any]) -> set[nn.Module]:
    """The modules of units that are gathered for the backward pass, too: not FSDP2's root, which is none of them, and
    not what :func:`_gather_once` spares."""
    lists = [unit if isinstance(unit, list) else [unit] for unit in units]
    once = VocabParallelHead | VocabParallelEmbedding
    return {module for modules in lists if not any(isinstance(m, once) for m in modules) for module in modules}


def _shard_experts(model: nn.Module, mesh: DeviceMesh, collectives: NetworkCollectives | None, *, bf16: bool) -> None:
    """Experts that are split over ranks are units of their own, over the ranks that have the same ones. The rows that
    a rank's experts get are of all ranks of the expert-parallel group, so that their gradients are sums over it
    already; what is left to sum is over ``mesh``."""
    known = model.experts() if isinstance(model, Model) else None
    experts = [m for m in model.modules() if isinstance(m, Experts)] if known is None else known
    for module in experts:
        fully_shard(module, mesh=mesh, mp_policy=_precision(bf16), shard_placement_fn=_expert_cut(module, mesh))
    _sum_gradients(experts, mesh)
    again = experts if _is_trained(model) else []
    communicate_by(experts, mesh, collectives or NetworkCollectives(), again)


def _is_trained(model: nn.Module) -> bool:
    """Not a reference model, which has no backward pass. (Under adapters some blocks may have frozen weights alone.)"""
    return any(parameter.requires_grad for parameter in model.parameters())


def _precision(bf16: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _sum_gradients(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    for module in modules if mesh.size() > 1 else ():  # one rank would divide by 1.0: a pass for nothing
        if isinstance(module, FSDPModule):
            # FSDP2 averages by default, which would divide by the ranks a second time.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def _expert_cut(model: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """FSDP cuts dimension 0, of experts' weights the experts. Where that leaves ranks with fewer than others and
    another dimension does not, it cuts that one."""
    experts = {p for module in model.modules() if isinstance(module, ExpertLinear) for p in module.parameters()}
    # The last dimension shards; the one before it, if there is one, replicates.
    ranks = mesh.size(mesh.ndim - 1)

    def cut(parameter: nn.Parameter) -> Shard | None:
        if parameter not in experts or not isinstance(parameter, DTensor):
            return None
        sizes = parameter.to_local().shape
        return next((Shard(dim) for dim, size in enumerate(sizes) if size % ranks == 0), None)

    return cut


def _check_parameters(model: nn.Module) -> None:
    """Whether an ordinary parameter's gradient is the same on all TP ranks, or each has a part of it, only its module
    knows. And nothing in it says that the ranks hold copies: a norm or a checkpoint would count each of them."""
    parameters = dict(model.named_parameters())
    meshes = [p.device_mesh for p in parameters.values() if isinstance(p, DTensor)]
    size = max(map(_tp_ranks, meshes), default=1)
    # On one TP rank there are no copies to tell apart.
    plain = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
    if size > 1 and plain:
        raise ValueError(
            f"{plain[0]} is an ordinary parameter among parameters on a tensor-parallel mesh of {size} ranks: "
            "use a layer of smp.layers, or make it with smp.layers.tp_parameter"
        )


def _tp_ranks(mesh: DeviceMesh) -> int:
    """Number of tensor-parallel ranks of a parameter's mesh; meshes of experts have other dimensions too."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index("tp")) if "tp" in names else mesh.size()


def free_gathered(model: nn.Module) -> None:
    """Free weights that a forward pass without a backward pass has left gathered, as FSDP does with the root unit's.

    An optimizer that is built before would get the gathered parameters, which are replaced later: they never train.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def last_micro_batch(model: nn.Module, last: bool, strategy: Strategy = "optim_grads_params") -> None:
    """Before each micro-batch: what its backward pass leaves for the last one of the step.

    That is the reduction of gradients over the replicas, and what ``strategy`` does not shard between micro-batches:
    with ``optim_grads`` weights stay gathered, with ``optim`` gradients are whole and not reduced either.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or strategy != "optim")  # sets what the next line sets, too
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or strategy == "optim_grads_params")
