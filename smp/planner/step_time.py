"""Step time by formula: a roofline of each part, links, and the pipeline's simulator.

For each layer: matrix products at a share of the peak that falls with partly filled waves of tiles, attention, and what
norms, activations and residuals read and write; the collectives of tensor, context and data parallelism. Collectives
that smp runs during a computation cost what they take longer than it; those of tensor parallelism that something waits
for cost all of their time. A stage is as fast as its slower half: the device, or the host that issues the operations.
FP8, what is offloaded and other optimizers than Adam have costs of their own (``fp8.py``, ``update.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from smp.config import Config, Layout
from smp.config.batch import count_micro_batches
from smp.config.layer_specs import LayerSpec
from smp.config.layers import layer_specs
from smp.config.rules.fp8 import layers_in_bf16
from smp.config.rules.mtp import mtp_layers
from smp.models.arithmetic import forward_flops
from smp.models.inventory import (
    Parameter,
    inventory,
    of_each_block,
    prediction_parameters,
    vocabulary_matrix,
)
from smp.models.part import ModelPart, whole
from smp.pipeline.simulate_schedule import StageCosts, simulate
from smp.pipeline.stage_plan import Plan
from smp.planner.devices import Device
from smp.planner.fp8 import Fp8Costs, in_fp8
from smp.planner.seconds import Pass, StepTime
from smp.planner.update import update_seconds
from smp.training.cost.memory import kept_by_blocks
from smp.training.cost.sparse_memory import is_sparse

TILE = 128, 256
"""Rows and columns of a tile of a product's result, as large kernels use."""
OPERATIONS = 24
"""Operations that the host issues for a block's forward pass; twice as many for its backward pass."""


def _offloaded(config: Config, layout: Layout) -> float:
    """Bytes that an average block sends to the host and gets back. Without a pipeline the last blocks of a micro-batch
    stay: their backward passes begin at once."""
    stay = min(config.parallel.activation_loading_horizon - 1, config.model.num_layers) if layout.pp == 1 else 0
    kept = kept_by_blocks(config, layout)
    return sum(kept) / len(kept) * (1 - stay / config.model.num_layers)


