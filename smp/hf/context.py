"""Context parallelism in a transformed model: each rank has a part of the tokens of every sequence.

The script cuts its batch with :func:`cut_sequence`. A sequence of n tokens lies in 2 x cp chunks, and rank r holds
chunks r and 2 x cp - 1 - r, as SMP v2 scripts cut it. The model then gets its position ids and the labels of the
tokens after each chunk, and attention exchanges keys through Hugging Face's registry of attention functions. The loss
of a rank is such that its mean over all data ranks is the mean over whole sequences.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from smp.config.schema import ConfigError
from smp.data.sample import IGNORE_INDEX
from smp.hf.adapters import base_of, faces_of
from smp.hf.planning.module_plan import check_dropout
from smp.hf.state import state
from smp.kernels.attention_cores.attention_core import AttentionCore, AttentionSpec
from smp.kernels.attention_cores.fused_attention import DEFAULT_ATTENTION
from smp.kernels.sequence_cut import cut_sequences
from smp.kernels.token_layout import TokenLayout
from smp.layers.context_parallel.make_core import CommType, context_parallel_attention
from smp.parallel.collectives import Group, start_all_gather, start_all_reduce, wait

NAME = "smp_context_parallel"
COMM_TYPES = ("p2p", "all_gather")
FAMILIES = (
    "cohere",
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
)
"""Model types that tests compared. In others something other than causal attention may mix tokens, such as
convolutions."""


@dataclass
class CutContext:
    """How sequences are cut, and the attention over them.

    Attributes:
        core: attention over cut sequences.
        group: the ranks that hold parts of the same sequences.
        layouts: with their plans, by shape and window; few in a run.
    """

    core: AttentionCore
    group: Group
    layouts: dict[tuple[Any, ...], TokenLayout] = field(default_factory=dict)

    def layout(self, batch: int, length: int, spec: AttentionSpec, like: torch.Tensor) -> TokenLayout:
        """The layout of ``batch`` sequences with ``length`` tokens on each rank, prepared once for each shape."""
        key = (batch, length, spec.window, like.dtype, like.device)
        if key not in self.layouts:
            # Scripts with a new length in every step would keep plans for ever.
            if len(self.layouts) >= 32:
                self.layouts.clear()
            # cp ranks hold length tokens each of sequences of length x cp.
            cut = cut_sequences(batch, length * self.group.size, self.group.size)
            plain = TokenLayout(batch, length, cut=cut)
            self.layouts[key] = self.core.prepare(plain, [spec], like.dtype, like.device)
        return self.layouts[key]


def cut_sequence(whole: torch.Tensor) -> torch.Tensor:
    """This rank's tokens of sequences, (batch, length, ...) -> (batch, length / cp, ...). Labels are cut the same way,
    unshifted.

    Raises:
        ConfigError: 2 x context_parallel_degree does not divide the length.
    """
    size, rank = state.cp_size, state.cp_rank
    if size == 1:
        return whole
    if whole.shape[1] % (2 * size):
        raise ConfigError(
            f"a sequence of {whole.shape[1]} tokens cannot be cut into 2 x {size} chunks for context_parallel_degree "
            f"{size}; the next length that can is {whole.shape[1] + -whole.shape[1] % (2 * size)}"
        )
    # Chunks r and 2 cp - 1 - r: with a causal mask every rank then has the same number of scores to
    # compute.
    chunks = whole.chunk(2 * size, dim=1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=1)


def check(model: nn.Module, comm_type: str) -> None:
    """Check that sequences of ``model`` can be cut.

    Raises:
        ConfigError: with the reason.
    """
    if comm_type not in COMM_TYPES:
        raise ConfigError(f"transform(cp_comm_type={comm_type!r}): there are {', '.join(COMM_TYPES)}")
    if state.cp_size == 1:
        return
    base, _ = base_of(model)
    config = getattr(base, "config", None)
    kind = getattr(config, "model_type", None)
    what = f"context_parallel_degree {state.cp_size}"
    if kind not in FAMILIES or not hasattr(base, "loss_function"):
        raise ConfigError(f"{what}: not for {type(base).__name__} ({kind}); compared are {', '.join(FAMILIES)}")
    loss = getattr(base.loss_function, "__name__", None)
    # Only of this loss is it known that labels are shifted by one, and how num_items_in_batch
    # divides.
    if loss != "ForCausalLMLoss":
        raise ConfigError(
            f"{what}: {type(base).__name__} has {loss}: cut sequences train causal language models (ForCausalLMLoss)"
        )
    # Soft caps and chunked attention (Llama 4) are not in the attention that exchanges keys.
    for number in ("attn_logit_softcapping", "attention_chunk_size"):
        if getattr(config, number, None):
            raise ConfigError(f"{what}: config.{number} is {getattr(config, number)}: cut sequences have none")
    for name, module in model.named_modules():
        if getattr(module, "is_causal", True) is not True:
            raise ConfigError(f"{what}: {name}.is_causal is {module.is_causal}: attention over cut sequences is causal")
    check_dropout(model)


def install(model: nn.Module, comm_type: str) -> None:
    """Give ``model`` attention over cut sequences. Nothing without context parallelism."""
    mesh = state.context.cp
    if mesh is None:
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    base, _ = base_of(model)
    context = CutContext(context_parallel_attention(DEFAULT_ATTENTION, mesh, cast(CommType, comm_type)), Group.of(mesh))
    # All layers share one config, and each looks its attention function up by this name.
    base.config._attn_implementation_internal = NAME
    for module in model.modules():
        # Attention functions are called with the attention module only: the context hangs there.
        if hasattr(module, "is_causal") or module in faces_of(model):
            module.smp_context = context  # type: ignore[assignment]
        # Its frequencies depend on the longest position, which only one rank has.
        if _follows_length(module):
            module.register_forward_pre_hook(_WithLastPosition(context.group), with_kwargs=True)
            module.register_forward_hook(_without_last_position)
    for face in faces_of(model):
        # Both models of peft: a script may call either.
        face.register_forward_pre_hook(_complete, with_kwargs=True)
    # A script may call the inner model (model.model) without positions: refused there.
    if base.base_model is not base:
        base.base_model.register_forward_pre_hook(_with_positions, with_kwargs=True)
    base.generate = _refuse_generate


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask: attention over cut sequences derives it from the layout."""


