"""How long a training step takes, by formula: a roofline of each part, links, the pipeline's simulator. No torch.

For each layer: matrix products at a share of the peak that falls with partly filled waves of tiles, attention, and what
norms, activations and residuals read and write; the collectives of tensor, context and data parallelism. Collectives
that smp runs beside a computation cost what they take longer than it; those of tensor parallelism that something waits
for cost all of their time. A stage is as fast as its slower half: the device, or the host that issues the operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from smp.config import Config, Layout
from smp.models.arithmetic import forward_flops
from smp.models.inventory import Parameter, block_parameters, inventory, vocabulary_matrix
from smp.models.part import ModelPart, whole
from smp.pipeline.plan import Plan
from smp.pipeline.simulate import StageCosts, simulate
from smp.planner.devices import Device

TILE = 128, 256
"""Rows and columns of a tile of a product's result, as large kernels take them."""
OPERATIONS = 24
"""That the host issues for a block's forward pass; twice as many for its backward pass."""
OPTIMIZER_BYTES = 40
"""Read and written per parameter by clipping and AdamW: gradient, weight and two moments."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step; the parts add up to ``total``.

    Attributes:
        products, attention, elementwise: of the device, with what is computed again.
        tensor: exposed collectives of tensor parallelism.
        context: exposed transfers of context parallelism.
        data: exposed gathers of weights and reductions of gradients.
        bubble: waiting of a pipeline's slowest rank, messages included.
        optimizer: clipping and update.
        host: what the device waits for the host.
    """

    products: float
    attention: float
    elementwise: float
    tensor: float
    context: float
    data: float
    bubble: float
    optimizer: float
    host: float

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class _Pass:
    """Seconds of one pass of something."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    host: float = 0.0

    def __add__(self, other: _Pass) -> _Pass:
        return _Pass(*(x + y for x, y in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: float) -> _Pass:
        return _Pass(*(x * times for x in vars(self).values()))

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def issued(self, operations: int, device: Device) -> _Pass:
        """With the time that the host is behind."""
        late = max(0.0, operations * device.launch - self.total)
        return self + _Pass(host=late)


class StepModel:
    """Times of one layout on one kind of device.

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
        self.tokens = data.micro_batch_size * data.seq_length // layout.cp
        self.micro_batches = data.global_batch_size // (data.micro_batch_size * layout.data_parallel)
        self.width = 2 if parallel.bf16 else 4
        self.peak = device.peak if parallel.bf16 else device.peak / 2  # TF32
        self.blocks = list(block_parameters(model, 0))
        self.forward, self.backward = self._block_passes()

    def predict(self) -> StepTime:
        """The step of the slowest rank."""
        return self._with_pipeline(self.plan) if self.plan else self._without_pipeline()

    def _block_passes(self) -> tuple[_Pass, _Pass]:
        """A block's forward and backward pass for one micro-batch."""
        flops = forward_flops(self.config.model, self.config.data.seq_length or 1)
        attended = flops.layer - sum(p.flops for p in self.blocks)
        attention = attended * self.tokens / self.layout.tp / (self.peak * self.device.attention_share)
        products = sum(self._product(p) for p in self.blocks)
        elementwise = self._elementwise()
        tensor, context = self._tensor_collectives(), self._context_exchange(attention)
        ahead = _Pass(products, attention, elementwise, tensor, context[0]).issued(OPERATIONS, self.device)
        # half of the backward pass's collectives of tensor parallelism run beside products of weight gradients
        back = _Pass(2 * products, 2.5 / 0.85 * attention, 2 * elementwise, tensor / 2, context[1])
        back = back.issued(2 * OPERATIONS, self.device)
        granularity = self.config.parallel.recompute_granularity
        if granularity == "full":
            back += ahead
        elif granularity == "selective":
            back += _Pass(elementwise=elementwise)
        return ahead, back

    def _product(self, parameter: Parameter) -> float:
        """Seconds of a linear layer's forward product on one rank: of whole waves of tiles."""
        if not parameter.flops:
            return 0.0
        rows, inner = parameter.local_shape(self.layout)
        flops = 2 * self.tokens * rows * inner
        tiles = math.ceil(self.tokens / TILE[0]) * math.ceil(rows / TILE[1])
        filled = self.tokens * rows / (TILE[0] * TILE[1]) / (math.ceil(tiles / self.device.tiles) * self.device.tiles)
        # smaller tiles, or a product that is split along its inner dimension, fill a wave in part at most half empty
        return flops / (self.peak * self.device.product_share * max(filled, 0.5))

    def _elementwise(self) -> float:
        """Seconds that norms, RoPE, activation and residuals of a forward pass read and write memory."""
        model, tp = self.config.model, self.layout.tp
        split = tp if self.config.parallel.sequence_parallel else 1
        heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
        assert model.kv_channels is not None and model.ffn_hidden_size is not None, "resolved before"
        rotated = 2 * (heads + groups) * model.kv_channels // tp
        activation = (3 if model.gated else 2) * model.ffn_hidden_size // tp
        numbers = 10 * model.hidden_size // split + rotated + activation  # two norms and two sums: 2 x 2 + 2 x 3
        return self.tokens * numbers * self.width / (self.device.bandwidth * self.device.memory_share)

    def _tensor_collectives(self) -> float:
        """Seconds of the four of a forward pass, or of two all-reduces, which move as much."""
        bytes_ = self.tokens * self.config.model.hidden_size * self.width
        return 4 * self._collective(bytes_, "tp")

    def _context_exchange(self, attention: float) -> tuple[float, float]:
        """Seconds that attention's exchange takes longer than attention, forward and backward."""
        cp, model = self.layout.cp, self.config.model
        if cp == 1:
            return 0.0, 0.0
        groups = model.num_query_groups or model.num_attention_heads
        keys = 2 * self.tokens * max(1, groups // self.layout.tp) * (model.kv_channels or 0)
        ahead, back = (self._collective(cp * keys * width, "cp") for width in (self.width, self.width + 4))
        return max(0.0, ahead - attention), max(0.0, back - 2.5 / 0.85 * attention)

    def _collective(self, whole_bytes: float, dim: str) -> float:
        """Seconds of an all-gather or a reduce-scatter of a tensor over one dimension of the mesh."""
        size = getattr(self.layout, dim)
        if size == 1:
            return 0.0
        return whole_bytes * (size - 1) / size / self._link(dim) + self.device.latency * (size - 1)

    def _link(self, dim: str) -> float:
        """Bytes/s of a ring over a dimension: several ranks on a node share the way to the next one's links."""
        order = ["tp", "cp", "dp_shard", "dp_replicate", "pp"]  # the first varies fastest
        stride = math.prod(getattr(self.layout, name) for name in order[: order.index(dim)])
        size, per_node = getattr(self.layout, dim), self.device.devices_per_node
        beside = max(1, per_node // stride)
        link = self.device.local_link if size <= beside else self.device.node_link * min(size, beside)
        return min(link, self.device.local_link) * self.device.link_share

    def _sharded(self, elements: int, width: int) -> float:
        """Seconds of gathering weights, or reducing gradients, of this many elements over FSDP's ranks."""
        layout = self.layout
        ranks = layout.dp_shard * layout.cp
        if ranks == 1:
            return 0.0
        over = "cp" if layout.dp_shard == 1 else "dp_shard"
        return elements * width * (ranks - 1) / ranks / self._link(over) + self.device.latency * (ranks - 1)

    def _elements(self, part: ModelPart) -> int:
        return sum(math.prod(p.local_shape(self.layout)) for p in inventory(self.config.model, [part]))

    def _head(self) -> _Pass:
        """The output layer and the loss of a micro-batch, forward and backward: three products; logits are read and
        written about six times, in fp32."""
        matrix = vocabulary_matrix(self.config.model, "head", has_product=True)
        rows, _ = matrix.local_shape(self.layout)
        passes = self.tokens * rows * 4 * 6 / (self.device.bandwidth * self.device.memory_share)
        return _Pass(products=3 * self._product(matrix), elementwise=passes, tensor=self._tensor_collectives() / 2)

    def _without_pipeline(self) -> StepTime:
        model, count = self.config.model, self.micro_batches
        layers = model.num_layers
        work = ((self.forward + self.backward) * layers + self._head()) * count
        data = self._exposed_gathers() + self._replicas(self._elements(whole(layers)))
        return self._step(work, data, 0.0, self._elements(whole(layers)))

    def _exposed_gathers(self) -> float:
        """Seconds of FSDP that no computation hides. The next block's weights come during the current one's passes; in
        the backward pass gradients go beside them. Each micro-batch gathers again, unless the strategy keeps them."""
        block = sum(math.prod(p.local_shape(self.layout)) for p in self.blocks)
        gather, reduce_ = self._sharded(block, self.width), self._sharded(block, 4)
        layers, strategy = self.config.model.num_layers, self.config.parallel.data_parallel_sharding_strategy
        late_forward = max(0.0, gather - self.forward.total) * (layers - 1)
        late_backward = max(0.0, gather + reduce_ - self.backward.total) * (layers - 1)
        late_reduce = max(0.0, reduce_ - self.backward.total) * (layers - 1)
        ends = gather + reduce_  # the first one's gather and the last one's reduction have nothing beside them
        first = late_forward + ends
        if strategy == "optim_grads_params":
            return (late_forward + late_backward + ends) * self.micro_batches
        times = self.micro_batches if strategy == "optim_grads" else 1
        return first + late_reduce * times

    def _replicas(self, elements: int) -> float:
        """Seconds of the sum over replicas, which runs beside the backward pass of the last micro-batch."""
        if self.layout.dp_replicate == 1:
            return 0.0
        shard = elements // (self.layout.dp_shard * self.layout.cp)
        taken = 2 * self._collective(shard * 4, "dp_replicate")
        return max(0.0, taken - self.backward.total * self.config.model.num_layers / self.layout.pp)

    def _with_pipeline(self, plan: Plan) -> StepTime:
        """The simulator's step; of the busiest rank, its work, and as bubble what it waits."""
        head = self._head()
        passes = [self.forward * part.count + head * (part.head / 3) for part in plan.parts]
        backs = [self.backward * part.count + head * (part.head * 2 / 3) for part in plan.parts]
        elements = [self._elements(part) for part in plan.parts]
        costs = [
            StageCosts(
                ahead.total, back.total * 0.55, back.total * 0.45, self._sharded(n, self.width), self._sharded(n, 4)
            )
            for ahead, back, n in zip(passes, backs, elements, strict=True)
        ]
        timeline = simulate(plan.training, costs, self._message())
        busiest = max(range(self.layout.pp), key=lambda rank: timeline.work[rank])
        own = plan.stages_of(busiest)
        work = _Pass()
        for stage in own:
            work += (passes[stage] + backs[stage]) * self.micro_batches
        n = sum(elements[stage] for stage in own)
        return self._step(work, self._replicas(n), timeline.step_time - timeline.work[busiest], n)

    def _message(self) -> float:
        """Seconds of one message between stages."""
        split = self.layout.tp if self.config.parallel.sequence_parallel else 1
        size = self.tokens * self.config.model.hidden_size * self.width / split
        return size / (self._link("pp") if self.layout.pp > 1 else math.inf) + self.device.latency

    def _step(self, work: _Pass, data: float, bubble: float, elements: int) -> StepTime:
        owned = elements / (self.layout.dp_shard * self.layout.cp)
        update = owned * OPTIMIZER_BYTES / (self.device.bandwidth * self.device.memory_share)
        return StepTime(**vars(work), data=data, bubble=bubble, optimizer=update)