class StepModel:
    """Predicts the time of one layout on one kind of device.

    Args:
        config: resolved.
        layout: degrees of the mesh.
        device: what runs it.
        plan: of the pipeline.
    """

    def __init__(self, config: Config, layout: Layout, device: Device, plan: Plan | None = None) -> None:
        model, data, parallel = config.model, config.data, config.parallel
        assert data.seq_length is not None and data.global_batch_size is not None, "resolved before"
        self.config, self.layout, self.device, self.plan = config, layout, device, plan
        # Sequences of a micro-batch are cut over cp.
        self.tokens = data.micro_batch_size * data.seq_length // layout.cp
        self.micro_batches = count_micro_batches(data, layout.data_parallel)
        self.width = 2 if parallel.bf16 else 4
        self.peak = device.peak_of(bf16=parallel.bf16)
        self.fp8 = Fp8Costs.of(parallel)
        self.gathered_width = 1 if parallel.fp8_param_gather else self.width
        self.offloaded = _offloaded(config, layout) if parallel.offload_activations else 0.0
        # Parameters of each block, by layer.
        self.blocks = of_each_block(model, range(model.num_layers), list)
        self.forward, self.backward = self._mean_passes()
        self.predictions = len(mtp_layers(model))

    def predict(self) -> StepTime:
        """The step of the slowest rank."""
        return self._with_pipeline(self.plan) if self.plan else self._without_pipeline()

    def _mean_passes(self) -> tuple[Pass, Pass]:
        """An average block's forward and backward pass for one micro-batch: the mean over kinds of blocks (mixer,
        number of parts, experts or not, FP8 or not)."""
        model, forward, backward = self.config.model, Pass(), Pass()
        layers = range(model.num_layers)
        in_bf16 = layers_in_bf16(self.config.parallel, model.num_layers)
        specs = layer_specs(model)
        in_8_bits = [self.fp8 is not None and layer not in in_bf16 for layer in layers]
        blocks = zip(specs[: model.num_layers], in_8_bits, strict=True)
        kinds = [(type(spec.mixer), spec.parts, spec.has_experts, eight) for spec, eight in blocks]
        for kind, number in Counter(kinds).items():
            # A layer in bf16 among FP8 ones is a kind of its own.
            first = kinds.index(kind)
            # A layer of each kind stands for all of them.
            ahead, back = self._block_passes(self.blocks[first], specs[first], fp8=in_8_bits[first])
            # Weighted by the number of layers.
            forward, backward = forward + ahead * (number / len(layers)), backward + back * (number / len(layers))
        return forward, backward

    def _block_passes(self, block: Sequence[Parameter], spec: LayerSpec, *, fp8: bool) -> tuple[Pass, Pass]:
        flops = forward_flops(self.config.model, self.config.data.seq_length or 1)
        # What is left of a layer's FLOPs without its matrix products is attention's.
        attended = flops.layer - sum(p.flops for each in self.blocks for p in each) / len(self.blocks)
        # Heads are divided over tp.
        attention = attended * self.tokens / self.layout.tp / (self.peak * self.device.attention_share)
        products, gradients = self._products(block, fp8=fp8)
        elementwise, exchange = self._elementwise(spec), self._expert_exchange() if spec.has_experts else 0.0
        rounding = self._rounding(block) if fp8 else (0.0, 0.0)
        context = self._context_exchange(attention)
        # FP8 gathers move 1 byte per element.
        tensor = self._tensor_collectives(spec.parts, in_8_bits=1 if fp8 else 0)
        ahead = Pass(products, attention, elementwise + rounding[0], tensor, context[0], exchange)
        # Half of the backward pass's tensor-parallel collectives run during products of weight
        # gradients.
        all_in_8_bits = fp8 and self.fp8 is not None and self.fp8.all_products
        tensor = self._tensor_collectives(spec.parts, in_8_bits=1 if all_in_8_bits else 0) / 2
        # FlashAttention's backward pass has 2.5 times the FLOPs (5 products instead of 2) at 0.85
        # of the rate.
        back = Pass(gradients, 2.5 / 0.85 * attention, 2 * elementwise + rounding[1], tensor, context[1], exchange)
        ahead, back = ahead.issued(OPERATIONS, self.device), back.issued(2 * OPERATIONS, self.device)
        granularity = self.config.parallel.recompute_granularity
        if granularity == "full":
            # The forward pass once more, collectives included.
            back += ahead
        elif granularity == "selective":
            # Products and attention are kept; what lies between them is computed again.
            back += Pass(elementwise=elementwise)
        copies = self.offloaded / self.device.host_link
        return ahead.copying(copies), back.copying(copies)

    def _products(self, block: Sequence[Parameter], *, fp8: bool) -> tuple[float, float]:
        """Seconds of a block's products, forward and backward. Modules other than linear layers, such as routers, are
        without FP8."""
        ahead = back = 0.0
        for p in block:
            plain = self._product(p)
            eight = self._product(p, in_8_bits=True) if fp8 and in_fp8(p) else plain
            ahead += eight
            # Two products of the forward's size: input gradient and weight gradient.
            back += eight + (eight if self.fp8 is None or self.fp8.all_products else plain)
        return ahead, back

    def _rounding(self, block: Sequence[Parameter]) -> tuple[float, float]:
        """Seconds to round operands to 8 bits, forward and backward."""
        assert self.fp8 is not None
        ahead, back = self.fp8.bytes_of_block(block, self.layout, self._tokens_of)
        bandwidth = self.device.bandwidth * self.device.memory_share
        return ahead / bandwidth, back / bandwidth

    def _prediction_layers(self) -> tuple[Pass, Pass]:
        """Forward and backward pass of the multi-token prediction layers without their losses. Each is like the last
        block, with a projection between norms in front, which a rank computes for its own tokens."""
        model, last = self.config.model, self.config.model.num_layers - 1
        fp8 = self.fp8 is not None and last not in layers_in_bf16(self.config.parallel, model.num_layers)
        ahead, back = self._block_passes(self.blocks[last], layer_specs(model)[last], fp8=fp8)
        split = self._slices()
        products = sum(self._product(p) for p in prediction_parameters(model, 0)) / split
        numbers = self.tokens * 10 * model.hidden_size / split  # three norms, and both results side by side
        elementwise = numbers * self.width / (self.device.bandwidth * self.device.memory_share)
        around = Pass(products, elementwise=elementwise)
        return (ahead + around) * self.predictions, (back + around * 2) * self.predictions

    def _tokens_of(self, parameter: Parameter) -> float:
        """Rows of a product on this rank; for experts those of all of them."""
        if parameter.chosen is not None:
            return self._tokens_to_experts() * parameter.chosen
        # Down projections of latent attention and routers are whole on each rank, for its slice of the tokens.
        return self.tokens / self._slices() if parameter.shard_dim is None else self.tokens

    def _product(self, parameter: Parameter, *, in_8_bits: bool = False) -> float:
        """Seconds of a linear layer's forward product on one rank (for experts of all of them), in whole waves of
        tiles."""
        if not parameter.flops:
            return 0.0
        device = self.device
        *experts, rows, inner = parameter.local_shape(self.layout)
        number = experts[0] if experts else 1
        # Even loads: every expert has the same number of rows.
        tokens = self._tokens_of(parameter) / number
        flops = 2 * number * tokens * rows * inner
        tiles = number * math.ceil(tokens / TILE[0]) * math.ceil(rows / TILE[1])
        # Tiles run in waves of as many as there are multiprocessors; the last wave takes as long as a full one.
        waves = math.ceil(tiles / device.tiles) * device.tiles
        filled = number * tokens * rows / (TILE[0] * TILE[1]) / waves
        rate = device.fp8_peak * device.fp8_share if in_8_bits else self.peak * device.product_share
        # At least half full: libraries then take smaller tiles, or split the inner dimension.
        return flops / (rate * max(filled, 0.5))

    def _elementwise(self, spec: LayerSpec) -> float:
        """Seconds in which norms, RoPE, activation and residuals of a forward pass read and write memory; with experts
        also the sorting of rows and the sum of results."""
        model, tp, split = self.config.model, self.layout.tp, self._slices()
        assert model.ffn_hidden_size is not None, "resolved before"
        # Queries and keys are read and written.
        rotated = 0 if spec.mixer is None else 2 * self._rotated() // tp
        wide, sorted_ = 0 if spec.feed_forward is None else model.ffn_hidden_size, 0
        if spec.has_experts:
            wide = (model.moe_shared_expert_intermediate_size or 0) + model.moe_router_topk * (
                model.moe_ffn_hidden_size or 0
            )
            sorted_ = (3 * model.moe_router_topk + 1) * model.hidden_size  # read and written, then read and summed
        # Gated: gate and up read, result written.
        activation = (3 if model.gated else 2) * wide // tp
        branches = (spec.mixer is not None) + (spec.feed_forward is not None)
        numbers = 5 * branches * model.hidden_size // split + rotated + activation + sorted_  # a norm 2, a sum 3
        return self.tokens * numbers * self.width / (self.device.bandwidth * self.device.memory_share)

    def _slices(self) -> int:
        """Number of ranks that share a sequence's tokens between attention and MLP."""
        return self.layout.tp if self.config.parallel.sequence_parallel else 1

    def _rotated(self) -> int:
        """Elements of a token's queries and keys that RoPE reads and writes. Latent attention also assembles keys and
        values from its projections and normalizes its latents."""
        model, heads = self.config.model, self.config.model.num_attention_heads
        if model.multi_latent_attention:
            whole = heads * (2 * (model.qk_head_dim + model.qk_pos_emb_head_dim) + model.v_head_dim)
            return whole + model.kv_lora_rank + (model.q_lora_rank or 0)
        assert model.kv_channels is not None, "resolved before"
        return (heads + (model.num_query_groups or heads)) * model.kv_channels

    def _tensor_collectives(self, parts: int, in_8_bits: int = 0) -> float:
        """Seconds of tensor-parallel collectives in a forward pass with ``parts`` parts (attention, MLP): each has a
        gather and a reduce-scatter, or an all-reduce, which moves as much. Under sequence parallelism gathers move
        ``in_8_bits`` bytes per element; 0: as many as the others."""
        bytes_ = self.tokens * self.config.model.hidden_size * self.width
        gathered = bytes_ * in_8_bits / self.width if in_8_bits and self.config.parallel.sequence_parallel else bytes_
        return parts * (self._collective(bytes_, "tp") + self._collective(gathered, "tp"))

    def _expert_exchange(self) -> float:
        """Seconds of both all-to-alls of a pass, which nothing hides."""
        model, ep = self.config.model, self.layout.ep
        # Each token's hidden state goes to topk experts.
        rows = self._tokens_to_experts() * model.moe_router_topk * model.hidden_size * self.width
        return 2 * self.device.fabric.all_to_all(rows, ep, self._stride("ep"))

    def _tokens_to_experts(self) -> float:
        """Tokens that this rank sends to experts: tensor-parallel ranks that do not cut an expert's matrices share
        them."""
        return self.tokens * self.layout.expert_tp / self.layout.tp

    def _context_exchange(self, attention: float) -> tuple[float, float]:
        """Seconds by which attention's exchange exceeds attention, forward and backward."""
        cp, model = self.layout.cp, self.config.model
        if cp == 1:
            return 0.0, 0.0
        groups, width = model.num_query_groups or model.num_attention_heads, 2 * (model.kv_channels or 0)
        if model.multi_latent_attention:
            width = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
        keys = self.tokens * max(1, groups // self.layout.tp) * width
        if is_sparse(self.config):  # one row for all heads, and the indexer's key
            keys = self.tokens * (model.kv_lora_rank + model.qk_pos_emb_head_dim + model.dsa_indexer_head_dim)
        # Backward the keys go round once more, and their gradients in fp32.
        ahead, back = (self._collective(cp * keys * width, "cp") for width in (self.width, self.width + 4))
        return max(0.0, ahead - attention), max(0.0, back - 2.5 / 0.85 * attention)

    def _collective(self, whole_bytes: float, dim: str) -> float:
        """Seconds of an all-gather or reduce-scatter of a tensor over one dimension of the mesh."""
        return self.device.fabric.ring(whole_bytes, getattr(self.layout, dim), self._stride(dim))

    def _stride(self, dim: str) -> int:
        """Distance between neighbouring ranks of a dimension; the first one varies fastest. Ranks of ep are neighbours
        among those of data and context parallelism."""
        order = ["expert_tp", "ep"] if dim == "ep" else ["tp", "cp", "dp_shard", "dp_replicate", "pp"]
        return math.prod(getattr(self.layout, name) for name in order[: order.index(dim)])

    def _sharded(self, parameters: Sequence[Parameter], width: int) -> float:
        """Seconds to gather weights, or reduce gradients, over FSDP's ranks; experts have fewer."""
        seconds = 0.0
        for experts in (False, True):
            ranks, stride = self._sharing(experts=experts), self.layout.tp
            if experts:
                # Experts' FSDP ranks are further apart: those of ep lie between them.
                stride = self.layout.expert_tp * self.layout.ep
            # Expert and other parameters have different FSDP groups.
            elements = self._elements([p for p in parameters if (p.chosen is not None) == experts])
            if elements:
                seconds += self.device.fabric.ring(elements * width, ranks, stride)
        return seconds

    def _sharing(self, *, experts: bool) -> int:
        """Number of ranks over which FSDP shards a parameter."""
        return self.layout.expert_shard if experts else self.layout.dp_shard * self.layout.cp

    def _elements(self, parameters: Sequence[Parameter]) -> int:
        """Elements with which a rank computes."""
        return sum(math.prod(p.local_shape(self.layout)) for p in parameters)

    def _owned(self, parameter: Parameter) -> float:
        """Elements that a rank updates."""
        return math.prod(parameter.local_shape(self.layout)) / self._sharing(experts=parameter.chosen is not None)

    def _parameters(self, part: ModelPart) -> list[Parameter]:
        return list(inventory(self.config.model, [part]))

    def _head(self) -> Pass:
        """Output layer and loss of a micro-batch, forward and backward: three products, and logits read and written
        about six times in fp32. Once for each prediction."""
        matrix = vocabulary_matrix(self.config.model, "head", has_product=True)
        rows, _ = matrix.local_shape(self.layout)
        passes = self.tokens * rows * 4 * 6 / (self.device.bandwidth * self.device.memory_share)
        one = Pass(products=3 * self._product(matrix), elementwise=passes, tensor=self._tensor_collectives(1))
        return one * (1 + self.predictions)

    def _without_pipeline(self) -> StepTime:
        model, count = self.config.model, self.micro_batches
        layers = model.num_layers
        ahead, back = self._prediction_layers()
        work = ((self.forward + self.backward) * layers + ahead + back + self._head()) * count
        parameters = self._parameters(whole(layers))
        return self._step(work, self._exposed_gathers() + self._replicas(parameters), 0.0, parameters)

    def _exposed_gathers(self) -> float:
        """Seconds of FSDP that no computation hides. The next block's weights are gathered during the current one's
        passes; in the backward pass gradients are reduced then, too. Each micro-batch gathers again unless the strategy
        keeps weights."""
        gather, reduce_ = (
            sum(self._sharded(block, width) for block in self.blocks) / len(self.blocks)
            # Gradients are reduced in fp32, 4 bytes.
            for width in (self.gathered_width, 4)
        )
        layers = self.config.model.num_layers + self.predictions
        strategy = self.config.parallel.data_parallel_sharding_strategy
        # The first block's gather is in ``ends``.
        late_forward = max(0.0, gather - self.forward.total) * (layers - 1)
        late_backward = max(0.0, gather + reduce_ - self.backward.total) * (layers - 1)
        # Gradients only, where weights stay gathered.
        late_reduce = max(0.0, reduce_ - self.backward.total) * (layers - 1)
        ends = gather + reduce_  # the first one's gather and the last one's reduction have nothing to hide under
        first = late_forward + ends
        if strategy == "optim_grads_params":
            return (late_forward + late_backward + ends) * self.micro_batches
        # Gradients: per micro-batch, or once with "optim".
        times = self.micro_batches if strategy == "optim_grads" else 1
        return first + late_reduce * times

    def _replicas(self, parameters: Sequence[Parameter]) -> float:
        """Seconds by which the sum over replicas exceeds the backward pass of the last micro-batch, during which it
        runs."""
        if self.layout.dp_replicate == 1:
            return 0.0
        # An all-reduce: twice the traffic of an all-gather.
        taken = 2 * self._collective(sum(map(self._owned, parameters)) * 4, "dp_replicate")
        return max(0.0, taken - self.backward.total * self.config.model.num_layers / self.layout.pp)

    def _with_pipeline(self, plan: Plan) -> StepTime:
        """The simulator's step: the busiest rank's work, and its waits as the bubble."""
        head = self._head()
        ahead, back = self._prediction_layers()
        # The output layer: one product forward, two backward.
        passes = [self.forward * part.count + (ahead + head * (1 / 3)) * part.head for part in plan.parts]
        backs = [self.backward * part.count + (back + head * (2 / 3)) * part.head for part in plan.parts]
        parameters = [self._parameters(part) for part in plan.parts]
        # Of a backward pass the input part has more: attention has no weights.
        costs = [
            StageCosts(
                ahead.total,
                back.total * 0.55,
                back.total * 0.45,
                self._sharded(own, self.gathered_width),
                self._sharded(own, 4),
            )
            for ahead, back, own in zip(passes, backs, parameters, strict=True)
        ]
        timeline = simulate(plan.training, costs, self._message())
        busiest = max(range(self.layout.pp), key=lambda rank: timeline.work[rank])
        own = plan.stages_of(busiest)
        work = Pass()
        for stage in own:
            work += (passes[stage] + backs[stage]) * self.micro_batches
        held = [p for stage in own for p in parameters[stage]]
        return self._step(work, self._replicas(held), timeline.step_time - timeline.work[busiest], held)

    def _message(self) -> float:
        """Seconds of one message between stages."""
        split = self._slices()
        size = self.tokens * self.config.model.hidden_size * self.width / split
        return self.device.fabric.message(size, self.layout.pp, self._stride("pp"))

    def _step(self, work: Pass, data: float, bubble: float, parameters: Sequence[Parameter]) -> StepTime:
        update = update_seconds(self.config, self.layout, self.device, [(p, self._owned(p)) for p in parameters])
        return StepTime(**vars(work), data=data, bubble=bubble, optimizer=update)
