"""The plan of ``smp.transform`` for each module, made before the model is changed, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from smp.config.schema import ConfigError
from smp.hf.adapters import base_of, layer_under, target_of, with_adapters
from smp.hf.experts import dense, own_experts, own_sorted_experts
from smp.hf.planning.borrowed import Borrowed, borrowed_parameters, matrix_of_fused_kernel, whole_parameters
from smp.hf.planning.rows import (
    COLUMN,
    DIVIDE,
    EMBEDDING,
    EMBEDDING_COLUMNS,
    EXPERTS,
    LATENT,
    OWN_PARAMETERS,
    REPLICATE,
    ROW,
    SORTED_EXPERTS,
    STYLES,
    SUMMED,
    expert_rows_of,
    is_conv1d,
    is_linear,
    no_rows,
    pattern_of,
    rows_of,
)
from smp.hf.planning.unnamed import lent_rows, unnamed_experts, unnamed_rows
from smp.layers.adapters.lora import Lora

# Config fields that modules read in forward, where no nn.Dropout shows them.
_DROPOUTS = (
    "activation_dropout",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "router_jitter_noise",
)
_NOISES = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
"""Numbers that modules of experts have read when they were made, and multiply their input by noise with."""
_POSITION_NOISE = ("pos_embed_jitter", "pos_embed_rescale", "pos_embed_shift")
"""Fields of DINOv3, which perturbs positions in training; None: no noise."""


@dataclass(frozen=True)
class Step:
    """What is done to one module.

    Attributes:
        style: of its row.
        cuts: for each of its own parameters the dimension that is cut, None where every rank has all of it.
        transposed: the weight is stored (in, out), as GPT-2's ``Conv1D`` stores it.
        heads: rows of the weight, (first, number), that this rank uses of key/value heads fewer than the ranks.
        note: for the report.
        dense: of experts that all have all tokens.
        summed: of LATENT: how many of the last columns have a gradient that is summed.
    """

    style: str
    cuts: Mapping[str, int | None]
    transposed: bool = False
    heads: tuple[int, int] | None = None
    note: str = ""
    dense: bool = False
    summed: int = 0


@dataclass
class Plan:
    """The plan of a model.

    Steps by the module's name; attributes of modules to set; modules whose children share a collective; parameters that
    modules read from those below them; methods other than forward that read parameters; and of mixers with a fused
    kernel the child whose matrix that kernel must not multiply with, since it is cut."""

    steps: dict[str, Step] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    boundaries: set[str] = field(default_factory=set)
    borrowed: dict[str, Borrowed] = field(default_factory=dict)
    methods: dict[str, set[str]] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)


def make_plan(model: nn.Module, given: Mapping[str, str] | None, tp_size: int, tp_rank: int, ep_size: int = 1) -> Plan:
    """The plan of ``model`` for one rank of ``tp_size``, above 1, with experts cut over ``ep_size`` data ranks too.

    Raises:
        ConfigError: with the module's name, for what would not be equal to the model before.
    """
    base, _ = base_of(model)
    rows = rows_of(base, given)
    # Later ones win: this file's guesses, then plans, then what must stay whole, then the caller.
    rows = unnamed_rows(base, rows, tp_size, ep_size) | rows | lent_rows(base) | dict(given or {})
    if not rows:
        raise no_rows(base)
    rows = with_adapters(model, rows, pattern_of)
    modules = dict(model.named_modules())
    # Replicated modules first: no row below them counts.
    whole = _whole(modules, rows)
    # Parameters without a module of their own kind (sinks) need rows by name.
    _check_parameters_named(model, rows, whole)
    plan = Plan()
    for name, module in modules.items():
        style = REPLICATE if name in whole else rows.get(pattern_of(name), rows.get(name))
        if style in (*COLUMN, *ROW):
            plan.steps[name] = _linear(model, name, module, style, tp_size, tp_rank, plan)
        elif style in (EMBEDDING, EMBEDDING_COLUMNS):
            plan.steps[name] = _embedding(name, module, style, tp_size)
        elif style == EXPERTS:
            plan.steps[name] = _experts(name, module, tp_size, ep_size, plan)
        elif style in SORTED_EXPERTS:
            plan.steps[name] = _sorted_experts(name, module, style, tp_size, plan)
        elif style == LATENT:
            plan.steps[name] = _latent(model, name, module)
        elif style is not None and style not in STYLES:
            raise ConfigError(f"{name}: smp.transform has no style {style}; {_leave_whole(name)}")
        elif own := _own(module):
            cut = {} if name in whole else _cut_parameters(name, module, rows, tp_size)
            plan.steps[name] = Step(style or (OWN_PARAMETERS if cut else REPLICATE), dict.fromkeys(own) | cut)
    # Checks follow when all steps are known: some compare modules with each other.
    _check_experts(model, plan, ep_size)
    _numbers(modules, rows, tp_size, plan)
    _check_regions(modules, rows, whole, plan)
    _check_shared(modules, plan)
    if any(module.training for module, _, _ in dropouts(model)):  # else when it is set to training (smp.hf.guards)
        check_dropout(model)
    plan.borrowed, plan.methods = borrowed_parameters(model, whole_parameters(plan.steps), plan.steps)
    plan.fused = _fused(modules, plan)
    return plan


def make_expert_plan(model: nn.Module, given: Mapping[str, str] | None, ep_size: int) -> Plan:
    """The plan of ``model`` on one tensor-parallel rank, where nothing but experts is cut.

    Raises:
        ConfigError: with the module's name, for what would not be equal to the model before.
    """
    # Without tensor parallelism only experts are cut: other rows have nothing to do.
    rows = expert_rows_of(model, given)
    rows = unnamed_experts(model, rows, ep_size) | rows
    modules, plan = dict(model.named_modules()), Plan()
    whole = _whole(modules, rows)
    for name, module in modules.items():
        if name not in whole and rows.get(pattern_of(name)) == EXPERTS:
            plan.steps[name] = _experts(name, module, 1, ep_size, plan)
    _check_experts(model, plan, ep_size)
    return plan


def _experts(name: str, module: nn.Module, tp_size: int, ep_size: int, plan: Plan) -> Step:
    degrees = {"expert_parallel_degree": ep_size, "tensor_parallel_degree": tp_size}
    said = " x ".join(f"{key} {degree}" for key, degree in degrees.items() if degree > 1)
    try:
        # transformers' forward loops over num_experts: with the divided number it runs this rank's
        # experts.
        own = own_experts(name, module, tp_size * ep_size, said)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_leave_whole(name)}") from None
    if dense(module) and ep_size > 1:
        raise ConfigError(f"{name}: every expert of {type(module).__name__} has all tokens: expert_parallel_degree 1")
    # Experts are the stack's first dimension: cut 0.
    plan.numbers.setdefault(name, {})["num_experts"] = own
    note = f"{own} of {own * tp_size * ep_size} on each rank"
    return Step(EXPERTS, dict.fromkeys(_own(module), 0), note=note, dense=dense(module))


def _sorted_experts(name: str, module: nn.Module, style: str, tp_size: int, plan: Plan) -> Step:
    try:
        own = own_sorted_experts(name, module, tp_size)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_leave_whole(name)}") from None
    plan.numbers.setdefault(name, {})["num_experts"] = own
    return Step(style, dict.fromkeys(_own(module), 0), note=f"{own} of {own * tp_size} on each rank")


def _fused(modules: Mapping[str, nn.Module], plan: Plan) -> dict[str, str]:
    """Children that are cut, by the module whose fused kernel would multiply with their whole matrices."""
    cut = {id(modules[name]) for name, step in plan.steps.items() if step.style in (*COLUMN, *ROW)}
    found = ((name, matrix_of_fused_kernel(module)) for name, module in modules.items())
    return {n: child for n, child in found if child and id(layer_under(modules[n].get_submodule(child))) in cut}


def _check_experts(model: nn.Module, plan: Plan, ep_size: int) -> None:
    """Raise ConfigError where expert parallelism has no experts to cut, or adapters of peft are in the model."""
    if ep_size == 1:
        return
    what = f"expert_parallel_degree {ep_size}"
    if base_of(model)[0] is not model:
        raise ConfigError(f"{what}: not with adapters of peft")
    if not any(step.style == EXPERTS for step in plan.steps.values()):
        raise ConfigError(f"{what}: {type(model).__name__} has no experts that could be cut")


def _own(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]


def _whole(modules: Mapping[str, nn.Module], rows: Mapping[str, str]) -> set[str]:
    """Modules that a row replicates, and all modules below them."""
    tops = [name for name in modules if rows.get(pattern_of(name)) == REPLICATE]
    # "layer1" is not inside "layer": the dot decides.
    return {name for name in modules for top in tops if name == top or name.startswith(top + ".")}


def _leave_whole(name: str) -> str:
    return f'rows={{"{pattern_of(name)}": "replicate"}} leaves it whole on every rank'


def _check_parameters_named(model: nn.Module, rows: Mapping[str, str], whole: set[str]) -> None:
    """Check rows for parameters that no linear layer holds: vectors can be cut (attention sinks), stacks belong to
    experts."""
    for name, parameter in model.named_parameters():
        style, owner = rows.get(pattern_of(name)), name.rpartition(".")[0]
        # Stacks are cut with their experts' row.
        if style in (None, REPLICATE) or owner in whole or rows.get(pattern_of(owner)) == EXPERTS:
            continue
        if style != "colwise" or parameter.ndim > 1:
            raise ConfigError(
                f"{name}: smp.transform cannot cut a parameter of its own ({style}); {_leave_whole(owner)}"
            )


def _cut_parameters(name: str, module: nn.Module, rows: Mapping[str, str], tp_size: int) -> dict[str, int]:
    """Own parameters of a module that a row cuts, with the dimension: vectors with a number for each head."""
    cut = [own for own in _own(module) if rows.get(pattern_of(f"{name}.{own}")) == "colwise"]
    for own in cut:
        if len(module.get_parameter(own)) % tp_size:
            raise ConfigError(f"{name}.{own}: {len(module.get_parameter(own))} numbers are not divisible by {tp_size}")
    return dict.fromkeys(cut, 0)


def _latent(model: nn.Module, name: str, module: nn.Module) -> Step:
    """The step for the compressed keys of latent attention (DeepSeek's MLA): the rotary part is one head that all ranks
    use."""
    size = getattr(model.get_submodule(target_of(name).rpartition(".")[0]), "qk_rope_head_dim", None)
    if not isinstance(size, int) or not is_linear(module):
        raise ConfigError(f"{name}: {LATENT} needs nn.Linear in a module with qk_rope_head_dim; {_leave_whole(name)}")
    return Step(LATENT, dict.fromkeys(_own(module)), summed=size)


def _linear(model: nn.Module, name: str, module: nn.Module, style: str, tp_size: int, tp_rank: int, plan: Plan) -> Step:
    transposed = is_conv1d(module)
    if not is_linear(module):
        kind = f"{type(module).__name__} of {type(module).__module__}"
        raise ConfigError(f"{name}: {style} is for nn.Linear, this is {kind}; {_leave_whole(name)}")
    weight = module.get_parameter("weight")
    # nn.Linear stores (out, in), Conv1D (in, out).
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    dim = out_dim if style in COLUMN else in_dim
    has_bias = module._parameters.get("bias") is not None
    # A vocabulary that is not divisible: the head stays whole rather than refused, as any tokenizer
    # may give one.
    if weight.shape[dim] % tp_size and name in _heads_of_vocabulary(model):
        cuts: dict[str, int | None] = dict.fromkeys(_own(module))
        return Step(REPLICATE, cuts, note=f"{weight.shape[dim]} rows are not divisible by {tp_size}")
    parent = target_of(name).rpartition(".")[0]
    heads = _shared_heads(model, name, weight.shape[dim], tp_size, tp_rank, plan) if style == "colwise" else None
    if heads is not None:
        plan.boundaries.add(parent)
        note = f"{weight.shape[dim] // heads[1]} heads for {tp_size} ranks: all have them, each uses one"
        return Step(style, dict.fromkeys(_own(module)), transposed, heads, note)
    if weight.shape[dim] % tp_size:
        raise ConfigError(
            f"{name}: {weight.shape[dim]} {'columns' if style in ROW else 'rows'} are not divisible by "
            f"tensor_parallel_degree {tp_size}"
        )
    cuts = {"weight": dim}
    if has_bias:
        # Of a row-parallel layer the bias is added once, after the sum: every rank has it whole.
        cuts["bias"] = 0 if style in COLUMN else None
    if style in COLUMN and parent:
        # Siblings in one parent share the all-reduce of their input's gradient.
        plan.boundaries.add(parent)
    return Step(style, cuts, transposed)


def _shared_heads(
    model: nn.Module, name: str, width: int, tp_size: int, tp_rank: int, plan: Plan
) -> tuple[int, int] | None:
    """(first row, number) of a key or value projection with fewer heads than ranks that this rank uses; None when the
    heads themselves are cut.

    Sets ``num_key_value_groups`` of the attention: query heads of this rank per key/value head of this rank.
    """
    parent_name, _, last = target_of(name).rpartition(".")
    parent = model.get_submodule(parent_name)
    size = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
    if not isinstance(size, int):
        return None
    queries = heads_of(model)
    if queries is None:  # of layers with their own numbers
        queries = getattr(parent, "num_heads", None)
    if isinstance(queries, int) and queries % tp_size:
        raise ConfigError(f"{parent_name}: {queries} heads are not divisible by tensor_parallel_degree {tp_size}")
    if last not in ("k_proj", "v_proj") or width % size or not isinstance(queries, int):
        return None
    heads = width // size
    if heads % tp_size == 0:
        return None
    groups = getattr(parent, "num_key_value_groups", None)
    if tp_size % heads or not isinstance(groups, int):
        raise ConfigError(
            f"{name}: {heads} key/value heads and tensor_parallel_degree {tp_size}: one must divide the other"
        )
    # Each rank keeps one key/value head: all of its query heads form the one group.
    plan.numbers.setdefault(parent_name, {})["num_key_value_groups"] = queries // tp_size
    # Ranks r with equal r * heads // tp_size use the same head.
    return tp_rank * heads // tp_size * size, size


def heads_of(model: Any) -> int | None:
    """Query heads of every layer of a language model; None where its configuration does not say or layers differ."""
    config = getattr(model, "config", None)
    try:
        heads = getattr(config.get_text_config(), "num_attention_heads", None) if config is not None else None
    except (AttributeError, RuntimeError):  # of diffusers; each layer has another number
        # diffusers' configurations raise for a text config; layers of some have numbers of their
        # own.
        return None
    return heads if isinstance(heads, int) else None


def _heads_of_vocabulary(model: Any) -> set[str]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {name for name, module in model.named_modules() if module is head}


def _embedding(name: str, module: nn.Module, style: str, tp_size: int) -> Step:
    if not isinstance(module, nn.Embedding) or _own(module) != ["weight"]:
        raise ConfigError(f"{name}: {style} is for nn.Embedding, this is {type(module).__name__}")
    # An embedding that computes with what it looked up gives no zeros for rows of other ranks.
    if any(True for child in module.children() for _ in child.parameters()):  # of others' rows it would make nothing
        return Step(REPLICATE, {"weight": None}, note=f"{type(module).__name__} does more than look rows up")
    if style == EMBEDDING_COLUMNS:
        if module.embedding_dim % tp_size:
            raise ConfigError(f"{name}: {module.embedding_dim} columns are not divisible by {tp_size}")
        return Step(style, {"weight": 1})
    # max_norm renormalizes rows in place during the forward pass.
    if module.max_norm is not None:
        raise ConfigError(f"{name}: max_norm changes rows that other ranks hold; {_leave_whole(name)}")
    rows = module.num_embeddings
    if rows % tp_size:
        # The table is used whole: vocabularies are often odd.
        return Step(REPLICATE, {"weight": None}, note=f"{rows} rows are not divisible by {tp_size}")
    return Step(EMBEDDING, {"weight": 0})


def _numbers(modules: Mapping[str, nn.Module], rows: Mapping[str, str], tp_size: int, plan: Plan) -> None:
    """Apply rows of style "divide" to attributes of modules."""
    for pattern, style in rows.items():
        if style != DIVIDE:
            continue
        # The pattern's last word is the attribute, such as num_heads.
        owner, _, attribute = pattern.rpartition(".")
        for name, module in modules.items():
            if pattern_of(name) != pattern_of(owner):
                continue
            value = getattr(module, attribute, None)
            if not isinstance(value, int) or value % tp_size:
                raise ConfigError(
                    f"{name}.{attribute} is {value!r}: tensor_parallel_degree {tp_size} does not divide it"
                )
            plan.numbers.setdefault(name, {})[attribute] = value // tp_size


def _check_regions(modules: Mapping[str, nn.Module], rows: Mapping[str, str], whole: set[str], plan: Plan) -> None:
    """Check that every parameter next to a module whose output stays cut has a row. Used on some heads or columns only,
    its gradient would be a part of a sum, different on each rank, and no error would show it."""
    cut = {target_of(name).rpartition(".")[0] for name, step in plan.steps.items() if step.style == "colwise"}
    for name in plan.steps:
        inside = any(name == parent or name.startswith(parent + ".") for parent in cut)
        if inside and not _has_row(name, modules[name], rows) and name not in whole:
            raise ConfigError(
                f"{name} ({type(modules[name]).__name__}) has parameters next to columns that are cut, and no row says "
                f'how they are used: rows={{"{pattern_of(name)}": "{SUMMED}"}}, or "{REPLICATE}" if on whole columns'
            )


def _has_row(name: str, module: nn.Module, rows: Mapping[str, str]) -> bool:
    return pattern_of(name) in rows or all(pattern_of(f"{name}.{own}") in rows for own in _own(module))


def _check_shared(modules: Mapping[str, nn.Module], plan: Plan) -> None:
    """Check that a parameter which two modules share (a tied head) is cut in one way."""
    seen: dict[int, tuple[str, int | None]] = {}
    # By identity: tied parameters appear under several names.
    for full, parameter, dim in _cuts(modules, plan):
        other, before = seen.setdefault(id(parameter), (full, dim))
        if before != dim:
            raise ConfigError(f"{full} and {other} are one parameter and would be cut in two ways")


def _cuts(modules: Mapping[str, nn.Module], plan: Plan) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    for name, step in plan.steps.items():
        for own, dim in step.cuts.items():
            yield f"{name}.{own}", modules[name].get_parameter(own), dim


def check_dropout(model: nn.Module) -> None:
    """Refuse dropout: masks come from each rank's generator. Heads or chunks of different ranks would get the same
    mask, and the residual stream a different one on each rank.

    Raises:
        ConfigError: with the first module or number that drops anything.
    """
    for _, where, value in dropouts(model):
        of_positions = where.startswith("config.pos_embed_")
        what = "noise" if of_positions or where.endswith(("jitter_noise", "jitter_eps")) else "dropout"
        raise ConfigError(
            f"{where} is {value}: {what} under tensor parallelism or context parallelism would not equal one "
            f"process; set the {what}s of the model's config to {None if of_positions else 0}"
        )


def dropouts(model: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    """(module, name of the number, value) for all that a model drops in training, and for noise of experts' inputs and
    of DINOv3's positions."""
    for name, module in model.named_modules():
        # The run's own adapters key their masks by tokens, so the layout does not matter.
        if isinstance(module, Lora):  # its masks are keyed by tokens
            continue
        numbers = {k: v for k, v in vars(module).items() if ("drop" in k or k in _NOISES) and isinstance(v, float)}
        if isinstance(module, _DropoutNd):
            numbers["p"] = module.p
        yield from ((module, f"{name}.{key}", value) for key, value in numbers.items() if value > 0)
    # Functional dropout (F.dropout in attention) shows in the config only.
    config = getattr(model, "config", None)
    for key in _DROPOUTS:  # some read it in forward
        if (value := getattr(config, key, None) or 0.0) > 0:
            yield model, f"config.{key}", value
    for key in _POSITION_NOISE:
        if (noise := getattr(config, key, None)) is not None:
            yield model, f"config.{key}", noise


def check_untouched(model: nn.Module) -> None:
    """Check that nothing has cut, wrapped or trained ``model`` yet.

    Raises:
        ConfigError: with what did.
    """
    if hasattr(model, "smp_report"):
        raise ConfigError(f"{type(model).__name__} was transformed already")
    base, _ = base_of(model)
    if getattr(base, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"{type(base).__name__} is quantized ({type(base.hf_quantizer).__name__}), and what is packed cannot be "
            "cut: load it without quantization_config, or dequantized"
        )
    for name, module in model.named_modules():
        if type(module).__name__ in ("FullyShardedDataParallel", "DistributedDataParallel", "DataParallel"):
            raise ConfigError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}: transform the model before"
            )
        # Another library's hook (accelerate's) would be replaced by the cut's own forward, or call
        # the whole one.
        if "forward" in vars(module):
            raise ConfigError(f"{name or 'the model'}: something has replaced its forward: transform the model before")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(f"{name} is a DTensor already: transform the model before fully_shard")
        if parameter.grad is not None:
            raise ConfigError(
                f"{name} has a gradient, which would be lost: transform the model before the first backward"
            )