def _refuse_generate(*_: Any, **__: Any) -> None:
    raise ConfigError("generate: sequences are cut for training; generate with context_parallel_degree 1")


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """(batch, heads or groups, length / cp, head_dim) -> (batch, length / cp, heads, head_dim); no scores."""
    context: CutContext = module.smp_context
    batch, _, length, _ = query.shape
    # Attention over cut sequences has only a causal mask (and windows); anything else here would be
    # ignored.
    if attention_mask is not None or dropout or softcap or key.shape[2] != length:
        raise ConfigError(f"{type(module).__name__}: cut sequences have no mask, dropout, softcap or cache")
    spec = AttentionSpec(window=sliding_window, scale=scaling)
    layout = context.layout(batch, length, spec, query)
    # Gathered heads may lie head by head; what is exchanged is sent as it lies.
    # [batch x length / cp, heads or groups, head_dim]
    q, k, v = (rearrange(x, "b h n d -> (b n) h d").contiguous() for x in (query, key, value))
    out, _ = context.core(q, k, v, layout, spec)
    return out.unflatten(0, (batch, length)), None


def _with_positions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("position_ids") is None:
        raise ConfigError(
            f"{type(model).__name__}: cut sequences go through the whole model, which knows the positions of its tokens"
        )


def _complete(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward arguments with positions, shifted labels and token count added."""
    group: Group = model.smp_context.group
    if (chosen := base_of(model)[0].config._attn_implementation) != NAME:
        raise ConfigError(f"attention became {chosen} after smp.transform, and would see this rank's tokens only")
    signature = inspect.signature(model.forward)
    # Bound by name: labels may be positional, and the hook replaces all arguments by keywords.
    given: dict[str, Any] = dict(signature.bind(*args, **kwargs).arguments)
    # transformers passes unknown arguments on by **kwargs: num_items_in_batch comes that way.
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    given |= given.pop(rest, {})
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if tokens is None:
        raise ConfigError(f"{type(model).__name__}: cut sequences are given by name, input_ids= or inputs_embeds=")
    batch, length = tokens.shape[:2]
    mask = given.pop("attention_mask", None)
    # Tokens after the end are seen by nobody under a causal mask: padding there needs no mask.
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        raise ConfigError(
            "attention_mask: cut sequences are not padded, but on the right, with labels -100 and no mask"
        )
    if given.get("position_ids") is not None:
        raise ConfigError("position_ids: of cut sequences they follow from the cut: leave them out")
    if length % 2:
        raise ConfigError(f"{length} tokens on each rank: cut sequences come as two chunks, see smp.cut_sequence")
    given["position_ids"] = positions(length, group).to(tokens.device).expand(batch, -1)
    if given.get("labels") is not None:
        ignore = given.get("ignore_index", IGNORE_INDEX)
        if given.get("shift_labels") is None:
            given["shift_labels"] = shifted(given["labels"], group, ignore)
        # The Trainer passes the count over all micro-batches; without it this batch's is used.
        count = given.get("num_items_in_batch")
        if count is None:
            valid = (given["shift_labels"] != ignore).sum()
            # The loss is a sum over this rank's tokens / count. FSDP averages over all data ranks,
            # of which cp share one sequence: without count / cp the gradient would be cp times too
            # small.
            count = wait(start_all_reduce(valid, group), group)
        given["num_items_in_batch"] = count / group.size
    return (), given


def _follows_length(module: nn.Module) -> bool:
    """Whether a rotary embedding chooses its frequencies by the largest position (dynamic NTK, LongRoPE)."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)


@dataclass(frozen=True)
class _WithLastPosition:
    """Forward pre-hook of such an embedding: appends the last position of the whole sequence, which only one rank
    has."""

    group: Group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        # transformers calls rotary embeddings with (x, position_ids), the second by either way.
        given = kwargs.pop("position_ids") if "position_ids" in kwargs else args[1]
        last = torch.full_like(given[:, :1], given.shape[1] * self.group.size - 1)
        return (args[0], torch.cat((given, last), 1), *args[2:]), kwargs


def _without_last_position(module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(part[:, :-1] for part in output)  # cosines and sines, (batch, length / cp, head_dim)


def positions(length: int, group: Group) -> torch.Tensor:
    """Position of each of this rank's tokens in its sequence, int64 (1, length)."""
    chunk = length // 2
    first, last = group.rank * chunk, (2 * group.size - 1 - group.rank) * chunk
    return torch.cat((torch.arange(first, first + chunk), torch.arange(last, last + chunk)))[None]


def shifted(labels: torch.Tensor, group: Group, ignore: int) -> torch.Tensor:
    """The label of the token after each of this rank's, which may be on another rank, int64 (batch, length / cp)."""
    chunk = labels.shape[1] // 2
    # The successor of a chunk's last token is the first token of the next chunk.
    firsts = torch.stack((labels[:, 0], labels[:, chunk]))  # (2, batch)
    everyone = wait(start_all_gather(firsts, group), group).view(group.size, 2, -1)
    # Rank r's first chunks are 0 .. cp - 1 in order, its second ones 2 cp - 1 down to cp.
    in_order = torch.cat((everyone[:, 0], everyone[:, 1].flip(0)))  # (2 x cp, batch), by chunk
    # After the last chunk nothing follows.
    in_order = F.pad(in_order, (0, 0, 0, 1), value=ignore)
    following = in_order[torch.tensor([group.rank + 1, 2 * group.size - group.rank], device=labels.device)]
    first, last = labels.split(chunk, 1)
    return torch.cat((first[:, 1:], following[0][:, None], last[:, 1:], following[1][:, None]), 1)
