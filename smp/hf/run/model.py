"""A language model of transformers as a :class:`smp.models.protocol.Model`: what ``pretrain_gpt.py`` and
``finetune.py`` train where ``--model-implementation`` is transformers.

The module's children are this module's own, so parameters, checkpoints and adapters have Hugging Face's names. The
forward pass is Hugging Face's, down to the output matrix; what that would give, logits of all tokens, is never made
(:mod:`smp.hf.run.head`). Parameters are cut by :func:`smp.transform`, in fp32 on the meta device, and filled part by
part (:mod:`smp.hf.loading.delayed`): no rank holds the whole model.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp.config import ConfigError, ModelConfig
from smp.hf.loading.delayed import DelayedParamIniter, allocate
from smp.hf.loading.first_values import FirstValues
from smp.hf.planning.module_plan import dropouts
from smp.hf.run.apart import Shift
from smp.hf.run.causality import refuse_two_sided
from smp.hf.run.cross_attention import attends_across, hide_filler, keep_apart
from smp.hf.run.documents import CACHES, refusal_of_documents, refuse_new_caches
from smp.hf.run.head import BIAS, OutputMatrix, check_scores, row_of
from smp.hf.run.images import document_positions, take_pixels, with_filler
from smp.hf.run.longrope import TextLengths, choose_by_text
from smp.hf.run.lora import TokenNumbers, offer
from smp.hf.state import adopt
from smp.hf.transform import transform
from smp.kernels import TORCH, Kernels
from smp.layers.heads.head import ModelOutput
from smp.layers.heads.score import scored
from smp.models.foreign import SCORE, blocks_of, decoder_of, new_module, output_matrix, reads_apart, tower_blocks
from smp.models.micro_batch import MicroBatch, OwnCache
from smp.models.protocol import Model, OutputShard
from smp.parallel.context import ParallelContext
from smp.parallel.dtensor_region import local_part, local_region


class TransformersModel(Model):
    """A language model of transformers, without memory and not yet sharded: a decoder, which may see images, or an
    encoder of prompts with a decoder of answers.

    Args:
        config: with ``transformers_config``.
        context: of the run.
        kernels: what computes the cross-entropy.

    Attributes:
        module: Hugging Face's own object, whose children this module has.
        notes: what the user should hear.
        shift: of an encoder with a decoder, what takes prompt and answer apart.
        no_documents: why documents in one sequence cannot be kept apart; empty: they can.

    Raises:
        ConfigError: transformers cannot build it, or it cannot be cut or run in this way.
    """

    casts_weights = False
    capabilities = frozenset(("generation", "own cache"))

    def __init__(self, config: ModelConfig, context: ParallelContext, kernels: Kernels = TORCH) -> None:
        super().__init__()
        assert config.transformers_config is not None, "the model of another implementation"
        self.config, self.notes = config, []
        module = new_module(config.transformers_config, scores=config.scalar_head)
        refuse_two_sided(module)
        _refuse_inner_images(module, context)
        self.notes += [*_without_dropout(module), *_without_router_losses(module)]
        # smp.transform reads smp.state: the run's groups are put there.
        adopt(context)
        transform(module)
        for experts in self._experts_of(module):
            experts.smp_cut.ep_mean = False  # runs add gradients up
        keep_apart(module)
        take_pixels(module)
        self._numbers = TokenNumbers()
        offer(module, context.tp, self._numbers)
        self._lengths = TextLengths()
        choose_by_text(module, self._lengths)
        # Next to the children, not as one: then names are Hugging Face's.
        self._module = (module,)
        for name, child in module.named_children():
            self.add_module(name, child)
        # Its own buffers are in one dictionary for both: BART's bias of logits.
        self._buffers = module._buffers
        tensors = {**module._parameters, **module._buffers}
        if own := [name for name, tensor in tensors.items() if tensor is not None and name != BIAS]:
            raise ConfigError(f"--model-implementation transformers: {type(module).__name__} itself has {own[0]}")
        self._output = None if config.scalar_head else OutputMatrix(module, kernels.cross_entropy)
        if config.scalar_head:
            check_scores(module)
        self._blocks = [_as_block(layer) for layer in [*tower_blocks(module), *(b for _, b in blocks_of(module))]]
        names = inspect.signature(type(module).forward).parameters
        # A cache would be filled in training, too, and kept, and with one transformers tells no documents apart.
        self._asked = {"use_cache": False} if _takes_use_cache(module) else {}
        refuse_new_caches(module)
        takes = [name for name in CACHES if name in names and not config.scalar_head]
        self._cache_name = takes[0] if takes and module._supports_default_dynamic_cache() else ""
        self.shift = Shift(module) if reads_apart(module) else None
        if self.shift is not None:
            self.capabilities = frozenset()
        self._slices = context.tp.size() if context.sequence_parallel else 1
        self.no_documents = refusal_of_documents(module)

    @property
    def module(self) -> Any:
        return self._module[0]

    @property
    def head(self) -> nn.Module | None:  # type: ignore[override]
        return output_matrix(self.module)

    def get_input_embeddings(self) -> nn.Module:
        return self.module.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """The head, as of every transformers model; optimizers ask it which matrices are those of the vocabulary."""
        return self.head

    def output_shard(self) -> OutputShard | None:
        if self._output is None:
            return None
        return OutputShard(self._output.shard, sequence_parallel=False)  # tokens are together in front of it

    def blocks(self) -> list[Any]:
        return self._blocks

    def fsdp_units(self) -> list[nn.Module | list[nn.Module]]:
        """The units of FSDP: each layer of decoder and vision tower, and the two vocabulary matrices, unless they are
        tied. Tied ones are in the root unit, which is gathered around the whole forward pass."""
        units: list[nn.Module | list[nn.Module]] = list(self._blocks)
        table, head = self.module.get_input_embeddings(), self.head
        if self.config.scalar_head:  # the row is read here, not by its own forward pass
            return [*units, table]
        if self.shift is not None:  # an encoder and a decoder read the table through modules of their own
            return units
        shared = {id(p) for p in table.parameters()} & {id(p) for p in head.parameters()}  # type: ignore[union-attr]
        return units if shared or head is None else [*units, table, head]

    def experts(self) -> list[nn.Module]:
        return self._experts_of(self)

    @staticmethod
    def _experts_of(module: nn.Module) -> list[Any]:
        cuts = ((part, vars(part).get("smp_cut")) for part in module.modules())
        return [part for part, cut in cuts if cut is not None and cut.ep is not None]

    def allocate(self, device: torch.device) -> None:
        allocate(self.module)

    def draw(self, device: torch.device, seed: int) -> None:
        DelayedParamIniter(self.module, seed).init()

    @torch.no_grad()
    def draw_scores(self, seed: int) -> None:
        """Draw the row of scores by transformers' rule, where the weights are those of a language model without one."""
        row = self.module.get_parameter(f"{SCORE}.weight")
        region, whole = local_region(row), FirstValues(self.module).draw(f"{SCORE}.weight", seed)
        for dim, (first, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
            whole = whole.narrow(dim, first, size)
        if not region.empty:
            local_part(row).copy_(whole)

    def forward(self, micro_batch: MicroBatch) -> ModelOutput:
        batch = micro_batch
        if (batch.labels is None) != (batch.loss_weights is None):
            raise ValueError("a loss needs labels and loss_weights, logits neither")
        self._lengths.of_tokens = batch.sequence_lengths
        if batch.own_cache is not None:
            return self._next(batch, batch.own_cache)
        if self.training and batch.token_index is not None:
            self._numbers.index = self._even(batch.token_index)
        if self.shift is not None:
            return self._answered(batch, self.shift)
        arguments: dict[str, Any] = {"input_ids": self._even(with_filler(batch)), **self._asked}
        if batch.images is not None:
            arguments |= batch.images.values
            arguments |= {name: self._even(of_tokens) for name, of_tokens in batch.images.tokens.items()}
            hide_filler(arguments, batch)
        if batch.document_ids is not None:
            if self.no_documents:
                raise ConfigError(self.no_documents)
            # Documents are known by positions that start again: transformers masks what lies before.
            assert batch.position_ids is not None, "positions of documents start again"
            arguments["position_ids"] = self._even_columns(document_positions(self.module, batch))
        if self._output is None:
            hidden = self.module.base_model(**arguments).last_hidden_state[:, : batch.input_ids.shape[1]]
            weight = row_of(self.head, hidden.dtype)
            weights = None if batch.loss_weights is None else batch.loss_weights.flatten()
            shape = hidden.shape[0], hidden.shape[1]
            return scored(hidden.flatten(0, 1), weight, weights, batch.answers, shape)
        with self._output.wanted(batch) as result:
            logits = self.module(**arguments).logits[:, : batch.input_ids.shape[1]]
        return ModelOutput(logits=logits) if result.output is None else result.output

    def _answered(self, batch: MicroBatch, shift: Shift) -> ModelOutput:
        """The loss of answers by an encoder with a decoder."""
        if batch.labels is None:
            raise ConfigError(f"{type(self.module).__name__} is an encoder with a decoder, which runs only train here")
        arguments, answers = shift.apart(batch)
        assert self._output is not None, "it is no reward model"
        with self._output.wanted(answers) as result:
            self.module(**arguments, **self._asked)
        assert result.output is not None, "labels give a loss"
        return result.output

    def _next(self, batch: MicroBatch, cache: OwnCache) -> ModelOutput:
        """This rank's columns of the logits of the next tokens, (rows, columns), with transformers' cache."""
        arguments = dict(self._asked)
        if self._cache_name:
            if cache.value is None:
                from transformers import DynamicCache

                cache.value = DynamicCache(config=self.module.config.get_text_config(decoder=True))
            arguments = {"use_cache": True, self._cache_name: cache.value}
        assert self._output is not None, "a reward model writes nothing"
        with self._output.wanted(batch):
            out = self.module(input_ids=batch.input_ids, **arguments)
        shard = self._output.shard
        return ModelOutput(logits=out.logits[:, -1, shard.start : shard.start + shard.valid])

    def _even(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length, ...) padded with zeros to a length that sequence-parallel ranks can share evenly; each
        padding token is a document of its own."""
        # F.pad's pairs begin with the last dimension: zeros for all after the second.
        return F.pad(tokens, (*(0, 0) * (tokens.ndim - 2), 0, -tokens.shape[1] % self._slices))

    def _even_columns(self, positions: torch.Tensor) -> torch.Tensor:
        """(..., length) padded with zeros to the length of :meth:`_even`."""
        return F.pad(positions, (0, -positions.shape[-1] % self._slices))


def _takes_use_cache(module: Any) -> bool:
    """Whether the forward pass of ``module``, or of the decoder that it passes its other arguments on to (Qwen3-VL),
    has an argument ``use_cache``."""
    own = inspect.signature(type(module).forward).parameters
    if "use_cache" in own or all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in own.values()):
        return "use_cache" in own
    return "use_cache" in inspect.signature(type(module.get_decoder()).forward).parameters


def _refuse_inner_images(module: Any, context: ParallelContext) -> None:
    """Refuse sequence parallelism where the decoder's layers add image features for all tokens (Qwen3-VL, Mllama)."""
    if not context.sequence_parallel or not decoder_of(module):
        return
    inner = inspect.signature(type(module.get_decoder()).forward).parameters
    if any(name.startswith("deepstack") for name in inner) or attends_across(module):
        raise ConfigError(
            f"--sequence-parallel: {type(module).__name__} has features of images between its layers, at places "
            "among all tokens; leave it out"
        )


def _without_dropout(module: nn.Module) -> list[str]:
    """Set dropout probabilities to 0: transformers draws from one generator, so masks would depend on the layout."""
    found: dict[str, float] = {}
    for owner, name, value in list(dropouts(module)):
        key = name.rpartition(".")[2]
        found[key] = max(value, found.get(key, 0.0))
        setattr(owner.config if owner is module else owner, key, 0.0)
    for router in module.modules():
        # PhiMoE's routers draw experts among those whose scores differ by less than this, and take the best ones in
        # evaluation, with the same gradient. The number itself stays: it says which experts share the weight.
        if hasattr(router, "router_jitter_noise"):
            router.training = False
            router.train = MethodType(_stays, router)  # type: ignore[method-assign]
    if not found:
        return []
    named = ", ".join(f"{name} {value:g}" for name, value in found.items())
    return [f"note: dropout of config.json is off, its masks would depend on the layout: {named}"]


def _without_router_losses(module: Any) -> list[str]:
    """Let the forward pass compute no auxiliary losses of routers: a run adds none (docs/any-model.md), so their logits
    would be kept for nothing."""
    configs = [module.config, module.config.get_text_config(decoder=True)]
    asked = [config for config in configs if getattr(config, "output_router_logits", False)]
    for config in asked:
        config.output_router_logits = False
    said = "note: auxiliary losses of routers are not added, though config.json asks for them (output_router_logits)"
    return [said] if asked else []


def _stays(module: nn.Module, mode: bool = True) -> nn.Module:
    """``train`` of a module that is in evaluation always."""
    return module


def _as_block(layer: Any) -> Any:
    """Give ``layer`` the attribute ``run``, which recompute, compile and offload replace. Hooks of the layer stay
    outside of it."""
    layer.run = vars(layer).get("forward") or MethodType(type(layer).forward, layer)
    layer.forward = MethodType(_through_run, layer)
    return layer


def _through_run(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer.run(*args, **kwargs)
